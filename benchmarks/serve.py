"""Tokens per second, latencies, memory and start-up of a served model, alone or beside a peer.

    python -m benchmarks.serve                                   starts `tpugate serve` itself
    python -m benchmarks.serve --url http://host:8000 --api-key sk-…
    python -m benchmarks.serve --peer vllm --peer-venv DIR       both up, runs alternate, ratios

Figures of different invocations do not compare: the machine, its other load and its clock change.
Ratios within one do.
"""

import asyncio
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import click

from benchmarks import recipes, report
from benchmarks.closed_loop import SCENARIOS, Figures, Load, measure
from benchmarks.options import Counts
from benchmarks.servers import RunningServer, ServerError, running, stop_on_sigterm
from models.errors import ModelError
from models.library import resolve
from models.settings import ModelSettings

MIN_REQUESTS = 4
FOLDER = click.Path(exists=True, file_okay=False, path_type=Path)


@dataclass(frozen=True)
class Plan:
    """What to run, the same for each server."""

    model: str
    clients: Sequence[int]
    rounds: int
    requests_per_client: int
    max_tokens: int
    scenario: str
    seed: int


@dataclass(frozen=True)
class Target:
    """A server that answers already."""

    name: str
    url: str
    api_key: str


def run_plan(plan: Plan, targets: Sequence[Target]) -> dict[str, dict[int, list[Figures]]]:
    """Every target takes its turn at each number of clients, in each round."""
    runs: dict[str, dict[int, list[Figures]]] = {
        target.name: {clients: [] for clients in plan.clients} for target in targets
    }
    for target in targets:
        asyncio.run(measure(_load(plan, target, MIN_REQUESTS, seed=-1)))  # first-use costs
    for turn in range(plan.rounds):
        for clients in plan.clients:
            # Whoever goes first meets the warmer or the colder machine: change places.
            for target in targets if turn % 2 == 0 else targets[::-1]:
                figures = asyncio.run(measure(_load(plan, target, clients, plan.seed + turn)))
                runs[target.name][clients].append(figures)
                _progress(turn, target, figures)
    return runs


def _load(plan: Plan, target: Target, clients: int, seed: int) -> Load:
    return Load(
        url=target.url,
        model=plan.model,
        num_clients=clients,
        num_requests=max(MIN_REQUESTS, clients * plan.requests_per_client),
        max_tokens=plan.max_tokens,
        api_key=target.api_key,
        scenario=plan.scenario,
        seed=seed,
    )


def _progress(turn: int, target: Target, figures: Figures) -> None:
    problem = f", {figures.num_errors} errors: {figures.first_error}" if figures.num_errors else ""
    click.echo(
        f"round {turn + 1}, {figures.num_clients} clients, {target.name}: "
        f"{figures.output_tokens_per_s} tokens/s, TTFT p50 {figures.ttft_p50_ms} ms{problem}",
        err=True,
    )


@contextmanager
def tpugate_twice(
    model: str, options: tuple[str, ...], models_dir: Path
) -> Iterator[tuple[RunningServer, float]]:
    """The server at its second start, and the seconds that its first took: cold, with no programs."""
    with tempfile.TemporaryDirectory(prefix="tpugate-bench-") as folder:
        recipe = recipes.tpugate(model, Path(folder), options, models_dir)
        with running(recipe) as cold:
            cold_s = cold.ready_s
        with running(recipe) as warm:
            yield warm, cold_s


def _target(server: RunningServer) -> Target:
    return Target(server.recipe.name, server.recipe.url, server.recipe.api_key)


def _model_dir(plan: Plan, given: Path | None) -> Path:
    return given or resolve(plan.model, ModelSettings.from_environment()).path


