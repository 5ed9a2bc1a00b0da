"""The price book in SQL: rows are added, never changed."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, fields

from sqlalchemy import insert, select, text
from sqlalchemy.ext.asyncio import AsyncSession

from gateway.db.engine import Database
from gateway.domain.accounting.price_rules import sort_out
from gateway.domain.accounting.prices import Price, PriceBook, Term
from gateway.domain.accounting.tables import PriceRow

_FIELDS = tuple(item.name for item in fields(Price))
"""Columns have the same names."""


@dataclass(frozen=True)
class Added:
    """What became of prices that were to be added."""

    added: list[Price]
    known: list[Price]
    """That were there already."""
    refused: list[str]
    """Why, each a sentence."""
    doubtful: list[Price] = field(default_factory=list)
    """Put aside, or also among `added` if they were to be taken."""


async def read_book(session: AsyncSession) -> PriceBook:
    """All prices."""
    return PriceBook(price_of_row(row) for row in await session.scalars(select(PriceRow)))


async def add_prices(
    database: Database,
    prices: Sequence[Price],
    *,
    is_trial: bool = False,
    takes_doubtful: bool = False,
) -> Added:
    """Add what is new and within the rules; of two that overlap, the one that is there stays.

    Raises `UnavailableError`.
    """
    async with database.session() as session:
        if not is_trial:
            await _lock(session)
        book = await read_book(session)
        found = sort_out(prices, book)
        added = [*found.good, *(found.doubtful if takes_doubtful else ())]
        if added and not is_trial:
            await session.execute(insert(PriceRow), [_row(price) for price in added])
    known = [price for price in prices if book.get(price.id)]
    return Added(added, known, found.refused, found.doubtful)


async def _lock(session: AsyncSession) -> None:
    """Until the transaction ends: two that add at once each see what the other has added."""
    if session.get_bind().dialect.name == "postgresql":
        await session.execute(text("LOCK TABLE prices IN SHARE ROW EXCLUSIVE MODE"))
    else:
        await session.execute(text("BEGIN IMMEDIATE"))


def price_of_row(row: PriceRow) -> Price:
    """Raises ValueError if somebody has written a term that is none."""
    return Price(**{**{name: getattr(row, name) for name in _FIELDS}, "term": Term(row.term)})


def _row(price: Price) -> dict[str, object]:
    own = {name: getattr(price, name) for name in _FIELDS}
    return {**own, "price_id": price.id, "added_unix_ns": time.time_ns()}
