"""Protects what is read of the ledger on SQLite and PostgreSQL: the same reports, waste, explanations, metrics and audits."""

from decimal import Decimal

import pytest

from gateway.db.engine import Database
from gateway.domain.accounting.audit import audit
from gateway.domain.accounting.booking import Booking
from gateway.domain.accounting.closing import close_hours
from gateway.domain.accounting.explain import explain
from gateway.domain.accounting.metrics import read_totals
from gateway.domain.accounting.price_store import add_prices
from gateway.domain.accounting.prices import Price, PriceBook, Pricing, Term
from gateway.domain.accounting.report import By, Window, report
from gateway.domain.accounting.waste import waste
from gateway.domain.accounting.what_if import parse, reprice
from tests.fakes.chip_time import HOUR_UNIX_NS, SECOND, random_life
from workers.chip_time import encode

PRICE = Price(
    sku="v6e", region="any", term=Term.ON_DEMAND, usd_per_chip_hour=Decimal("2.70"), effective_from_ns=0,
    effective_to_ns=None, source="a test", retrieved_at="2026-12-01",
)  # fmt: skip
PRICING = Pricing(PriceBook([PRICE]))
BEGIN = HOUR_UNIX_NS // SECOND
WINDOW = Window(BEGIN - 86400, BEGIN + 3 * 86400)


@pytest.mark.parametrize(
    "by", [(By.MODEL,), (By.DAY, By.KEY), (By.HOUR, By.TAG)], ids=["model", "day", "hour"]
)
async def test_all_that_is_read_adds_up_on_both_databases(
    database: Database, by: tuple[By, ...]
) -> None:
    life = random_life(5, "g", 60)
    life.release()
    await add_prices(database, [PRICE])
    await Booking(database).book("g", [(e, encode(e)) for e in life.entries], PRICING)
    await close_hours(database, BEGIN + 10 * 86400)

    measured = life.num_chips * life.end_ns
    made = await report(database, WINDOW, by)
    assert sum(line.amounts["loaded_ns"] for line in made.lines) == measured
    assert made.total.loaded_usd == PRICE.dollars(measured)
    half = await reprice(database, made, parse("usd=1.35"), HOUR_UNIX_NS)
    assert half.total.ratio == Decimal("0.5")
    wasted = await waste(database, WINDOW)
    async with database.session() as session:
        totals = await read_totals(session, PRICING, HOUR_UNIX_NS)
    idle = sum(line.chip_ns for line in wasted if line.kind == "idle")
    assert idle == totals.spent_ns["m", "idle"] > 0
    assert totals.usd == {"m": PRICE.dollars(measured)}
    names = {member.request_id for e in life.entries for member in getattr(e, "members", ())}
    assert (await explain(database, min(names))).is_equal is True
    found = await audit(database)
    assert [check.as_dict()["faults"] for check in found.checks] == [[]] * 6
