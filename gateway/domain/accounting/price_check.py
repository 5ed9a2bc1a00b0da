"""Looks the price book over: were rows changed, do they contradict each other, are they old, does a chip lack one."""

from dataclasses import dataclass, field
from datetime import date, timedelta

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from gateway.db.engine import Database
from gateway.domain.accounting.price_rules import DOUBTFUL, far_below, named, sort_out
from gateway.domain.accounting.price_store import price_of_row
from gateway.domain.accounting.prices import NoPrice, Price, PriceBook, Pricing, Term
from gateway.domain.accounting.tables import ChipGroup, PriceRow
from gateway.settings import GatewaySettings

STALE = timedelta(days=180)
_NANOS_PER_DAY = 86400 * 10**9
_EPOCH = date(1970, 1, 1)


@dataclass
class BookCheck:
    num_prices: int = 0
    faults: list[str] = field(default_factory=list)
    """What must not be, each a sentence."""
    warnings: list[str] = field(default_factory=list)
    """What somebody should look at."""


async def check_book(database: Database, settings: GatewaySettings, now_ns: int) -> BookCheck:
    """Raises `UnavailableError`."""
    found = BookCheck()
    async with database.session() as session:
        prices = await _read(session, found)
        chips = await _running_chips(session)
    found.num_prices = len(prices)
    found.faults += sort_out(prices).refused
    low = {price.id: price for price in far_below(prices)}
    found.warnings += [f"{named(price)} is {DOUBTFUL}" for price in low.values()]
    book = PriceBook(prices)
    found.warnings += _stale(book, now_ns)
    pricing = Pricing(book, Term(settings.price_term), settings.price_region)
    for sku, region in chips:
        price = pricing.price_at(sku, region, now_ns)
        if isinstance(price, NoPrice):
            found.warnings.append(f"Chips run that have no price. {price.message}")
    return found


async def _read(session: AsyncSession, found: BookCheck) -> list[Price]:
    prices = []
    for row in await session.scalars(select(PriceRow).order_by(PriceRow.price_id)):
        try:
            price = price_of_row(row)
        except ValueError:
            found.faults.append(f"row {row.price_id} cannot be read: its term is {row.term[:40]!r}")
            continue
        if price.id != row.price_id:
            found.faults.append(
                f"row {row.price_id} was changed after it was added: {named(price)}, {price.source_line}"
            )
        prices.append(price)
    return prices


async def _running_chips(session: AsyncSession) -> list[tuple[str, str]]:
    query = select(ChipGroup.sku, ChipGroup.region).where(ChipGroup.ended == "").distinct()
    return sorted((sku, region) for sku, region in await session.execute(query))


def _stale(book: PriceBook, now_ns: int) -> list[str]:
    """Prices that are valid, of which nobody has said so for long; one sentence for each source."""
    today = _EPOCH + timedelta(days=now_ns // _NANOS_PER_DAY)
    old: dict[str, int] = {}
    for price in book.valid_at(now_ns):
        if today - date.fromisoformat(price.retrieved_at) > STALE:
            old[price.source_line] = old.get(price.source_line, 0) + 1
    return [
        f"{count} valid {'price is' if count == 1 else 'prices are'} older than {STALE.days} days: {source}"
        for source, count in old.items()
    ]
