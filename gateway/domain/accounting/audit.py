"""Does the ledger add up? Six invariants, each with a residual that is 0 or a fault.

    I1  tiling       a group's entries follow each other without a gap, and their classes add up to chips × time
    I2  shares       what requests are charged with adds up to the steps' time
    I3  money        loaded dollars = price × M for each model, closed hour and price, as exact fractions;
                     and what reports read (rollups) is the sum of the ledger's lines, key by key
    I4  tokens       the ledger's tokens are the engine's counters
    I5  sign         nothing is negative; no step without a participant
    I6  provenance   the log's hash chain holds, and working the log out again gives the ledger's lines: whose they
                     are, how they ended and what they were spent

Sums of lines and periods are checked from the first one; what needs the raw log, as far back as retention has
kept it. Running groups and open hours are checked up to the last entry that is in SQL.
"""

from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from sqlalchemy import ColumnElement, case, func, or_, select
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import InstrumentedAttribute

from gateway.db.engine import Database
from gateway.domain.accounting.audit_log import audit_log
from gateway.domain.accounting.audit_rollups import check_rollups
from gateway.domain.accounting.findings import Check, Scope
from gateway.domain.accounting.reading import read_fits, read_price_rows, snapshot, sum_of
from gateway.domain.accounting.tables import (
    Charge,
    ChipGroup,
    Closing,
    OpenCharge,
    Period,
    Rollup,
)
from workers.chip_time import Spent

_NANOS_PER_HOUR = 3600 * 10**9
Amount = ColumnElement[int] | InstrumentedAttribute[int]


@dataclass
class Audit:
    """What was looked at, and what was found."""

    scope: Scope
    checks: list[Check] = field(default_factory=list)

    @property
    def is_sound(self) -> bool:
        return all(check.is_sound for check in self.checks)

    def as_dict(self) -> dict[str, Any]:
        return {
            "is_sound": self.is_sound,
            "scope": self.scope.as_dict(),
            "checks": [check.as_dict() for check in self.checks],
        }


async def audit(database: Database) -> Audit:
    """All six, over one state of the ledger. Raises `UnavailableError`."""
    checks = {
        name: Check(name, text, unit)
        for name, text, unit in (
            ("I1", "entries and classes add up to chips × time", "nano-chip-seconds"),
            ("I2", "shares of requests add up to the steps' time", "nano-chip-seconds"),
            ("I3", "loaded dollars are price × chip-time", "US$"),
            ("I4", "tokens are the engine's counters", "tokens"),
            ("I5", "nothing is negative, no step is without a participant", "rows"),
            ("I6", "the hash chain holds; the log gives the ledger's lines", "nano-chip-seconds"),
        )
    }
    scope = Scope()
    async with snapshot(database) as session:
        await _check_periods(session, checks["I1"])
        await _check_shares(session, checks["I2"])
        await _check_money(session, checks["I3"])
        await _check_closings(session, checks["I3"])
        await check_rollups(session, checks["I3"])
        await _check_tokens(session, checks["I4"])
        await _check_signs(session, checks["I5"])
        await audit_log(session, await read_fits(session), checks, scope)
        scope.num_open_hours = len(
            (
                await session.execute(
                    select(Period.model, Period.hour)
                    .where(Period.is_closed.is_(False))
                    .group_by(Period.model, Period.hour)
                )
            ).all()
        )
    return Audit(scope, list(checks.values()))


async def _check_periods(session: AsyncSession, check: Check) -> None:
    classes = func.sum(sum_of(getattr(Period, f"{spent.value}_ns") for spent in Spent))
    measured = {}
    query = select(Period.group_id, func.sum(Period.measured_ns), classes).group_by(Period.group_id)
    for group_id, whole, parts in await session.execute(query):
        measured[group_id] = whole
        check.equal(parts, whole, f"classes of group {group_id}")
    for group in await session.scalars(select(ChipGroup)):
        whole = measured.pop(group.group_id, 0)
        check.equal(whole, group.num_chips * group.end_ns, f"periods of group {group.group_id}")
    strays = select(Period.group_id).join(ChipGroup, ChipGroup.group_id == Period.group_id)
    for group_id in await session.scalars(strays.where(ChipGroup.model != Period.model)):
        check.fail(f"periods of group {group_id} are another model's")
    for group_id, whole in measured.items():
        check.equal(whole, 0, f"periods of group {group_id}, which is unknown")


