"""Real child processes for tests: started, watched, never left behind."""

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import TracebackType

SERVE = ("-P", "-m", "cli.main", "serve")
"""Arguments of Python."""
STOP_S = 30.0
_DIE_WITH_PARENT = ("setpriv", "--pdeathsig", "KILL", "--")
"""A test run that is killed leaves nothing behind either. It becomes the command. Not by `preexec_fn`: Python
between fork and exec hangs for ever if it collects what a thread of the test's has locked."""


class ProcessUnderTest:
    """A child in its own process group whose output lies in a file; the group is killed at the end."""

    def __init__(self, *arguments: str, output: Path, **settings: str) -> None:
        environment = {k: v for k, v in os.environ.items() if not k.startswith("TPUGATE_")}
        environment |= {f"TPUGATE_{name.upper()}": value for name, value in settings.items()}
        self.output_path = output
        with output.open("ab") as sink:
            self._process = subprocess.Popen(
                [*_DIE_WITH_PARENT, sys.executable, *arguments],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def __enter__(self) -> "ProcessUnderTest":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.kill()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def output(self) -> str:
        return self.output_path.read_text(encoding="utf-8", errors="replace")

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def send(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def wait(self) -> int:
        """The exit code; negative for a signal."""
        return self._process.wait(STOP_S)

    def kill(self) -> None:
        """SIGKILL to the group."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(STOP_S)


class WorkerUnderTest(ProcessUnderTest):
    """`python -m workers` with the scripted engine unless told otherwise."""

    def __init__(self, url: str, worker_id: str, output: Path, **settings: str) -> None:
        self.worker_id = worker_id
        super().__init__(
            "-m",
            "workers",
            output=output,
            **{"engine": "fake", "redis_url": url, "worker_id": worker_id, **settings},
        )
