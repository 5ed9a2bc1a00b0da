"""Reads from the database what answers tell their cost with, and what metrics tell of the ledger."""

import time
from decimal import Decimal

from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncSession

from gateway.db.engine import Database
from gateway.domain.accounting.live import Rates
from gateway.domain.accounting.metrics import read_totals
from gateway.domain.accounting.price_store import read_book
from gateway.domain.accounting.prices import Pricing, Term
from gateway.domain.accounting.tables import DAY_S, HOUR_S, Period
from gateway.settings import GatewaySettings


async def read_rates(database: Database, settings: GatewaySettings) -> Rates:
    """The price book, κ of the last day, and the ledger's sums. Raises `UnavailableError`."""
    async with database.session() as session:
        pricing = await _pricing(session, settings)
        return Rates(
            pricing=pricing,
            kappas=await _read_kappas(session, time.time()),
            totals=await read_totals(session, pricing, time.time_ns()),
        )


async def read_pricing(database: Database, settings: GatewaySettings) -> Pricing:
    """The price book as it is now. Raises `UnavailableError`."""
    async with database.session() as session:
        return await _pricing(session, settings)


async def _pricing(session: AsyncSession, settings: GatewaySettings) -> Pricing:
    return Pricing(await read_book(session), Term(settings.price_term), settings.price_region)


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
