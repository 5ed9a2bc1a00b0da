"""Stored responses, in Redis for a time: `tpugate:response:{key id}:{id}` and an index of each API key."""

import logging
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, cast

import msgspec
from redis.exceptions import RedisError

from gateway.errors import UnavailableError
from gateway.settings import GatewaySettings
from gateway.streams import connect
from workers.protocol import gateway_key

logger = logging.getLogger(__name__)

IN_PROGRESS = "in_progress"


@dataclass(frozen=True)
class Stored:
    response: dict[str, Any]
    input: list[dict[str, Any]]
    """All that the model was given, an earlier response's items first."""
    gateway_id: str
    """Of the process that works on it, or did."""

    @property
    def status(self) -> str:
        return str(self.response["status"])


class ResponseStore:
    """Every key sees its own alone. Every method raises `UnavailableError` if Redis is away."""

    def __init__(self, settings: GatewaySettings) -> None:
        self._settings = settings
        self._redis = connect(settings.redis_url, settings.redis_timeout_s)
        script = (files("gateway") / "lua" / "settle.lua").read_text()
        self._settle = self._redis.register_script(script)

    async def close(self) -> None:
        await self._redis.aclose()

    async def put(self, key_id: str, stored: Stored) -> bool:
        """Keep it; False if it is too large for that."""
        body = _packed(stored)
        if len(body) > self._settings.response_max_bytes:
            return False
        name, index = _name(key_id, stored.response["id"]), _index(key_id)
        fields = {"status": stored.status, "gateway": stored.gateway_id, "body": body}
        ttl_s = self._settings.response_ttl_s
        with _spoken():
            async with self._redis.pipeline(transaction=True) as pipe:
                pipe.hset(name, mapping=cast(dict[Any, Any], fields))
                pipe.expire(name, ttl_s)
                pipe.zadd(index, {stored.response["id"]: time.time()})
                pipe.expire(index, ttl_s)
                pipe.zrange(index, 0, -(self._settings.responses_per_key + 1))
                *_, surplus = await pipe.execute()
            if surplus:
                await self._redis.delete(*(_name(key_id, old.decode()) for old in surplus))
                await self._redis.zrem(index, *surplus)
        return True

    async def get(self, key_id: str, response_id: str) -> Stored | None:
        with _spoken():
            found = await self._redis.hgetall(_name(key_id, response_id))
        fields = cast(dict[bytes, bytes], found)
        if not fields:
            return None
        record = msgspec.json.decode(zlib.decompress(fields[b"body"]))
        # The status decides between an end and a cancellation that came together.
        record["response"]["status"] = fields[b"status"].decode()
        return Stored(record["response"], record["input"], fields[b"gateway"].decode())

    async def settle(self, key_id: str, stored: Stored) -> bool:
        """End what is in progress; False if it is not any more."""
        name = _name(key_id, stored.response["id"])
        with _spoken():
            return bool(await self._settle(keys=[name], args=[stored.status, _packed(stored)]))

    async def is_in_progress(self, key_id: str, response_id: str) -> bool:
        with _spoken():
            status = await self._redis.hget(_name(key_id, response_id), "status")
        return cast(bytes | None, status) == IN_PROGRESS.encode()

    async def delete(self, key_id: str, response_id: str) -> bool:
        with _spoken():
            await self._redis.zrem(_index(key_id), response_id)
            return bool(await self._redis.delete(_name(key_id, response_id)))

    async def is_alive(self, gateway_id: str) -> bool:
        """Whether the process still shows that it lives."""
        with _spoken():
            return bool(await self._redis.exists(gateway_key(gateway_id)))


@contextmanager
def _spoken() -> Iterator[None]:
    try:
        yield
    except (RedisError, OSError) as error:
        logger.warning("stored responses cannot be reached: %s", error)
        raise UnavailableError("Stored responses cannot be reached. Try again shortly.") from error


def _packed(stored: Stored) -> bytes:
    record = {"response": stored.response, "input": stored.input}
    return zlib.compress(msgspec.json.encode(record), 1)


def _name(key_id: str, response_id: str) -> str:
    return f"tpugate:response:{key_id}:{response_id}"


def _index(key_id: str) -> str:
    return f"tpugate:responses:{key_id}"
