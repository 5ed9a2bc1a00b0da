"""Reads a model's requests and aborts from Redis.

An entry is pending with the worker that read it until it is acknowledged, so nothing is lost with a
worker: whoever is ready and has room takes over what is pending with a worker whose status key is gone.

What waits for its turn is pending with nobody's consumer, where a blocking read does not find it. Whoever
leaves something there rings: a read waits for that too, and one worker hears it.
"""

import time
from collections.abc import Iterable, Sequence
from importlib.resources import files
from typing import Any

import msgspec
from redis.asyncio import Redis
from redis.exceptions import ResponseError

from workers.channel import Channel, Command, checked, entries_of
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
        self.model = model
        self.stream = requests_stream(model)
        self._bell = f"tpugate:bell:{model}"
        self.may_wait = True
        """Entries may wait for their turn: the last read heard so, or nothing at all."""
        self._backlog = _script("backlog.lua")
        self._take = _script("take.lua")
        self._reclaim = redis.register_script(_script("reclaim.lua"))
        self._leave = redis.register_script(_script("leave.lua"))

    async def ensure_group(self) -> None:
        """Create streams and groups unless they are there; entries older than a group count too."""
        for stream in (self.stream, self._bell):
            try:
                await self._redis.xgroup_create(stream, REQUEST_GROUP, id="0", mkstream=True)
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
        found = [entries_of(reply) for reply in replies]
        return [entries[0][1] if entries else None for entries in found]

    async def take(self, entry_ids: Sequence[bytes]) -> list[Entry]:
        """Claim entries of the backlog; those that another worker took meanwhile are left out.

        Rings if any are left.
        """
        keys, owners = (
            (2, self.stream, self._bell),
            (REQUEST_GROUP, self._worker_id, WAITING_CONSUMER),
        )
        (taken,) = checked(
            await self._channel.call(("EVAL", self._take, *keys, *owners, *entry_ids))
        )
        return [Entry(*entry) for entry in taken]

    async def read(self, count: int) -> list[Entry]:
        """At most `count` new entries; waits up to `BLOCK_S` for the first, or for a ring: see `may_wait`."""
        new = (">", ">")
        command = (*self._reading(count), "BLOCK", int(1000 * BLOCK_S), "STREAMS")
        (reply,) = checked(
            await self._channel.call((*command, self.stream, self._bell, *new), wait_s=BLOCK_S)
        )
        found = dict(reply or ())
        self.may_wait = self.stream.encode() not in found
        if rings := found.get(self._bell.encode()):
            self.may_wait = True
            await self._channel.call(("XACK", self._bell, REQUEST_GROUP, *(r[0] for r in rings)))
        return _entries(found.get(self.stream.encode(), ()))

    async def read_pending(self, count: int) -> list[Entry]:
        """What is pending with this worker, oldest first: a reply of `read` may have been lost."""
        command = (*self._reading(count), "STREAMS", self.stream, "0")
        (reply,) = checked(await self._channel.call(command))
        return _entries(reply[0][1] if reply else ())

    async def reclaim(self, count: int) -> list[Entry]:
        """Take over at most `count` entries from workers that are gone."""
        taken: Any = await self._reclaim(
            keys=[self.stream],
            args=[REQUEST_GROUP, self._worker_id, count, worker_key(""), WAITING_CONSUMER],
        )
        return [Entry(*entry) for entry in taken]

    async def give_back(self, entry_ids: Sequence[bytes]) -> None:
        """Let other workers have these entries at once; nothing was sent for them."""
        async with self._redis.pipeline(transaction=True) as pipe:
            pipe.xclaim(
                self.stream, REQUEST_GROUP, WAITING_CONSUMER, 0, list(entry_ids), justid=True
            )
            pipe.xadd(self._bell, {PAYLOAD_FIELD: b""}, maxlen=1, approximate=False)
            await pipe.execute()

    async def drop(self, entry_id: bytes) -> None:
        """Remove an entry that is no request."""
        async with self._redis.pipeline(transaction=True) as pipe:
            pipe.xack(self.stream, REQUEST_GROUP, entry_id)
            pipe.xdel(self.stream, entry_id)
            await pipe.execute()

    async def leave(self) -> None:
        """Remove this worker's consumers if nothing is pending with them."""
        await self._leave(keys=[self.stream, self._bell], args=[REQUEST_GROUP, self._worker_id])

    def _reading(self, count: int) -> Command:
        return ("XREADGROUP", "GROUP", REQUEST_GROUP, self._worker_id, "COUNT", count)


def _entries(found: Iterable[Any]) -> list[Entry]:
    """Without those that were deleted."""
    entries = entries_of(found)
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
