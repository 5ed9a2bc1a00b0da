"""Writes what neighbouring entries of one group come to: one transaction, or nothing.

Exactly once does not rest on who else is at work: the transaction moves `chip_groups.next_number` on from the
number that it has read, and one that finds another number there has lost, and leaves nothing behind.
"""

import asyncio
from collections.abc import Iterable, Sequence

from sqlalchemy import Table, delete, insert, select, update
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncSession

from gateway.db.engine import Database
from gateway.domain.accounting.adding import add_up
from gateway.domain.accounting.posting import Fits, KnownFit, Open, Posting
from gateway.domain.accounting.prices import NoPrice, Pricing
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
    Coefficients,
    Opened,
    Released,
    Span,
    Spent,
    Step,
    chain,
    encode,
    first_hash,
)
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


class OutOfTurnError(Exception):
    """Another accountant has moved the group on meanwhile."""


class Booking:
    """Of one accountant; holds the fits that it has seen."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._fits: dict[tuple[str, str], KnownFit] = {}

    async def book(
        self, group_id: str, entries: Sequence[tuple[AnyEntry, bytes]], pricing: Pricing
    ) -> int:
        """Write entries and their payloads; those that are there already are passed over.

        They must follow each other, and the group's line or a new group's beginning. Gives the number of the
        next entry. Raises `UnavailableError`, `OutOfTurnError`, `posting.UnknownFitError`.
        """
        try:
            async with self._database.session() as session:
                return await self._book(session, group_id, entries, pricing)
        except IntegrityError as error:
            # Another accountant has written the same rows first.
            raise OutOfTurnError(group_id) from error

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
            await self._write(session, group, news, pricing, is_lost=True)
            return True

    async def read_fits(self, session: AsyncSession) -> Fits:
        """All that ever were; asked for again when a step names one that is new."""
        for row in await session.scalars(select(Fit)):
            self._fits[row.fit_id, row.bucket] = KnownFit(
                Coefficients(row.fixed, row.prefill, row.attention, row.decode, row.context),
                row.residual_ppm,
            )
        return self._fits

    async def _book(
        self,
        session: AsyncSession,
        group_id: str,
        entries: Sequence[tuple[AnyEntry, bytes]],
        pricing: Pricing,
    ) -> int:
        group = await session.get(ChipGroup, group_id)
        if group is None:
            first = entries[0][0]
            if not isinstance(first, Opened):
                return 0
            group = _new_group(group_id, first)
            session.add(group)
            await session.flush()
        news = [pair for pair in entries if pair[0].number >= group.next_number]
        if not news or news[0][0].number != group.next_number or group.ended:
            return group.next_number
        await self._write(session, group, news, pricing)
        return news[-1][0].number + 1

    async def _write(
        self,
        session: AsyncSession,
        group: ChipGroup,
        news: Sequence[tuple[AnyEntry, bytes]],
        pricing: Pricing,
        *,
        is_lost: bool = False,
    ) -> None:
        steps = [entry for entry, _ in news if isinstance(entry, Step)]
        named = {step.fit for step in steps if step.fit}
        if named - {fit_id for fit_id, _ in self._fits}:
            await self.read_fits(session)
        posting = Posting(
            group.num_chips,
            group.granted_unix_ns,
            _PriceAt(pricing, group.sku, group.region),
            self._fits,
            await _read_open(session, group.group_id),
            group.next_step,
        )
        before = set(posting.opened)
        entries = [entry for entry, _ in news]
        if sum(len(step.members) for step in steps) > _INLINE_MEMBERS:
            await asyncio.to_thread(posting.post, entries)
        else:
            posting.post(entries)
        await _move_on(session, group, news, posting, is_lost=is_lost)
        await _write_log(session, group, news, posting)
        await _write_open(session, group.group_id, before, posting.opened.values())
        await _write_lines(session, group, posting)


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
    news: Sequence[tuple[AnyEntry, bytes]],
    posting: Posting,
    *,
    is_lost: bool,
) -> None:
    last = news[-1][0]
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
            head=chain(group.head, [payload for _, payload in news])[-1],
            next_step=posting.next_step,
            ended=ended,
            **counted,
        )
        .execution_options(synchronize_session=False)
    )
    if moved.rowcount != 1:  # type: ignore[attr-defined]
        raise OutOfTurnError(group.group_id)


async def _write_log(
    session: AsyncSession,
    group: ChipGroup,
    news: Sequence[tuple[AnyEntry, bytes]],
    posting: Posting,
) -> None:
    payloads = [payload for _, payload in news]
    hashes = chain(group.head, payloads)
    await session.execute(
        insert(ChipEntry),
        [
            {
                "group_id": group.group_id,
                "number": raw.entry.number,
                "kind": raw.kind,
                "begin_ns": raw.entry.begin_ns,
                "end_ns": raw.entry.end_ns,
                "unix_end_ns": raw.unix_end_ns,
                "price_id": raw.price_id,
                "payload": payload,
                "hash": head,
            }
            for raw, payload, head in zip(posting.raw, payloads, hashes, strict=True)
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
