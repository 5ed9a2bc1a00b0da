"""Protects the ledger on SQLite and PostgreSQL: whatever comes twice, late, out of order or torn, each entry is booked
once, and hours that are over add up to chips × time."""

import asyncio
import random
from decimal import Decimal

import pytest
from sqlalchemy import func, select

from gateway.db.engine import Database
from gateway.domain.accounting.booking import Booking, OutOfTurnError
from gateway.domain.accounting.closing import close_hours
from gateway.domain.accounting.fits import MIN_STEPS, refit
from gateway.domain.accounting.prices import Price, PriceBook, Pricing, Term
from gateway.domain.accounting.retention import prune
from gateway.domain.accounting.tables import (
    DAY_S,
    HOUR_S,
    IDLE,
    BadBatch,
    Charge,
    ChipEntry,
    OpenCharge,
    Period,
    PriceRow,
    Rollup,
)
from tests.fakes.accountant import (
    NO_PRICES,
    Office,
    Open,
    assert_sound,
    group_of,
    rows,
    until,
    wait_for,
)
from tests.fakes.chip_time import HOUR_UNIX_NS, SECOND, Life, random_life
from workers.attribution import weights
from workers.chip_time import (
    CHIP_TIME_STREAM,
    Batch,
    Coefficients,
    Member,
    Span,
    Spent,
    committed_key,
    decode_entry,
    decode_fits,
    encode,
    fits_key,
)
from workers.protocol import FinishReason

LATER_S = HOUR_UNIX_NS / SECOND + 100 * 3600


def price(usd: str, from_ns: int, to_ns: int | None = None) -> Price:
    return Price(
        sku="v6e", region="any", term=Term.ON_DEMAND, usd_per_chip_hour=Decimal(usd),
        effective_from_ns=from_ns, effective_to_ns=to_ns, source="a test", retrieved_at="2026-12-01",
    )  # fmt: skip


async def write_prices(database: Database, *prices: Price) -> Pricing:
    async with database.session() as session:
        for one in prices:
            session.add(
                PriceRow(
                    price_id=one.id, sku=one.sku, region=one.region, term=one.term.value,
                    usd_per_chip_hour=one.usd_per_chip_hour, currency=one.currency,
                    effective_from_ns=one.effective_from_ns, effective_to_ns=one.effective_to_ns,
                    source=one.source, retrieved_at=one.retrieved_at, added_unix_ns=0, detail={},
                )
            )  # fmt: skip
    return Pricing(PriceBook(prices))


async def book(database: Database, life: Life, pricing: Pricing = NO_PRICES) -> None:
    pairs = [(entry, encode(entry)) for entry in life.entries]
    await Booking(database).book(life.group, pairs, pricing)


@pytest.mark.parametrize("seed", range(3))
async def test_twice_late_and_out_of_order_each_entry_is_booked_once(
    database: Database, open_office: Open, seed: int
):
    chance = random.Random(seed)
    lives = [random_life(seed * 10 + i, f"g{i}") for i in range(2)]
    lives[0].release()
    sent = [batch for life in lives for size in (1, 4) for batch in life.batches(size)]
    chance.shuffle(sent)
    office = open_office()
    for number, batch in enumerate(sent):
        await office.send(batch)
        if number == len(sent) // 2:
            await office.close()
            office = open_office(name="two")
    for life in lives:
        await wait_for(database, life)
    assert await close_hours(database, LATER_S) > 0
    await assert_sound(database)
    kept = await rows(database, ChipEntry)
    assert {decode_entry(row.payload) for row in kept if row.group_id == "g1"} == set(
        lives[1].entries
    )
    assert (await group_of(database, "g0")).ended == "released"  # type: ignore[union-attr]
    await until(lambda: _is_empty(office), "Redis keeps nothing")
    assert int(await office.redis.get(committed_key("g0"))) == len(lives[0].entries)


async def _is_empty(office: Office) -> bool:
    return await office.redis.xlen(CHIP_TIME_STREAM) == 0


async def test_what_is_no_batch_is_put_aside_and_stops_nobody(
    database: Database, open_office: Open
):
    life = Life()
    life.span(SECOND)
    office = open_office()
    gap = Batch("g", 0, [encode(life.entries[0]), encode(life.entries[0])], b"h")
    for bad in (b"\x00", b"", encode(Batch("g", 0, [b"\xff"], b"h")), encode(gap)):
        await office.send(bad)
    for batch in life.batches():
        await office.send(batch)
    await wait_for(database, life)
    assert len(await rows(database, BadBatch)) == 4


