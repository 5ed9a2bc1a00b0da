"""The part of the audit that walks the raw log: chain, tiling, and all charges worked out again."""

from collections import defaultdict
from dataclasses import dataclass, field

import msgspec
from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncSession

from gateway.domain.accounting.audit_owners import Owners
from gateway.domain.accounting.findings import Check, Scope
from gateway.domain.accounting.recompute import (
    Fits,
    UnknownFitError,
    classes,
    hour_of,
    share_step,
)
from gateway.domain.accounting.tables import Charge, ChipEntry, ChipGroup, OpenCharge, Period
from workers.chip_time import (
    AnyEntry,
    Opened,
    Released,
    Span,
    Spent,
    Step,
    decode_entry,
    first_hash,
    next_hash,
)

_PAGE = 2000
"""Entries held at a time."""

_GRANTED = (
    "model",
    "worker_id",
    "engine",
    "sku",
    "num_chips",
    "region",
    "granted_unix_ns",
)
"""What a group's row has of its `Opened`."""


@dataclass
class _Hour:
    """What the log says of a group's hour."""

    hour: int
    classes: dict[tuple[str, str], int] = field(default_factory=lambda: defaultdict(int))
    """Nano-chip-seconds by price and class."""
    measured: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    charges: dict[tuple[str, str], tuple[int, int, int]] = field(default_factory=dict)
    """(prefill, decode, delivered tokens) by price and request."""

    def charge(self, price_id: str, request_id: str, amounts: tuple[int, int, int]) -> None:
        before = self.charges.get((price_id, request_id), (0, 0, 0))
        self.charges[price_id, request_id] = (
            before[0] + amounts[0],
            before[1] + amounts[1],
            before[2] + amounts[2],
        )


async def audit_log(
    session: AsyncSession, fits: Fits, checks: dict[str, Check], scope: Scope
) -> None:
    for group in (await session.scalars(select(ChipGroup))).all():
        scope.num_groups += 1
        scope.num_running += not group.ended
        scope.num_pruned_groups += group.first_kept > 0
        scope.num_pruned_entries += group.first_kept
        await _Walk(session, group, fits, checks, scope).run()


