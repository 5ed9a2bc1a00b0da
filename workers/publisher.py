"""Writes deltas to the gateways' reply streams and acknowledges finished requests.

Whatever gathered while the last write was under way goes out at once: one append for each gateway, and
if requests ended in it, one transaction with their acknowledgement. So a slow Redis makes writes larger,
not more, and an entry is gone only when its terminal delta is there to be read. Most steps end nothing
and are one plain append: a write is on the path of every token, and costs the machine its model's time.
"""

import asyncio
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

from redis.asyncio import Redis

from workers.channel import Channel, Command, checked
from workers.link import OUTAGE, Patience
from workers.protocol import PAYLOAD_FIELD, REQUEST_GROUP, OutputDelta, StepDeltas, encode

REPLIES_MAX_LEN = 100_000
"""Entries kept of a reply stream nobody reads (approximate)."""
REPLIES_TTL_S = 300
"""A reply stream that nobody wrote to for about this long is dropped."""
RENEWAL_S = 30.0
"""How often that is put off while a stream is written to."""
MAX_DELTAS = 2_000
"""Deltas of one append, so that an outage's backlog does not become one huge entry."""


@dataclass
class _Batch:
    replies: dict[str, list[OutputDelta]] = field(default_factory=lambda: defaultdict(list))
    finished: list[bytes] = field(default_factory=list)


class Publisher:
    """`put` and `finish` only take note; `run` writes, in order, trying again while Redis is away."""

    def __init__(self, redis: Redis, requests_stream: str, worker_id: str) -> None:
        self._channel = Channel(redis)
        self._requests_stream = requests_stream
        self._worker_id = worker_id
        self._batch = _Batch()
        self.unacknowledged: set[bytes] = set()
        """Entries of requests that ended here while Redis does not know it yet."""
        self._renewed_s: dict[str, float] = {}
        """When each reply stream's life was last put off."""
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()

    def put(self, reply_to: str, delta: OutputDelta) -> None:
        self._batch.replies[reply_to].append(delta)
        if not self._wake.is_set():
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
                    # It may have been written: gateways drop repeats by `seq`. Or Redis has lost all.
                    self._renewed_s.clear()
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
        appends = [
            (reply_to, StepDeltas(worker_id=self._worker_id, deltas=part))
            for reply_to, deltas in batch.replies.items()
            for part in _parts(deltas)
        ]
        now_s = time.monotonic()
        renewals = [
            name for name in batch.replies if now_s - self._last_renewal_s(name) > RENEWAL_S
        ]
        commands = [_append(reply_to, step) for reply_to, step in appends]
        commands += [("EXPIRE", reply_to, REPLIES_TTL_S) for reply_to in renewals]
        if batch.finished:
            commands += [
                ("XACK", self._requests_stream, REQUEST_GROUP, *batch.finished),
                ("XDEL", self._requests_stream, *batch.finished),
            ]
        if len(commands) > 1:
            commands = [("MULTI",), *commands, ("EXEC",)]
        checked(await self._channel.call(*commands))
        if renewals:
            self._note_renewals(renewals, now_s)

    def _last_renewal_s(self, reply_to: str) -> float:
        return self._renewed_s.get(reply_to, float("-inf"))

    def _note_renewals(self, renewals: list[str], now_s: float) -> None:
        """Gateways come and go: what is too old to tell anything is forgotten."""
        kept = {name: at for name, at in self._renewed_s.items() if now_s - at <= RENEWAL_S}
        self._renewed_s = {**kept, **dict.fromkeys(renewals, now_s)}


def _parts(deltas: list[OutputDelta]) -> Iterator[list[OutputDelta]]:
    for start in range(0, len(deltas), MAX_DELTAS):
        yield deltas[start : start + MAX_DELTAS]


def _append(reply_to: str, step: StepDeltas) -> Command:
    return ("XADD", reply_to, "MAXLEN", "~", REPLIES_MAX_LEN, "*", PAYLOAD_FIELD, encode(step))
