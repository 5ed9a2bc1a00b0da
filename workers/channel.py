"""A connection to Redis for what every request needs, at a fraction of what the client library takes.

The library's commands cost 80 to 200 µs of processor time each: a pool, retries, telemetry, and a task and a
timer for every write. This takes one of its connections, which signs in, encrypts and parses, writes all
commands of a call at once and waits for their replies: about 30 µs.
"""

import asyncio
from collections.abc import Callable
from typing import Any, cast

from hiredis import pack_command
from redis.asyncio import Redis
from redis.asyncio.connection import AbstractConnection
from redis.exceptions import ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from workers.protocol import PAYLOAD_FIELD

Command = tuple[str | bytes | int | float, ...]
_packed = cast(Callable[[Command], bytes], pack_command)


class Channel:
    """For one caller at a time. It connects with the first call, and anew after a failure."""

    def __init__(self, redis: Redis) -> None:
        """A connection of the pool of `redis`, which closes it, with its timeout."""
        self._pool = redis.connection_pool
        self._connection: AbstractConnection | None = None
        self._timeout_s: float | None = None

    async def call(self, *commands: Command, wait_s: float = 0.0) -> list[Any]:
        """The replies, in order; a refused command's is a `ResponseError`.

        `wait_s` is how long commands may block. Raises `RedisError` or `OSError` if there are no replies.
        """
        connection = self._connection or await self._connect()
        limit_s = None if self._timeout_s is None else self._timeout_s + wait_s
        try:
            # A connection whose reply is not awaited to the end is dropped by the library.
            async with asyncio.timeout(limit_s):
                if connection.is_connected and await connection.can_read():
                    # Redis has closed it since the last call; this one connects again.
                    await connection.disconnect(nowait=True)
                await connection.send_packed_command(
                    b"".join(map(_packed, commands)), check_health=False
                )
                return [await _reply(connection) for _ in commands]
        except TimeoutError as error:
            raise RedisTimeoutError("Redis did not answer in time.") from error

    async def _connect(self) -> AbstractConnection:
        connection: AbstractConnection = await self._pool.get_connection()  # type: ignore[no-untyped-call]
        self._connection = connection
        # The timeout is kept here: the library makes a task of every write that has one.
        self._timeout_s, connection.socket_timeout = connection.socket_timeout, None
        return connection


def checked(replies: list[Any]) -> list[Any]:
    """The same. Raises the first `ResponseError` among them, or in a transaction's."""
    for reply in replies:
        if isinstance(reply, ResponseError):
            raise reply
        if isinstance(reply, list):
            checked([item for item in reply if isinstance(item, ResponseError)])
    return replies


def entries_of(reply: Any) -> list[tuple[bytes, bytes | None]]:  # noqa: ANN401
    """Ids and payloads that a read of one stream gave; a payload is None if its entry was deleted."""
    return [(entry_id, _payload(fields)) for entry_id, fields in reply[0][1]] if reply else []


def _payload(fields: list[bytes] | None) -> bytes | None:
    if fields is None:
        return None
    return fields[1] if fields[0] == PAYLOAD_FIELD else b""


async def _reply(connection: AbstractConnection) -> Any:  # noqa: ANN401
    try:
        return await connection.read_response(disable_decoding=True)
    except ResponseError as error:
        return error
