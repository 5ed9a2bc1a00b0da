"""Tokens per second, latencies, memory and start-up of a served model, alone or beside a peer.

    python -m benchmarks.serve                                   starts `tpugate serve` itself
    python -m benchmarks.serve --url http://host:8000 --api-key sk-…
    python -m benchmarks.serve --peer vllm --peer-venv DIR --rounds 3 --cold-start --results FILE
    python -m benchmarks.serve --scenario short --clients 32     a quick look

With a peer both servers are up and take turns, so that a ratio compares runs of the same minute; the
peer is stopped (SIGSTOP) while it is not its turn, because some servers poll while they have nothing to
do. Figures of different invocations do not compare. With --results, what is finished is kept, and the
same command goes on after an interruption.
"""

import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import click
import uvloop

from benchmarks import recipes, report
from benchmarks.cells import Cell, Plan, Results, ResultsError, Spot, spots
from benchmarks.closed_loop import SCENARIOS, Load, measure
from benchmarks.engine_metrics import difference, read_counters
from benchmarks.options import Counts, Names
from benchmarks.servers import Recipe, RunningServer, ServerError, running, stop_on_sigterm
from models.errors import ModelError
from models.library import resolve
from models.settings import ModelSettings

MIN_REQUESTS = 4
WARM_UP_TOKENS = 8
IDLE_S = 5.0
LONG_PROMPT = "long-prompt"
FOLDER = click.Path(exists=True, file_okay=False, path_type=Path)


@dataclass(frozen=True)
class Target:
    """A server that answers already; `server` is known if it was started here."""

    name: str
    url: str
    api_key: str
    server: RunningServer | None = None
    is_peer: bool = False


def _load(plan: Plan, target: Target, spot: Spot) -> Load:
    return Load(
        url=target.url,
        model=plan.model,
        num_clients=spot.clients,
        num_requests=max(MIN_REQUESTS, spot.clients * plan.requests_per_client),
        max_tokens=plan.max_tokens,
        api_key=target.api_key,
        scenario=spot.scenario,
        seed=plan.seed + spot.turn,
    )


def _warm_up(plan: Plan, target: Target) -> None:
    """First-use costs, and caches that the other server's turn has left cold."""
    load = _load(plan, target, Spot("short", MIN_REQUESTS, -plan.seed - 1, target.name))
    uvloop.run(measure(Load(**{**asdict(load), "max_tokens": WARM_UP_TOKENS})))


def run_cell(plan: Plan, target: Target, spot: Spot) -> Cell:
    _warm_up(plan, target)
    load = _load(plan, target, spot)
    before = {} if target.is_peer else uvloop.run(read_counters(target.url))
    figures = uvloop.run(measure(load))
    after = {} if target.is_peer else uvloop.run(read_counters(target.url))
    return Cell(figures, difference(before, after))


@contextmanager
def _turn_of(target: Target, targets: Sequence[Target]) -> Iterator[None]:
    """Nobody else computes: peers are stopped, and go on afterwards."""
    others = [t.server for t in targets if t.is_peer and t is not target and t.server is not None]
    for server in others:
        server.pause()
    try:
        yield
    finally:
        for server in others:
            server.resume()


def run_plan(plan: Plan, targets: Sequence[Target], results: Results) -> None:
    """Measure every cell that `results` does not hold."""
    named = {target.name: target for target in targets}
    for spot in spots(plan, list(named)):
        if spot.key in results.cells:
            continue
        target = named[spot.server]
        with _turn_of(target, targets):
            cell = run_cell(plan, target, spot)
        results.add(spot, cell)
        _progress(spot, cell)


def _progress(spot: Spot, cell: Cell) -> None:
    figures, steps = cell.figures, cell.steps
    problem = f", {figures.num_errors} errors: {figures.first_error}" if figures.num_errors else ""
    engine = f", host {steps.host_ms} ms, padding {steps.padding_ratio}" if steps else ""
    click.echo(
        f"round {spot.turn + 1}, {spot.scenario}, {spot.clients} clients, {spot.server}: "
        f"{figures.output_tokens_per_s} tokens/s, TTFT p50 {figures.ttft_p50_ms} ms"
        f"{engine}{problem}",
        err=True,
    )


def _measure_idle(targets: Sequence[Target], results: Results) -> None:
    for target in targets:
        if target.server is None or target.name in results.idle:
            continue
        before = sum(t.user_s + t.system_s for t in target.server.cpu_times().values())
        time.sleep(IDLE_S)
        after = sum(t.user_s + t.system_s for t in target.server.cpu_times().values())
        results.idle[target.name] = round((after - before) / IDLE_S, 3)


def _note_memory(targets: Sequence[Target], results: Results) -> None:
    for target in targets:
        for row in target.server.peak_memory() if target.server else []:
            key = f"{target.name}: {row.process}"
            results.memory[key] = max(row.peak_rss_mib, results.memory.get(key, 0))
    results.write()


