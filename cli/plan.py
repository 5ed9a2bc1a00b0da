"""`tpugate plan`: does a model fit on a TPU that is not here, and what does a step move there."""

import dataclasses
import json
import sys
from typing import TYPE_CHECKING, Any, cast

import click

from cli.errors import CommandError, SettingError
from torchtpu.ahead_of_time.chips import CHIPS

if TYPE_CHECKING:
    from workers.engine.planner import Plan, PlannedStep

_GIB = 1 << 30
_COUNT = click.IntRange(min=1)


@click.command()
@click.option("--model", metavar="REF", required=True, help="As for `tpugate worker`.")
@click.option("--chip", type=click.Choice(list(CHIPS)), required=True, help="The TPU to plan for.")
@click.option(
    "--dtype",
    type=click.Choice(["auto", "bfloat16", "float32"]),
    default="auto",
    help="Type of the weights (default: auto, bfloat16).",
)
@click.option("--max-rows", type=_COUNT, help="Choices that run at once (default: 32).")
@click.option("--context-len", type=_COUNT, help="Tokens of a request (default: 2048).")
@click.option("--block-len", type=_COUNT, help="Tokens of one KV block (default: 16).")
@click.option("--num-blocks", type=_COUNT, help="KV blocks (default: what the chip holds).")
@click.option("--all", "every_bucket", is_flag=True, help="Every program, not the largest two.")
@click.option("--json", "as_json", is_flag=True, help="Print the plan as one JSON object.")
def plan(model: str, chip: str, every_bucket: bool, as_json: bool, **options: Any) -> None:  # noqa: ANN401
    """Compile an engine's step programs for a TPU, without the TPU and without the weights.

    Says what each program computes, moves and holds. Exits with 0 if all fit, 1 if one does not or the
    plan fails, 2 if a setting is wrong.
    """
    try:
        made = _make(model, chip, every_bucket, {k: v for k, v in options.items() if v is not None})
    except ModuleNotFoundError as error:
        raise CommandError(
            f"{error.name} is not installed, which plans need: pip install 'tpugate[worker]'"
        ) from error
    click.echo(json.dumps(facts(made), indent=2) if as_json else render(made))
    sys.exit(0 if made.fits else 1)


def _make(model: str, chip: str, every_bucket: bool, options: dict[str, Any]) -> "Plan":
    from models.errors import ModelError, ModelReferenceError
    from torchtpu.bringup import bring_up
    from torchtpu.errors import SettingError as BadVariable
    from torchtpu.errors import TorchTpuError
    from workers.engine.build import EngineConfig
    from workers.errors import HopelessLoadError, LoadError

    def progress(what: str, share: float) -> None:
        if sys.stderr.isatty():
            click.echo(f"{what} …", err=True)

    try:
        config = EngineConfig(model=model, served_name=model, **options)
        device = bring_up("tpu")
        from workers.engine.planner import plan_engine  # imports torch: after the bring-up

        return plan_engine(config, CHIPS[chip], device, progress, every_bucket=every_bucket)
    except (HopelessLoadError, ModelReferenceError, BadVariable, ValueError) as error:
        raise SettingError(str(error)) from error
    except (LoadError, ModelError, TorchTpuError) as error:
        raise CommandError(str(error)) from error


def facts(plan: "Plan") -> dict[str, Any]:
    """The plan as plain values; bytes are bytes."""
    return {
        "chip": plan.chip.name,
        "hbm_bytes": plan.chip.hbm_bytes,
        "fits": plan.fits,
        "weights_bytes": plan.weights_bytes,
        "cache_bytes": plan.cache_bytes,
        "num_blocks": plan.num_blocks,
        "programs": [
            {
                "name": step.bucket.name,
                "fits": step.compiled.fits,
                "refusal": step.compiled.refusal,
                "live_bytes": step.live_bytes,
                "hbm_ratio": step.hbm_ratio,
                "cost": _cost(step),
                "memory": step.compiled.memory and dataclasses.asdict(step.compiled.memory),
            }
            for step in plan.steps
        ],
    }


def _cost(step: "PlannedStep") -> dict[str, Any] | None:
    cost = step.compiled.cost
    if cost is None:
        return None
    return {"flops": cost.flops, "hbm_bytes": cost.hbm_bytes, "read": dict(cost.read)} | {
        "written": dict(cost.written)
    }


def render(plan: "Plan") -> str:
    """The plan as a table for a terminal."""
    weights, cache = plan.weights_bytes / _GIB, plan.cache_bytes / _GIB
    lines = [
        f"One device of {plan.chip.name}: {plan.chip.hbm_bytes / _GIB:.2f} GiB of HBM; weights "
        f"{weights:.2f} GiB, KV cache {cache:.2f} GiB in {plan.num_blocks} blocks.",
        "",
    ]
    titles = ("program", "GFLOP", "HBM MB", "weights", "KV", "other", "x must", "peak GiB")
    rows = [titles, *(_row(step) for step in plan.steps)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(titles))]
    for row in rows:
        cells = [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        lines.append("  ".join([row[0].ljust(widths[0]), *cells]).rstrip())
    lines += [
        f"{step.bucket.name} does not fit: {step.compiled.refusal}"
        for step in plan.steps
        if not step.compiled.fits
    ]
    lines += [
        "",
        "HBM MB is an estimate from the compiler's schedule; `x must` is its ratio to the weights and",
        "the keys and values of a full bucket. No time is estimated.",
        "All programs fit." if plan.fits else "Not all programs fit.",
    ]
    return "\n".join(lines)


def _row(step: "PlannedStep") -> tuple[str, ...]:
    cost, memory = step.compiled.cost, step.compiled.memory
    if cost is None or memory is None:
        return (step.bucket.name, *["-"] * 6, "too much")
    megabytes = [cost.hbm_bytes, cost.of("weights"), cost.of("kv"), cost.of("other")]
    return (
        step.bucket.name,
        f"{cost.flops / 1e9:.2f}",
        *(f"{number / 1e6:.1f}" for number in megabytes),
        f"{cast(float, step.hbm_ratio):.2f}",
        f"{memory.peak / _GIB:.2f}",
    )
