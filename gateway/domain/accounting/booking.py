"""Writes what neighbouring entries of one group come to: one transaction, or nothing.

Exactly once does not rest on who else is at work: the transaction moves `chip_groups.next_number` on from the
number that it has read, and one that finds another number there has lost, and leaves nothing behind.

A group's line stops for good before an entry that cannot be booked (`broken_at` is then `next_number`). What
its chips do from there on becomes a fault when the group ends.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TypeVar

from sqlalchemy import Table, delete, insert, select, update
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncSession

from gateway.db.engine import Database
from gateway.domain.accounting.adding import add_up
from gateway.domain.accounting.fits import adopt, coefficients_of
from gateway.domain.accounting.posting import Fits, KnownFit, Open, Posting
from gateway.domain.accounting.prices import NoPrice, Pricing
from gateway.domain.accounting.soundness import flaw
from gateway.domain.accounting.tables import (
    DAY_S,
    HOUR_S,
    Charge,
    ChipEntry,
    ChipGroup,
    Fit,
    OpenCharge,
    Period,
    Rollup,
)
from workers.chip_time import (
    AnyEntry,
    Opened,
    Released,
    Span,
    Spent,
    Step,
    chain,
    encode,
    first_hash,
)
from workers.chip_time import Fits as PublishedFits
from workers.protocol import HEARTBEAT_TTL_S

_INLINE_MEMBERS = 200
"""Steps with more members than that together are worked out in a thread."""
_OPEN_FIELDS = (
    "request_id", "key_id", "tag", "hour", "price_id", "first_number", "last_number",
    "num_prompt_tokens", "num_choices", "fit_id",
)  # fmt: skip
_AMOUNTS = [
    column.name
    for column in OpenCharge.__table__.columns
    if column.name not in (*_OPEN_FIELDS, "group_id")
]
_NANOS = 10**9

logger = logging.getLogger(__name__)
Pairs = Sequence[tuple[AnyEntry, bytes]]
"""Entries with their payloads."""
FindFits = Callable[[str], Awaitable[PublishedFits | None]]
T = TypeVar("T")


class OutOfTurnError(Exception):
    """Another accountant has moved the group on meanwhile."""


async def _nobody(_: str) -> None:
    return None


class Booking:
    """Of one accountant; holds the fits that it has seen."""

    def __init__(self, database: Database, ask_workers: FindFits = _nobody) -> None:
        """`ask_workers` gives the fits that workers of a model have; may raise `RedisError`."""
        self._database = database
        self._ask_workers = ask_workers
        self._fits: dict[tuple[str, str], KnownFit] = {}

    async def book(
        self,
        group_id: str,
        entries: Pairs,
        pricing: Pricing,
        heads: Mapping[int, bytes] | None = None,
    ) -> int:
        """Write entries and their payloads; those that are there already are passed over.

        They must follow each other, and the group's line or a new group's beginning. `heads` are the chain's
        hashes after some of them, as the worker told them; another one is noted. Gives the number of the next
        entry, which is the same as before if the group's line has ended or is broken.
        Raises `UnavailableError`, `OutOfTurnError`, `RedisError`.
        """
        try:
            async with self._database.session() as session:
                return await self._book(session, group_id, entries, pricing, heads or {})
        except IntegrityError as error:
            # Another accountant has written the same rows first; fits that were stored here are not.
            self._fits.clear()
            raise OutOfTurnError(group_id) from error
        except Exception:
            self._fits.clear()
            raise

    async def lose(self, group_id: str, seen_unix_ns: int, pricing: Pricing) -> bool:
        """End a group that has died: what passed since its last entry is a fault. False if it has ended."""
        async with self._database.session() as session:
            group = await session.get(ChipGroup, group_id)
            if group is None or group.ended:
                return False
            sign_ns = max(seen_unix_ns, group.seen_unix_ns) + int(HEARTBEAT_TTL_S * _NANOS)
            end_ns = max(group.end_ns, sign_ns - group.granted_unix_ns)
            number = group.next_number
            last: list[AnyEntry] = [
                Span(number=number, begin_ns=group.end_ns, end_ns=end_ns, spent=Spent.FAULT),
                Released(number=number + 1, begin_ns=end_ns, end_ns=end_ns),
            ]
            news = [(entry, encode(entry)) for entry in last]
            await self._write(session, group, news, pricing, {}, is_lost=True)
            return True

    async def _find_fits(self, session: AsyncSession, group: ChipGroup, steps: list[Step]) -> None:
        """Know what the steps were shared by, as far as anybody does."""
        named = {(step.fit, step.bucket) for step in steps if step.fit}
        if unknown := named - self._fits.keys():
            await self._read_fits(session, {fit_id for fit_id, _ in unknown})
        if named - self._fits.keys():
            # SQL was made anew, say, under workers that live on.
            fits = await self._ask_workers(group.model)
            if fits is not None:
                await adopt(session, fits, group.model, group.sku)
                await self._read_fits(session, {fits.id})

    async def _read_fits(self, session: AsyncSession, fit_ids: set[str]) -> None:
        for row in await session.scalars(select(Fit).where(Fit.fit_id.in_(fit_ids))):
            self._fits[row.fit_id, row.bucket] = KnownFit(coefficients_of(row), row.residual_ppm)

    async def _book(
        self,
        session: AsyncSession,
        group_id: str,
        entries: Pairs,
        pricing: Pricing,
        heads: Mapping[int, bytes],
    ) -> int:
        group = await session.get(ChipGroup, group_id)
        if group is None:
            first = entries[0][0]
            if not isinstance(first, Opened) or flaw(first, 0, first.num_chips):
                return 0
            group = _new_group(group_id, first)
            session.add(group)
            await session.flush()
        news = [pair for pair in entries if pair[0].number >= group.next_number]
        if not news or news[0][0].number != group.next_number or is_over(group):
            return group.next_number
        await self._find_fits(session, group, [one for one, _ in news if isinstance(one, Step)])
        sound, why = await _aside(news, partial(_sound, news, group, self._fits))
        if sound:
            await self._write(session, group, sound, pricing, heads)
        next_number = group.next_number + len(sound)
        if why:
            await _note_broken(session, group_id, next_number, why)
        return next_number

    async def _write(
        self,
        session: AsyncSession,
        group: ChipGroup,
        news: Pairs,
        pricing: Pricing,
        heads: Mapping[int, bytes],
        *,
        is_lost: bool = False,
    ) -> None:
        posting = Posting(
            group.num_chips,
            group.granted_unix_ns,
            _PriceAt(pricing, group.sku, group.region),
            self._fits,
            await _read_open(session, group.group_id),
            group.next_step,
        )
        before = set(posting.opened)
        await _aside(news, partial(posting.post, [entry for entry, _ in news]))
        hashes = chain(group.head, [payload for _, payload in news])
        await _move_on(session, group, posting, hashes[-1], is_lost=is_lost)
        await _write_log(session, group.group_id, news, posting, hashes)
        await _write_open(session, group.group_id, before, posting.opened.values())
        await _write_lines(session, group, posting)
        numbers = [entry.number for entry, _ in news]
        for number, head in zip(numbers, hashes, strict=True):
            if heads.get(number, head) != head and group.broken_at is None:
                why = f"the worker's chain has another hash after entry {number}"
                await _note_broken(session, group.group_id, numbers[0], why)
                break


def is_over(group: ChipGroup) -> bool:
    """Whether no entry can be added to its line any more."""
    return bool(group.ended) or group.broken_at == group.next_number


class _PriceAt:
    """Prices of one group's chips; neighbouring entries have the same."""

    def __init__(self, pricing: Pricing, sku: str, region: str) -> None:
        self._pricing, self._sku, self._region = pricing, sku, region
        self._until_ns = self._from_ns = 0
        self._price_id = ""

    def __call__(self, unix_ns: int) -> str:
        if not self._from_ns <= unix_ns < self._until_ns:
            # An hour and a half holds a slice of entries, and a change within it is a cut of its own.
            segments = self._pricing.segments(
                self._sku, self._region, unix_ns, unix_ns + 5400 * _NANOS
            )
            first = segments[0]
            self._from_ns, self._until_ns = first.from_ns, first.to_ns
            self._price_id = "" if isinstance(first.price, NoPrice) else first.price.id
        return self._price_id


