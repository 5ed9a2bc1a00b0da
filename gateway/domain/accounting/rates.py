"""Reads from the database what answers tell their cost with."""

import time
from decimal import Decimal

from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncSession

from gateway.db.engine import Database
from gateway.domain.accounting.live import Rates
from gateway.domain.accounting.price_store import read_book
from gateway.domain.accounting.prices import Pricing
from gateway.domain.accounting.tables import DAY_S, HOUR_S, Period


async def read_rates(database: Database) -> Rates:
    """The price book and κ of the last day. Raises `UnavailableError`."""
    async with database.session() as session:
        return Rates(
            pricing=Pricing(await read_book(session)),
            kappas=await _read_kappas(session, time.time()),
        )


async def read_pricing(database: Database) -> Pricing:
    """The price book as it is now. Raises `UnavailableError`."""
    async with database.session() as session:
        return Pricing(await read_book(session))


async def _read_kappas(session: AsyncSession, now_s: float) -> dict[str, Decimal]:
    """By model: chip-time of the last 24 hours and what has passed of this one, over that of its steps."""
    first = int(now_s) // HOUR_S * HOUR_S - DAY_S
    measured, steps = func.sum(Period.measured_ns), func.sum(Period.step_ns)
    query = (
        select(Period.model, measured, steps)
        .where(Period.hour >= first)
        .group_by(Period.model)
        .having(steps > 0)
    )
    return {model: Decimal(m) / Decimal(d) for model, m, d in await session.execute(query)}