@dataclass(frozen=True)
class Where:
    """Which servers: one at `url`, or our own and perhaps a peer, started here."""

    url: str
    api_key: str
    options: tuple[str, ...]
    peer: str | None
    peer_venv: Path | None
    model_dir: Path | None
    cold_start: bool


def _start(recipe: Recipe, stack: ExitStack, kind: str, results: Results) -> RunningServer:
    click.echo(f"starting {recipe.name} ({kind})", err=True)
    server = stack.enter_context(running(recipe))
    results.starts[f"{recipe.name}: {kind}"] = server.ready_s
    results.write()
    return server


def _start_ours(plan: Plan, where: Where, stack: ExitStack, results: Results) -> RunningServer:
    """With `cold_start` our programs are compiled anew, in a folder of their own, and read back."""
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tpugate-bench-")))
    models_dir = ModelSettings.from_environment().cache_dir if where.cold_start else None
    recipe = recipes.tpugate(plan.model, folder, where.options, models_dir)
    if where.cold_start:
        with ExitStack() as first:
            _start(recipe, first, "cold, nothing compiled", results)
    # Alone, nothing says whether the programs of these very sources were kept.
    kind = "warm" if where.cold_start else "with the programs that were kept"
    return _start(recipe, stack, kind, results)


def _start_all(plan: Plan, where: Where, stack: ExitStack, results: Results) -> list[Target]:
    ours = _start_ours(plan, where, stack, results)
    targets = [Target(ours.recipe.name, ours.recipe.url, ours.recipe.api_key, ours)]
    if where.peer_venv:
        folder = where.model_dir or resolve(plan.model, ModelSettings.from_environment()).path
        recipe = recipes.vllm(plan.model, folder, where.peer_venv, os.cpu_count() or 1)
        peer = _start(recipe, stack, "as measured", results)
        targets.append(Target(recipe.name, recipe.url, recipe.api_key, peer, is_peer=True))
    return targets


def execute(plan: Plan, where: Where, results: Results) -> None:
    """Fill `results`. Raises `ServerError`, `ModelError` or KeyboardInterrupt; what is done is kept."""
    if where.url:
        run_plan(plan, [Target("server", where.url.rstrip("/"), where.api_key)], results)
        return
    with ExitStack() as stack:
        targets = _start_all(plan, where, stack, results)
        for target in targets:
            _warm_up(plan, target)
        _measure_idle(targets, results)
        try:
            run_plan(plan, targets, results)
        finally:
            _note_memory(targets, results)


def _plan(given: dict[str, Any]) -> Plan:
    clients = {
        name: given["long_clients"] if name == LONG_PROMPT else given["clients"]
        for name in given["scenario"]
    }
    names = {item.name for item in fields(Plan)} - {"clients"}
    return Plan(clients=clients, **{name: given[name] for name in names})


@click.command(help="Closed-loop load on a served model; prints Markdown tables.")
@click.option("--model", default="smollm2-135m-instruct", show_default=True)
@click.option("--scenario", default=",".join(SCENARIOS), type=Names(list(SCENARIOS)))
@click.option("--clients", default="1,8,16,32", show_default=True, type=Counts())
@click.option("--long-clients", default="8,16", show_default=True, type=Counts())
@click.option("--max-tokens", default=64, show_default=True)
@click.option("--requests-per-client", default=3, show_default=True)
@click.option("--rounds", default=1, show_default=True, help="Repeats; medians are shown.")
@click.option("--seed", default=1, show_default=True, help="Another seed, other prompts.")
@click.option("--url", default="", help="A server that runs already, instead of starting one.")
@click.option("--api-key", default="", help="For --url.")
@click.option("--serve-option", "options", multiple=True, help="Passed to `tpugate serve`.")
@click.option("--cold-start", is_flag=True, help="Start once before with nothing compiled.")
@click.option("--peer", type=click.Choice(["vllm"]), help="Measure beside it.")
@click.option("--peer-venv", type=FOLDER, help="The environment that the peer is installed in.")
@click.option("--model-dir", type=FOLDER, help="The peer's copy of the model; else our cache's.")
@click.option(
    "--results",
    "results_path",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Keeps what is finished; the same command goes on.",
)
def main(results_path: Path | None, **given: Any) -> None:  # noqa: ANN401  click has checked the types
    """Read the options, run, print; exit code 1 if a request failed."""
    stop_on_sigterm()
    plan = _plan(given)
    where = Where(**{item.name: given[item.name] for item in fields(Where)})
    if bool(where.peer) != bool(where.peer_venv) or (where.peer and where.url):
        raise click.UsageError("--peer and --peer-venv go together, and not with --url")
    try:
        results = Results.open(results_path, plan)
        execute(plan, where, results)
    except (ServerError, ModelError, ResultsError) as error:
        raise click.ClickException(str(error)) from error
    except KeyboardInterrupt:
        click.echo("interrupted: the tables hold what is finished", err=True)
    click.echo(report.whole(plan, results))
    sys.exit(1 if results.num_errors else 0)


if __name__ == "__main__":
    main()
