"""`Idempotency-Key`: a request that is sent again is answered once (docs/decisions/0017-idempotency.md).

Redis holds one record for each name (API key and idempotency key): who works on it, and later the answer. So
it does not matter which gateway the repeat reaches; on the same one it joins the answer that is being made.
"""

import asyncio
import hashlib
import logging
import re
import time
import zlib
from collections.abc import Awaitable, Callable
from importlib.resources import files
from typing import cast

import msgspec
from litestar.types import ASGIApp
from redis.asyncio import Redis
from redis.exceptions import RedisError

from gateway.domain.openai.services import HttpRequest, read_body
from gateway.errors import (
    BadRequestError,
    GatewayError,
    IdempotencyError,
    RequestTimeoutError,
    ServerError,
    UnavailableError,
)
from gateway.recordings import Playback, Recording
from gateway.request_ids import has_failed
from gateway.settings import GatewaySettings
from gateway.streams import connect
from workers.protocol import gateway_key

logger = logging.getLogger(__name__)

HEADER = "idempotency-key"
_NAME = re.compile(r"[\x21-\x7e]{1,255}")
_POLL_S = 0.2
_MARGIN_S = 60
"""How much longer than a request the claim on a name lasts."""
_MAX_PER_KEY = 1000
"""Answers kept of one API key; the oldest go first."""
_MAX_BYTES = 256 * 1024
"""Of one answer, compressed."""

Handler = Callable[[HttpRequest], Awaitable[ASGIApp]]


async def answered_once(request: HttpRequest, handler: Handler) -> ASGIApp:
    """What `handler` answers; if the request has a name that was used before, what it answered then.

    Raises `BadRequestError`, `IdempotencyError`, `UnavailableError`, `RequestTimeoutError`, and what `handler` raises.
    """
    if HEADER not in request.headers:
        return await handler(request)
    # Not injected: the framework would start a group of tasks for every request with two dependencies.
    replays = cast(Replays, request.app.state["replays"])
    return await replays.answer(request, handler)


class _Answer(msgspec.Struct, array_like=True, frozen=True):
    status: int
    headers: list[tuple[bytes, bytes]]
    body: bytes
    """Compressed."""


class _Record(msgspec.Struct, array_like=True, frozen=True):
    fingerprint: bytes
    """Of path and body."""
    gateway_id: str
    """Who works on it, or did."""
    is_over: bool = False
    answer: _Answer | None = None
    """None, if it is over, was too large to be kept."""


