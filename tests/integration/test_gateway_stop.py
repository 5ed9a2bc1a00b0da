"""A stop ends the gateway's work on Redis wherever it comes between: a lost cancellation would hold the
process until it is killed."""

import asyncio
from pathlib import Path

from gateway.dispatch import Dispatcher
from gateway.settings import GatewaySettings

NUM_STOPS = 60
"""Turns of the event loop at which a poll is interrupted: more than a poll takes."""


async def test_it_ends_at_whichever_turn_of_the_loop_it_comes(redis_url: str, tmp_path: Path):
    settings = GatewaySettings(data_dir=tmp_path, redis_url=redis_url, poll_interval_s=0.001)
    for turns in range(NUM_STOPS):
        dispatcher = Dispatcher(settings)
        await dispatcher.start()
        for _ in range(turns):
            await asyncio.sleep(0)
        async with asyncio.timeout(10):
            await dispatcher.stop()
