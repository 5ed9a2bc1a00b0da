"""The engine alone, in this process: tokens per second without HTTP, host work, time per bucket.

    python -m benchmarks.engine                                  tokens/s at 8, 16, 32 and 64 requests
    python -m benchmarks.engine --rows 32 --context-len 128      few programs: a quick look
    python -m benchmarks.engine --sampling greedy,truncated      what each kind of sampling costs
    python -m benchmarks.engine --sampling greedy,json,half-json --rows 16 --rounds 5   … and a grammar
    python -m benchmarks.engine --buckets                        milliseconds of a full step per bucket

Programs are kept where a worker keeps them, so only a first run compiles.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from benchmarks import report
from benchmarks.engine_load import SAMPLING, EngineFigures, EngineLoad, measure
from benchmarks.options import Counts, Names
from torchtpu.environment import read_settings
from workers.engine.build import DEFAULT_ROWS, EngineConfig, build_engine
from workers.errors import LoadError

if TYPE_CHECKING:
    from workers.engine.engine import ModelEngine

FIGURES_HEADER = [
    "requests at once",
    "sampling",
    "tokens/s",
    "steps",
    "step ms",
    "host ms",
    "engine thread's CPU ms",
    "CPU ms",
    "padding",
    "cached",
    "compiles",
]
BUCKETS_HEADER = ["bucket", "tokens", "wall ms", "CPU ms", "runs"]


def _progress(what: str, share: float) -> None:
    click.echo(f"\r{share:4.0%} {what:60}", nl=share >= 1.0, err=True)


def build(config: EngineConfig) -> tuple["ModelEngine", int]:
    """A warm engine and the size of its vocabulary. Raises `LoadError`."""
    started = time.monotonic()
    loaded = build_engine(config, _progress)
    from workers.engine.engine import ModelEngine  # torch comes after the device

    click.echo(f"ready after {time.monotonic() - started:.1f} s", err=True)
    assert isinstance(loaded.engine, ModelEngine)
    return loaded.engine, loaded.card.vocab_size


def _medians(rounds: Sequence[EngineFigures]) -> EngineFigures:
    """The round with the median throughput: one that was measured, so that its figures agree."""
    return sorted(rounds, key=lambda figures: figures.tokens_per_s)[len(rounds) // 2]


def throughput(engine: "ModelEngine", loads: Sequence[Sequence[EngineLoad]]) -> str:
    """Each of `loads` is one row of the table, measured once for each of its seeds; they take turns."""
    figures: list[list[EngineFigures]] = [[] for _ in loads]
    for turn in zip(*loads, strict=True):
        for load, taken in zip(turn, figures, strict=True):
            entry = measure(engine, load)
            taken.append(entry)
            click.echo(
                f"{entry.rows} requests, {entry.sampling}: {entry.tokens_per_s} tokens/s, "
                f"{entry.step_ms} ms a step, host {entry.host_ms} ms",
                err=True,
            )
    rows = [list(asdict(_medians(taken)).values()) for taken in figures]
    return report.table(FIGURES_HEADER, rows)


def _loads(given: dict[str, Any], vocab_size: int) -> Iterator[list[EngineLoad]]:
    for sampling in given["sampling"]:
        for rows in given["rows"]:
            yield [
                EngineLoad(
                    rows=rows,
                    num_requests=rows * given["requests"],
                    prompt_len=given["prompt_len"],
                    prefix_len=given["prefix_len"],
                    output_len=given["output_len"],
                    sampling=sampling,
                    vocab_size=vocab_size,
                    seed=seed,
                )
                for seed in range(given["seed"], given["seed"] + given["rounds"])
            ]


def bucket_table(engine: "ModelEngine", num_runs: int, wanted: str) -> str:
    """Every bucket of the engine's ladder whose name has `wanted` in it."""
    from benchmarks.bucket_times import measure_buckets

    parts = engine._parts
    buckets = [b for b in parts.scheduler._config.ladder.buckets if wanted in b.name]
    times = measure_buckets(parts, buckets, num_runs)
    return report.table(BUCKETS_HEADER, [list(asdict(entry).values()) for entry in times])


@click.command(help="Throughput, host work and bucket times of the engine alone.")
@click.option("--model", default="smollm2-135m-instruct", show_default=True)
@click.option("--device", default="tpu", type=click.Choice(["tpu", "cpu", "cuda"]))
@click.option("--dtype", default="auto", type=click.Choice(["auto", "bfloat16", "float32"]))
@click.option("--rows", default="8,16,32,64", show_default=True, type=Counts())
@click.option("--max-rows", type=int, help="Of the engine; else the most of --rows, 32 at least.")
@click.option("--context-len", type=int, help="Shorter contexts need fewer programs.")
@click.option("--num-blocks", type=int, help="Of the KV cache.")
@click.option("--requests", default=3, show_default=True, help="Per row, one after the other.")
@click.option("--rounds", default=1, show_default=True, help="Repeats; the median one is shown.")
@click.option("--prompt-len", default=44, show_default=True)
@click.option("--prefix-len", default=0, show_default=True, help="Shared by all prompts.")
@click.option("--output-len", default=64, show_default=True)
@click.option("--sampling", default="greedy", show_default=True, type=Names(list(SAMPLING)))
@click.option("--seed", default=1, show_default=True, help="Another seed, other prompts.")
@click.option("--buckets", is_flag=True, help="Time every bucket instead.")
@click.option("--only", default="", help="Buckets whose name has this in it, such as r32-c128.")
@click.option("--runs", default=10, show_default=True, help="Of each bucket.")
def main(**given: Any) -> None:  # noqa: ANN401  click has checked the types
    """Read the options, run, print."""
    config = EngineConfig(
        model=given["model"],
        served_name=given["model"],
        device=given["device"],
        dtype=given["dtype"],
        max_rows=given["max_rows"] or max(DEFAULT_ROWS, *given["rows"]),
        num_blocks=given["num_blocks"],
        context_len=given["context_len"],
        compile_cache_dir=read_settings().cache_dir / "programs",
    )
    try:
        engine, vocab_size = build(config)
    except LoadError as error:
        raise click.ClickException(str(error)) from error
    if given["buckets"]:
        click.echo(bucket_table(engine, given["runs"], given["only"]))
        return
    warm_up = next(_loads({**given, "seed": -1, "rounds": 1, "rows": [8]}, vocab_size))
    throughput(engine, [warm_up])
    click.echo(throughput(engine, list(_loads(given, vocab_size))))


if __name__ == "__main__":
    main()