async def _aside(news: Pairs, work: Callable[[], T]) -> T:
    """In a thread, if there is much of it: the event loop has answers to send."""
    num_members = sum(len(entry.members) for entry, _ in news if isinstance(entry, Step))
    return await asyncio.to_thread(work) if num_members > _INLINE_MEMBERS else work()


def _sound(news: Pairs, group: ChipGroup, fits: Fits) -> tuple[Pairs, str]:
    """Those before the first that cannot be booked, and why it cannot."""
    end_ns = group.end_ns
    for place, (entry, _) in enumerate(news):
        if why := flaw(entry, end_ns, group.num_chips):
            return news[:place], why
        if isinstance(entry, Step) and entry.fit and (entry.fit, entry.bucket) not in fits:
            return news[:place], f"nobody knows its fit {entry.fit}"
        end_ns = entry.end_ns
    return news, ""


async def _note_broken(session: AsyncSession, group_id: str, number: int, why: str) -> None:
    logger.error("chip-time of %s is broken at entry %d: %s", group_id, number, why)
    await session.execute(
        update(ChipGroup)
        .where(ChipGroup.group_id == group_id)
        .values(broken_at=number, broken_why=why)
        .execution_options(synchronize_session=False)
    )


def _new_group(group_id: str, opened: Opened) -> ChipGroup:
    return ChipGroup(
        group_id=group_id,
        model=opened.model,
        worker_id=opened.worker_id,
        engine=opened.engine,
        sku=opened.sku,
        region=opened.region,
        num_chips=opened.num_chips,
        granted_unix_ns=opened.granted_unix_ns,
        next_number=0,
        head=first_hash(group_id),
        end_ns=0,
        seen_unix_ns=opened.granted_unix_ns,
        next_step=0,
        computed_tokens=0,
        padded_tokens=0,
        cached_tokens=0,
        delivered_tokens=0,
        ended="",
        broken_why="",
        first_kept=0,
    )


