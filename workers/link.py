"""The connection to Redis, and patience when it is away."""

import asyncio
import logging

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

BLOCK_S = 0.5
"""How long a blocking read waits; also how long a drain waits for the last read."""
SOCKET_TIMEOUT_S = 5.0
FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 2.0
OUTAGE = (RedisError, OSError)
"""What any command raises while Redis is away, loading, full or read-only."""

log = logging.getLogger("worker")


def connect(url: str) -> Redis:
    """A client that never repeats a command by itself: a read that was lost must be noticed."""
    return Redis.from_url(
        url,
        protocol=2,
        socket_timeout=SOCKET_TIMEOUT_S,
        socket_connect_timeout=2.0,
        retry=Retry(NoBackoff(), 0),
    )


class Patience:
    """Growing pauses between attempts; one line in the log when an outage begins and when it ends."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._pause_s = 0.0

    async def pause(self, error: Exception) -> None:
        """Wait before the next attempt."""
        if not self._pause_s:
            log.warning("%s: Redis does not answer (%s); trying again.", self._what, error)
        self._pause_s = min(max(2 * self._pause_s, FIRST_PAUSE_S), LONGEST_PAUSE_S)
        await asyncio.sleep(self._pause_s)

    def reset(self) -> None:
        """The attempt was a success."""
        if self._pause_s:
            log.info("%s: Redis answers again.", self._what)
        self._pause_s = 0.0
