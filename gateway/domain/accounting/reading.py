"""What audits, explanations and reports read of the ledger in common."""

from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from functools import reduce
from operator import add

from sqlalchemy import ColumnElement, select, text
from sqlalchemy.ext.asyncio import AsyncSession

from gateway.db.engine import Database
from gateway.domain.accounting.fits import coefficients_of
from gateway.domain.accounting.recompute import Fits
from gateway.domain.accounting.tables import Fit, PriceRow
from workers.chip_time import Coefficients


@asynccontextmanager
async def snapshot(database: Database) -> AsyncIterator[AsyncSession]:
    """A session that sees the ledger as it is now, whatever the accountant writes meanwhile.

    Raises `UnavailableError`.
    """
    async with database.session() as session:
        if session.get_bind().dialect.name == "sqlite":
            # The driver begins a transaction at the first write only.
            await session.execute(text("BEGIN"))
        else:
            await session.execute(text("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ"))
        yield session


async def read_fits(session: AsyncSession) -> Fits:
    """All coefficients that steps were ever shared by."""
    fits: dict[str, dict[str, Coefficients]] = {}
    for row in await session.scalars(select(Fit)):
        fits.setdefault(row.fit_id, {})[row.bucket] = coefficients_of(row)
    return fits


async def read_price_rows(session: AsyncSession) -> dict[str, PriceRow]:
    """The price book by id."""
    return {row.price_id: row for row in await session.scalars(select(PriceRow))}


def sum_of(amounts: Iterable[ColumnElement[int]]) -> ColumnElement[int]:
    """Of several columns of a row."""
    return reduce(add, amounts)
