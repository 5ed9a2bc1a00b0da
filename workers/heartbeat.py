"""Tells gateways that this worker lives, what it is doing, and what its model is."""

import asyncio
from collections.abc import Callable

from redis.asyncio import Redis

from workers.link import OUTAGE, Patience
from workers.protocol import (
    HEARTBEAT_INTERVAL_S,
    HEARTBEAT_TTL_S,
    MODELS_SET,
    WORKERS_SET,
    ModelCard,
    WorkerStatus,
    card_key,
    encode,
    worker_key,
)


class Heartbeat:
    """Writes the status each second and whenever `beat_now` is called, and the card once it is known."""

    def __init__(self, redis: Redis, status: Callable[[], WorkerStatus]) -> None:
        self._redis = redis
        self._status = status
        self._wake = asyncio.Event()
        self._card: ModelCard | None = None
        self._is_card_new = False
        self._is_closed = False

    def beat_now(self) -> None:
        self._wake.set()

    def announce(self, card: ModelCard) -> None:
        """Publish this card, in place of an older one, with the next beat."""
        self._card = card
        self._is_card_new = True
        self.beat_now()

    async def run(self) -> None:
        patience = Patience("heartbeat")
        while not self._is_closed:
            self._wake.clear()
            try:
                await self._beat()
            except OUTAGE as error:
                await patience.pause(error)
                continue
            patience.reset()
            try:
                async with asyncio.timeout(HEARTBEAT_INTERVAL_S):
                    await self._wake.wait()
            except TimeoutError:
                continue

    def close(self) -> None:
        """No more beats."""
        self._is_closed = True
        self._wake.set()

    async def take_back(self) -> None:
        """Remove the status, so that others see at once that this worker is gone."""
        worker_id = self._status().worker_id
        async with self._redis.pipeline(transaction=True) as pipe:
            pipe.delete(worker_key(worker_id))
            pipe.srem(WORKERS_SET, worker_id)
            await pipe.execute()

    async def _beat(self) -> None:
        status = self._status()
        card, is_new = self._card, self._is_card_new
        async with self._redis.pipeline(transaction=True) as pipe:
            pipe.set(worker_key(status.worker_id), encode(status), ex=int(HEARTBEAT_TTL_S))
            pipe.sadd(WORKERS_SET, status.worker_id)
            if card is not None:
                # With each beat, because a Redis that came back empty has lost it.
                pipe.set(card_key(card.model), encode(card), nx=not is_new)
                pipe.sadd(MODELS_SET, card.model)
            await pipe.execute()
        if card is self._card:
            self._is_card_new = False