class Replays:
    """One per application; owns the tasks that make answers of named requests."""

    def __init__(self, settings: GatewaySettings, gateway_id: str) -> None:
        self._settings = settings
        self._gateway_id = gateway_id
        self._redis: Redis = connect(settings.redis_url, settings.redis_timeout_s)
        self._running: dict[str, Recording] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        script = (files("gateway") / "lua" / "claim.lua").read_text()
        self._claim_script = self._redis.register_script(script)
        script = (files("gateway") / "lua" / "remember.lua").read_text()
        self._remember_script = self._redis.register_script(script)

    async def stop(self) -> None:
        """End the answers in flight: no client is left."""
        for recording in self._running.values():
            recording.abandon()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._redis.aclose()

    async def answer(self, request: HttpRequest, handler: Handler) -> ASGIApp:
        """See `answered_once`; the request has the header."""
        given = request.headers[HEADER]
        if _NAME.fullmatch(given) is None:
            raise BadRequestError(
                f"Invalid header '{HEADER}': 1 to 255 printable ASCII characters are wanted.",
                param=HEADER,
                code="invalid_value",
            )
        body = await read_body(request, self._settings)
        path = request.scope["path"].encode()
        mine = _Record(hashlib.sha256(path + b"\0" + body).digest(), self._gateway_id)
        key_id = str(request.auth.key_id)
        name = f"{key_id}:{hashlib.sha256(given.encode()).hexdigest()}"
        try:
            return await self._find_or_make(request, handler, name, mine)
        except (RedisError, OSError) as error:
            raise UnavailableError(
                "The request cannot be made idempotent now. Try again shortly.",
                retry_after_s=self._settings.retry_after_unavailable_s,
            ) from error

    async def _find_or_make(
        self, request: HttpRequest, handler: Handler, name: str, mine: _Record
    ) -> ASGIApp:
        until_s = time.monotonic() + self._settings.request_timeout_s
        while time.monotonic() < until_s:
            other = await self._claim(name, mine)
            if other is None:
                return self._make(request, handler, name, mine)
            if other.fingerprint != mine.fingerprint:
                raise IdempotencyError(
                    f"This '{HEADER}' was used for another request.", param=HEADER
                )
            if other.is_over:
                return self._replay(other)
            recording = self._running.get(name)
            if recording is not None and not recording.is_abandoned:
                return self._play(recording, is_replay=True)
            # Another gateway works on it; or this one is about to write or to withdraw its record.
            await asyncio.sleep(_POLL_S)
        raise RequestTimeoutError("The first request of this name took longer than it may.")

    async def _claim(self, name: str, mine: _Record) -> _Record | None:
        """None if the name is ours now, else whose it is."""
        payload = msgspec.msgpack.encode(mine)
        lease_ms = int((self._settings.request_timeout_s + _MARGIN_S) * 1000)
        found = await self._claim_script(keys=[_entry(name)], args=[payload, lease_ms, b""])
        if found is None:
            return None
        other = msgspec.msgpack.decode(found, type=_Record)
        is_dead = not other.is_over and not await self._redis.exists(gateway_key(other.gateway_id))
        if is_dead:
            found = await self._claim_script(keys=[_entry(name)], args=[payload, lease_ms, found])
            return None if found is None else msgspec.msgpack.decode(found, type=_Record)
        return other

    def _make(self, request: HttpRequest, handler: Handler, name: str, mine: _Record) -> ASGIApp:
        recording = self._running[name] = Recording(self._settings.idempotency_grace_s)
        playback = self._play(recording, is_replay=False)
        task = asyncio.create_task(self._record(request, handler, name, mine))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return playback

    def _play(self, recording: Recording, *, is_replay: bool) -> Playback:
        return Playback(recording, self._settings.ping_interval_s, is_replay=is_replay)

    def _replay(self, record: _Record) -> ASGIApp:
        if record.answer is None:
            raise IdempotencyError(
                f"The answer to this '{HEADER}' was too large to be kept.",
                param=HEADER,
                code="idempotent_answer_not_kept",
            )
        recording = Recording(self._settings.idempotency_grace_s)
        recording.status, recording.headers = record.answer.status, record.answer.headers
        recording.pieces = [zlib.decompress(record.answer.body)]
        recording.is_complete = True
        return self._play(recording, is_replay=True)

    async def _record(
        self, request: HttpRequest, handler: Handler, name: str, mine: _Record
    ) -> None:
        """Let the handler answer into the recording, whatever the client does, and keep a good answer."""
        recording = self._running[name]
        inner: HttpRequest = type(request)(request.scope, recording.receive)
        try:
            app = await handler(inner)
            await app(request.scope, recording.receive, recording.send)
        except GatewayError as error:
            recording.fail(error)
        except Exception as error:  # noqa: BLE001  the client's task raises it
            failure = ServerError("The server failed on this request.")
            failure.__cause__ = error
            recording.fail(failure)
        is_good = (
            recording.is_complete
            and recording.status == 200
            and not recording.is_abandoned
            and not has_failed(request.scope)
        )
        try:
            if is_good:
                await self._remember(name, mine, recording)
            else:
                await self._redis.delete(_entry(name))
        except (RedisError, OSError) as error:
            logger.warning("the answer to a named request cannot be kept: %s", error)
        finally:
            del self._running[name]

    async def _remember(self, name: str, mine: _Record, recording: Recording) -> None:
        body = await asyncio.to_thread(zlib.compress, b"".join(recording.pieces), 1)
        answer = _Answer(recording.status, list(recording.headers), body)
        kept = msgspec.structs.replace(
            mine, is_over=True, answer=answer if len(body) <= _MAX_BYTES else None
        )
        index = f"tpugate:replays:{name.partition(':')[0]}"
        args: list[bytes | int | float] = [
            msgspec.msgpack.encode(kept),
            int(self._settings.idempotency_ttl_s * 1000),
            time.time(),
            _MAX_PER_KEY,
        ]
        await self._remember_script(keys=[_entry(name), index], args=args)


def _entry(name: str) -> str:
    return f"tpugate:replay:{name}"
