"""What was paid for and served nobody, as money: a line for each kind, by model and day.

Two sorts, which overlap and so are not one sum. `overhead` is time between steps; closed hours have spread it
over the requests. `in_steps` is part of what requests were charged with:

    padding, rejected   the step's time by its share of padded or refused tokens: an estimate
    preempted           prefill of what a preemption had lost
    aborted, failed     all steps of requests that ended so
    discarded           steps whose token did not join the answer, as it was drawn after the end
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal

from sqlalchemy import ColumnElement, func, literal, select
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import InstrumentedAttribute

from gateway.db.engine import Database
from gateway.domain.accounting.reading import read_price_rows, snapshot
from gateway.domain.accounting.report import By, Cell, Window, read_cells
from gateway.domain.accounting.tables import DAY_S, Period, PriceRow

_NANOS_PER_HOUR = 3600 * 10**9
OVERHEAD = ("idle", "bubble", "compile", "provision", "weights", "drain", "fault", "probe")
_ESTIMATED = {"padding": "padding_ns", "rejected": "rejected_ns"}
_OF_REQUESTS = {
    "preempted": "recomputed_ns",
    "aborted": "aborted_ns",
    "failed": "failed_ns",
    "discarded": "discarded_ns",
}
KINDS = (*OVERHEAD, *_ESTIMATED, *_OF_REQUESTS)


@dataclass(frozen=True)
class WasteLine:
    model: str
    day: str
    kind: str
    sort: str
    """`overhead` or `in_steps`."""
    chip_ns: int
    share: Decimal | None
    """Of all chip-time of the model's day; None if there was none."""
    usd: Decimal | None
    reason: str | None
    """Why there are no dollars."""


async def waste(database: Database, window: Window) -> list[WasteLine]:
    """By model, day and kind; kinds that cost nothing are left out. Raises `UnavailableError`."""
    async with snapshot(database) as session:
        prices = await read_price_rows(session)
        spent = await _of_periods(session, window)
        names = tuple(_OF_REQUESTS.values())
        for cell in await read_cells(session, window, (By.MODEL, By.DAY), names):
            _add_requests(spent, cell)
    found = []
    for (model, day), kinds in sorted(spent.items()):
        measured = sum(kinds.get("measured", {}).values())
        found += [
            _line((model, day, kind), kinds[kind], measured, prices)
            for kind in KINDS
            if sum(kinds.get(kind, {}).values())
        ]
    return found


_Spent = dict[tuple[str, str], dict[str, dict[str, int]]]
"""Nano-chip-seconds by (model, day), kind and price."""


async def _of_periods(session: AsyncSession, window: Window) -> _Spent:
    columns: dict[str, InstrumentedAttribute[int]] = {"measured": Period.measured_ns}
    columns |= {kind: getattr(Period, f"{kind}_ns") for kind in (*OVERHEAD, *_ESTIMATED)}
    day: ColumnElement[int] = (Period.hour - Period.hour % literal(DAY_S)).label("day")
    query = (
        select(Period.model, day, Period.price_id, *(func.sum(each) for each in columns.values()))
        .where(Period.hour >= window.from_s, Period.hour < window.to_s)
        .group_by(Period.model, day, Period.price_id)
    )
    spent: _Spent = {}
    for model, start, price_id, *sums in await session.execute(query):
        kinds = spent.setdefault((model, f"{datetime.fromtimestamp(start, UTC):%Y-%m-%d}"), {})
        for kind, amount in zip(columns, sums, strict=True):
            kinds.setdefault(kind, {})[price_id] = int(amount)
    return spent


def _add_requests(spent: _Spent, cell: Cell) -> None:
    model, day = cell.keys
    kinds = spent.setdefault((model, day), {})
    for kind, name in _OF_REQUESTS.items():
        kinds.setdefault(kind, {})[cell.price_id] = cell.amounts[name]


def _line(
    keys: Sequence[str], by_price: Mapping[str, int], measured: int, prices: Mapping[str, PriceRow]
) -> WasteLine:
    model, day, kind = keys
    chip_ns = sum(by_price.values())
    is_priced = all(price_id in prices for price_id, amount in by_price.items() if amount)
    usd = None
    if is_priced:
        usd = sum(
            (prices[p].usd_per_chip_hour * amount for p, amount in by_price.items() if amount),
            Decimal(0),
        )
        usd /= _NANOS_PER_HOUR
    return WasteLine(
        model=model,
        day=day,
        kind=kind,
        sort="overhead" if kind in OVERHEAD else "in_steps",
        chip_ns=chip_ns,
        share=Decimal(chip_ns) / Decimal(measured) if measured else None,
        usd=usd,
        reason=None if is_priced else "no_price",
    )
