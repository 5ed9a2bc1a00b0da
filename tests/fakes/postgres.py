"""A real PostgreSQL for tests, on a socket of its own in a folder that is removed afterwards."""

import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType

import pytest

_PLACES = sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
_USER = "postgres"
"""The server does not run as root."""
_SETTINGS = {"fsync": "off", "listen_addresses": "", "max_connections": "50"}


def find_programs() -> Path:
    """The folder of `initdb` and `postgres`; skips the test where they are not installed."""
    on_path = shutil.which("pg_ctl")
    if not _PLACES and on_path is None:
        pytest.skip("PostgreSQL's server is not installed (Debian: apt-get install postgresql)")
    return _PLACES[0] if _PLACES else Path(str(on_path)).resolve().parent


class OwnPostgres:
    """One server; `database()` makes an empty database and gives its URL."""

    def __init__(self) -> None:
        self._programs = find_programs()
        self._folder = Path(tempfile.mkdtemp(prefix="tpugate-pg-"))
        self._user = _USER if os.geteuid() == 0 else pwd.getpwuid(os.geteuid()).pw_name
        if os.geteuid() == 0:
            shutil.chown(self._folder, _USER)
        self._data = self._folder / "data"
        self._server: subprocess.Popen[bytes] | None = None
        self._num_databases = 0

    def __enter__(self) -> "OwnPostgres":
        try:
            self._run("initdb", "--pgdata", str(self._data), "--auth", "trust", "--no-sync")
            self.start()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()
        shutil.rmtree(self._folder, ignore_errors=True)

    def start(self) -> None:
        settings = [f"-c{name}={value}" for name, value in _SETTINGS.items()]
        self._server = subprocess.Popen(
            [str(self._programs / "postgres"), "-D", str(self._data), "-k", str(self._folder), *settings],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            user=self._user if os.geteuid() == 0 else None,
            cwd=self._folder,
        )  # fmt: skip
        end_s = time.monotonic() + 30
        while self._call("pg_isready", "-h", str(self._folder)).returncode:
            if self._server.poll() is not None or time.monotonic() > end_s:
                raise RuntimeError("PostgreSQL does not start")
            time.sleep(0.05)

    def stop(self) -> None:
        """At once: clients are cut off."""
        if self._server is not None:
            self._server.send_signal(signal.SIGQUIT)
            self._server.wait(30)

    def database(self) -> str:
        self._num_databases += 1
        name = f"t{self._num_databases}"
        self._run("createdb", "-h", str(self._folder), name)
        return f"postgresql+asyncpg://{self._user}@/{name}?host={self._folder}"

    def _run(self, program: str, *arguments: str) -> None:
        done = self._call(program, *arguments)
        if done.returncode:
            raise RuntimeError(f"{program} failed: {done.stderr.decode(errors='replace')}")

    def _call(self, program: str, *arguments: str) -> subprocess.CompletedProcess[bytes]:
        return subprocess.run(
            [str(self._programs / program), *arguments],
            capture_output=True,
            check=False,
            user=self._user if os.geteuid() == 0 else None,
            cwd=self._folder,
        )
