"""CPU time of everything but the model while many answers stream, by process and step.

    python -m benchmarks.stack                        32 clients, a step every 30 ms
    python -m benchmarks.stack --clients 64 --step-ms 10

Where the device is the CPU, each of these milliseconds is taken from the model. The scripted engine
gives every client one token a step, so a step is as many tokens as there are clients.
"""

import asyncio
import os
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import click
import uvloop

from benchmarks import recipes, report
from benchmarks.gateway import Endpoint
from benchmarks.servers import CpuTime, RunningServer, ServerError, running, stop_on_sigterm
from cli.load.http_client import Connection, RequestFailedError

CLIENT = "load generator"
WARM_UP_S = 2.0


async def _client(endpoint: Endpoint, body: bytes, until: float) -> int:
    """Streams one after the other until the clock says `until`; returns how many ended."""
    num_ended = 0
    async with endpoint.connection() as connection:
        while time.perf_counter() < until:
            await _drain(connection, body)
            num_ended += 1
    return num_ended


async def _drain(connection: Connection, body: bytes) -> None:
    async for _ in connection.send("POST", "/v1/chat/completions", body):
        pass


async def stream_all(endpoint: Endpoint, clients: int, num_tokens: int, seconds: float) -> int:
    """Tokens received in about `seconds`. Raises `RequestFailedError` or an `OSError`."""
    body = endpoint.body(num_tokens, stream=True)
    until = time.perf_counter() + seconds
    ended = await asyncio.gather(*(_client(endpoint, body, until) for _ in range(clients)))
    return sum(ended) * num_tokens


def _cpu(server: RunningServer) -> dict[str, CpuTime]:
    own = os.times()
    return {**server.cpu_times(), CLIENT: CpuTime(own.user, own.system)}


def rows(
    before: dict[str, CpuTime], after: dict[str, CpuTime], num_steps: float
) -> list[list[object]]:
    """Milliseconds a step of each process that lived all the while, and of all together."""
    spent = {
        name: (
            (after[name].user_s - start.user_s) * 1e3 / num_steps,
            (after[name].system_s - start.system_s) * 1e3 / num_steps,
        )
        for name, start in before.items()
        if name in after
    }
    spent["all"] = (sum(u for u, _ in spent.values()), sum(s for _, s in spent.values()))
    return [
        [name, f"{user:.2f}", f"{system:.2f}", f"{user + system:.2f}"]
        for name, (user, system) in spent.items()
    ]


def measure(server: RunningServer, clients: int, num_tokens: int, seconds: float) -> str:
    """The table. Raises as `stream_all`."""
    endpoint = Endpoint(server.recipe.url, server.recipe.api_key, "scripted")
    uvloop.run(stream_all(endpoint, clients, num_tokens, WARM_UP_S))
    before, started = _cpu(server), time.perf_counter()
    tokens = uvloop.run(stream_all(endpoint, clients, num_tokens, seconds))
    after, wall_s = _cpu(server), time.perf_counter() - started
    num_steps = tokens / clients
    click.echo(f"{num_steps:.0f} steps of {wall_s * 1e3 / num_steps:.1f} ms", err=True)
    return report.table(
        ["process", "user ms a step", "system ms", "together"], rows(before, after, num_steps)
    )


@click.command(help="CPU time of gateway, queue, worker and client while answers stream.")
@click.option("--clients", default=32, show_default=True)
@click.option("--num-tokens", default=64, show_default=True, help="Of one answer.")
@click.option("--step-ms", default=30.0, show_default=True, help="Pause of the scripted engine.")
@click.option("--seconds", default=20.0, show_default=True, help="Length of the measurement.")
@click.option("--serve-option", "options", multiple=True, help="Passed to `tpugate serve`.")
def main(
    clients: int, num_tokens: int, step_ms: float, seconds: float, options: tuple[str, ...]
) -> None:
    """Read the options, run, print."""
    stop_on_sigterm()
    with tempfile.TemporaryDirectory(prefix="tpugate-bench-") as folder:
        recipe = recipes.tpugate("scripted", Path(folder), ("--engine", "fake", *options))
        settings = {"TPUGATE_STEP_DELAY_S": str(step_ms / 1e3), "TPUGATE_MAX_ROWS": str(clients)}
        recipe = replace(recipe, environment={**recipe.environment, **settings})
        try:
            with running(recipe) as server:
                click.echo(measure(server, clients, num_tokens, seconds))
        except (ServerError, RequestFailedError, OSError) as error:
            raise click.ClickException(str(error)) from error


if __name__ == "__main__":
    main()
