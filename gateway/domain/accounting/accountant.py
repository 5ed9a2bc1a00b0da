"""The accountant: reads chip-time off the stream and writes it to SQL, each entry once.

    stream ──(consumer group)──> pieces by group ──in number order──> booking ──> committed_key, XACK, XDEL

One gateway's accountant is at work at a time, by a lease; the others wait for it to end. That saves work and
no more: what keeps the ledger right is the transaction (`booking`). Entries that came early wait for those
that are missing, which their worker sends again. A message is acknowledged when all of it is in SQL, so what
an accountant leaves behind its successor finds among the pending ones.
"""

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TypeVar

import msgspec
from redis.asyncio import Redis
from redis.exceptions import RedisError
from sqlalchemy import func, insert, select, update

from gateway.db.engine import Database
from gateway.domain.accounting.booking import Booking, OutOfTurnError, is_over
from gateway.domain.accounting.closing import close_hours
from gateway.domain.accounting.fits import newest_fits, refit
from gateway.domain.accounting.prices import Pricing
from gateway.domain.accounting.retention import prune
from gateway.domain.accounting.tables import DAY_S, BadBatch, ChipGroup
from gateway.domain.accounting.waiting import Waiting, decoded
from gateway.errors import GatewayError
from workers.channel import Channel, checked, entries_of
from workers.chip_time import (
    ACCOUNTANTS,
    CHIP_TIME_STREAM,
    Fits,
    committed_key,
    decode_fits,
    encode,
    fits_key,
)
from workers.protocol import HEARTBEAT_TTL_S, worker_key

LEASE_KEY = "tpugate:chip-time:accountant"
LEASE_S = 10.0
_CONSUMER = "accountant"
"""The same for all: whoever has the lease goes on with what the one before had read."""
_READ_COUNT = 50
_BLOCK_MS = 500
_MAX_EARLY = 200_000
"""Entries of a group that wait for missing ones; more are left in Redis."""
_UPKEEP_S = 2.0
_TIDY_S = 600.0
"""How often old entries go, and models without a fit of today are fitted."""
_MISSES_UNTIL_LOST = 4
"""Looks, with Redis well, at which a group's worker has no status, until it is taken for lost."""
_FIRST_PAUSE_S = 0.2
_LONGEST_PAUSE_S = 5.0
_MAX_BAD = 500
_INLINE_BYTES = 16 * 1024
"""A longer message is read in a thread."""

logger = logging.getLogger(__name__)
T = TypeVar("T")
ReadPricing = Callable[[], Awaitable[Pricing]]


