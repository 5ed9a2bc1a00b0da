"""The accountant as a task of a gateway process."""

import asyncio
from functools import partial

from gateway.db.engine import Database
from gateway.domain.accounting.accountant import Accountant
from gateway.domain.accounting.rates import read_pricing
from gateway.settings import GatewaySettings
from gateway.streams import connect


class Accounting:
    """One per application; does nothing if the settings say so."""

    def __init__(self, settings: GatewaySettings, database: Database, owner: str) -> None:
        self._redis = connect(settings.redis_url, settings.redis_timeout_s)
        pricing = partial(read_pricing, database, settings)
        keep_log_s = settings.keep_log_days * 86400
        self._accountant = Accountant(self._redis, database, pricing, owner, keep_log_s)
        self._is_on = settings.accountant == "on"
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        if self._is_on:
            self._task = asyncio.create_task(self._accountant.run())

    async def stop(self) -> None:
        """What was read and not written is left to the next accountant."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})
            await self._accountant.release()
        await self._redis.aclose()
