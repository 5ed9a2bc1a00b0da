"""Protects the ledger from what no worker of ours sends, and from a Redis that forgets: nobody else is hurt, what cannot
be booked becomes a fault, and the audit tells of it."""

import asyncio

import pytest

from gateway.db.engine import Database
from gateway.domain.accounting.audit import audit
from gateway.domain.accounting.booking import Booking
from gateway.domain.accounting.closing import close_hours
from gateway.domain.accounting.tables import Charge, ChipEntry, Period
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
from tests.fakes.chip_time import HOUR_UNIX_NS, SECOND, Life
from workers.chip_time import (
    CHIP_TIME_STREAM,
    AnyEntry,
    Batch,
    Coefficients,
    Ended,
    Fits,
    Joined,
    Member,
    Opened,
    Span,
    Spent,
    Step,
    encode,
    fits_key,
)
from workers.protocol import FinishReason

LATER_S = HOUR_UNIX_NS / SECOND + 100 * 3600
TOO_BIG = 2**63
MEMBER = Member("a", 0, True, 7, 0)


def span(begin_ns: int = SECOND, end_ns: int = 2 * SECOND, **fields: object) -> AnyEntry:
    return Span(number=2, begin_ns=begin_ns, end_ns=end_ns, spent=Spent.IDLE, **fields)  # type: ignore[arg-type]


def step(*members: Member, **fields: object) -> AnyEntry:
    given = {"begin_ns": SECOND, "end_ns": 2 * SECOND, "step": 0, "bucket": "b", **fields}
    return Step(number=2, members=members, **given)  # type: ignore[arg-type]


BAD: dict[str, AnyEntry] = {
    "ends before it begins": span(end_ns=SECOND - 1),
    "overlaps": span(begin_ns=SECOND - 1),
    "leaves a hole": span(begin_ns=SECOND + 1),
    "too long": span(end_ns=TOO_BIG),
    "too long for its chips": span(end_ns=10**17),
    "a gap below 0": step(MEMBER, idle_ns=-1, bubble_ns=1),
    "a gap longer than itself": step(MEMBER, idle_ns=2 * SECOND),
    "tokens below 0": step(Member("a", 0, True, -7, 0), MEMBER),
    "too many tokens": step(Member("a", 0, True, TOO_BIG, 0)),
    "padding below 0": step(MEMBER, num_padded=-7),
    "a name that is too long": step(Member("a" * 300, 0, True, 7, 0)),
    "a name that is no text": step(Member("a\0", 0, True, 7, 0)),
    "a key that is no text": span(joined=(Joined("b", "k\0", "", 4, 1),)),
    "an end below 0": span(ended=(Ended("a", FinishReason.STOP, -1, 0),)),
    "opened again": Opened(
        number=2, begin_ns=SECOND, end_ns=SECOND, model="m", worker_id="g", engine="model",
        sku="v6e", num_chips=1, granted_unix_ns=0,
    ),
}  # fmt: skip


def broken(entry: AnyEntry) -> Life:
    """Sound to entry 1, then `entry` and one more."""
    life = Life()
    life.join("a", "k1")
    life.span(SECOND)
    life.entries.append(entry)
    life.span(SECOND)
    return life


async def send_all(open_office: Open, *lives: Life) -> None:
    office = open_office()
    for life in lives:
        for batch in life.batches():
            await office.send(batch)


async def test_what_cannot_be_booked_ends_a_line_and_hurts_no_other(
    database: Database, open_office: Open
):
    other = Life("other")
    other.span(SECOND)
    lives = []
    for number, entry in enumerate(BAD.values()):
        lives.append(broken(entry))
        lives[-1].group = f"g{number}"
    await send_all(open_office, *lives, other)
    await wait_for(database, other)
    for life, why in zip(lives, BAD, strict=True):

        async def is_noted(group_id: str = life.group) -> bool:
            group = await group_of(database, group_id)
            return group is not None and group.broken_at == 2 and bool(group.broken_why)

        await until(is_noted, f"it is noted: {why}")


async def test_the_rest_of_a_broken_line_is_a_fault(database: Database):
    life = broken(BAD["overlaps"])
    booking = Booking(database)
    pairs = [(entry, encode(entry)) for entry in life.entries]
    assert await booking.book("g", pairs, NO_PRICES) == 2
    assert await booking.book("g", pairs, NO_PRICES) == 2, "nor is it later"
    assert await booking.lose("g", HOUR_UNIX_NS + 10 * SECOND, NO_PRICES)
    await close_hours(database, LATER_S)
    (period,) = await rows(database, Period)
    assert (period.idle_ns, period.fault_ns) == (2 * SECOND, 2 * (10 + 5 - 1) * SECOND)
    (line,) = await rows(database, Charge, Charge.kind == "charge")
    assert (line.request_id, line.status) == ("a", "fault")
    found = await audit(database)
    assert [check.name for check in found.checks if not check.is_sound] == ["I6"]


