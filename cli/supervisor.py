"""Starts child processes, keeps them running, and leaves none behind.

A child that ends is started again after 1, 2, 4 … 30 seconds. One that was never ready and ends with a
setting's exit code (2), which also is that of a model that can never load, or three times with a failure's (1), will not get better: then everything stops,
with that child's own sentence. Each child leads a process group, so Ctrl-C reaches only the supervisor,
which stops the children in order; and the kernel kills them if the supervisor is killed.
"""

import asyncio
import ctypes
import logging
import os
import re
import signal
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import click

from cli.errors import CommandError, SettingError

FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 30.0
SETTLED_S = 60.0
"""A child that ran this long starts again at the first pause."""
MAX_FAILED_STARTS = 3
FAILED, MISUSED = 1, 2
PR_SET_PDEATHSIG = 1
SENTENCE = re.compile(r"(?:Error:|[\d:]{8} \S+ ERROR) (.+)")
"""A command's last word, or a line of its log."""
LINE_LIMIT = 1 << 20
LONGEST_LINE = 4_000
"""Characters shown of a line."""

log = logging.getLogger("serve")
_libc = ctypes.CDLL(None) if sys.platform == "linux" else None


@dataclass
class Child:
    """One process that must run. `environment` is asked anew before each start."""

    name: str
    command: tuple[str, ...]
    environment: Callable[[], Mapping[str, str]]
    stop_timeout_s: float
    noise: tuple[str, ...] = ()
    """Lines of its output with one of these are not worth showing."""
    was_ready: bool = False
    """Set by whoever can tell; until then an end is a failed start."""
    process: asyncio.subprocess.Process | None = None
    last_error: str = ""
    num_failed_starts: int = field(default=0, init=False)
    keeper: asyncio.Task[None] | None = field(default=None, init=False)

    @property
    def is_running(self) -> bool:
        return self.process is not None and self.process.returncode is None


class Supervisor:
    def __init__(self) -> None:
        self.children: list[Child] = []
        self._is_stopping = False
        self._parent = os.getpid()
        self.failure: asyncio.Future[CommandError] = asyncio.get_running_loop().create_future()
        """Resolved when a child will not get better."""

    def start(self, child: Child) -> None:
        self.children.append(child)
        child.keeper = asyncio.create_task(self._keep(child))
        child.keeper.add_done_callback(self._on_keeper_done)

    def _on_keeper_done(self, keeper: asyncio.Task[None]) -> None:
        if keeper.cancelled() or (error := keeper.exception()) is None or self.failure.done():
            return
        log.debug("A process could not be kept.", exc_info=error)
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        self.failure.set_result(CommandError(f"A process could not be started: {reason}."))

    async def stop(self, children: list[Child]) -> None:
        """SIGTERM to all of these at once; SIGKILL to those that are not gone within their timeout."""
        for child in children:
            if child.keeper is not None and not child.is_running:
                child.keeper.cancel()
        await asyncio.gather(*(self._stop(child) for child in children))

    def begin_stop(self) -> None:
        """From now on a child that ends is not started again."""
        self._is_stopping = True

    def kill(self) -> None:
        """SIGKILL to every process group, at once."""
        self._is_stopping = True
        for child in self.children:
            _signal_group(child, signal.SIGKILL)

    async def _stop(self, child: Child) -> None:
        if child.process is not None and child.is_running:
            # Only the leader: what it started itself is its own to stop.
            child.process.terminate()
            try:
                async with asyncio.timeout(child.stop_timeout_s):
                    await child.process.wait()
            except TimeoutError:
                log.warning("%s does not stop and is killed.", child.name)
        _signal_group(child, signal.SIGKILL)
        if child.keeper is not None:
            await asyncio.gather(child.keeper, return_exceptions=True)

    async def _keep(self, child: Child) -> None:
        loop = asyncio.get_running_loop()
        pause_s = FIRST_PAUSE_S
        while not self._is_stopping:
            started_s = loop.time()
            code = await self._run(child)
            if self._is_stopping:
                return
            if self._is_hopeless(child, code):
                return
            if loop.time() - started_s > SETTLED_S:
                pause_s = FIRST_PAUSE_S
            log.warning(
                "%s ended (%s); it starts again in %d s.", child.name, _describe(code), pause_s
            )
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    def _is_hopeless(self, child: Child, code: int) -> bool:
        if child.was_ready:
            return False
        child.num_failed_starts += 1
        if code != MISUSED and child.num_failed_starts < MAX_FAILED_STARTS:
            return False
        text = child.last_error or f"{child.name} cannot be started ({_describe(code)})."
        kind = SettingError if code == MISUSED else CommandError
        if not self.failure.done():
            self.failure.set_result(kind(text))
        return True

    async def _run(self, child: Child) -> int:
        child.process = await asyncio.create_subprocess_exec(
            *child.command,
            env=dict(child.environment()),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            process_group=0,
            preexec_fn=self._die_with_parent,
            limit=LINE_LIMIT,
        )
        await self._copy_output(child)
        return await child.process.wait()

    async def _copy_output(self, child: Child) -> None:
        """Every line of the child goes to stderr behind its name, until the child and its like are gone."""
        assert child.process is not None and child.process.stdout is not None
        stream = child.process.stdout
        ended = asyncio.create_task(child.process.wait())
        while True:
            line = asyncio.create_task(_read_line(stream))
            await asyncio.wait({line, ended}, return_when=asyncio.FIRST_COMPLETED)
            if not line.done():
                # Something that the child started may hold the pipe open: give the rest a moment.
                await asyncio.wait({line}, timeout=0.2)
            if not line.done() or not line.result():
                line.cancel()
                await ended
                return
            self._report(child, line.result())

    def _report(self, child: Child, line: bytes) -> None:
        text = line.decode(errors="replace").rstrip()[:LONGEST_LINE]
        said = SENTENCE.match(text)
        if said is not None:
            child.last_error = said[1]
        if any(part in text for part in child.noise):
            return
        click.echo(f"{child.name:<10} | {text}", err=True)

    def _die_with_parent(self) -> None:
        """In the child, before it becomes its program."""
        if _libc is not None:
            _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != self._parent:
                os._exit(FAILED)


async def _read_line(stream: asyncio.StreamReader) -> bytes:
    try:
        return await stream.readline()
    except ValueError:
        # Longer than any line of a log; its parts are of no use.
        return b"(a line that is too long)\n"


def _signal_group(child: Child, number: signal.Signals) -> None:
    if child.process is None:
        return
    try:
        os.killpg(child.process.pid, number)
    except (ProcessLookupError, PermissionError):
        return


def _describe(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"
