"""The accountant and what is told of the ledger, as tasks of a gateway process."""

import asyncio
import logging
import time
from functools import partial

from gateway.db.engine import Database
from gateway.domain.accounting.accountant import Accountant
from gateway.domain.accounting.metrics import CostCollector, read_totals
from gateway.domain.accounting.rates import read_pricing
from gateway.errors import GatewayError
from gateway.settings import GatewaySettings
from gateway.streams import connect

logger = logging.getLogger(__name__)


class Accounting:
    """One per application; writes nothing if the settings say so."""

    def __init__(self, settings: GatewaySettings, database: Database, owner: str) -> None:
        self._redis = connect(settings.redis_url, settings.redis_timeout_s)
        pricing = partial(read_pricing, database, settings)
        keep_log_s = settings.keep_log_days * 86400
        self._accountant = Accountant(self._redis, database, pricing, owner, keep_log_s)
        self._database, self._read_pricing = database, pricing
        self._refresh_s = settings.cost_refresh_s
        self._is_on = settings.accountant == "on"
        self._tasks: set[asyncio.Task[None]] = set()
        self.collector = CostCollector()
        """For the registry of metrics."""

    def start(self) -> None:
        work = [self._tell_totals(), *([self._accountant.run()] if self._is_on else [])]
        self._tasks = {asyncio.create_task(one) for one in work}
        for task in self._tasks:
            task.add_done_callback(_say_failure)

    async def stop(self) -> None:
        """What was read and not written is left to the next accountant."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
            if self._is_on:
                await self._accountant.release()
        await self._redis.aclose()

    async def _tell_totals(self) -> None:
        while True:
            try:
                pricing = await self._read_pricing()
                self.collector.totals = await read_totals(self._database, pricing, time.time_ns())
            except GatewayError as error:
                logger.warning("metrics of cost stay as they were: %s", error.message)
            await asyncio.sleep(self._refresh_s)


def _say_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.error("a task of the ledger has failed; chip-time waits in Redis", exc_info=error)
