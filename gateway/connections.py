"""One client's TCP connection: what it may cost, and what it hears if it does not speak HTTP.

uvicorn waits for the rest of a request for ever, takes a head of any length, waits for ever for a client
that has stopped reading, and answers what is no HTTP in plain text. This is its protocol with those bounds.

A client that stops reading fills its own buffers, here `_WRITE_BUFFER_BYTES` at most: then `send` waits,
so the stream's task stops there and nobody else's, and after `stalled_s` without room the connection is
cut, which the stream sees as a client that has left. A host that is gone without a word is noticed by the
kernel (`keep_honest`).
"""

import asyncio
import re
import socket
from dataclasses import dataclass
from typing import ClassVar, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from gateway.errors import (
    BadRequestError,
    BodyTimeoutError,
    GatewayError,
    HeadTooLargeError,
    error_body,
)
from gateway.request_ids import new_request_id

_MAX_HEAD_BYTES = 64 * 1024
"""Of a head that does not arrive in one piece."""
_WRITE_BUFFER_BYTES = 32 * 1024
_KERNEL_BUFFER_BYTES = 256 * 1024
"""What the kernel keeps for a client that does not read; enough for 2 MB/s over 100 ms of way."""
_PROBE_AFTER_S = 30
_PROBE_EVERY_S = 10
_NUM_PROBES = 3
_LAST_WORD_S = 5.0
"""How much later than the application this gives a body up, so that the application can say so."""
_UPGRADE = re.compile(rb"\r\nupgrade:[^\r]*(?=\r\n)", re.IGNORECASE)
_REASONS = {400: b"Bad Request", 408: b"Request Timeout", 431: b"Request Header Fields Too Large"}


@dataclass(frozen=True)
class Limits:
    """Durations are seconds."""

    arrival_s: float
    """For a request's head, and for its body."""
    stalled_s: float
    """Without room for more of an answer."""


class _BoundedProtocol(HttpToolsProtocol):
    limits: ClassVar[Limits]

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(cast(asyncio.Transport, transport))
        self.transport.set_write_buffer_limits(high=_WRITE_BUFFER_BYTES)
        self._in_head = True
        """Also before the first byte of a connection, not between two requests: that is keep-alive."""
        self._in_body = False
        self._head_bytes = 0
        self._arrival: asyncio.TimerHandle | None = None
        self._stall: asyncio.TimerHandle | None = None
        self._expect_more(self.limits.arrival_s)

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget_arrival()
        self.resume_writing()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if not self._in_body and b"pgrade:" in data:
            data = _without_upgrade(data)
        was_in_head = self._in_head
        super().data_received(data)
        if not (self._in_head or self._in_body):
            return
        if self._in_head:
            self._head_bytes += len(data)
            if self._head_bytes > _MAX_HEAD_BYTES:
                self._refuse(HeadTooLargeError("The request's head is too large."))
                return
        if self._arrival is None or was_in_head != self._in_head:
            # A request that arrives in one piece needs no timer.
            extra_s = _LAST_WORD_S if self._in_body else 0.0
            self._expect_more(self.limits.arrival_s + extra_s)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head = True
        self._head_bytes = 0

    def on_headers_complete(self) -> None:
        self._in_head, self._in_body = False, True
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._in_body = False
        self._forget_arrival()
        super().on_message_complete()

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._stall is None:
            self._stall = self.loop.call_later(self.limits.stalled_s, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None

    def timeout_keep_alive_handler(self) -> None:
        # To close waits until all is written, which may be never.
        if self.transport.get_write_buffer_size():
            self.transport.abort()
        else:
            super().timeout_keep_alive_handler()

    def send_400_response(self, msg: str) -> None:
        self._refuse(BadRequestError("This is not a valid HTTP/1.1 request."))

    def _expect_more(self, seconds: float) -> None:
        self._forget_arrival()
        self._arrival = self.loop.call_later(seconds, self._on_late)

    def _forget_arrival(self) -> None:
        if self._arrival is not None:
            self._arrival.cancel()
            self._arrival = None

    def _on_late(self) -> None:
        self._arrival = None
        if self.flow.read_paused:
            # It is we who do not read: a request behind another one of the same connection.
            self._expect_more(self.limits.arrival_s)
        elif self._in_body or self._head_bytes == 0:
            self.transport.close()
        else:
            self._refuse(BodyTimeoutError("The request did not arrive in time."))

    def _refuse(self, error: GatewayError) -> None:
        """Answer and close; only close if another answer of this connection is not finished."""
        self._forget_arrival()
        # Its body is what is wrong, and it is not one of several requests.
        is_this_one = self._in_body and not self.pipeline and not self.cycle.response_started
        if self.cycle is None or self.cycle.response_complete or is_this_one:
            body = error_body(error)
            lines = [
                b"HTTP/1.1 %d %b" % (error.status, _REASONS[error.status]),
                b"content-type: application/json",
                b"content-length: %d" % len(body),
                b"x-request-id: " + new_request_id(),
                b"connection: close",
            ]
            self.transport.write(b"\r\n".join(lines) + b"\r\n\r\n" + body)
        self.transport.close()


def protocol_of(limits: Limits) -> type[HttpToolsProtocol]:
    """The class that uvicorn makes a connection's protocol of."""
    return type("BoundedProtocol", (_BoundedProtocol,), {"limits": limits})


def keep_honest(listener: socket.socket, stalled_s: float) -> None:
    """Let the kernel notice hosts that are gone, on all connections that `listener` accepts."""
    options = {
        "TCP_KEEPIDLE": _PROBE_AFTER_S,
        "TCP_KEEPINTVL": _PROBE_EVERY_S,
        "TCP_KEEPCNT": _NUM_PROBES,
        "TCP_USER_TIMEOUT": int(stalled_s * 1000),
    }
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _KERNEL_BUFFER_BYTES)
    for name, value in options.items():
        if hasattr(socket, name):  # not every system has all of them
            listener.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _without_upgrade(data: bytes) -> bytes:
    """A request without its offer of another protocol, with which the parser would drop the body.

    Clients that would like HTTP/2 (Java's among them) send one with every request.
    """
    head, end, rest = data.partition(b"\r\n\r\n")
    return _UPGRADE.sub(b"", head + end) + rest if end else data
