"""An accountant at work on a real Valkey, and looks at what it has written."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

from sqlalchemy import select

from gateway.db.engine import Database
from gateway.domain.accounting.accountant import Accountant
from gateway.domain.accounting.audit import audit
from gateway.domain.accounting.prices import PriceBook, Pricing
from gateway.domain.accounting.tables import ChipGroup
from gateway.streams import connect
from tests.fakes.chip_time import Life
from workers.chip_time import CHIP_TIME_STREAM, Batch, encode
from workers.protocol import PAYLOAD_FIELD

NO_PRICES = Pricing(PriceBook([]))


class Office:
    """An accountant at work on a real Valkey."""

    def __init__(self, url: str, database: Database, pricing: Pricing, name: str) -> None:
        self.redis = connect(url, 5.0)
        self.pricing = pricing
        self.accountant = Accountant(self.redis, database, self._read_pricing, name, 3600.0)
        self.task = asyncio.create_task(self.accountant.run())

    async def _read_pricing(self) -> Pricing:
        return self.pricing

    async def send(self, batch: Batch | bytes) -> None:
        payload = batch if isinstance(batch, bytes) else encode(batch)
        await self.redis.xadd(CHIP_TIME_STREAM, {PAYLOAD_FIELD: payload})

    async def close(self) -> None:
        self.task.cancel()
        await asyncio.wait({self.task})
        await self.accountant.release()
        await self.redis.aclose()


Open = Callable[..., Office]
"""What the fixture `open_office` is."""


async def until(condition: Callable[[], Awaitable[Any]], what: str) -> Any:
    end_s = time.monotonic() + 30
    while time.monotonic() < end_s:
        if found := await condition():
            return found
        await asyncio.sleep(0.02)
    raise AssertionError(f"gave up waiting until {what}")


async def group_of(database: Database, group_id: str = "g") -> ChipGroup | None:
    async with database.session() as session:
        return await session.get(ChipGroup, group_id)


async def rows(database: Database, table: Any, *where: Any) -> list[Any]:
    async with database.session() as session:
        return list(await session.scalars(select(table).where(*where)))


async def wait_for(database: Database, life: Life) -> None:
    async def is_booked() -> bool:
        group = await group_of(database, life.group)
        return group is not None and group.next_number == len(life.entries)

    await until(is_booked, f"{life.group} is booked")


async def assert_sound(database: Database) -> None:
    found = await audit(database)
    assert found.is_sound, [check.as_dict() for check in found.checks if not check.is_sound]