class _Walk:
    """Along one group's entries."""

    def __init__(
        self,
        session: AsyncSession,
        group: ChipGroup,
        fits: Fits,
        checks: dict[str, Check],
        scope: Scope,
    ) -> None:
        self._session = session
        self._group = group
        self._fits = fits
        self._checks = checks
        self._scope = scope
        self._name = f"of group {group.group_id}"
        self._number = group.first_kept
        self._head = group.checkpoint or first_hash(group.group_id)
        self._end_ns: int | None = 0 if group.first_kept == 0 else None
        self._hour: _Hour | None = None
        self._owners = Owners(group.group_id, is_whole=group.first_kept == 0)
        self._last: AnyEntry | None = None
        self._first_hour: int | None = None
        self._has_broken = False

    async def run(self) -> None:
        query = (
            select(ChipEntry)
            .where(ChipEntry.group_id == self._group.group_id)
            .order_by(ChipEntry.number)
            .execution_options(yield_per=_PAGE)
        )
        rows = await self._session.stream_scalars(query)
        async for row in rows:
            await self._take(row)
        if self._hour is not None:
            await self._close(self._hour)
        self._finish()

    async def _take(self, row: ChipEntry) -> None:
        self._scope.num_entries += 1
        first, last = self._scope.first_unix_ns, self._scope.last_unix_ns
        self._scope.first_unix_ns = (
            row.unix_end_ns if first is None else min(first, row.unix_end_ns)
        )
        self._scope.last_unix_ns = max(last or 0, row.unix_end_ns)
        self._follow(row)
        entry = self._decoded(row)
        hour = hour_of(row.unix_end_ns)
        if self._hour is None or self._hour.hour != hour:
            if self._hour is not None:
                await self._close(self._hour)
            self._hour = _Hour(hour)
            self._first_hour = hour if self._first_hour is None else self._first_hour
        self._last = entry
        if entry is not None:
            self._owners.take(entry, row.price_id)
            self._book(self._hour, row.price_id, entry)

    def _follow(self, row: ChipEntry) -> None:
        """The chain, and the line without a gap."""
        tiling, provenance = self._checks["I1"], self._checks["I6"]
        if row.number != self._number:
            tiling.fail(f"entries {self._number} to {row.number - 1} {self._name} are missing")
        if self._end_ns is not None:
            tiling.equal(
                self._group.num_chips * row.begin_ns,
                self._group.num_chips * self._end_ns,
                f"the beginning of entry {row.number} {self._name}, in chip-time",
            )
        self._number, self._end_ns = row.number + 1, row.end_ns
        provenance.checked += 1
        self._head = next_hash(self._head, row.payload)
        if self._head != row.hash and not self._has_broken:
            provenance.fail(f"the hash chain {self._name} breaks at entry {row.number}")
            self._has_broken = True

    def _decoded(self, row: ChipEntry) -> AnyEntry | None:
        """None, and a fault, if the payload is none or is not what the row's columns say."""
        check = self._checks["I6"]
        try:
            entry = decode_entry(row.payload)
        except (msgspec.DecodeError, msgspec.ValidationError):
            check.fail(f"entry {row.number} {self._name} cannot be read")
            return None
        said = (entry.number, entry.begin_ns, entry.end_ns, _kind(entry))
        calendar = self._group.granted_unix_ns + entry.end_ns
        filed = (row.number, row.begin_ns, row.end_ns, row.kind)
        if said != filed or calendar != row.unix_end_ns:
            check.fail(
                f"entry {row.number} {self._name} is filed under another number, time or kind"
            )
        if isinstance(entry, Opened) and any(
            getattr(entry, name) != getattr(self._group, name) for name in _GRANTED
        ):
            check.fail(
                f"the group {self._group.group_id} was granted other chips than its row says"
            )
        if isinstance(entry, Opened | Released) and entry.end_ns != entry.begin_ns:
            check.fail(f"entry {row.number} {self._name} should have no length")
        return entry

    def _book(self, hour: _Hour, price_id: str, entry: AnyEntry) -> None:
        chips = self._group.num_chips
        sign = self._checks["I5"]
        sign.checked += 1
        whole = chips * (entry.end_ns - entry.begin_ns)
        hour.measured[price_id] += whole
        found = classes(entry, chips)
        if whole < 0 or any(amount < 0 for amount in found.values()):
            sign.fail(f"a negative part in entry {entry.number} {self._name}", 1)
        for spent, amount in found.items():
            hour.classes[price_id, spent] += amount
        self._checks["I1"].equal(
            sum(found.values()), whole, f"classes of entry {entry.number} {self._name}"
        )
        if isinstance(entry, Step):
            self._share(hour, price_id, entry)
        elif found.get(Spent.STEP):
            sign.fail(f"entry {entry.number} {self._name} is a step that nobody took part in", 1)
        for ended in entry.ended:
            hour.charge(price_id, ended.request_id, (0, 0, ended.num_output_tokens))

    def _share(self, hour: _Hour, price_id: str, step: Step) -> None:
        if not step.members and not step.is_failed:
            self._checks["I5"].fail(f"step {step.step} {self._name} has no participant", 1)
        try:
            shared = share_step(step, self._group.num_chips, self._fits)
        except UnknownFitError as error:
            self._checks["I6"].fail(f"{error} ({self._name})")
            return
        if shared.parts:
            total = sum(part.share_ns for part in shared.parts)
            self._checks["I2"].equal(total, shared.cost_ns, f"shares of step {step.step}")
        for part in shared.parts:
            amounts = (part.share_ns, 0, 0) if part.member.is_prefill else (0, part.share_ns, 0)
            hour.charge(price_id, part.member.request_id, amounts)

    async def _close(self, hour: _Hour) -> None:
        """Compare an hour with the ledger, unless retention has left only a part of it."""
        periods = await self._session.scalars(
            select(Period).where(Period.group_id == self._group.group_id, Period.hour == hour.hour)
        )
        rows = {row.price_id: row for row in periods}
        is_pruned = self._group.first_kept > 0 and hour.hour == self._first_hour
        measured = sum(row.measured_ns for row in rows.values())
        if is_pruned and sum(hour.measured.values()) < measured:
            self._scope.num_pruned_hours += 1
            self._owners.forget()
            return
        self._compare_classes(hour, rows)
        await self._compare_charges(hour)
        await self._owners.close(self._session, hour.hour, self._checks["I6"])

    def _compare_classes(self, hour: _Hour, rows: dict[str, Period]) -> None:
        for price_id in rows.keys() | hour.measured.keys():
            row = rows.get(price_id)
            for spent in Spent:
                booked = getattr(row, f"{spent.value}_ns") if row is not None else 0
                what = f"{spent.value} {self._name} in hour {hour.hour}"
                self._checks["I6"].equal(booked, hour.classes.get((price_id, spent), 0), what)

    async def _compare_charges(self, hour: _Hour) -> None:
        booked: dict[tuple[str, str], tuple[int, int, int]] = {}
        for table in (Charge, OpenCharge):
            keys = (table.price_id, table.request_id)
            amounts = (table.prefill_ns, table.decode_ns, table.delivered_tokens)
            query = (
                select(*keys, *(func.sum(amount) for amount in amounts))
                .where(table.group_id == self._group.group_id, table.hour == hour.hour)
                .group_by(*keys)
            )
            for price_id, request_id, *sums in await self._session.execute(query):
                before = booked.get((price_id, request_id), (0, 0, 0))
                prefill, decode, tokens = (a + int(b) for a, b in zip(before, sums, strict=True))
                booked[price_id, request_id] = (prefill, decode, tokens)
        tokens_by_request: dict[str, int] = defaultdict(int)
        for key in booked.keys() | hour.charges.keys():
            in_ledger, in_log = booked.get(key, (0, 0, 0)), hour.charges.get(key, (0, 0, 0))
            what = f"request {key[1]} {self._name} in hour {hour.hour}"
            self._checks["I6"].equal(in_ledger[0], in_log[0], f"prefill of {what}")
            self._checks["I6"].equal(in_ledger[1], in_log[1], f"decode of {what}")
            # An end may fall into another price segment than the line that has its tokens.
            tokens_by_request[key[1]] += in_ledger[2] - in_log[2]
        for request_id, difference in tokens_by_request.items():
            self._checks["I4"].equal(
                difference, 0, f"delivered tokens of request {request_id} {self._name}"
            )

    def _finish(self) -> None:
        """The line reaches as far as the group's row says."""
        group = self._group
        if self._number != group.next_number:
            self._checks["I1"].fail(
                f"entries {self._number} to {group.next_number - 1} {self._name} are missing"
            )
        elif self._end_ns is not None:
            self._checks["I1"].equal(
                group.num_chips * self._end_ns,
                group.num_chips * group.end_ns,
                f"the end {self._name}",
            )
        if self._head != group.head and not self._has_broken:
            self._checks["I6"].fail(f"the hash chain {self._name} does not end in its head")
        if bool(group.ended) != isinstance(self._last, Released) and self._last is not None:
            self._checks["I1"].fail(f"the line {self._name} has no end, or its row does not say so")
        if group.broken_at is not None:
            self._checks["I6"].fail(
                f"entry {group.broken_at} {self._name} came broken: {group.broken_why}"
            )


def _kind(entry: AnyEntry) -> str:
    """What `ChipEntry.kind` should be."""
    return entry.spent.value if isinstance(entry, Span) else type(entry).__name__.lower()