def run_started(
    plan: Plan, options: tuple[str, ...], peer_venv: Path | None, model_dir: Path | None
) -> tuple[str, dict[str, object]]:
    """Start tpugate (and the peer), measure; the report as Markdown and as JSON values."""
    folder = _model_dir(plan, model_dir)
    with ExitStack() as stack:
        models_dir = ModelSettings.from_environment().cache_dir
        ours, cold_s = stack.enter_context(tpugate_twice(plan.model, options, models_dir))
        servers = [ours]
        if peer_venv:
            peer = recipes.vllm(plan.model, folder, peer_venv, os.cpu_count() or 1)
            servers.append(stack.enter_context(running(peer)))
        runs = run_plan(plan, [_target(server) for server in servers])
        starts = [[ours.recipe.name, "cold: nothing compiled yet", cold_s]]
        starts += [[server.recipe.name, "as measured", server.ready_s] for server in servers]
        parts = [
            report.throughput_table(runs),
            report.memory_table(servers),
            report.table(["server", "start", "seconds until ready"], starts),
        ]
        memory = {s.recipe.name: [asdict(row) for row in s.peak_memory()] for s in servers}
    values: dict[str, object] = {"runs": _plain(runs), "starts": starts, "memory": memory}
    if peer_venv:
        parts.insert(1, report.ratio_table(runs, "tpugate", "vllm"))
        values["ratios"] = report.ratios(runs, "tpugate", "vllm")
    return "\n\n".join(parts), values


def _plain(runs: report.Runs) -> dict[str, object]:
    return {
        server: {clients: [asdict(entry) for entry in figures] for clients, figures in rows.items()}
        for server, rows in runs.items()
    }


def num_errors(runs: object) -> int:
    """Failed requests in the `runs` of a JSON report."""
    if isinstance(runs, dict):
        return int(runs.get("num_errors", 0)) + sum(num_errors(value) for value in runs.values())
    return sum(num_errors(value) for value in runs) if isinstance(runs, list) else 0


@dataclass(frozen=True)
class Where:
    """Which servers: one at `url`, or our own and perhaps a peer, started here."""

    url: str
    api_key: str
    options: tuple[str, ...]
    peer: str | None
    peer_venv: Path | None
    model_dir: Path | None


def execute(plan: Plan, where: Where) -> tuple[str, dict[str, object]]:
    """The report as Markdown and as JSON values. Raises `ServerError` or `ModelError`."""
    if not where.url:
        return run_started(plan, where.options, where.peer_venv, where.model_dir)
    runs = run_plan(plan, [Target("server", where.url.rstrip("/"), where.api_key)])
    return report.throughput_table(runs), {"runs": _plain(runs)}


@click.command(help="Closed-loop load on a served model; prints Markdown tables.")
@click.option("--model", default="smollm2-135m-instruct", show_default=True)
@click.option("--clients", default="1,8,16,32", show_default=True, type=Counts())
@click.option("--max-tokens", default=64, show_default=True)
@click.option("--requests-per-client", default=2, show_default=True)
@click.option("--rounds", default=1, show_default=True, help="Repeats; medians are shown.")
@click.option("--scenario", default="short", type=click.Choice(list(SCENARIOS)))
@click.option("--seed", default=1, show_default=True, help="Another seed, other prompts.")
@click.option("--url", default="", help="A server that runs already, instead of starting one.")
@click.option("--api-key", default="", help="For --url.")
@click.option("--serve-option", "options", multiple=True, help="Passed to `tpugate serve`.")
@click.option("--peer", type=click.Choice(["vllm"]), help="Measure beside it.")
@click.option("--peer-venv", type=FOLDER, help="The environment that the peer is installed in.")
@click.option("--model-dir", type=FOLDER, help="The peer's copy of the model; else our cache's.")
@click.option("--json", "json_path", type=click.Path(dir_okay=False, path_type=Path))
def main(json_path: Path | None, **options: object) -> None:
    """Read the options, run, print; exit code 1 if a request failed."""
    stop_on_sigterm()
    given: dict[str, Any] = options  # click has checked the types
    plan = Plan(**{item.name: given[item.name] for item in fields(Plan)})
    where = Where(**{item.name: given[item.name] for item in fields(Where)})
    if bool(where.peer) != bool(where.peer_venv) or (where.peer and where.url):
        raise click.UsageError("--peer and --peer-venv go together, and not with --url")
    try:
        text, values = execute(plan, where)
    except (ServerError, ModelError) as error:
        raise click.ClickException(str(error)) from error
    click.echo(text)
    if json_path:
        document = json.dumps({"plan": asdict(plan), **values}, indent=1)
        json_path.write_text(document, encoding="utf-8")
    sys.exit(1 if num_errors(values["runs"]) else 0)


if __name__ == "__main__":
    main()
