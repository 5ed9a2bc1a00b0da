"""A `tpugate serve` of one's own to measure: with a queue and a database that nobody else uses."""

import asyncio
import secrets
import socket
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

from cli.errors import CommandError
from cli.load.closed_loop import Server
from cli.load.http_client import RequestFailedError
from cli.settings import child_environment
from cli.supervisor import Child, Supervisor

POLL_S = 0.2
STOP_S = 60.0


@asynccontextmanager
async def own_server(flags: Mapping[str, str]) -> AsyncIterator[Server]:
    """The server, ready; `flags` are those of `tpugate serve`. Its log goes to stderr.

    Raises `CommandError` with its own last sentence if it cannot be started.
    """
    with tempfile.TemporaryDirectory(prefix="tpugate-bench-") as folder:
        port = _free_port()
        server = Server(f"http://127.0.0.1:{port}", secrets.token_urlsafe())
        own = {"host": "127.0.0.1", "port": str(port), "data_dir": str(Path(folder) / "data")}
        own |= {"redis_url": "", "database_url": "", "admin_key": server.api_key}
        child = Child(
            "server",
            (sys.executable, "-P", "-m", "cli.main", "serve"),
            lambda: child_environment(**{**flags, **own}),
            STOP_S,
        )
        supervisor = Supervisor()
        supervisor.start(child)
        try:
            await _wait_until_ready(server, supervisor)
            child.was_ready = True
            yield server
        finally:
            supervisor.begin_stop()
            await supervisor.stop([child])


async def _wait_until_ready(server: Server, supervisor: Supervisor) -> None:
    while not await _is_ready(server):
        await asyncio.wait({supervisor.failure}, timeout=POLL_S)
        if supervisor.failure.done():
            raise supervisor.failure.result()


async def _is_ready(server: Server) -> bool:
    try:
        async with server.connection() as connection:
            await connection.fetch("GET", "/ready")
    except (RequestFailedError, OSError):
        return False
    return True


def _free_port() -> int:
    try:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            return int(probe.getsockname()[1])
    except OSError as error:
        raise CommandError(f"No port is free: {error.strerror}.") from error
