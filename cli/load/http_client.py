"""A keep-alive HTTP/1.1 connection that costs the measured machine little.

The load generator shares its cores with the servers, so it parses with httptools and msgspec (C) and
does nothing else: httpx spends about ten times as long on a streamed chunk, which at 30 streams is a
visible share of a core.
"""

import asyncio
import ssl
from collections.abc import AsyncIterator, Mapping
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit

import httptools
import msgspec

READ_SIZE = 1 << 16
_SHOWN = 300
"""Bytes of a refusal that an error tells."""


class RequestFailedError(Exception):
    """The server answered with another status than 200 or with what is no HTTP, closed early, or sent an
    in-band error."""


class Delta(msgspec.Struct):
    content: str | None = None


class Choice(msgspec.Struct):
    """Of a chat, or of a plain completion."""

    delta: Delta | None = None
    text: str | None = None


class Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int


class Event(msgspec.Struct):
    """What a measurement reads of a chunk."""

    choices: tuple[Choice, ...] = ()
    usage: Usage | None = None
    error: object = None

    @property
    def has_text(self) -> bool:
        return any(
            choice.text or (choice.delta is not None and choice.delta.content)
            for choice in self.choices
        )


_decode_event = msgspec.json.Decoder(Event).decode


class _ResponseBody:
    """Callbacks of the parser: collects body bytes until the message is complete."""

    def __init__(self) -> None:
        self.parts: list[bytes] = []
        self.complete = False

    def on_body(self, body: bytes) -> None:
        self.parts.append(body)

    def on_message_complete(self) -> None:
        self.complete = True

    def take(self) -> bytes:
        data = b"".join(self.parts)
        self.parts.clear()
        return data


class Connection:
    """One connection to `url`, for one request at a time; an async context manager.

    The path of `url` comes before that of every request.
    """

    def __init__(self, url: str, headers: Mapping[str, str] | None = None) -> None:
        parts = urlsplit(url)
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._host = parts.hostname or "127.0.0.1"
        self._port = parts.port or (443 if self._tls else 80)
        self._root = parts.path.rstrip("/")
        self._head = f"Host: {parts.netloc}\r\nContent-Type: application/json\r\n" + "".join(
            f"{name}: {value}\r\n" for name, value in (headers or {}).items()
        )
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def __aenter__(self) -> Self:
        self._reader, self._writer = await asyncio.open_connection(
            self._host, self._port, ssl=self._tls
        )
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._writer is not None:
            self._writer.close()

    async def send(self, method: str, path: str, body: bytes = b"") -> AsyncIterator[bytes]:
        """Body bytes as they arrive. Raises `RequestFailedError` or an `OSError`."""
        assert self._reader is not None and self._writer is not None, "use `async with`"
        head = f"{method} {self._root}{path} HTTP/1.1\r\n{self._head}Content-Length: {len(body)}\r\n\r\n"
        self._writer.write(head.encode() + body)
        response = _ResponseBody()
        parser = httptools.HttpResponseParser(response)
        failed = b""
        while not response.complete:
            data = await self._reader.read(READ_SIZE)
            if not data:
                raise RequestFailedError("the server closed the connection")
            try:
                parser.feed_data(data)
            except httptools.HttpParserError as error:
                raise RequestFailedError(f"what came is no HTTP: {error}") from error
            received = response.take()
            if parser.get_status_code() != 200:
                failed = (failed + received)[:_SHOWN]
            elif received:
                yield received
        if parser.get_status_code() != 200:
            raise RequestFailedError(f"{parser.get_status_code()}: {failed!r}")

    async def fetch(self, method: str, path: str, body: bytes = b"") -> bytes:
        """The whole body. Raises as `send`."""
        return b"".join([part async for part in self.send(method, path, body)])

    async def events(self, path: str, body: bytes) -> AsyncIterator[Event]:
        """Each server-sent event of a POST, up to `[DONE]`. Raises as `send`."""
        rest = b""
        async for part in self.send("POST", path, body):
            *lines, rest = (rest + part).split(b"\n")
            for line in lines:
                payload = line.removeprefix(b"data:").strip()
                if not line.startswith(b"data:") or payload == b"[DONE]":
                    continue
                try:
                    event = _decode_event(payload)
                except msgspec.MsgspecError as error:
                    raise RequestFailedError(f"an event that is none: {error}") from error
                if event.error is not None:
                    raise RequestFailedError(str(event.error))
                yield event
