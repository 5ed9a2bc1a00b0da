"""What one request has cost, worked out again from the raw log, step by step, beside what the ledger says."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

from sqlalchemy import func, or_, select
from sqlalchemy.ext.asyncio import AsyncSession

from gateway.db.engine import Database
from gateway.domain.accounting.findings import iso
from gateway.domain.accounting.reading import read_fits, snapshot
from gateway.domain.accounting.recompute import Fits, UnknownFitError, share_step
from gateway.domain.accounting.tables import (
    Charge,
    ChipEntry,
    ChipGroup,
    Fit,
    OpenCharge,
    Period,
    PriceRow,
)
from gateway.errors import NotFoundError
from gateway.request_ids import quoted_id
from workers.chip_time import Step, decode_entry

_NANOS_PER_HOUR = 3600 * 10**9
SHOWN = Decimal("1e-12")
"""Dollars are shown to the trillionth."""
AnyCharge = Charge | OpenCharge


@dataclass(frozen=True)
class StepLine:
    """One choice's part in a step."""

    group: str
    number: int
    """Of the entry."""
    step: int
    ended_unix_ns: int
    bucket: str
    method: str
    num_members: int
    choice: int
    phase: str
    num_tokens: int
    context_len: int
    weight: int
    weight_of_all: int
    cost_ns: int
    """The whole step's."""
    share_ns: int
    sum_ns: int
    """Of this line and those before."""
    price_id: str

    def as_dict(self) -> dict[str, Any]:
        fields = {name: getattr(self, name) for name in self.__dataclass_fields__}
        fields["ended"] = iso(fields.pop("ended_unix_ns"))
        return fields


@dataclass(frozen=True)
class PriceLine:
    """What a part of the request, in one hour on one group's chips, was charged."""

    hour: str
    model: str
    group: str
    sku: str
    num_chips: int
    status: str
    active_ns: int
    loaded_ns: int | None
    """None while the hour is open."""
    kappa: Decimal | None
    """κ of the model's hour as it stands: M / Σ D."""
    price_id: str
    usd_per_chip_hour: Decimal | None
    price_source: str
    active_usd: Decimal | None
    loaded_usd: Decimal | None
    reason: str | None
    """Why there are no loaded dollars."""


@dataclass
class Explanation:
    """A request of a client, all its prompts together."""

    request_ids: list[str]
    steps: list[StepLine] = field(default_factory=list)
    lines: list[PriceLine] = field(default_factory=list)
    fits: list[dict[str, Any]] = field(default_factory=list)
    recomputed: dict[str, int] = field(default_factory=lambda: {"prefill_ns": 0, "decode_ns": 0})
    ledger: dict[str, int] = field(default_factory=dict)
    pruned: list[str] = field(default_factory=list)
    """Parts that are there as lines of the ledger only."""

    @property
    def is_equal(self) -> bool | None:
        """Whether log and ledger agree; None if the log is no longer whole."""
        if self.pruned:
            return None
        return all(self.recomputed[name] == self.ledger[name] for name in self.recomputed)


async def explain(database: Database, request_id: str) -> Explanation:
    """`request_id` is an answer's id, an `x-request-id` of ours, or an id of the wire.

    Raises `NotFoundError` if the ledger has no line of it, `UnavailableError`.
    """
    async with snapshot(database) as session:
        charges = await _charges(session, request_id)
        if not charges:
            raise NotFoundError(
                f"The ledger has no line of the request {request_id[:100]!r}. Give the answer's id or its "
                "x-request-id, if that was not your own; a request's first steps take a few seconds to arrive."
            )
        found = Explanation(sorted({charge.request_id for charge in charges}))
        await _add_steps(session, found, charges, await read_fits(session))
        await _add_lines(session, found, charges)
        await _add_fits(session, found, charges)
    for name in ("prefill_ns", "decode_ns", "uncached_tokens", "cached_tokens", "output_tokens"):
        found.ledger[name] = sum(getattr(charge, name) for charge in charges)
    found.ledger["delivered_tokens"] = sum(charge.delivered_tokens for charge in charges)
    return found


async def _charges(session: AsyncSession, quoted: str) -> list[AnyCharge]:
    """All lines, corrections too."""
    own = quoted_id(quoted)
    charges: list[AnyCharge] = []
    for table in (Charge, OpenCharge):
        column = table.request_id
        is_it = column == quoted
        if own is not None:
            # "-" to "." are the numbered prompts: a range, which an index can answer.
            is_it = or_(is_it, column == own, (column > f"{own}-") & (column < f"{own}."))
        charges.extend(await session.scalars(select(table).where(is_it)))
    return charges


async def _add_steps(
    session: AsyncSession, found: Explanation, charges: Sequence[AnyCharge], fits: Fits
) -> None:
    ranges: dict[str, tuple[int, int]] = {}
    for charge in charges:
        if charge.first_number is not None and charge.last_number is not None:
            first, last = ranges.get(charge.group_id, (charge.first_number, charge.last_number))
            ranges[charge.group_id] = (
                min(first, charge.first_number),
                max(last, charge.last_number),
            )
    for group_id, (first, last) in ranges.items():
        group = await _group(session, group_id)
        if first < group.first_kept:
            kept = (
                "all" if last < group.first_kept else f"entries {first} to {group.first_kept - 1}"
            )
            found.pruned.append(f"{kept} of group {group_id}")
        query = (
            select(ChipEntry)
            .where(ChipEntry.group_id == group_id, ChipEntry.number.between(first, last))
            .where(ChipEntry.kind == "step")
            .order_by(ChipEntry.number)
            .execution_options(yield_per=1000)
        )
        async for row in await session.stream_scalars(query):
            step = decode_entry(row.payload)
            if isinstance(step, Step):
                _add_step(found, group, row, step, fits)