async def test_a_group_whose_beginning_is_no_beginning_is_not_made(
    database: Database, open_office: Open
):
    names = ["g" * 300, "g\0", "no-chips", "no-calendar"]
    lives = [Life(name) for name in names]
    lives[2] = Life("no-chips", num_chips=0)
    lives[3] = Life("no-calendar", granted_unix_ns=TOO_BIG)
    other = Life("other")
    for life in (*lives, other):
        life.span(SECOND)
    await send_all(open_office, *lives, other)
    await wait_for(database, other)
    assert {row.group_id for row in await rows(database, ChipEntry)} == {"other"}


async def test_payloads_that_were_changed_on_their_way_are_told_of(
    database: Database, open_office: Open
):
    life = Life()
    life.span(SECOND)
    (batch,) = life.batches(2)
    shorter = Span(number=1, begin_ns=0, end_ns=SECOND - 1, spent=Spent.IDLE)
    payloads = [batch.payloads[0], encode(shorter)]
    office = open_office()
    await office.send(Batch("g", 0, payloads, batch.head))

    async def is_noted() -> bool:
        group = await group_of(database)
        return group is not None and group.broken_at == 0

    await until(is_noted, "it is noted")


async def test_a_redis_that_forgets_its_consumer_groups_is_read_on(
    database: Database, open_office: Open
):
    first, second = Life("first"), Life("second")
    for life in (first, second):
        life.span(SECOND)
    office = open_office()
    for batch in first.batches():
        await office.send(batch)
    await wait_for(database, first)
    await office.redis.flushall()
    await asyncio.sleep(0.1)
    for batch in second.batches():
        await office.send(batch)
    await wait_for(database, second)
    await assert_sound(database)


async def test_a_worker_that_is_gone_is_noticed_also_if_entries_are_missing_that_it_would_send_again(
    database: Database, open_office: Open
):
    whole, known, unknown = Life("whole"), Life("known"), Life("unknown")
    for life in (whole, known, unknown):
        life.span(SECOND, Spent.COMPILE)
        life.span(SECOND)
    office = open_office()
    for batch in whole.batches():
        await office.send(batch)
    first, _, last = known.batches(1)
    for batch in (first, last, *unknown.batches(1)[1:]):
        await office.send(batch)

    async def is_over() -> bool:
        groups = [await group_of(database, name) for name in ("whole", "known")]
        are_lost = all(group is not None and group.ended == "fault" for group in groups)
        return are_lost and await _is_empty(office)

    await until(is_over, "they are given up")
    assert await group_of(database, "unknown") is None
    await assert_sound(database)


async def test_a_line_that_has_ended_takes_nothing_more_and_keeps_nothing_waiting(
    database: Database, open_office: Open
):
    life = Life()
    life.release()
    office = open_office()
    for batch in life.batches():
        await office.send(batch)
    await wait_for(database, life)
    for _ in range(3):
        life.span(SECOND)
        await office.send(life.batches(1)[-1])
        await until(lambda: _is_empty(office), "Redis keeps nothing")
    group = await group_of(database)
    assert group is not None
    assert group.next_number == 2
    await assert_sound(database)


async def _is_empty(office: Office) -> bool:
    return await office.redis.xlen(CHIP_TIME_STREAM) == 0


async def test_fits_that_sql_has_lost_are_learnt_from_workers_again(
    database: Database, open_office: Open
):
    life = Life(fit="f1")
    life.join("a", "k1")
    members = [MEMBER, Member("a", 1, False, 1, 7)]
    life.step(members, SECOND)
    office = open_office()
    fits = Fits("f1", {"b": Coefficients(1, 2, 3, 4, 5)})
    await office.redis.set(fits_key("m"), encode(fits))
    for batch in life.batches():
        await office.send(batch)
    await wait_for(database, life)
    (period,) = await rows(database, Period)
    assert period.fitted_ns == period.step_ns == 2 * SECOND
    await assert_sound(database)
    unknown = Life("other", fit="f2")
    unknown.step(members, SECOND)
    for batch in unknown.batches():
        await office.send(batch)

    async def is_noted() -> bool:
        group = await group_of(database, "other")
        return group is not None and group.broken_at == 1 and "f2" in group.broken_why

    await until(is_noted, "it is noted")


@pytest.mark.parametrize("members", [(), (Member("a", 0, True, 0, 0), Member("b", 0, True, 0, 0))])
async def test_a_step_that_computed_nothing_is_booked(
    database: Database, members: tuple[Member, ...]
):
    life = Life()
    life.step(list(members), SECOND)
    life.release()
    await Booking(database).book("g", [(entry, encode(entry)) for entry in life.entries], NO_PRICES)
    await close_hours(database, LATER_S)
    assert sum(line.loaded_ns for line in await rows(database, Charge)) == 2 * SECOND
