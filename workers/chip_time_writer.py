"""Ships the meter's entries to the ledger's stream, and keeps each until an accountant has committed it.

    meter ──take──> numbered, encoded, chained ──XADD──> stream          a few times a second, all that gathered
                          └─ kept until `committed_key` has passed it; sent again if Redis may have lost it

A repeat does no harm: an accountant knows entries by group and number. What is kept is bounded. While Redis is
away and the bound is reached, the meter tells steps as faults until there is room: their time is never lost,
only on whom it was spent.
"""

import asyncio
import time
from collections import deque
from dataclasses import dataclass

import msgspec
from redis.asyncio import Redis

from workers.channel import Channel, Command, checked
from workers.chip_time import (
    CHIP_TIME_STREAM,
    Batch,
    committed_key,
    decode_fits,
    encode,
    first_hash,
    fits_key,
    next_hash,
)
from workers.link import OUTAGE, Patience
from workers.meter import Meter
from workers.protocol import PAYLOAD_FIELD

INTERVAL_S = 0.1
"""How often entries leave, several steps at a time: what a killed worker has not sent becomes a fault."""
MAX_ENTRIES = 500
"""Of one batch, so that an outage's backlog does not become one huge record."""
MAX_KEPT_BYTES = 64 * 1024 * 1024
STREAM_MAX_LEN = 200_000
"""Batches kept if no accountant reads them (approximate): some hours of one busy worker."""
LOOK_S = 2.0
"""How often `committed_key` and the fits are read."""
FIRST_RESEND_S, LAST_RESEND_S = 15.0, 300.0
"""After how long without progress everything that is kept is sent again; twice as long each time."""


@dataclass(frozen=True)
class _Kept:
    number: int
    payload: bytes
    hash: bytes
    """The chain's, after it."""


class ChipTimeWriter:
    """Of one group. `run` until the process ends, then `finish`."""

    def __init__(self, redis: Redis, group: str, model: str, meter: Meter) -> None:
        self._channel = Channel(redis)
        self._group, self._model, self._meter = group, model, meter
        self._head = first_hash(group)
        self._kept: deque[_Kept] = deque()
        self._kept_bytes = 0
        self._num_sent = 0
        """Of what is kept, how many are in the stream as far as is known."""
        self._looked_s = float("-inf")
        self._moved_s = time.monotonic()
        """When `committed_key` moved last, or everything was sent again."""
        self._resend_s = FIRST_RESEND_S

    async def run(self) -> None:
        patience = Patience("chip-time")
        while True:
            self._gather()
            try:
                await self._send()
                if time.monotonic() - self._looked_s >= LOOK_S:
                    await self._look()
            except OUTAGE as error:
                # It may come back with nothing.
                self._num_sent = 0
                await patience.pause(error)
                continue
            patience.reset()
            await asyncio.sleep(INTERVAL_S)

    async def finish(self) -> None:
        """Send what is left, and again all that no accountant is known to have: nobody will notice a loss later.

        Raises what `OUTAGE` names, or `TimeoutError` of the caller's.
        """
        self._gather()
        await self._look()
        self._num_sent = 0
        await self._send()

    def _gather(self) -> None:
        for entry in self._meter.take():
            payload = encode(entry)
            self._head = next_hash(self._head, payload)
            self._kept.append(_Kept(entry.number, payload, self._head))
            self._kept_bytes += len(payload)
        self._meter.is_overfull = self._kept_bytes > MAX_KEPT_BYTES

    async def _send(self) -> None:
        while self._num_sent < len(self._kept):
            part = [
                self._kept[i]
                for i in range(self._num_sent, min(self._num_sent + MAX_ENTRIES, len(self._kept)))
            ]
            batch = Batch(
                self._group, part[0].number, [kept.payload for kept in part], part[-1].hash
            )
            checked(await self._channel.call(_append(batch)))
            self._num_sent += len(part)

    async def _look(self) -> None:
        """Forget what is committed, read the fits, and send again what may be lost."""
        self._looked_s = time.monotonic()
        committed, fits, num_batches = checked(
            await self._channel.call(
                ("GET", committed_key(self._group)),
                ("GET", fits_key(self._model)),
                ("XLEN", CHIP_TIME_STREAM),
            )
        )
        self._forget_below(_number(committed))
        if fits is not None:
            try:
                self._meter.fits = decode_fits(fits)
            except msgspec.MsgspecError:
                self._meter.fits = None
        if not self._num_sent:
            self._moved_s = self._looked_s
        elif not num_batches:
            # An accountant deletes a batch after it has said that it is committed: Redis has lost these.
            self._num_sent = 0
        elif self._looked_s - self._moved_s >= self._resend_s:
            self._num_sent = 0
            self._moved_s = self._looked_s
            self._resend_s = min(2 * self._resend_s, LAST_RESEND_S)

    def _forget_below(self, number: int) -> None:
        while self._kept and self._kept[0].number < number:
            self._kept_bytes -= len(self._kept.popleft().payload)
            self._num_sent = max(0, self._num_sent - 1)
            self._moved_s, self._resend_s = self._looked_s, FIRST_RESEND_S


def _append(batch: Batch) -> Command:
    limit = ("MAXLEN", "~", STREAM_MAX_LEN)
    return ("XADD", CHIP_TIME_STREAM, *limit, "*", PAYLOAD_FIELD, encode(batch))


def _number(text: bytes | None) -> int:
    try:
        return int(text or 0)
    except ValueError:
        return 0