def _add_step(found: Explanation, group: ChipGroup, row: ChipEntry, step: Step, fits: Fits) -> None:
    wanted = set(found.request_ids)
    if not any(member.request_id in wanted for member in step.members):
        return
    try:
        shared = share_step(step, group.num_chips, fits)
    except UnknownFitError as error:
        raise NotFoundError(f"The request cannot be worked out again: {error}.") from error
    for part in shared.parts:
        member = part.member
        if member.request_id not in wanted:
            continue
        phase = "prefill" if member.is_prefill else "decode"
        found.recomputed[f"{phase}_ns"] += part.share_ns
        line = StepLine(
            group=group.group_id,
            number=row.number,
            step=step.step,
            ended_unix_ns=row.unix_end_ns,
            bucket=step.bucket,
            method="affine" if shared.is_fitted else "token-proportional",
            num_members=len(step.members),
            choice=member.choice,
            phase=phase,
            num_tokens=member.num_tokens,
            context_len=member.context_len,
            weight=part.weight,
            weight_of_all=part.weight_of_all,
            cost_ns=shared.cost_ns,
            share_ns=part.share_ns,
            sum_ns=sum(found.recomputed.values()),
            price_id=row.price_id,
        )
        found.steps.append(line)


async def _add_lines(
    session: AsyncSession, found: Explanation, charges: Sequence[AnyCharge]
) -> None:
    parts: dict[tuple[int, str, str], list[AnyCharge]] = {}
    for charge in charges:
        parts.setdefault((charge.hour, charge.price_id, charge.group_id), []).append(charge)
    for (hour, price_id, group_id), rows in sorted(parts.items()):
        group = await _group(session, group_id)
        price = await session.get(PriceRow, price_id) if price_id else None
        measured, steps, is_closed = await _period(session, group.model, hour, price_id)
        active = sum(row.prefill_ns + row.decode_ns for row in rows)
        loaded = sum(row.loaded_ns for row in rows if isinstance(row, Charge))
        ended = [row.status for row in rows if isinstance(row, Charge) and row.kind == "charge"]
        has_open = any(isinstance(row, OpenCharge) for row in rows)
        rate = None if price is None else price.usd_per_chip_hour
        is_final = is_closed and not has_open
        found.lines.append(
            PriceLine(
                hour=iso(hour * 10**9) or "",
                model=group.model,
                group=group_id,
                sku=group.sku,
                num_chips=group.num_chips,
                status="running" if has_open or not ended else ended[-1],
                active_ns=active,
                loaded_ns=loaded if is_final else None,
                kappa=Decimal(measured) / Decimal(steps) if steps else None,
                price_id=price_id,
                usd_per_chip_hour=rate,
                price_source="" if price is None else f"{price.source} ({price.retrieved_at})",
                active_usd=dollars(active, rate),
                loaded_usd=dollars(loaded, rate) if is_final else None,
                reason="no_price" if price is None else None if is_final else "hour_not_closed",
            )
        )


async def _group(session: AsyncSession, group_id: str) -> ChipGroup:
    group = await session.get(ChipGroup, group_id)
    if group is None:
        raise NotFoundError(f"The ledger names the group {group_id!r}, which it does not have.")
    return group


async def _period(
    session: AsyncSession, model: str, hour: int, price_id: str
) -> tuple[int, int, bool]:
    """M, Σ D and whether the hour is closed, all groups of the model together."""
    is_it = (Period.model == model, Period.hour == hour, Period.price_id == price_id)
    sums = select(func.sum(Period.measured_ns), func.sum(Period.step_ns)).where(*is_it)
    measured, steps = (await session.execute(sums)).one()
    opened = select(func.count()).where(*is_it, Period.is_closed.is_(False))
    return int(measured or 0), int(steps or 0), not await session.scalar(opened)


async def _add_fits(
    session: AsyncSession, found: Explanation, charges: Sequence[AnyCharge]
) -> None:
    used = {charge.fit_id for charge in charges if charge.fit_id}
    buckets = {line.bucket for line in found.steps if line.method == "affine"}
    for fit in await session.scalars(
        select(Fit).where(Fit.fit_id.in_(used), Fit.bucket.in_(buckets)).order_by(Fit.bucket)
    ):
        names = ("fit_id", "bucket", "fixed", "prefill", "attention", "decode", "context")
        fields = {name: getattr(fit, name) for name in names}
        found.fits.append({**fields, "residual_ppm": fit.residual_ppm, "num_steps": fit.num_steps})


def dollars(nanos: int, usd_per_chip_hour: Decimal | None) -> Decimal | None:
    """Exact to `Decimal`'s 28 digits; None without a price."""
    return None if usd_per_chip_hour is None else usd_per_chip_hour * nanos / _NANOS_PER_HOUR
