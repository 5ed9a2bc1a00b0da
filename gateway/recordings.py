"""An answer that is made once and sent to several clients: while it is made, or later.

The maker is an ASGI application as any other; what it sends is kept here instead of going to a client. Each
client's `Playback` reads on at its own pace. If the last one leaves, the maker goes on for a while, so that
a client whose connection broke can come back, and is then told that its client has left.
"""

import asyncio
from collections.abc import Sequence
from typing import Any

from litestar.types import Message, Receive, Scope, Send

from gateway.errors import GatewayError
from gateway.sse import PING

REPLAYED = (b"idempotent-replayed", b"true")
Headers = Sequence[tuple[bytes, bytes]]


class Recording:
    """Lives in one event loop."""

    def __init__(self, grace_s: float) -> None:
        self._grace_s = grace_s
        self._abandoned = asyncio.Event()
        self._news = asyncio.Event()
        self._num_readers = 0
        self._timer: asyncio.TimerHandle | None = None
        self.status = 0
        """0 until the answer has begun."""
        self.headers: Headers = ()
        self.pieces: list[bytes] = []
        self.is_complete = False
        self.failure: GatewayError | None = None

    @property
    def is_abandoned(self) -> bool:
        return self._abandoned.is_set()

    async def receive(self) -> Any:  # noqa: ANN401  a message of ASGI
        """The maker's channel: silent, until nobody waits for the answer any more."""
        await self._abandoned.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        """The maker's other channel."""
        if message["type"] == "http.response.start":
            self.status, self.headers = message["status"], list(message["headers"])
        elif message["type"] == "http.response.body":
            body = message["body"]
            if body and body != PING:
                self.pieces.append(body)
            self.is_complete = not message["more_body"]
        self._tell()

    def fail(self, error: GatewayError) -> None:
        self.failure = error
        self._tell()

    def abandon(self) -> None:
        """Tell the maker that nobody waits."""
        self._abandoned.set()

    def enter(self) -> None:
        self._num_readers += 1
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def leave(self) -> None:
        self._num_readers -= 1
        if not self._num_readers and not self.is_complete and self.failure is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(self._grace_s, self.abandon)

    async def wait(self, timeout_s: float | None) -> bool:
        """Until something has changed; False after `timeout_s` without."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._news.wait()
        except TimeoutError:
            return False
        return True

    def _tell(self) -> None:
        self._news.set()
        self._news = asyncio.Event()


class Playback:
    """ASGI response: a recording from its beginning, to one client. A failure before the beginning is raised."""

    def __init__(self, recording: Recording, ping_interval_s: float, *, is_replay: bool) -> None:
        self._recording = recording
        self._ping_interval_s = ping_interval_s
        self._is_replay = is_replay
        # Here, not when it is called: a client counts from the moment that it was promised the answer.
        recording.enter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        play = asyncio.create_task(self._play(send))
        gone = asyncio.create_task(_until_gone(receive))
        try:
            await asyncio.wait((play, gone), return_when=asyncio.FIRST_COMPLETED)
            if play.done():
                play.result()
        finally:
            play.cancel()
            gone.cancel()
            self._recording.leave()

    async def _play(self, send: Send) -> None:
        recording = self._recording
        while not recording.status and recording.failure is None:
            await recording.wait(None)
        if not recording.status and recording.failure is not None:
            raise recording.failure
        marks = (REPLAYED,) if self._is_replay else ()
        headers = [*recording.headers, *marks]
        await send({"type": "http.response.start", "status": recording.status, "headers": headers})
        num_sent = 0
        while not (recording.is_complete and num_sent == len(recording.pieces)):
            if num_sent == len(recording.pieces):
                if recording.failure is not None:
                    break
                if not await recording.wait(self._ping_interval_s) and _is_stream(headers):
                    await _send_piece(send, PING)
                continue
            piece = b"".join(recording.pieces[num_sent:])
            num_sent = len(recording.pieces)
            await _send_piece(send, piece)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _send_piece(send: Send, piece: bytes) -> None:
    await send({"type": "http.response.body", "body": piece, "more_body": True})


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _is_stream(headers: Headers) -> bool:
    return any(value.startswith(b"text/event-stream") for name, value in headers)