async def _check_shares(session: AsyncSession, check: Check) -> None:
    charged: dict[tuple[str, int, str], int] = {}
    for table in (Charge, OpenCharge):
        keys = (table.group_id, table.hour, table.price_id)
        active = func.sum(table.prefill_ns + table.decode_ns)
        for row in await session.execute(select(*keys, active).group_by(*keys)):
            key = (row[0], row[1], row[2])
            charged[key] = charged.get(key, 0) + int(row[3])
    keys = (Period.group_id, Period.hour, Period.price_id)
    for row in await session.execute(select(*keys, func.sum(Period.step_ns)).group_by(*keys)):
        found = charged.pop((row[0], row[1], row[2]), 0)
        check.equal(found, int(row[3]), f"charges of group {row[0]} in hour {row[1]}")
    for key, amount in charged.items():
        check.equal(amount, 0, f"charges of group {key[0]} in hour {key[1]}, which has no period")


async def _check_money(session: AsyncSession, check: Check) -> None:
    loaded = await _by_period(session, Charge, Charge.loaded_ns)
    spread = await _by_period(session, Closing, Closing.spread_ns)
    is_open = case((Period.is_closed, 0), else_=1)
    periods = await _by_period(session, Period, Period.measured_ns, Period.step_ns, is_open)
    prices = await read_price_rows(session)
    for key, (measured, steps, num_open) in periods.items():
        if num_open:
            continue
        model, hour, price_id = key
        where = f"{model} in hour {hour} at price {price_id or 'none'}"
        price = prices.get(price_id)
        if price_id and price is None:
            check.fail(f"{where}: there is no such price")
        # Without a price there are no dollars, but the chip-time has to be there all the same.
        rate = Fraction(1) if price is None else Fraction(price.usd_per_chip_hour) / _NANOS_PER_HOUR
        (found,) = loaded.get(key, (0,))
        check.equal(found * rate, measured * rate, where, is_counted=price is not None)
        (added,) = spread.get(key, (0,))
        if added != measured - steps:
            check.fail(f"{where}: its closings do not spread all that no step took")


async def _check_closings(session: AsyncSession, check: Check) -> None:
    """What a closing has spread is what its corrections add up to."""
    query = select(Charge.closing_id, func.sum(Charge.loaded_ns)).group_by(Charge.closing_id)
    corrected = {row[0]: int(row[1]) for row in await session.execute(query) if row[0] is not None}
    for closing in await session.scalars(select(Closing)):
        check.checked += 1
        if corrected.pop(closing.id, 0) != closing.spread_ns:
            check.fail(f"corrections of closing {closing.id} do not add up to what it has spread")
    if corrected:
        check.fail(f"corrections of closings that are unknown: {sorted(corrected)[:5]}")


async def _check_tokens(session: AsyncSession, check: Check) -> None:
    computed = Period.prefill_tokens + Period.decode_tokens + Period.failed_tokens
    steps = await _by_group(session, Period, computed, Period.padded_tokens)
    lines = await _by_group(session, Charge, Charge.cached_tokens, Charge.delivered_tokens)
    opened = await _by_group(
        session, OpenCharge, OpenCharge.cached_tokens, OpenCharge.delivered_tokens
    )
    for group in await session.scalars(select(ChipGroup)):
        name = group.group_id
        num_computed, num_padded = steps.get(name, (0, 0))
        cached, delivered = (
            sum(pair)
            for pair in zip(lines.get(name, (0, 0)), opened.get(name, (0, 0)), strict=True)
        )
        check.equal(num_computed, group.computed_tokens, f"computed tokens of group {name}")
        check.equal(num_padded, group.padded_tokens, f"padding of group {name}")
        check.equal(cached, group.cached_tokens, f"cached tokens of group {name}")
        check.equal(delivered, group.delivered_tokens, f"delivered tokens of group {name}")


async def _by_group(
    session: AsyncSession, table: type[Period | Charge | OpenCharge], *amounts: Amount
) -> dict[str, tuple[int, ...]]:
    columns = [func.sum(amount) for amount in amounts]
    rows = await session.execute(select(table.group_id, *columns).group_by(table.group_id))
    return {row[0]: tuple(map(int, row[1:])) for row in rows}


async def _by_period(
    session: AsyncSession, table: type[Period | Charge | Closing], *amounts: Amount
) -> dict[tuple[str, int, str], tuple[int, ...]]:
    keys = (table.model, table.hour, table.price_id)
    columns = [func.sum(amount) for amount in amounts]
    rows = await session.execute(select(*keys, *columns).group_by(*keys))
    return {(row[0], row[1], row[2]): tuple(map(int, row[3:])) for row in rows}


async def _check_signs(session: AsyncSession, check: Check) -> None:
    for table in (Period, Charge, OpenCharge, Rollup):
        columns = table.__table__.columns
        names = [column.name for column in columns if column.name.endswith(("_ns", "tokens"))]
        is_negative = or_(*(getattr(table, name) < 0 for name in names))
        check.checked += await session.scalar(select(func.count()).select_from(table)) or 0
        found = await session.scalar(select(func.count()).select_from(table).where(is_negative))
        if found:
            check.fail(f"{found} negative rows in {table.__tablename__}", found)
