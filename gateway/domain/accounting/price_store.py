"""The price book in SQL: rows are added, never changed."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import insert, select
from sqlalchemy.ext.asyncio import AsyncSession

from gateway.db.engine import Database
from gateway.domain.accounting.prices import Price, PriceBook, Term, overlap
from gateway.domain.accounting.tables import PriceRow


@dataclass(frozen=True)
class Added:
    """What became of prices that were to be added."""

    added: list[Price]
    known: list[Price]
    """That were there already."""
    refused: list[str]
    """Why, each a sentence."""


async def read_book(session: AsyncSession) -> PriceBook:
    """All prices."""
    return PriceBook(
        Price(
            sku=row.sku,
            region=row.region,
            term=Term(row.term),
            usd_per_chip_hour=row.usd_per_chip_hour,
            effective_from_ns=row.effective_from_ns,
            effective_to_ns=row.effective_to_ns,
            source=row.source,
            retrieved_at=row.retrieved_at,
            currency=row.currency,
            detail=row.detail,
        )
        for row in await session.scalars(select(PriceRow))
    )


async def add_prices(
    database: Database, prices: Sequence[Price], *, is_trial: bool = False
) -> Added:
    """Add what is new and overlaps nothing; of two that overlap, the one that is there stays.

    Raises `UnavailableError`.
    """
    async with database.session() as session:
        book = await read_book(session)
        there = list(book)
        known = [price for price in prices if book.get(price.id)]
        added: list[Price] = []
        refused: list[str] = []
        for price in prices:
            if price in known or price in added:
                continue
            clash = overlap([*(p for p in (*there, *added) if p.line == price.line), price])
            if clash is None:
                added.append(price)
            else:
                one, other = clash
                refused.append(
                    f"{price.sku} {price.region} {price.term.value}: both US$ {one.usd_per_chip_hour} "
                    f"({one.source_line}) and US$ {other.usd_per_chip_hour} ({other.source_line}) would be valid"
                )
        if added and not is_trial:
            await session.execute(insert(PriceRow), [_row(price) for price in added])
    return Added(added, known, refused)


def _row(price: Price) -> dict[str, object]:
    return {
        "price_id": price.id,
        "sku": price.sku,
        "region": price.region,
        "term": price.term.value,
        "usd_per_chip_hour": price.usd_per_chip_hour,
        "currency": price.currency,
        "effective_from_ns": price.effective_from_ns,
        "effective_to_ns": price.effective_to_ns,
        "source": price.source,
        "retrieved_at": price.retrieved_at,
        "added_unix_ns": time.time_ns(),
        "detail": dict(price.detail),
    }
