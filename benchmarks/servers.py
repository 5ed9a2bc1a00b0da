"""Starting the servers to measure, waiting until they are ready, reading their peak memory."""

import asyncio
import contextlib
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import uvloop

from cli.load.http_client import Connection, RequestFailedError

POLL_INTERVAL_S = 0.05
STOP_TIMEOUT_S = 60.0
LOG_TAIL_LINES = 15


class ServerError(Exception):
    """A server did not start; the message holds the end of its log."""


@dataclass(frozen=True)
class Recipe:
    """How to start one server."""

    name: str
    command: Sequence[str]
    url: str
    ready_path: str
    environment: Mapping[str, str]
    """On top of the environment of the benchmark."""
    api_key: str = ""
    ready_timeout_s: float = 900.0


@dataclass(frozen=True)
class ProcessMemory:
    """Peak resident memory of one process of a server since it started, in MiB."""

    process: str
    peak_rss_mib: int


@dataclass(frozen=True)
class CpuTime:
    """CPU time of one process since it started, in seconds."""

    user_s: float
    system_s: float

    @property
    def total_s(self) -> float:
        return self.user_s + self.system_s


@dataclass(frozen=True)
class RunningServer:
    recipe: Recipe
    pid: int
    ready_s: float
    """Seconds from the start of the process until its ready address answered 200."""

    def peak_memory(self) -> list[ProcessMemory]:
        """One row per living process, the largest first (VmHWM of Linux: no sampling needed)."""
        rows = []
        for process in self._processes():
            with contextlib.suppress(psutil.NoSuchProcess, FileNotFoundError, StopIteration):
                rows.append(ProcessMemory(_label(process), _peak_rss_mib(process.pid)))
        return sorted(rows, key=lambda row: -row.peak_rss_mib)

    def cpu_times(self) -> dict[str, CpuTime]:
        """Of each living process, by its name; processes of one name together."""
        times: dict[str, CpuTime] = {}
        for process in self._processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                name, spent = _label(process), process.cpu_times()
                so_far = times.get(name, CpuTime(0.0, 0.0))
                times[name] = CpuTime(so_far.user_s + spent.user, so_far.system_s + spent.system)
        return times

    def pause(self) -> None:
        """Stop all its processes where they are."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        for process in self._processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)

    def _processes(self) -> list[psutil.Process]:
        parent = psutil.Process(self.pid)
        return [parent, *parent.children(recursive=True)]


def _label(process: psutil.Process) -> str:
    """The program and its first two arguments that are neither options nor the interpreter's."""
    words = [word for word in process.cmdline() if not word.startswith("-")]
    names = [Path(word).name for word in words if not word.endswith("/env")]
    if names and names[0].startswith("python"):
        names = names[1:]
    return " ".join(names[:2]) or process.name()


def _peak_rss_mib(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
    return int(next(line for line in status if line.startswith("VmHWM:")).split()[1]) // 1024


def stop_on_sigterm() -> None:
    """Make SIGTERM an ordinary end of this process, so that `running` stops what it started."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


def free_port() -> int:
    """A port of the loopback address that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def _answers(url: str, path: str) -> bool:
    try:
        async with Connection(url) as connection:
            await connection.fetch("GET", path)
    except (RequestFailedError, OSError):
        return False
    return True


async def _wait_until_ready(recipe: Recipe, process: subprocess.Popen[bytes]) -> bool:
    deadline = time.monotonic() + recipe.ready_timeout_s
    while not await _answers(recipe.url, recipe.ready_path):
        if process.poll() is not None or time.monotonic() > deadline:
            return False
        await asyncio.sleep(POLL_INTERVAL_S)
    return True


def _stop(process: subprocess.Popen[bytes]) -> None:
    """SIGTERM to the server, as an operator would; SIGKILL to what is left of its processes."""
    with contextlib.suppress(psutil.NoSuchProcess):
        family = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_TIMEOUT_S)
        for left in [*family, psutil.Process(process.pid)] if process.poll() is None else family:
            with contextlib.suppress(psutil.NoSuchProcess):
                left.kill()
    process.wait()


@contextlib.contextmanager
def running(recipe: Recipe) -> Iterator[RunningServer]:
    """The server of `recipe`, ready; stopped with all its processes at the end.

    Raises `ServerError` if it ends or is not ready in time.
    """
    with tempfile.TemporaryDirectory(prefix="tpugate-bench-") as folder:
        log = Path(folder) / "log"
        settings = [f"{name}={value}" for name, value in recipe.environment.items()]
        with log.open("wb") as sink:
            started = time.monotonic()
            process = subprocess.Popen(
                ["env", *settings, *recipe.command],
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            if not uvloop.run(_wait_until_ready(recipe, process)):
                tail = log.read_text(encoding="utf-8", errors="replace").splitlines()
                head = f"{recipe.name} did not get ready; its log ends with:"
                raise ServerError("\n".join([head, *tail[-LOG_TAIL_LINES:]]))
            yield RunningServer(recipe, process.pid, round(time.monotonic() - started, 2))
        finally:
            _stop(process)
