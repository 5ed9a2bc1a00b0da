"""A connection to Redis for what every request needs, at a fraction of what the client library takes.

The library's commands cost 80 to 200 µs of processor time each: a pool, retries, telemetry, and a task and a
timer for every write. Here the library connects (it signs in, encrypts and picks the database); from then on
what is called in one turn of the event loop leaves in one write, replies go to whoever waits for them, and a
round trip costs about 15 µs.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, cast

from hiredis import Reader, pack_command
from redis.asyncio import Redis
from redis.asyncio.connection import AbstractConnection
from redis.exceptions import BusyLoadingError, InvalidResponse, RedisError, ResponseError
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from workers.protocol import PAYLOAD_FIELD

Command = tuple[str | bytes | int | float, ...]
_packed = cast(Callable[[Command], bytes], pack_command)
_INCOMPLETE = object()


class Channel:
    """Calls may overlap: their commands run in order. It connects with the first, and anew after a failure."""

    def __init__(self, redis: Redis) -> None:
        """With the address, the credentials and the timeout of `redis`, which closes it."""
        self._pool = redis.connection_pool
        self._wire: _Wire | None = None
        self._connecting: asyncio.Task[_Wire] | None = None

    async def call(self, *commands: Command, wait_s: float = 0.0) -> list[Any]:
        """The replies, in order; a refused command's is a `ResponseError`.

        `wait_s` is how long the commands may block. Raises `RedisError` or `OSError` if there are no replies,
        though the commands may have been obeyed.
        """
        if not commands:
            return []
        wire = self._wire
        if wire is None or wire.is_closed:
            wire = await self._connected()
        done = wire.write(commands, wait_s)
        try:
            return await done
        except asyncio.CancelledError:
            if wait_s:
                # What Redis would hand to a read that nobody waits for any more is lost.
                wire.fail(RedisConnectionError("A read was cancelled."))
            raise

    async def _connected(self) -> "_Wire":
        """All that come while it connects wait for the same attempt."""
        if self._connecting is None:
            self._connecting = asyncio.create_task(self._connect())
            self._connecting.add_done_callback(self._forget_attempt)
        return await asyncio.shield(self._connecting)

    def _forget_attempt(self, attempt: asyncio.Task["_Wire"]) -> None:
        self._connecting = None
        if not attempt.cancelled():
            attempt.exception()  # whoever waited for it has got it

    async def _connect(self) -> "_Wire":
        old, self._wire = self._wire, None
        if old is not None:
            await old.connection.disconnect(nowait=True)
            await self._pool.release(old.connection)
        connection: AbstractConnection = await self._pool.get_connection()  # type: ignore[no-untyped-call]
        self._wire = _Wire(connection)
        return self._wire


class _Call:
    def __init__(self, done: asyncio.Future[list[Any]], num_replies: int) -> None:
        self.done = done
        self.num_replies = num_replies
        self.replies: list[Any] = []
        self.timer: asyncio.TimerHandle | None = None


class _Wire(asyncio.Protocol):
    """A connection that is made, and the calls that wait for replies, the oldest first."""

    def __init__(self, connection: AbstractConnection) -> None:
        self.connection = connection
        self.is_closed = False
        self._loop = asyncio.get_running_loop()
        self._calls: deque[_Call] = deque()
        self._timeout_s = connection.socket_timeout
        self._reader = Reader(
            protocolError=InvalidResponse, replyError=_error, notEnoughData=_INCOMPLETE
        )
        # The one thing that the library does not give away.
        self._transport = cast(Any, connection)._writer.transport
        self._library: asyncio.BaseProtocol = self._transport.get_protocol()
        self._transport.set_protocol(self)

    def write(self, commands: tuple[Command, ...], wait_s: float) -> asyncio.Future[list[Any]]:
        call = _Call(self._loop.create_future(), len(commands))
        self._calls.append(call)
        if self._timeout_s is not None:
            call.timer = self._loop.call_later(self._timeout_s + wait_s, self._on_late)
        self._transport.write(b"".join(map(_packed, commands)))
        return call.done

    def data_received(self, data: bytes) -> None:
        self._reader.feed(data)
        try:
            while (reply := self._reader.gets()) is not _INCOMPLETE:
                if isinstance(reply, RedisConnectionError):
                    raise reply
                self._hand_out(reply)
        except RedisError as error:
            self.fail(error)

    def connection_lost(self, exc: Exception | None) -> None:
        self._library.connection_lost(exc)
        self.fail(RedisConnectionError(f"Redis has closed the connection ({exc})."))

    def fail(self, error: RedisError) -> None:
        """Close it; all calls end with `error`."""
        self.is_closed = True
        self._transport.abort()
        while self._calls:
            self._end(self._calls.popleft(), error)

    def _hand_out(self, reply: Any) -> None:  # noqa: ANN401
        call = self._calls[0]
        call.replies.append(reply)
        if len(call.replies) == call.num_replies:
            self._end(self._calls.popleft(), None)

    def _end(self, call: _Call, error: RedisError | None) -> None:
        if call.timer is not None:
            call.timer.cancel()
        if call.done.done():
            return  # it was cancelled
        if error is None:
            call.done.set_result(call.replies)
        else:
            call.done.set_exception(error)

    def _on_late(self) -> None:
        self.fail(RedisTimeoutError("Redis did not answer in time."))


def checked(replies: list[Any]) -> list[Any]:
    """The same. Raises the first `ResponseError` among them, or in a transaction's."""
    for reply in replies:
        if isinstance(reply, ResponseError):
            raise reply
        if isinstance(reply, list):
            checked([item for item in reply if isinstance(item, ResponseError)])
    return replies


def entries_of(entries: Iterable[Any]) -> list[tuple[bytes, bytes | None]]:
    """Ids and payloads of what was read of a stream; a payload is None if its entry was deleted."""
    return [(entry_id, _payload(fields)) for entry_id, fields in entries]


def _payload(fields: list[bytes] | None) -> bytes | None:
    if fields is None:
        return None
    return fields[1] if fields[0] == PAYLOAD_FIELD else b""


def _error(text: str) -> RedisError:
    """As the library has it: a Redis that is reading its data back is one that is away."""
    return (BusyLoadingError if text.startswith("LOADING") else ResponseError)(text)
