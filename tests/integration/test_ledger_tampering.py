"""Protects the ledger from whoever can write to its database: a value that was changed, a row that is gone and a cost
that was moved to somebody else are found by the audit."""

import asyncio
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Boolean, LargeBinary, String, func, literal_column, not_, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from gateway.db.engine import Database
from gateway.domain.accounting.audit import Audit, audit
from gateway.domain.accounting.booking import Booking
from gateway.domain.accounting.closing import close_hours
from gateway.domain.accounting.tables import (
    Charge,
    ChipEntry,
    ChipGroup,
    Closing,
    OpenCharge,
    Period,
    Rollup,
)
from gateway.settings import GatewaySettings
from tests.fakes.accountant import NO_PRICES
from tests.fakes.chip_time import HOUR_UNIX_NS, SECOND, random_life
from workers.chip_time import encode

Change = Callable[[AsyncSession], Awaitable[Any]]
ELSEWHERE = 10**6
"""Moves a number that is part of a key to where no row is."""
OF_NO_WEIGHT = {
    # How it was worked out, which `explain` tells anew from the log.
    Charge: {"method", "fit_id", "first_number", "last_number"},
    # Estimates and working state: no line of the ledger is made of them.
    Period: {
        "num_steps", "fitted_ns", "residual_ns", "recomputed_tokens", "rejected_tokens",
        "padding_ns", "rejected_ns", "is_closed",
    },
    ChipGroup: {"seen_unix_ns", "next_step", "broken_why"},
    Closing: {"measured_ns", "active_ns", "closed_unix_ns"},
}  # fmt: skip
TABLES: tuple[Any, ...] = (ChipEntry, Charge, Rollup, Period, ChipGroup, Closing)


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A ledger of two groups, one of them running, whose hours are closed but for the last."""
    folder = tmp_path_factory.mktemp("sound")

    async def make() -> Audit:
        database = Database(GatewaySettings(data_dir=folder))
        await database.create_tables()
        for seed in range(2):
            life = random_life(seed, f"g{seed}", 8 + 22 * seed)
            if seed == 0:
                life.release()
            pairs = [(entry, encode(entry)) for entry in life.entries]
            await Booking(database).book(life.group, pairs, NO_PRICES)
        assert await close_hours(database, HOUR_UNIX_NS / SECOND + 100 * 3600) > 0
        found = await audit(database)
        await database.close()
        return found

    assert asyncio.run(make()).is_sound
    return folder


def after(sound: Path, folder: Path, change: Change) -> Audit:
    """The audit of a copy that was changed."""
    shutil.copytree(sound, folder / "data")

    async def run() -> Audit:
        database = Database(GatewaySettings(data_dir=folder / "data"))
        try:
            async with database.session() as session:
                await change(session)
            return await audit(database)
        finally:
            await database.close()

    return asyncio.run(run())


async def one_of(session: AsyncSession, table: Any, *where: Any) -> list[Any]:
    """Conditions that hold for a row in the middle of a table."""
    key = list(table.__table__.primary_key.columns)
    rows = (await session.execute(select(*key).where(*where).order_by(*key))).all()
    assert rows, f"there is none in {table.__tablename__}"
    return [column == value for column, value in zip(key, rows[len(rows) // 2], strict=True)]


def changed_value(column: Any) -> Any:
    """Another one than it has."""
    if isinstance(column.type, LargeBinary):
        return b"\0tampered"
    if isinstance(column.type, String):
        return "tampered"
    if isinstance(column.type, Boolean):
        return not_(column)
    return func.coalesce(column, 0) + (ELSEWHERE if column.primary_key else 1)


@pytest.mark.parametrize("table", TABLES)
def test_a_value_that_was_changed_is_found(sound: Path, tmp_path: Path, table: Any):
    """In each column in turn; then the value is put back."""
    shutil.copytree(sound, tmp_path / "data")
    # A row's `id` is SQLite's name for it.
    columns = [column for column in table.__table__.columns if column.name != "id"]
    key = table.__table__.primary_key.columns
    rowid = literal_column("rowid")

    async def unnoticed() -> set[str]:
        database = Database(GatewaySettings(data_dir=tmp_path / "data"))

        async def write(name: str, value: Any) -> None:
            async with database.session() as session:
                await session.execute(
                    update(table.__table__).where(rowid == number).values({name: value})
                )

        async with database.session() as session:
            rows = (await session.execute(select(rowid, *columns).order_by(*key))).all()
        number, *values = rows[len(rows) // 2]
        found = set()
        for column, value in zip(columns, values, strict=True):
            await write(column.name, changed_value(column))
            if (await audit(database)).is_sound:
                found.add(column.name)
            await write(column.name, value)
        assert (await audit(database)).is_sound, "all values are back"
        await database.close()
        return found

    assert asyncio.run(unnoticed()) <= OF_NO_WEIGHT.get(table, set())


@pytest.mark.parametrize("table", TABLES)
def test_a_row_that_is_gone_is_missed(sound: Path, tmp_path: Path, table: Any):
    async def change(session: AsyncSession) -> None:
        where = await one_of(session, table)
        row = (await session.scalars(select(table).where(*where))).one()
        await session.delete(row)

    assert not after(sound, tmp_path, change).is_sound


@pytest.mark.parametrize("name", ["key_id", "tag", "status"])
def test_a_line_that_was_changed_with_its_rollups_contradicts_the_log(
    sound: Path, tmp_path: Path, name: str
):
    """All of one key's costs: the sums are right, and somebody else pays."""

    async def change(session: AsyncSession) -> None:
        for table in (Charge, Rollup):
            if hasattr(table, name):
                changed = update(table).values({name: "someone-else"})
                changed = changed.where(table.key_id == "key-1", table.tag == "tag")
                await session.execute(changed.execution_options(synchronize_session=False))

    found = after(sound, tmp_path, change)
    assert "I6" in [check.name for check in found.checks if not check.is_sound]


@pytest.mark.parametrize("name", ["key_id", "tag"])
def test_an_open_request_that_was_given_to_somebody_else_is_found(
    sound: Path, tmp_path: Path, name: str
):
    async def change(session: AsyncSession) -> None:
        changed = update(OpenCharge).values({name: "someone-else"})
        await session.execute(changed.execution_options(synchronize_session=False))

    assert not after(sound, tmp_path, change).is_sound
