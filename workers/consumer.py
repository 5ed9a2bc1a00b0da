"""Reads a model's requests and aborts from Redis.

An entry is pending with the worker that read it until it is acknowledged, so nothing is lost with a
worker: whoever is ready and has room takes over what is pending with a worker whose status key is gone.
"""

import time
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

import msgspec
from redis.asyncio import Redis
from redis.exceptions import ResponseError

from workers.channel import Channel, checked, entries_of
from workers.claims import Entry
from workers.link import BLOCK_S
from workers.protocol import (
    PAYLOAD_FIELD,
    REQUEST_GROUP,
    WAITING_CONSUMER,
    AbortRequest,
    aborts_stream,
    decode,
    requests_stream,
    worker_key,
)

ABORTS_LOOK_BACK_S = 60
"""A starting worker also reads the aborts of the last minute: it may take over older requests."""
ABORTS_BATCH = 1_000


def _script(name: str) -> str:
    return files("workers").joinpath("lua", name).read_text(encoding="utf-8")


class RequestQueue:
    """The requests stream of one model, seen by one worker. Every method raises `link.OUTAGE`."""

    def __init__(self, redis: Redis, model: str, worker_id: str) -> None:
        self._redis = redis
        self._channel = Channel(redis)
        """For what is done with every claim, which is one thing at a time."""
        self._worker_id = worker_id
        self.stream = requests_stream(model)
        self._backlog = _script("backlog.lua")
        self._take = _script("take.lua")
        self._reclaim = redis.register_script(_script("reclaim.lua"))
        self._leave = redis.register_script(_script("leave.lua"))

    async def ensure_group(self) -> None:
        """Create stream and group unless they are there; entries older than the group count too."""
        try:
            await self._redis.xgroup_create(self.stream, REQUEST_GROUP, id="0", mkstream=True)
        except ResponseError as error:
            if not str(error).startswith("BUSYGROUP"):
                raise

    async def backlog(self, count: int) -> list[bytes]:
        """Ids of the oldest entries that no worker has, at most `count`; they stay everybody's."""
        command = ("EVAL", self._backlog, 1, self.stream, REQUEST_GROUP, WAITING_CONSUMER, count)
        (ids,) = checked(await self._channel.call(command))
        return list(ids)

    async def peek(self, entry_ids: Sequence[bytes]) -> list[bytes | None]:
        """The payloads of entries; None for those that are gone."""
        commands = [("XRANGE", self.stream, entry_id, entry_id) for entry_id in entry_ids]
        replies = checked(await self._channel.call(*commands))
        found = [entries_of([(self.stream, reply)]) for reply in replies]
        return [entries[0][1] if entries else None for entries in found]

    async def take(self, entry_ids: Sequence[bytes]) -> list[Entry]:
        """Claim entries of the backlog; those that another worker took meanwhile are left out."""
        keys, owners = (1, self.stream), (REQUEST_GROUP, self._worker_id, WAITING_CONSUMER)
        (taken,) = checked(
            await self._channel.call(("EVAL", self._take, *keys, *owners, *entry_ids))
        )
        return [Entry(*entry) for entry in taken]

    async def read(self, count: int) -> list[Entry]:
        """At most `count` new entries; waits up to `BLOCK_S` for the first."""
        return await self._read(">", count, block_ms=int(1000 * BLOCK_S))

    async def read_pending(self, count: int) -> list[Entry]:
        """What is pending with this worker, oldest first: a reply of `read` may have been lost."""
        return await self._read("0", count, block_ms=None)

    async def reclaim(self, count: int) -> list[Entry]:
        """Take over at most `count` entries from workers that are gone."""
        taken: Any = await self._reclaim(
            keys=[self.stream],
            args=[REQUEST_GROUP, self._worker_id, count, worker_key(""), WAITING_CONSUMER],
        )
        return [Entry(*entry) for entry in taken]

    async def give_back(self, entry_ids: Sequence[bytes]) -> None:
        """Let other workers have these entries at once; nothing was sent for them."""
        await self._redis.xclaim(
            self.stream, REQUEST_GROUP, WAITING_CONSUMER, 0, list(entry_ids), justid=True
        )

    async def drop(self, entry_id: bytes) -> None:
        """Remove an entry that is no request."""
        async with self._redis.pipeline(transaction=True) as pipe:
            pipe.xack(self.stream, REQUEST_GROUP, entry_id)
            pipe.xdel(self.stream, entry_id)
            await pipe.execute()

    async def leave(self) -> None:
        """Remove this worker's consumer if nothing is pending with it."""
        await self._leave(keys=[self.stream], args=[REQUEST_GROUP, self._worker_id])

    async def _read(self, start: str, count: int, block_ms: int | None) -> list[Entry]:
        block = () if block_ms is None else ("BLOCK", block_ms)
        group = ("GROUP", REQUEST_GROUP, self._worker_id)
        (reply,) = checked(
            await self._channel.call(
                ("XREADGROUP", *group, "COUNT", count, *block, "STREAMS", self.stream, start),
                wait_s=(block_ms or 0) / 1e3,
            )
        )
        entries = entries_of(reply)
        return [Entry(entry_id, payload) for entry_id, payload in entries if payload is not None]


class AbortFeed:
    """The aborts stream of one model, read from a minute before now on."""

    def __init__(self, redis: Redis, model: str) -> None:
        self._redis = redis
        self._stream = aborts_stream(model)
        self._last_id: bytes | str = f"{int(1000 * (time.time() - ABORTS_LOOK_BACK_S))}-0"

    async def read(self) -> list[str]:
        """Request ids to abort; waits up to `BLOCK_S` for the first. Raises `link.OUTAGE`."""
        reply: Any = await self._redis.xread(
            {self._stream: self._last_id}, count=ABORTS_BATCH, block=int(1000 * BLOCK_S)
        )
        request_ids = []
        for entry_id, fields in reply[0][1] if reply else []:
            self._last_id = entry_id
            try:
                request_ids.append(decode(AbortRequest, fields.get(PAYLOAD_FIELD, b"")).request_id)
            except msgspec.DecodeError:
                continue
        return request_ids