class Accountant:
    """`run` until it is cancelled."""

    def __init__(
        self,
        redis: Redis,
        database: Database,
        read_pricing: ReadPricing,
        owner: str,
        keep_log_s: float,
    ) -> None:
        """`owner` is unique; `read_pricing` may raise `UnavailableError`."""
        self._keep_log_s = keep_log_s
        self._channel = Channel(redis)
        self._database = database
        self._read_pricing = read_pricing
        self._owner = owner
        self._booking = Booking(database, self._fits_of_workers)
        self._groups: dict[str, Waiting] = {}
        self._missed: dict[str, int] = defaultdict(int)
        self._seen_ns: dict[str, int] = {}
        self._dropped: set[str] = set()
        """Groups that it was said of."""
        self._has_recovered = False
        """The pending messages of this tenure were read."""
        self._has_caught_up = False
        """There was nothing more in the stream when it was read last."""
        self._upkeep_s = 0.0
        self._tidied_s = 0.0
        self._pricing: Pricing | None = None

    async def run(self) -> None:
        pause_s = 0.0
        while True:
            try:
                if not await self._holds_lease():
                    self._forget()
                    await asyncio.sleep(LEASE_S / 4)
                    continue
                await self._turn()
                pause_s = 0.0
            except (RedisError, OSError, GatewayError) as error:
                if not pause_s:
                    logger.warning("the accountant waits: %s", error)
                pause_s = await self._pause(pause_s)
            except Exception:
                logger.exception("the accountant has failed and tries again")
                pause_s = await self._pause(pause_s)

    async def _pause(self, last_s: float) -> float:
        """Longer than the last; whatever was under way is read again: it is pending, or in SQL and passed over."""
        self._forget()
        pause_s = min(_LONGEST_PAUSE_S, max(_FIRST_PAUSE_S, 2 * last_s))
        await asyncio.sleep(pause_s)
        return pause_s

    async def _turn(self) -> None:
        now_s = time.monotonic()
        if self._pricing is None or now_s - self._upkeep_s >= _UPKEEP_S:
            self._upkeep_s = now_s
            self._pricing = await self._read_pricing()
            await self._look_after_groups()
            await close_hours(self._database, time.time())
            if now_s - self._tidied_s >= _TIDY_S:
                await self._tidy()
                self._tidied_s = now_s
        messages = await self._read()
        self._has_caught_up = len(messages) < _READ_COUNT
        for message_id, payload in messages:
            await self._take(message_id, payload)
        for group_id in list(self._groups):
            await self._book(group_id)

    async def _tidy(self) -> None:
        await prune(self._database, time.time() - self._keep_log_s)
        async with self._database.session() as session:
            query = select(ChipGroup.model, ChipGroup.sku).where(ChipGroup.ended == "").distinct()
            kinds = [(row[0], row[1]) for row in await session.execute(query)]
        newest = await newest_fits(self._database)
        for model, sku in kinds:
            # Fits are kept for ever: one a day follows what changes, and stays few.
            if model not in newest or newest[model].age_s(time.time()) >= DAY_S:
                await refit(self._database, model, sku)
        for model, found in (await newest_fits(self._database)).items():
            checked(await self._channel.call(("SET", fits_key(model), encode(found.fits))))

    # Redis

    async def _holds_lease(self) -> bool:
        px = int(1000 * LEASE_S)
        mine = self._owner.encode()
        _, holder = await self._channel.call(
            ("SET", LEASE_KEY, mine, "NX", "PX", px), ("GET", LEASE_KEY)
        )
        if holder != mine:
            return False
        checked(await self._channel.call(("PEXPIRE", LEASE_KEY, px)))
        return True

    async def release(self) -> None:
        """Let another accountant begin at once."""
        try:
            (holder,) = await self._channel.call(("GET", LEASE_KEY))
            if holder == self._owner.encode():
                await self._channel.call(("DEL", LEASE_KEY))
        except (RedisError, OSError):
            logger.info("the accountant's lease was not given back; it expires by itself")

    async def _read(self) -> list[tuple[bytes, bytes | None]]:
        if not self._has_recovered:
            await self._channel.call(
                ("XGROUP", "CREATE", CHIP_TIME_STREAM, ACCOUNTANTS, "0", "MKSTREAM")
            )
            messages = await self._read_from("0")
            while messages:
                for message_id, payload in messages:
                    await self._take(message_id, payload)
                messages = await self._read_from(messages[-1][0])
            self._has_recovered = True
        return await self._read_from(">")

    async def _read_from(self, start: str | bytes) -> list[tuple[bytes, bytes | None]]:
        block = ("BLOCK", _BLOCK_MS) if start == ">" else ()
        (reply,) = checked(
            await self._channel.call(
                (
                    "XREADGROUP", "GROUP", ACCOUNTANTS, _CONSUMER, "COUNT", _READ_COUNT, *block,
                    "STREAMS", CHIP_TIME_STREAM, start,
                ),
                wait_s=_BLOCK_MS / 1000,
            )
        )  # fmt: skip
        return entries_of(reply[0][1]) if reply else []

    async def _acknowledge(self, message_ids: list[bytes]) -> None:
        if message_ids:
            checked(
                await self._channel.call(
                    ("XACK", CHIP_TIME_STREAM, ACCOUNTANTS, *message_ids),
                    ("XDEL", CHIP_TIME_STREAM, *message_ids),
                )
            )

    # Entries

    async def _take(self, message_id: bytes, payload: bytes | None) -> None:
        """Put a batch's entries beside those that wait; what is no batch is put aside."""
        if payload is None:
            await self._acknowledge([message_id])
            return
        try:
            # A worker's backlog comes in messages of a megabyte, and the event loop has answers to send.
            batch, entries = await _aside(payload, partial(decoded, payload))
        except (msgspec.MsgspecError, ValueError) as error:
            await self._refuse(message_id, payload, str(error))
            return
        waiting = self._groups.get(batch.group)
        if waiting is None:
            waiting = await self._look_up(batch.group)
            self._groups[batch.group] = waiting
        if len(waiting.entries) < _MAX_EARLY:
            waiting.add(message_id, entries, batch.head)

    async def _look_up(self, group_id: str) -> Waiting:
        async with self._database.session() as session:
            group = await session.get(ChipGroup, group_id)
            if group is None:
                return Waiting()
            return Waiting(next_number=group.next_number, is_over=is_over(group))

    async def _fits_of_workers(self, model: str) -> Fits | None:
        (payload,) = checked(await self._channel.call(("GET", fits_key(model))))
        try:
            return None if payload is None else decode_fits(payload)
        except msgspec.MsgspecError:
            return None

    async def _refuse(self, message_id: bytes, payload: bytes, reason: str) -> None:
        logger.error("a message of the chip-time stream is no batch and is put aside: %s", reason)
        async with self._database.session() as session:
            number = await session.scalar(select(func.count()).select_from(BadBatch)) or 0
            if number < _MAX_BAD and await session.get(BadBatch, message_id.decode()) is None:
                row = {"message_id": message_id.decode(), "reason": reason, "payload": payload}
                await session.execute(insert(BadBatch), [row])
        await self._acknowledge([message_id])

    async def _book(self, group_id: str) -> None:
        waiting, pricing = self._groups[group_id], self._pricing
        assert pricing is not None
        while news := waiting.next_slice():
            try:
                number = await self._booking.book(group_id, news, pricing, waiting.heads)
                waiting.is_over = number == waiting.next_number
            except OutOfTurnError:
                found = await self._look_up(group_id)
                number, waiting.is_over = found.next_number, found.is_over
            waiting.move_to(number)
        if waiting.is_over and waiting.has_news:
            # It was taken for lost and lives, it is broken, or it has no beginning.
            if group_id not in self._dropped:
                logger.error("chip-time of %s is dropped: its line has ended", group_id)
                self._dropped.add(group_id)
            waiting.drop_all()
        await self._settle(group_id, waiting)

    async def _settle(self, group_id: str, waiting: Waiting) -> None:
        """Tell the worker what it need not keep, and Redis too."""
        done = [i for i, last in waiting.messages.items() if last < waiting.next_number]
        for message_id in done:
            del waiting.messages[message_id]
        if done:
            key, day_s = committed_key(group_id), 86400
            checked(await self._channel.call(("SET", key, waiting.next_number, "EX", day_s)))
            await self._acknowledge(done)
        if not waiting.messages:
            del self._groups[group_id]

    # Groups

    async def _look_after_groups(self) -> None:
        """Note which workers live, and end the lines of those that do not."""
        async with self._database.session() as session:
            query = select(ChipGroup.group_id, ChipGroup.worker_id).where(ChipGroup.ended == "")
            groups = [(row[0], row[1]) for row in await session.execute(query)]
        # Of one that SQL does not know the beginning is missing; its name is its worker's.
        running = {group_id for group_id, _ in groups}
        groups.extend((group_id, group_id) for group_id in self._groups.keys() - running)
        if not groups:
            self._missed.clear()
            self._seen_ns.clear()
            return
        statuses = checked(
            await self._channel.call(*(("EXISTS", worker_key(worker)) for _, worker in groups))
        )
        now_ns = time.time_ns()
        known = {group_id for group_id, _ in groups}
        self._seen_ns = {name: seen for name, seen in self._seen_ns.items() if name in known}
        for (group_id, _), is_there in zip(groups, statuses, strict=True):
            if is_there:
                self._missed.pop(group_id, None)
                self._seen_ns[group_id] = now_ns
            else:
                await self._miss(group_id)
        await self._note_seen()

    async def _miss(self, group_id: str) -> None:
        self._missed[group_id] += 1
        waiting = self._groups.get(group_id)
        if self._missed[group_id] < _MISSES_UNTIL_LOST or (waiting and not self._has_caught_up):
            return
        assert self._pricing is not None
        if await self._booking.lose(group_id, self._seen_ns.pop(group_id, 0), self._pricing):
            logger.warning("the chips of %s are gone; its last moments are a fault", group_id)
        if waiting is not None:
            # Nobody is left to send what is missing before it.
            waiting.is_over = True
        self._missed.pop(group_id, None)

    async def _note_seen(self) -> None:
        """In SQL too, so that another accountant knows it."""
        async with self._database.session() as session:
            for group_id, seen_ns in self._seen_ns.items():
                await session.execute(
                    update(ChipGroup)
                    .where(ChipGroup.group_id == group_id, ChipGroup.ended == "")
                    .where(ChipGroup.seen_unix_ns < seen_ns - int(HEARTBEAT_TTL_S * 10**9))
                    .values(seen_unix_ns=seen_ns)
                )

    def _forget(self) -> None:
        """Not to be relied on after an outage, or while another has the lease."""
        self._groups.clear()
        self._missed.clear()
        self._has_recovered = False
        self._pricing = None


async def _aside(payload: bytes, work: Callable[[], T]) -> T:
    """In a thread, if the payload is long."""
    return await asyncio.to_thread(work) if len(payload) > _INLINE_BYTES else work()
