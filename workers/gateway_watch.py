"""Finds requests whose gateway is gone: nobody is left to read their answers."""

import logging
from collections.abc import Iterable

from redis.asyncio import Redis

from workers.link import OUTAGE
from workers.protocol import GenerateRequest, gateway_key

MAX_MISSES = 10
"""Looks in a row, about a second apart, at which a gateway's key was not there. Its time to live comes on top."""

log = logging.getLogger("worker")


class GatewayWatch:
    """Counts, for each gateway that a request waits for, the looks at which it was missing."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis
        self._misses: dict[str, int] = {}

    async def orphans(self, requests: Iterable[GenerateRequest]) -> list[GenerateRequest]:
        """Those of `requests` that should be aborted. None while Redis is away, which counts as no look."""
        watched = [request for request in requests if request.gateway_id]
        gateway_ids = sorted({request.gateway_id for request in watched})
        if not gateway_ids:
            self._misses = {}
            return []
        try:
            found = await self._redis.mget([gateway_key(item) for item in gateway_ids])
        except OUTAGE as error:
            # The claim loop reports and waits for the same outage.
            log.debug("Gateways not looked for: %s", error)
            return []
        self._misses = {
            gateway_id: self._misses.get(gateway_id, 0) + 1
            for gateway_id, value in zip(gateway_ids, found, strict=True)
            if value is None
        }
        gone = {item for item, misses in self._misses.items() if misses >= MAX_MISSES}
        return [request for request in watched if request.gateway_id in gone]
