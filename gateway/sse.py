"""Server-sent events: the framing, the chunk encoders of the hot path, and the ASGI responses.

Every token of every stream passes here, so only what it needs: the constant part of a chunk is built once
a request, and a chunk is a join of bytes with one JSON string encoded in between.
"""

from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import AbstractContextManager, aclosing
from typing import Protocol

import msgspec
from litestar.types import Receive, Scope, Send

from gateway.errors import ClientGoneError, GatewayError, ServerError, error_body
from gateway.request_ids import log_failure

PING = b": ping\n\n"
DONE = b"data: [DONE]\n\n"
_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
_encode = msgspec.json.Encoder().encode


def encoded(fields: object) -> bytes:
    """A part of a chunk as JSON."""
    return _encode(fields)


def error_event(error: GatewayError) -> bytes:
    return b"data: " + error_body(error) + b"\n\n"


class ChunkEncoder:
    """Chunks of one stream: they share id, creation time, model and fingerprint."""

    def __init__(self, envelope: dict[str, object], *, chat: bool, include_usage: bool) -> None:
        """`envelope` holds the fields all chunks share; with `include_usage`, chunks carry `usage: null`."""
        head = b"data: " + _encode(envelope)[:-1]
        self._chat = chat
        self._usage_head = head + b',"choices":[],"usage":'
        self._head = head + b',"choices":[{"index":'
        self._end = b'}],"usage":null}\n\n' if include_usage else b"}]}\n\n"
        before, after = (b',"delta":{"content":', b"}") if chat else (b',"text":', b"")
        self._before_text = before
        self._before_logprobs = after + b',"logprobs":'
        self._after_logprobs = b',"finish_reason":null' + self._end
        self._after_text = self._before_logprobs + b"null" + self._after_logprobs
        finish = b',"delta":{}' if chat else b',"text":""'
        self._before_reason = finish + b',"logprobs":null,"finish_reason":"'

    def role(self, choice: int, content: bytes = b'""') -> bytes:
        """The first chunk of a choice; nothing for plain completions, which have no roles. `content` is JSON."""
        if not self._chat:
            return b""
        return b'%b%d,"delta":{"role":"assistant","content":%b,"refusal":null%b' % (
            self._head,
            choice,
            content,
            self._after_text,
        )

    def text(self, choice: int, text: str) -> bytes:
        return b"%b%d%b%b%b" % (
            self._head,
            choice,
            self._before_text,
            _encode(text),
            self._after_text,
        )

    def scored_text(self, choice: int, text: str, logprobs: bytes) -> bytes:
        """A chunk whose tokens are told too; `logprobs` is JSON."""
        return b"%b%d%b%b%b%b%b" % (
            self._head,
            choice,
            self._before_text,
            _encode(text),
            self._before_logprobs,
            logprobs,
            self._after_logprobs,
        )

    def delta(self, choice: int, delta: dict[str, object], logprobs: bytes = b"null") -> bytes:
        """A chunk of a chat that brings something else than text; `logprobs` is JSON."""
        return b'%b%d,"delta":%b,"logprobs":%b%b' % (
            self._head,
            choice,
            _encode(delta),
            logprobs,
            self._after_logprobs,
        )

    def finish(self, choice: int, reason: str) -> bytes:
        return b'%b%d%b%b"%b' % (
            self._head,
            choice,
            self._before_reason,
            reason.encode(),
            self._end,
        )

    def usage(self, fields: dict[str, object]) -> bytes:
        """The chunk without choices."""
        return self._usage_head + _encode(fields) + b"}\n\n"


class WholeAnswer:
    """ASGI response: JSON with status 200."""

    def __init__(self, body: bytes, headers: Iterable[tuple[bytes, bytes]] = ()) -> None:
        self.body = body
        self._headers = headers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        length = (b"content-length", b"%d" % len(self.body))
        headers = [(b"content-type", b"application/json"), length, *self._headers]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": self.body, "more_body": False})


class Guard(AbstractContextManager[object], Protocol):
    """What a stream belongs to: told of the channel to watch, and left when the stream ends for any reason."""

    def watch(self, receive: Receive) -> None: ...


class EventStream:
    """ASGI response: 200 at once, then one send for each block of events."""

    def __init__(
        self,
        guard: Guard,
        blocks: AsyncGenerator[bytes, None],
        on_error: Callable[[GatewayError], bytes] = error_event,
    ) -> None:
        """An error that `blocks` raises becomes the last of the stream, in the words of `on_error`."""
        self._guard = guard
        self._blocks = blocks
        self._on_error = on_error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._guard:
            self._guard.watch(receive)
            await send({"type": "http.response.start", "status": 200, "headers": list(_HEADERS)})
            async with aclosing(self._blocks):
                last = await self._send_blocks(scope, send)
            await send({"type": "http.response.body", "body": last, "more_body": False})

    async def _send_blocks(self, scope: Scope, send: Send) -> bytes:
        try:
            async for block in self._blocks:
                await send({"type": "http.response.body", "body": block, "more_body": True})
        except ClientGoneError:
            pass
        except GatewayError as error:
            log_failure(scope, error)
            return self._on_error(error)
        except Exception as error:  # noqa: BLE001  the ASGI error handler of answers that have begun
            failure = ServerError("The server failed on this request.")
            failure.__cause__ = error
            log_failure(scope, failure)
            return self._on_error(failure)
        return b""