async def test_an_hour_that_is_over_is_spread_to_the_last_nanosecond(database: Database):
    life = Life(num_chips=3)
    for name, key in (("a", "k1"), ("b", "k2"), ("c", "k1")):
        life.join(name, key)
    life.step([Member(name, 0, True, 7, 0) for name in "abc"], 10 * SECOND + 1, idle_ns=7)
    life.step([Member("a", 0, False, 1, 7), Member("b", 0, False, 1, 7)], SECOND + 1)
    for name in "abc":
        life.end(name)
    life.span(5 * SECOND)
    life.release()
    await book(database, life)
    assert await close_hours(database, LATER_S) == 1
    assert await close_hours(database, LATER_S) == 0
    lines = await rows(database, Charge)
    measured = 3 * life.end_ns
    assert sum(line.loaded_ns for line in lines) == measured
    assert sum(line.loaded_ns for line in lines if line.kind == "correction") == 3 * (
        5 * SECOND + 7
    )
    for grain_s in (HOUR_S, DAY_S):
        sums = await rows(database, Rollup, Rollup.grain_s == grain_s)
        assert sum(row.loaded_ns for row in sums) == measured
        assert {row.key_id: row.num_requests for row in sums} == {"k1": 2, "k2": 1}
    await assert_sound(database)


async def test_an_hour_in_which_nothing_ran_stays_nobodys(database: Database):
    life = Life()
    life.span(5 * SECOND)
    life.release()
    await book(database, life)
    await close_hours(database, LATER_S)
    (line,) = await rows(database, Charge)
    assert (line.request_id, line.status, line.loaded_ns) == (IDLE, "idle", 10 * SECOND)
    await assert_sound(database)


async def test_late_entries_of_a_closed_hour_are_spread_by_another_closing(database: Database):
    early, late = Life("early"), Life("late")
    for life, key in ((early, "k1"), (late, "k2")):
        life.join(life.group, key)
        life.step([Member(life.group, 0, True, 7, 0)], SECOND)
        life.end(life.group)
        life.span(3 * SECOND)
        life.release()
    await book(database, early)
    await close_hours(database, LATER_S)
    before = {line.id: line.loaded_ns for line in await rows(database, Charge)}
    await book(database, late)
    assert await close_hours(database, LATER_S) == 1
    lines = await rows(database, Charge)
    assert {line.id: line.loaded_ns for line in lines if line.id in before} == before
    assert sum(line.loaded_ns for line in lines) == 2 * (early.end_ns + late.end_ns)
    await assert_sound(database)


