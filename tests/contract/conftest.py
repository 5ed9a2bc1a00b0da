"""Fixtures of the ledger's contract: a database of each kind, accountants that are stopped at the end."""

from collections.abc import AsyncIterator

import pytest

from gateway.db.engine import Database
from gateway.domain.accounting.prices import Pricing
from gateway.settings import GatewaySettings
from tests.fakes.accountant import NO_PRICES, Office, Open
from tests.fakes.valkey import OwnValkey


@pytest.fixture
async def database(database_url: str) -> AsyncIterator[Database]:
    database = Database(GatewaySettings(database_url=database_url))
    await database.create_tables()
    yield database
    await database.close()


@pytest.fixture
async def open_office(
    valkey_server: OwnValkey, redis_url: str, database: Database
) -> AsyncIterator[Open]:
    offices: list[Office] = []

    def open_one(pricing: Pricing = NO_PRICES, name: str = "one") -> Office:
        offices.append(Office(redis_url, database, pricing, name))
        return offices[-1]

    yield open_one
    for office in offices:
        await office.close()
