"""Protects the ledger while what it stands on is away: a database that is locked or stopped is waited for, and two
accountants that both believe to be the only one book each entry once."""

import asyncio
import random
import sqlite3
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import pytest

from gateway.db.engine import Database
from gateway.domain.accounting.accountant import LEASE_KEY
from gateway.domain.accounting.closing import close_hours
from gateway.domain.accounting.tables import ChipEntry, ChipGroup
from tests.fakes.accountant import Office, Open, assert_sound, rows, until, wait_for
from tests.fakes.chip_time import HOUR_UNIX_NS, SECOND, Life, random_life
from workers.chip_time import CHIP_TIME_STREAM
from workers.protocol import worker_key

Away = Callable[[], AbstractAsyncContextManager[None]]
LATER_S = HOUR_UNIX_NS / SECOND + 100 * 3600


def lives(number: int) -> list[Life]:
    made = [random_life(seed, f"g{seed}") for seed in range(number)]
    for life in made:
        life.release()
    return made


async def keep_alive(office: Office, some: list[Life]) -> None:
    """Nobody is to take them for lost, however long a test takes."""
    for life in some:
        await office.redis.set(worker_key(life.group), b"")


async def assert_whole(database: Database, some: list[Life]) -> None:
    await close_hours(database, LATER_S)
    await assert_sound(database)
    groups = await rows(database, ChipGroup)
    assert {group.group_id: (group.end_ns, group.ended) for group in groups} == {
        life.group: (life.end_ns, "released") for life in some
    }
    assert len(await rows(database, ChipEntry)) == sum(len(life.entries) for life in some)


@pytest.fixture
def away(database_url: str, tmp_path: Path, request: pytest.FixtureRequest) -> Away:
    """While it is entered nothing can be written: another process holds SQLite's lock; PostgreSQL is stopped."""

    @asynccontextmanager
    async def locked() -> AsyncIterator[None]:
        other = sqlite3.connect(tmp_path / "test.sqlite", isolation_level=None)
        other.execute("BEGIN EXCLUSIVE")
        yield
        other.rollback()
        other.close()

    @asynccontextmanager
    async def stopped() -> AsyncIterator[None]:
        server = request.getfixturevalue("postgres_server")
        await asyncio.to_thread(server.stop)
        try:
            yield
        finally:
            await asyncio.to_thread(server.start)

    return locked if database_url.startswith("sqlite") else stopped


async def test_a_database_that_is_away_is_waited_for(
    database: Database, open_office: Open, away: Away
):
    some = lives(2)
    office = open_office()
    await keep_alive(office, some)
    batches = [batch for life in some for batch in life.batches()]
    half = len(batches) // 2
    for batch in batches[:half]:
        await office.send(batch)
    async with away():
        for batch in batches[half:]:
            await office.send(batch)
        # Its first pauses are over before the database is back.
        await asyncio.sleep(0.7)
        assert not office.task.done()
        assert await office.redis.xlen(CHIP_TIME_STREAM) >= len(batches) - half
    for life in some:
        await wait_for(database, life)
    await assert_whole(database, some)


@pytest.mark.parametrize("seed", range(2))
async def test_accountants_that_all_hold_the_lease_book_each_entry_once(
    database: Database, open_office: Open, seed: int
):
    chance = random.Random(seed)
    some = lives(3)
    offices = [open_office(name=name) for name in ("one", "two", "three")]
    await keep_alive(offices[0], some)

    async def pass_on() -> None:
        """As if it ran out in the middle of a turn, again and again."""
        while True:
            await offices[0].redis.set(LEASE_KEY, chance.choice(["one", "two", "three"]))
            await asyncio.sleep(chance.uniform(0, 0.01))

    passing = asyncio.create_task(pass_on())
    batches = [batch for life in some for batch in life.batches(2)]
    for batch in chance.sample(batches, len(batches)):
        await offices[0].send(batch)
        await asyncio.sleep(0.002)

    async def is_empty() -> bool:
        return await offices[0].redis.xlen(CHIP_TIME_STREAM) == 0

    await until(is_empty, "Redis keeps nothing")
    passing.cancel()
    assert not any(office.task.done() for office in offices)
    await assert_whole(database, some)