async def test_a_request_over_midnight_and_a_price_that_changes_are_lines_of_their_own(
    database: Database,
):
    day_ns = HOUR_UNIX_NS // (DAY_S * SECOND) * DAY_S * SECOND
    midnight_ns = day_ns + DAY_S * SECOND
    change_ns = midnight_ns + 600 * SECOND
    pricing = await write_prices(database, price("1.00", 0, change_ns), price("2.00", change_ns))
    life = Life(granted_unix_ns=midnight_ns - 10 * SECOND)
    life.join("a", "k1")
    member = [Member("a", 0, False, 1, 7)]
    for length_s in (5, 10, 300, 600, 100):
        life.step(member, length_s * SECOND)
    life.end("a", 5)
    life.span(0)
    life.release()
    await book(database, life, pricing)
    await close_hours(database, LATER_S)
    lines = await rows(database, Charge, Charge.kind == "charge")
    told = [
        (line.hour * SECOND - midnight_ns, line.decode_ns // SECOND, line.status) for line in lines
    ]
    assert told == [(-3600 * SECOND, 10, "running"), (0, 620, "running"), (0, 1400, "stop")]
    assert len({line.price_id for line in lines}) == 2
    assert sum(line.output_tokens for line in lines) == lines[-1].delivered_tokens == 5
    days = await rows(database, Rollup, Rollup.grain_s == DAY_S)
    assert sorted({row.start * SECOND - midnight_ns for row in days}) == [-DAY_S * SECOND, 0]
    await assert_sound(database)


async def test_two_accountants_at_once_book_once(database: Database):
    life = random_life(5, "g")
    pairs = [(entry, encode(entry)) for entry in life.entries]
    one, other = Booking(database), Booking(database)

    async def work(booking: Booking) -> None:
        number = 0
        while number < len(pairs):
            try:
                number = await booking.book("g", pairs[number : number + 2], NO_PRICES)
            except OutOfTurnError:
                group = await group_of(database)
                number = group.next_number if group else 0

    await asyncio.gather(work(one), work(other))
    async with database.session() as session:
        assert await session.scalar(select(func.count()).select_from(ChipEntry)) == len(pairs)
    await close_hours(database, LATER_S)
    await assert_sound(database)


async def test_a_group_that_is_lost_ends_as_a_fault_with_its_requests(database: Database):
    life = Life()
    life.join("a", "k1")
    life.step([Member("a", 0, True, 7, 0)], SECOND)
    await book(database, life)
    seen_ns = HOUR_UNIX_NS + 3 * SECOND
    assert await Booking(database).lose("g", seen_ns, NO_PRICES)
    assert not await Booking(database).lose("g", seen_ns, NO_PRICES)
    (line,) = await rows(database, Charge)
    assert (line.request_id, line.status, line.prefill_ns) == ("a", "fault", 2 * SECOND)
    (period,) = await rows(database, Period)
    assert period.fault_ns == 2 * (3 + 5 - 1) * SECOND
    assert not await rows(database, OpenCharge)
    await close_hours(database, LATER_S)
    await assert_sound(database)


async def test_what_comes_after_a_groups_end_stops_nobody(database: Database, open_office: Open):
    ended, other = Life("g"), Life("other")
    ended.release()
    await book(database, ended)
    ended.span(SECOND)
    other.span(SECOND)
    nameless = Batch(
        "nameless", 0, [encode(Span(number=0, begin_ns=0, end_ns=1, spent=Spent.IDLE))], b"h"
    )
    office = open_office()
    for batch in (*ended.batches(), nameless, *other.batches()):
        await office.send(batch)
    await wait_for(database, other)
    await until(lambda: _is_empty(office), "Redis keeps nothing")
    assert (await group_of(database)).next_number == 2  # type: ignore[union-attr]
    assert await group_of(database, "nameless") is None


async def test_old_entries_go_and_the_rest_can_still_be_audited(database: Database):
    lives = [random_life(seed, f"g{seed}", 60) for seed in (7, 8)]
    for life in lives:
        life.release()
        await book(database, life)
    last_s = min(life.granted_unix_ns + life.end_ns for life in lives) / SECOND
    assert await prune(database, last_s - HOUR_S) == 0, "its hours are open"
    await close_hours(database, LATER_S)
    lines = len(await rows(database, Charge))
    assert await prune(database, last_s - HOUR_S) > 0
    groups = [await group_of(database, life.group) for life in lives]
    assert all(group is not None and group.first_kept > 0 and group.checkpoint for group in groups)
    assert len(await rows(database, Charge)) == lines
    await assert_sound(database)


async def test_steps_are_fitted_and_shared_by_the_fit_from_then_on(
    database: Database, open_office: Open
):
    true = Coefficients(9_000_000_000, 40_000_000, 3_000, 70_000_000, 20_000)
    life, chance = Life(num_chips=1), random.Random(1)

    def one_step() -> None:
        members = [
            Member("a", i, chance.random() < 0.4, 1 + chance.randrange(30), chance.randrange(900))
            for i in range(1 + chance.randrange(9))
        ]
        cost = sum(weights(members, true)) / 2 / len(members) / 1000
        life.step(members, round(cost * chance.uniform(0.99, 1.01)))

    life.join("a", "k1")
    for _ in range(MIN_STEPS):
        one_step()
    await book(database, life)
    fits = await refit(database, "m", "v6e")
    assert fits is not None
    found = fits.buckets["b"]
    for name in ("fixed", "prefill", "decode"):
        assert abs(getattr(found, name) / getattr(true, name) - 1) < 0.1, found
    office = open_office()
    told = await until(lambda: office.redis.get(fits_key("m")), "workers can read it")
    assert decode_fits(told) == fits, "one of today is not fitted anew"
    life.fit = fits.id
    one_step()
    for batch in life.batches():
        await office.send(batch)
    await wait_for(database, life)
    (period,) = await rows(database, Period)
    assert period.fitted_ns == life.end_ns - life.entries[-1].begin_ns
    assert 0 < period.residual_ns < 0.02 * period.fitted_ns
    await assert_sound(database)


async def test_what_a_failed_step_and_an_aborted_request_took_is_told(database: Database):
    life = Life(num_chips=1)
    life.join("a", "k1")
    member = Member("a", 0, True, 7, 0)
    life.step([member], SECOND, num_padded=7)
    life.step([member], 2 * SECOND, is_failed=True)
    life.end("a", 3, FinishReason.ABORT)
    life.span(0)
    await book(database, life)
    (period,) = await rows(database, Period)
    assert (period.step_ns, period.fault_ns, period.padding_ns) == (SECOND, 2 * SECOND, SECOND // 2)
    assert (period.prefill_tokens, period.failed_tokens, period.padded_tokens) == (7, 7, 7)
    (hour,) = await rows(database, Rollup, Rollup.grain_s == HOUR_S)
    assert (hour.aborted_ns, hour.aborted_tokens, hour.num_requests) == (SECOND, 3, 1)
