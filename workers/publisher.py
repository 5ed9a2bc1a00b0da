"""Writes deltas to the gateways' reply streams and acknowledges finished requests.

Whatever gathered while the last write was under way goes out in one transaction: one append for each
gateway, and with it the acknowledgement of every request that ended in it. So a slow Redis makes
writes larger, not more, and an entry is gone only when its terminal delta is there to be read.
"""

import asyncio
from collections import defaultdict
from dataclasses import dataclass, field

from redis.asyncio import Redis

from workers.link import OUTAGE, Patience
from workers.protocol import PAYLOAD_FIELD, REQUEST_GROUP, OutputDelta, StepDeltas, encode

REPLIES_MAX_LEN = 100_000
"""Entries kept of a reply stream nobody reads (approximate)."""
REPLIES_TTL_S = 300
"""A reply stream that nobody wrote to for this long is dropped."""
MAX_DELTAS = 2_000
"""Deltas of one append, so that an outage's backlog does not become one huge entry."""


@dataclass
class _Batch:
    replies: dict[str, list[OutputDelta]] = field(default_factory=lambda: defaultdict(list))
    finished: list[bytes] = field(default_factory=list)


class Publisher:
    """`put` and `finish` only take note; `run` writes, in order, trying again while Redis is away."""

    def __init__(self, redis: Redis, requests_stream: str, worker_id: str) -> None:
        self._redis = redis
        self._requests_stream = requests_stream
        self._worker_id = worker_id
        self._batch = _Batch()
        self.unacknowledged: set[bytes] = set()
        """Entries of requests that ended here while Redis does not know it yet."""
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()

    def put(self, reply_to: str, delta: OutputDelta) -> None:
        self._batch.replies[reply_to].append(delta)
        self._mark()

    def finish(self, entry_ids: list[bytes]) -> None:
        """Acknowledge and delete these entries together with the deltas that were put before."""
        self._batch.finished += entry_ids
        self.unacknowledged.update(entry_ids)
        self._mark()

    async def run(self) -> None:
        patience = Patience("publisher")
        while True:
            await self._wake.wait()
            self._wake.clear()
            batch, self._batch = self._batch, _Batch()
            while True:
                try:
                    await self._write(batch)
                    break
                except OUTAGE as error:
                    # The transaction may have been carried out: gateways drop repeats by `seq`.
                    await patience.pause(error)
            patience.reset()
            self.unacknowledged.difference_update(batch.finished)
            if not self._wake.is_set():
                self._idle.set()

    async def flush(self, timeout_s: float) -> bool:
        """Wait until everything is written; False if that took longer than `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    def _mark(self) -> None:
        self._idle.clear()
        self._wake.set()

    async def _write(self, batch: _Batch) -> None:
        async with self._redis.pipeline(transaction=True) as pipe:
            for reply_to, deltas in batch.replies.items():
                for start in range(0, len(deltas), MAX_DELTAS):
                    step = StepDeltas(
                        worker_id=self._worker_id, deltas=deltas[start : start + MAX_DELTAS]
                    )
                    pipe.xadd(
                        reply_to,
                        {PAYLOAD_FIELD: encode(step)},
                        maxlen=REPLIES_MAX_LEN,
                        approximate=True,
                    )
                pipe.expire(reply_to, REPLIES_TTL_S)
            if batch.finished:
                pipe.xack(self._requests_stream, REQUEST_GROUP, *batch.finished)
                pipe.xdel(self._requests_stream, *batch.finished)
            await pipe.execute()
