"""What each model was asked for and took, for a comparison with other chips.

Time and dollars are all of it, price × M, also of hours that are still open: not what has been spread over requests.
"""

from collections.abc import Iterable
from decimal import Decimal

from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncSession

from gateway.db.engine import Database
from gateway.domain.accounting.comparison import Load
from gateway.domain.accounting.prices import NANOS_PER_HOUR
from gateway.domain.accounting.reading import read_price_rows, snapshot
from gateway.domain.accounting.report import By, Window, read_cells
from gateway.domain.accounting.tables import ChipGroup, Period, PriceRow

_NANOS = 10**9
_TOKENS = ("num_requests", "uncached_tokens", "cached_tokens", "delivered_tokens")


async def read_loads(database: Database, window: Window, dtype: str) -> list[Load]:
    """One for each model that answered anything; `dtype` is of the weights, which the ledger does not know.

    Raises `UnavailableError`.
    """
    async with snapshot(database) as session:
        tokens: dict[str, dict[str, int]] = {}
        for cell in await read_cells(session, window, (By.MODEL,), _TOKENS):
            sums = tokens.setdefault(cell.keys[0], dict.fromkeys(_TOKENS, 0))
            for name in _TOKENS:
                sums[name] += cell.amounts[name]
        measured = await _measured(session, window)
        served = await _served(session, window)
        prices = await read_price_rows(session)
    return [
        Load(
            model=model,
            dtype=dtype,
            requests=sums["num_requests"],
            input_tokens=sums["uncached_tokens"] + sums["cached_tokens"],
            output_tokens=sums["delivered_tokens"],
            seconds=Decimal(served.get(model, 0)) / _NANOS,
            chip_ns=sum(measured.get(model, {}).values()),
            loaded_usd=_dollars(measured.get(model, {}), prices),
        )
        for model, sums in sorted(tokens.items())
        if sums["num_requests"]
    ]


async def _measured(session: AsyncSession, window: Window) -> dict[str, dict[str, int]]:
    """M by model and price."""
    query = (
        select(Period.model, Period.price_id, func.sum(Period.measured_ns))
        .where(Period.hour >= window.from_s, Period.hour < window.to_s)
        .group_by(Period.model, Period.price_id)
    )
    found: dict[str, dict[str, int]] = {}
    for model, price_id, amount in await session.execute(query):
        found.setdefault(model, {})[price_id] = int(amount)
    return found


async def _served(session: AsyncSession, window: Window) -> dict[str, int]:
    """Nanoseconds of the window in which at least one group of a model lived."""
    begin_ns, end_ns = window.from_s * _NANOS, window.to_s * _NANOS
    end = ChipGroup.granted_unix_ns + ChipGroup.end_ns
    query = select(ChipGroup.model, ChipGroup.granted_unix_ns, end).where(
        ChipGroup.granted_unix_ns < end_ns, end > begin_ns
    )
    lives: dict[str, list[tuple[int, int]]] = {}
    for model, granted, ended in await session.execute(query):
        lives.setdefault(model, []).append((max(granted, begin_ns), min(ended, end_ns)))
    return {model: covered(those) for model, those in lives.items()}


def covered(intervals: Iterable[tuple[int, int]]) -> int:
    """Length of the union of intervals."""
    total, until = 0, None
    for begin, end in sorted(intervals):
        begin = begin if until is None else max(begin, until)
        total += max(0, end - begin)
        until = end if until is None else max(until, end)
    return total


def _dollars(measured: dict[str, int], prices: dict[str, PriceRow]) -> Decimal | None:
    """None if some of the time has no price."""
    if not measured or not set(measured) <= set(prices):
        return None
    return sum(
        (
            prices[price_id].usd_per_chip_hour * amount / NANOS_PER_HOUR
            for price_id, amount in measured.items()
        ),
        Decimal(0),
    )
