"""This gateway, with queue, worker and scripted engine, beside LiteLLM's proxy in front of an instant upstream.

    python -m venv PEER && PEER/bin/pip install 'litellm[proxy]'
    python -m benchmarks.proxies --peer-venv PEER

Neither side computes an answer, so all time is that of the HTTP side: authentication, validation, and on our
side tokenising, queue and worker. One load generator measures both, taking turns; figures are medians.
"""

import statistics
import sys
import tempfile
from collections import defaultdict
from contextlib import ExitStack
from pathlib import Path

import click
import uvloop

from benchmarks import recipes, report
from benchmarks.gateway import NUM_TOKENS, WARM_UP_S, Endpoint, Row, measure
from benchmarks.servers import ServerError, running, stop_on_sigterm

OURS, PEER, UPSTREAM = "tpugate", "litellm", "upstream"
KINDS = (f"{NUM_TOKENS} tokens", f"{NUM_TOKENS} tokens, streamed")
CONNECTIONS = (1, 16)
Cell = tuple[str, int, str]
"""Kind of request, connections, server."""


def measure_rounds(
    endpoints: dict[str, Endpoint], rounds: int, seconds: float
) -> dict[Cell, list[Row]]:
    found: dict[Cell, list[Row]] = defaultdict(list)
    for endpoint in endpoints.values():
        for kind in KINDS:
            uvloop.run(measure(endpoint, kind, max(CONNECTIONS), WARM_UP_S))
    for _ in range(rounds):
        for kind in KINDS:
            for connections in CONNECTIONS:
                for name, endpoint in endpoints.items():
                    row = uvloop.run(measure(endpoint, kind, connections, seconds))
                    found[kind, connections, name].append(row)
    return found


def table(found: dict[Cell, list[Row]]) -> str:
    """Medians; what is added is the median latency without that of the upstream alone."""
    header = ["request", "connections", f"{OURS} requests/s", f"{PEER} requests/s", "ratio"]
    header += [f"p50 ms, {OURS} / {PEER} / {UPSTREAM} alone", "errors"]
    rows = []
    for kind in KINDS:
        for connections in CONNECTIONS:
            cells = {name: found[kind, connections, name] for name in (OURS, PEER, UPSTREAM)}
            rates = {
                name: round(statistics.median(row.requests_per_s for row in rows_), 1)
                for name, rows_ in cells.items()
            }
            p50s = [statistics.median(row.p50_ms for row in rows_) for rows_ in cells.values()]
            errors = sum(row.num_errors for rows_ in cells.values() for row in rows_)
            ratio = rates[OURS] / (rates[PEER] or 1.0)
            times = " / ".join(f"{p50:.2f}" for p50 in p50s)
            rows.append(
                [kind, connections, rates[OURS], rates[PEER], f"{ratio:.1f}", times, errors]
            )
    return report.table(header, rows)


@click.command(help="Requests a second and latency beside LiteLLM's proxy.")
@click.option("--peer-venv", required=True, type=click.Path(path_type=Path, exists=True))
@click.option("--rounds", default=3, show_default=True)
@click.option("--seconds", default=5.0, show_default=True, help="Length of each measurement.")
def main(peer_venv: Path, rounds: int, seconds: float) -> None:
    """Read the options, run, print; exit code 1 if a request failed."""
    stop_on_sigterm()
    with tempfile.TemporaryDirectory(prefix="tpugate-bench-") as name, ExitStack() as stack:
        folder = Path(name)
        upstream = recipes.instant_upstream()
        ours = recipes.tpugate("scripted", folder, ("--engine", "fake"))
        peer = recipes.litellm(upstream.url, peer_venv, folder)
        try:
            for recipe in (upstream, ours, peer):
                stack.enter_context(running(recipe))
            endpoints = {
                OURS: Endpoint(ours.url, ours.api_key, "scripted"),
                PEER: Endpoint(peer.url, peer.api_key, "instant"),
                UPSTREAM: Endpoint(upstream.url, "", "instant"),
            }
            found = measure_rounds(endpoints, rounds, seconds)
        except ServerError as error:
            raise click.ClickException(str(error)) from error
    click.echo(table(found))
    sys.exit(1 if any(row.num_errors for rows in found.values() for row in rows) else 0)


if __name__ == "__main__":
    main()
