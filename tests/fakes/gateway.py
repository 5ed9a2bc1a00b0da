"""A gateway process for tests, and what tests say to it over HTTP."""

import json
import socket
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import httpx

from tests.fakes.processes import ProcessUnderTest
from tests.fakes.wire import wait_until

ADMIN_KEY = "tpg-admin-key-for-tests-0001"
_RUN = (
    "from gateway.asgi import run; from gateway.settings import GatewaySettings; "
    "run(GatewaySettings.from_environment())"
)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class GatewayUnderTest(ProcessUnderTest):
    """The real gateway in a process of its own."""

    def __init__(self, redis_url: str, data_dir: Path, **settings: str) -> None:
        self.redis_url = redis_url
        self.data_dir = data_dir
        self.port = int(settings.pop("port", 0)) or free_port()
        data_dir.mkdir(parents=True, exist_ok=True)
        self.url = f"http://127.0.0.1:{self.port}"
        super().__init__(
            "-c",
            _RUN,
            output=data_dir / f"gateway-{self.port}.log",
            **{
                "redis_url": redis_url,
                "data_dir": str(data_dir),
                "port": str(self.port),
                "admin_key": ADMIN_KEY,
                "poll_interval_s": "0.1",
                **settings,
            },
        )
        self.client = httpx.Client(
            base_url=self.url, headers={"authorization": f"Bearer {ADMIN_KEY}"}, timeout=30
        )

    def kill(self) -> None:
        self.client.close()
        super().kill()

    def status_of(self, path: str) -> int:
        """0 while nobody listens."""
        try:
            return self.client.get(path).status_code
        except httpx.TransportError:
            return 0

    def wait_for_listening(self) -> None:
        wait_until(lambda: self.status_of("/health") == 200, f"the gateway listens: {self.output}")

    def wait_for_ready(self) -> None:
        wait_until(lambda: self.status_of("/ready") == 200, f"a worker is ready: {self.output}")

    def chat(self, *, script: Iterable[str | bytes] | None = None, **body: Any) -> httpx.Response:
        """POST /v1/chat/completions with defaults for what a test does not care about."""
        return self.client.post(
            "/v1/chat/completions", json=chat_body(**body), headers=script_header(script)
        )

    def metric(self, name: str) -> float:
        """Sum over all labels of a metric."""
        lines = self.client.get("/metrics").text.splitlines()
        found = [line for line in lines if line.split("{")[0].split(" ")[0] == name]
        return sum(float(line.rsplit(" ", 1)[1]) for line in found)


class LeavingClient:
    """Sends one chat request over a bare socket and may leave at any time."""

    def __init__(
        self,
        gateway: GatewayUnderTest,
        *,
        script: Iterable[bytes],
        headers: dict[str, str] | None = None,
        **body: Any,
    ) -> None:
        content = json.dumps(chat_body(**body)).encode()
        headers = {
            "host": "test",
            "authorization": f"Bearer {ADMIN_KEY}",
            "content-length": str(len(content)),
            **script_header(script),
            **(headers or {}),
        }
        lines = [f"{name}: {value}" for name, value in headers.items()]
        head = "\r\n".join(["POST /v1/chat/completions HTTP/1.1", *lines, "", ""])
        self._socket = socket.create_connection(("127.0.0.1", gateway.port), timeout=30)
        self._socket.sendall(head.encode() + content)
        self._received = b""

    def read_until(self, marker: bytes) -> bytes:
        while marker not in self._received:
            data = self._socket.recv(65536)
            assert data, f"the gateway closed the connection: {self._received!r}"
            self._received += data
        return self._received

    def leave(self) -> None:
        self._socket.close()


def chat_body(**fields: Any) -> dict[str, Any]:
    fields.setdefault("messages", [{"role": "user", "content": "one two three"}])
    return {"model": "m-small", **fields}


def script_header(script: Iterable[str | bytes] | None) -> dict[str, str]:
    """What the scripted engine is to emit, one token an item."""
    if script is None:
        return {}
    raw = [item if isinstance(item, bytes) else item.encode() for item in script]
    return {"x-model-script-hex": json.dumps([item.hex() for item in raw])}


def events(text: str) -> list[Any]:
    """The data of all events of a stream, `[DONE]` as it is."""
    found: list[Any] = []
    for block in text.split("\n\n"):
        if block.startswith("data: "):
            data = block.removeprefix("data: ")
            found.append(data if data == "[DONE]" else json.loads(data))
    return found


def joined(chunks: list[Any], choice: int = 0) -> str:
    """The text of one choice of a chat stream."""
    parts = [
        item["delta"].get("content") or ""
        for chunk in chunks
        if chunk != "[DONE]" and "choices" in chunk
        for item in chunk["choices"]
        if item["index"] == choice
    ]
    return "".join(parts)


def assert_error(response: httpx.Response, status: int, **fields: object) -> dict[str, Any]:
    """OpenAI's error object with all four keys, and `fields` in it."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    assert set(body) == {"error"}
    error: dict[str, Any] = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    for name, value in fields.items():
        assert error[name] == value, error
    return error
