"""The gateway's two ends of Redis Streams: one writer of requests and aborts, one reader of replies.

Requests and aborts that are ready in one turn of the event loop leave in one write.
Reads are one blocking XREAD per process, fanned out by the caller.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from importlib.resources import files
from typing import cast

import msgspec
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError, ResponseError

from gateway.errors import UnavailableError
from workers.channel import Channel, Command, checked, entries_of
from workers.protocol import (
    PAYLOAD_FIELD,
    REQUEST_GROUP,
    WAITING_CONSUMER,
    AbortRequest,
    GenerateRequest,
    StepDeltas,
    aborts_stream,
    decode,
    encode,
    requests_stream,
)

logger = logging.getLogger(__name__)

_READ_COUNT = 200
_BLOCK_MS = 1000
_TRIM_INTERVAL_S = 1.0
_REPLIES_TTL_S = 60
_MAX_BACKOFF_S = 2.0
_MAX_ABORTS = 10_000
"""Kept while Redis is away; the oldest go first."""
_SLICE = 128
"""So many deltas are handed out at once: each may wake a stream, and all that is woken runs in one go."""


def connect(url: str, timeout_s: float) -> Redis:
    """A client that fails at once instead of retrying: what to do about a failure is decided here, not in it."""
    return Redis.from_url(
        url,
        socket_timeout=timeout_s,
        socket_connect_timeout=timeout_s,
        retry=Retry(NoBackoff(), 0),
        protocol=2,
    )


@dataclass(frozen=True)
class _Abort:
    model: str
    request_id: str
    entry_id: bytes


class Outbox:
    """Writes requests; aborts are kept while Redis is away, and `run` is the task that writes them."""

    def __init__(self, redis: Redis, *, retry_after_s: int) -> None:
        self._channel = Channel(redis)
        self._retry_after_s = retry_after_s
        self._aborts: list[_Abort] = []
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        # Scripts are sent whole: their digests would need a second way for a Redis that does not know them.
        scripts = files("gateway") / "lua"
        self._enqueue_script = (scripts / "enqueue.lua").read_text()
        self._abort_script = (scripts / "abort.lua").read_text()

    async def enqueue(
        self, requests: tuple[GenerateRequest, ...], limit: int
    ) -> list[bytes] | None:
        """Entry ids, or None if the stream would hold more than `limit`. All requests are of one model.

        Raises `UnavailableError` if Redis did not answer; the requests are aborted as soon as it does,
        because they may have been written.
        """
        stream = requests_stream(requests[0].model)
        payloads = map(encode, requests)
        try:
            (entry_ids,) = checked(
                await self._channel.call(
                    ("EVAL", self._enqueue_script, 1, stream, limit, PAYLOAD_FIELD, *payloads)
                )
            )
        except ResponseError as error:
            logger.warning("a request cannot be queued: %s", error)
            raise self._unavailable("The request cannot be queued. Try again shortly.") from error
        except (RedisError, OSError) as error:
            logger.warning("the request queue cannot be written: %s", error)
            for request in requests:
                self.abort(request.model, request.request_id, b"")
            raise self._unavailable(
                "The request queue cannot be reached. Try again shortly."
            ) from error
        return cast(list[bytes] | None, entry_ids)

    def abort(self, model: str, request_id: str, entry_id: bytes) -> None:
        """Send an abort with the next round trip; never blocks and never fails."""
        self._aborts.append(_Abort(model, request_id, entry_id))
        self._idle.clear()
        self._wake.set()

    async def flush(self, timeout_s: float) -> None:
        """Wait until all aborts are written, at most `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            logger.warning("%d aborts could not be written", len(self._aborts))

    async def run(self) -> None:
        """Write aborts until cancelled."""
        backoff_s = 0.05
        while True:
            await self._wake.wait()
            self._wake.clear()
            aborts, self._aborts = self._aborts, []
            try:
                await self._channel.call(*map(self._command, aborts))
                backoff_s = 0.05
            except (RedisError, OSError) as error:
                logger.warning("aborts cannot be written: %s", error)
                self._aborts = [*aborts, *self._aborts][-_MAX_ABORTS:]
                await asyncio.sleep(backoff_s)
                backoff_s = min(backoff_s * 2, _MAX_BACKOFF_S / 4)
                self._wake.set()
            if not self._aborts:
                self._idle.set()

    def _command(self, abort: _Abort) -> Command:
        return (
            "EVAL",
            self._abort_script,
            2,
            aborts_stream(abort.model),
            requests_stream(abort.model),
            PAYLOAD_FIELD,
            encode(AbortRequest(abort.request_id)),
            abort.entry_id,
            REQUEST_GROUP,
            WAITING_CONSUMER,
        )

    def _unavailable(self, sentence: str) -> UnavailableError:
        return UnavailableError(sentence, retry_after_s=self._retry_after_s)


class ReplyReader:
    """The one reader of this gateway's reply stream; reconnects with growing pauses."""

    def __init__(
        self,
        redis: Redis,
        stream: str,
        *,
        on_step: Callable[[StepDeltas], None],
        on_connect: Callable[[], Awaitable[None]],
    ) -> None:
        """`on_connect` runs after each (re)connection, when everything already in the stream was read."""
        self._channel = Channel(redis)
        self._stream = stream
        self._on_step = on_step
        self._on_connect = on_connect
        self._last: bytes = b"0"
        self._trimmed_s = 0.0
        self._num_woken = 0
        """Deltas handed out since other tasks had their turn."""
        self.connected = False

    async def run(self) -> None:
        """Read until cancelled."""
        backoff_s = 0.05
        while True:
            try:
                if not self.connected:
                    while await self._read(block_ms=None):
                        pass
                    await self._on_connect()
                    self.connected = True
                await self._read(block_ms=_BLOCK_MS)
                backoff_s = 0.05
            except (RedisError, OSError) as error:
                if self.connected:
                    logger.warning("the reply stream cannot be read: %s", error)
                self.connected = False
                await asyncio.sleep(backoff_s)
                backoff_s = min(backoff_s * 2, _MAX_BACKOFF_S)

    async def _read(self, *, block_ms: int | None) -> int:
        block = () if block_ms is None else ("BLOCK", block_ms)
        command = ("XREAD", "COUNT", _READ_COUNT, *block, "STREAMS", self._stream, self._last)
        (reply,) = checked(await self._channel.call(command, wait_s=(block_ms or 0) / 1e3))
        entries = entries_of(reply[0][1]) if reply else []
        for entry_id, payload in entries:
            self._last = entry_id
            try:
                step = decode(StepDeltas, payload or b"")
            except (msgspec.DecodeError, msgspec.ValidationError):
                logger.warning("a reply cannot be read and is skipped")
                continue
            for part in _slices(step):
                self._on_step(part)
                self._num_woken += len(part.deltas)
                if self._num_woken >= _SLICE:
                    # Those that were woken go on, and whoever else has something to do.
                    self._num_woken = 0
                    await asyncio.sleep(0)
        now_s = time.monotonic()
        if now_s - self._trimmed_s > _TRIM_INTERVAL_S:
            self._trimmed_s = now_s
            await self._trim()
        return len(entries)

    async def _trim(self) -> None:
        await self._channel.call(
            ("XTRIM", self._stream, "MINID", "~", self._last),
            ("EXPIRE", self._stream, _REPLIES_TTL_S),
        )


def _slices(step: StepDeltas) -> list[StepDeltas]:
    if len(step.deltas) <= _SLICE:
        return [step]
    return [
        StepDeltas(worker_id=step.worker_id, deltas=step.deltas[start : start + _SLICE])
        for start in range(0, len(step.deltas), _SLICE)
    ]
