"""Protects the database's schema on SQLite and PostgreSQL: migrations make exactly the tables that the code knows,
take over a database that is older than migrations, and may be asked for by several gateways at once."""

import asyncio
from pathlib import Path
from typing import Any

from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, select
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine

import gateway.domain.accounting.tables
from gateway.db import schema
from gateway.db.engine import Database
from gateway.db.models import ApiKey
from gateway.settings import GatewaySettings


def database_at(url: str) -> Database:
    return Database(GatewaySettings(database_url=url))


async def differences(url: str) -> list[Any]:
    """What Alembic would change."""

    def compare(connection: Connection) -> list[Any]:
        # SQLite does not tell the types that columns were made with.
        options = {"compare_type": connection.dialect.name != "sqlite"}
        context = MigrationContext.configure(connection, opts=options)
        return compare_metadata(context, ApiKey.metadata)

    engine = create_async_engine(url)
    async with engine.connect() as connection:
        found = await connection.run_sync(compare)
    await engine.dispose()
    return found


def test_the_newest_revision_is_the_one_that_is_asked_for():
    config = Config()
    config.set_main_option("script_location", str(Path(schema.__file__).parent / "migrations"))
    assert ScriptDirectory.from_config(config).get_heads() == [schema.HEAD]


async def test_migrations_make_the_tables_that_the_code_knows(database_url: str):
    assert gateway.domain.accounting.tables.Charge.metadata is ApiKey.metadata
    database = database_at(database_url)
    await database.create_tables()
    await database.create_tables()
    await database.close()
    assert await differences(database_url) == []


async def test_gateways_that_start_at_once_make_it_once(database_url: str):
    databases = [database_at(database_url) for _ in range(4)]
    await asyncio.gather(*(database.create_tables() for database in databases))
    for database in databases:
        await database.close()
    assert await differences(database_url) == []


async def test_a_database_from_before_migrations_is_taken_over(database_url: str):
    engine = create_async_engine(database_url)
    async with engine.begin() as connection:
        await connection.run_sync(ApiKey.__table__.create)
    async with AsyncSession(engine) as session, session.begin():
        session.add(ApiKey(name="old", role="admin", key_hash=b"h" * 32, last4="abcd"))
    await engine.dispose()
    database = database_at(database_url)
    await database.create_tables()
    async with database.session() as session:
        assert await session.scalar(select(ApiKey.name)) == "old"
    await database.close()
    assert await differences(database_url) == []