async def _read_open(session: AsyncSession, group_id: str) -> dict[str, Open]:
    table: Table = OpenCharge.__table__  # type: ignore[assignment]
    rows = (await session.execute(select(table).where(table.c.group_id == group_id))).mappings()
    found = {}
    for row in rows:
        fields = {name: row[name] for name in _OPEN_FIELDS}
        one = Open(**fields)
        one.amounts.update((name, row[name]) for name in _AMOUNTS)
        found[one.request_id] = one
    return found


async def _move_on(
    session: AsyncSession,
    group: ChipGroup,
    posting: Posting,
    head: bytes,
    *,
    is_lost: bool,
) -> None:
    last = posting.raw[-1].entry
    ended = "fault" if is_lost else "released" if isinstance(last, Released) else ""
    counted = {
        name: ChipGroup.__table__.c[name] + amount for name, amount in posting.counters.items()
    }
    moved = await session.execute(
        update(ChipGroup)
        .where(
            ChipGroup.group_id == group.group_id,
            ChipGroup.next_number == group.next_number,
        )
        .values(
            next_number=last.number + 1,
            end_ns=last.end_ns,
            seen_unix_ns=max(group.seen_unix_ns, group.granted_unix_ns + last.end_ns),
            head=head,
            next_step=posting.next_step,
            ended=ended,
            **counted,
        )
        .execution_options(synchronize_session=False)
    )
    if moved.rowcount != 1:  # type: ignore[attr-defined]
        raise OutOfTurnError(group.group_id)


async def _write_log(
    session: AsyncSession, group_id: str, news: Pairs, posting: Posting, hashes: list[bytes]
) -> None:
    await session.execute(
        insert(ChipEntry),
        [
            {
                "group_id": group_id,
                "number": raw.entry.number,
                "kind": raw.kind,
                "begin_ns": raw.entry.begin_ns,
                "end_ns": raw.entry.end_ns,
                "unix_end_ns": raw.unix_end_ns,
                "price_id": raw.price_id,
                "payload": payload,
                "hash": head,
            }
            for raw, (_, payload), head in zip(posting.raw, news, hashes, strict=True)
        ],
    )


async def _write_open(
    session: AsyncSession, group_id: str, before: set[str], opened: Iterable[Open]
) -> None:
    rows = [{"group_id": group_id, **dict.fromkeys(_AMOUNTS, 0), **one.row()} for one in opened]
    if before:
        await session.execute(delete(OpenCharge).where(OpenCharge.group_id == group_id))
    if rows:
        await session.execute(insert(OpenCharge), rows)


async def _write_lines(session: AsyncSession, group: ChipGroup, posting: Posting) -> None:
    if posting.lines:
        empty = dict.fromkeys(_AMOUNTS, 0)
        own = {"model": group.model, "group_id": group.group_id}
        await session.execute(
            insert(Charge), [{**empty, **own, **line.row()} for line in posting.lines]
        )
    await add_up(
        session,
        Period.__table__,  # type: ignore[arg-type]
        [
            {
                "model": group.model, "hour": hour, "price_id": price_id,
                "group_id": group.group_id, "is_closed": False, **amounts,
            }
            for (hour, price_id), amounts in posting.periods.items()
        ],
    )  # fmt: skip
    for grain_s in (HOUR_S, DAY_S):
        await add_up(
            session,
            Rollup.__table__,  # type: ignore[arg-type]
            [
                {
                    "grain_s": grain_s, "start": start, "model": group.model,
                    "key_id": key_id, "tag": tag, "price_id": price_id, **amounts,
                }
                for (start, key_id, tag, price_id), amounts in posting.rollups(grain_s).items()
            ],
        )  # fmt: skip
