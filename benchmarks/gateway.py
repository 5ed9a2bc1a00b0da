"""What everything but the model costs: `--engine fake` behind the same gateway, queue and worker.

    python -m benchmarks.gateway                       starts `tpugate serve --engine fake` itself
    python -m benchmarks.gateway --url http://host:8000 --api-key sk-… --model NAME

The scripted engine takes some microseconds a token, so at one connection the whole latency of a request is
what the gateway, Redis and the worker process add. `/health` beside it is HTTP alone. Processor time is told by
process: on a machine that is shared with others it means more than the clock does.
"""

import asyncio
import json
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import click
import uvloop

from benchmarks import recipes, report
from benchmarks.options import Counts
from benchmarks.servers import CpuTime, RunningServer, ServerError, running, stop_on_sigterm
from cli.load.closed_loop import quantile_ms
from cli.load.http_client import Connection, RequestFailedError

NUM_TOKENS = 32
WARM_UP_S = 1.0


@dataclass(frozen=True)
class Endpoint:
    url: str
    api_key: str
    model: str

    def connection(self) -> Connection:
        headers = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        return Connection(self.url, headers)

    def body(self, num_tokens: int, *, stream: bool) -> bytes:
        """A chat request that the scripted engine answers by repeating its words."""
        words = " ".join(f"w{index}" for index in range(num_tokens))
        message = {"role": "user", "content": words}
        return json.dumps(
            {"model": self.model, "messages": [message], "max_tokens": num_tokens, "stream": stream}
        ).encode()


@dataclass(frozen=True)
class Row:
    """One kind of request at one number of connections; latencies in milliseconds."""

    kind: str
    connections: int
    requests_per_s: float
    p50_ms: float
    p99_ms: float
    num_errors: int
    num_requests: int


Send = Callable[[Connection], AsyncIterator[bytes]]


def kinds(endpoint: Endpoint) -> dict[str, Send]:
    """Name of a kind of request → how one is sent."""
    path = "/v1/chat/completions"
    one = endpoint.body(1, stream=False)
    plain = endpoint.body(NUM_TOKENS, stream=False)
    streamed = endpoint.body(NUM_TOKENS, stream=True)
    return {
        "GET /health": lambda connection: connection.send("GET", "/health"),
        "1 token": lambda connection: connection.send("POST", path, one),
        f"{NUM_TOKENS} tokens": lambda connection: connection.send("POST", path, plain),
        f"{NUM_TOKENS} tokens, streamed": lambda connection: connection.send(
            "POST", path, streamed
        ),
    }


async def _client(endpoint: Endpoint, send: Send, until: float, times: list[float]) -> int:
    """Requests one after the other until the clock says `until`; returns how many failed."""
    try:
        async with endpoint.connection() as connection:
            while (started := time.perf_counter()) < until:
                async for _ in send(connection):
                    pass
                times.append(time.perf_counter() - started)
    except (RequestFailedError, OSError) as error:
        click.echo(f"failed: {error}", err=True)
        return 1
    return 0


async def measure(endpoint: Endpoint, kind: str, connections: int, seconds: float) -> Row:
    """Send one kind of request from `connections` clients for `seconds`."""
    times: list[float] = []
    started = time.perf_counter()
    send = kinds(endpoint)[kind]
    failed = await asyncio.gather(
        *(_client(endpoint, send, started + seconds, times) for _ in range(connections))
    )
    wall_s = time.perf_counter() - started
    return Row(
        kind=kind,
        connections=connections,
        requests_per_s=round(len(times) / wall_s, 1),
        p50_ms=quantile_ms(times, 0.50),
        p99_ms=quantile_ms(times, 0.99),
        num_errors=sum(failed),
        num_requests=len(times),
    )


Cpu = dict[str, float]
"""Microseconds of processor time a request, by process."""


def measure_all(
    endpoint: Endpoint,
    connections: list[int],
    seconds: float,
    server: RunningServer | None = None,
) -> list[tuple[Row, Cpu]]:
    """With what each process of `server` takes, if that is given."""
    rows = []
    for kind in kinds(endpoint):
        uvloop.run(measure(endpoint, kind, 1, WARM_UP_S))
        for count in connections:
            before = server.cpu_times() if server else {}
            row = uvloop.run(measure(endpoint, kind, count, seconds))
            rows.append((row, _cpu(before, server.cpu_times() if server else {}, row)))
    return rows


def _cpu(before: dict[str, CpuTime], after: dict[str, CpuTime], row: Row) -> Cpu:
    spent = {name: after[name].total_s - start.total_s for name, start in before.items()}
    return {name: 1e6 * s / max(1, row.num_requests) for name, s in spent.items()}


@contextmanager
def scripted_server(model: str, options: tuple[str, ...]) -> Iterator[RunningServer]:
    with tempfile.TemporaryDirectory(prefix="tpugate-bench-") as folder:
        recipe = recipes.tpugate(model, Path(folder), ("--engine", "fake", *options))
        with running(recipe) as server:
            yield server


def _table(rows: list[tuple[Row, Cpu]]) -> str:
    header = ["request", "connections", "requests/s", "p50 ms", "p99 ms", "errors", "requests"]
    names = list(rows[0][1])
    header += [f"{name}, CPU µs a request" for name in names]
    cells = [[*asdict(row).values(), *(f"{cpu[name]:.0f}" for name in names)] for row, cpu in rows]
    return report.table(header, cells)


@click.command(help="Throughput and added latency of gateway, queue and worker process.")
@click.option("--url", default="", help="A server that runs already, instead of starting one.")
@click.option("--api-key", default="", help="For --url.")
@click.option("--model", default="smollm2-135m-instruct", show_default=True)
@click.option("--connections", default="1,16,64", show_default=True, type=Counts())
@click.option("--seconds", default=5.0, show_default=True, help="Length of each measurement.")
@click.option("--serve-option", "options", multiple=True, help="Passed to `tpugate serve`.")
def main(
    url: str,
    api_key: str,
    model: str,
    connections: list[int],
    seconds: float,
    options: tuple[str, ...],
) -> None:
    """Read the options, run, print; exit code 1 if a request failed."""
    stop_on_sigterm()
    try:
        if url:
            rows = measure_all(Endpoint(url, api_key, model), connections, seconds)
            text = _table(rows)
        else:
            with scripted_server(model, options) as server:
                endpoint = Endpoint(server.recipe.url, server.recipe.api_key, model)
                rows = measure_all(endpoint, connections, seconds, server)
                text = f"{_table(rows)}\n\n{report.memory_table([server])}"
    except ServerError as error:
        raise click.ClickException(str(error)) from error
    click.echo(text)
    sys.exit(1 if any(row.num_errors for row, _ in rows) else 0)


if __name__ == "__main__":
    main()
