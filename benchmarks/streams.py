"""Many streams at once through one gateway process: what each costs in memory, and whether others wait for them.

    python -m benchmarks.streams                      1,000 streams, a token every 250 ms

`/health` is asked all the while on a connection of its own. It needs nothing but the event loop, so its latency
is an upper bound of the loop's stalls: it also holds the waiting for one of the cores, which all processes share.
"""

import asyncio
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import click
import uvloop

from benchmarks import recipes, report
from benchmarks.gateway import Endpoint
from benchmarks.servers import RunningServer, ServerError, running, stop_on_sigterm
from cli.load.closed_loop import quantile_ms
from cli.load.http_client import RequestFailedError

PROBE_EVERY_S = 0.01
WARM_UP_STREAMS = 50
STARTS_PER_S = 200


async def _stream(endpoint: Endpoint, body: bytes, delay_s: float) -> int:
    """Bytes received."""
    await asyncio.sleep(delay_s)
    num_bytes = 0
    async with endpoint.connection() as connection:
        async for piece in connection.send("POST", "/v1/chat/completions", body):
            num_bytes += len(piece)
    return num_bytes


async def _probe(endpoint: Endpoint, times: list[float]) -> None:
    async with endpoint.connection() as connection:
        while True:
            started = time.perf_counter()
            await connection.fetch("GET", "/health")
            times.append(time.perf_counter() - started)
            await asyncio.sleep(PROBE_EVERY_S)


async def run_streams(endpoint: Endpoint, num_streams: int, num_tokens: int) -> list[float]:
    """Latencies of the probe while all streams run. Raises `RequestFailedError` or an `OSError`."""
    body = endpoint.body(num_tokens, stream=True)
    times: list[float] = []
    probe = asyncio.create_task(_probe(endpoint, times))
    try:
        await asyncio.gather(
            *(_stream(endpoint, body, number / STARTS_PER_S) for number in range(num_streams))
        )
    finally:
        probe.cancel()
    return times


def _gateway_mib(server: RunningServer) -> int:
    return next(row.peak_rss_mib for row in server.peak_memory() if "gateway" in row.process)


def measure(server: RunningServer, num_streams: int, num_tokens: int) -> str:
    """The table. Raises as `run_streams`."""
    endpoint = Endpoint(server.recipe.url, server.recipe.api_key, "scripted")
    uvloop.run(run_streams(endpoint, WARM_UP_STREAMS, num_tokens))
    before = _gateway_mib(server)
    started = time.perf_counter()
    times = uvloop.run(run_streams(endpoint, num_streams, num_tokens))
    wall_s = time.perf_counter() - started
    after = _gateway_mib(server)
    rows: list[list[object]] = [
        ["streams", num_streams],
        ["tokens/s", f"{num_streams * num_tokens / wall_s:.0f}"],
        ["gateway's peak memory before / after, MiB", f"{before} / {after}"],
        ["KiB a stream", f"{(after - before) * 1024 / num_streams:.0f}"],
        ["/health p50 / p99 / worst, ms", _latencies(times)],
    ]
    return report.table(["", ""], rows)


def _latencies(times: list[float]) -> str:
    values = (quantile_ms(times, 0.5), quantile_ms(times, 0.99), max(times) * 1e3)
    return " / ".join(f"{value:.1f}" for value in values)


@click.command(help="Memory of many concurrent streams, and stalls of the event loop meanwhile.")
@click.option("--streams", default=1000, show_default=True)
@click.option("--num-tokens", default=64, show_default=True, help="Of one answer.")
@click.option("--step-ms", default=250.0, show_default=True, help="Pause of the scripted engine.")
def main(streams: int, num_tokens: int, step_ms: float) -> None:
    """Read the options, run, print."""
    stop_on_sigterm()
    settings = {
        "TPUGATE_STEP_DELAY_S": str(step_ms / 1e3),
        "TPUGATE_MAX_ROWS": str(streams),
        "TPUGATE_QUEUE_LIMIT": str(2 * streams),
        "TPUGATE_KEY_LIMIT": str(2 * streams),
    }
    with tempfile.TemporaryDirectory(prefix="tpugate-bench-") as folder:
        recipe = recipes.tpugate("scripted", Path(folder), ("--engine", "fake"))
        recipe = replace(recipe, environment={**recipe.environment, **settings})
        try:
            with running(recipe) as server:
                click.echo(measure(server, streams, num_tokens))
        except (ServerError, RequestFailedError, OSError) as error:
            raise click.ClickException(str(error)) from error


if __name__ == "__main__":
    main()
