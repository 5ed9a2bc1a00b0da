"""The connection that every request goes through: replies never belong to another call, and it mends by itself."""

import asyncio

import pytest
from redis.exceptions import RedisError, ResponseError

from tests.fakes.valkey import OwnValkey
from workers.channel import Channel, checked
from workers.link import connect


async def test_a_refused_command_is_told_in_its_place_and_the_others_count(redis_url: str):
    async with connect(redis_url) as client:
        channel = Channel(client)
        replies = await channel.call(("SET", "k", 1), ("LPUSH", "k", "x"), ("GET", "k"))
        assert (replies[0], replies[2]) == (b"OK", b"1")
        assert isinstance(replies[1], ResponseError)
        with pytest.raises(ResponseError):
            checked(replies)


async def test_an_error_inside_a_transaction_is_found(redis_url: str):
    async with connect(redis_url) as client:
        await client.set("text", "x")
        replies = await Channel(client).call(("MULTI",), ("LPUSH", "text", "x"), ("EXEC",))
        with pytest.raises(ResponseError):
            checked(replies)


async def test_the_reply_to_a_call_that_was_cancelled_is_nobody_elses(redis_url: str):
    async with connect(redis_url) as client:
        channel = Channel(client)
        await channel.call(("PING",))
        reading = asyncio.create_task(
            channel.call(("XREAD", "BLOCK", 5000, "STREAMS", "late", "$"), wait_s=5.0)
        )
        await asyncio.sleep(0.05)
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        await client.xadd("late", {"p": b"x"})
        assert await channel.call(("ECHO", "mine")) == [b"mine"]


async def test_calls_that_overlap_get_their_own_replies_though_one_is_cancelled(redis_url: str):
    async with connect(redis_url) as client:
        channel = Channel(client)
        calls = [
            asyncio.create_task(channel.call(("ECHO", number), ("ECHO", -number)))
            for number in range(20)
        ]
        await asyncio.sleep(0)
        calls[3].cancel()
        replies = await asyncio.gather(*calls, return_exceptions=True)
        assert isinstance(replies.pop(3), asyncio.CancelledError)
        numbers = [number for number in range(20) if number != 3]
        assert replies == [[b"%d" % number, b"%d" % -number] for number in numbers]
        assert len(await client.client_list()) == 2


async def test_a_connection_that_redis_has_closed_is_replaced_before_anything_is_lost():
    with OwnValkey() as valkey:
        async with connect(valkey.url) as client:
            channel = Channel(client)
            await channel.call(("PING",))
            valkey.stop()
            valkey.start()
            await asyncio.sleep(0.05)  # the loop hears of it
            assert await channel.call(("ECHO", "again")) == [b"again"]
            valkey.stop()
            await asyncio.sleep(0.05)
            with pytest.raises((RedisError, OSError)):
                await channel.call(("PING",))
            valkey.start()
            assert await channel.call(("ECHO", "again")) == [b"again"]


async def test_a_redis_that_does_not_answer_fails_the_call_and_not_the_next_one(redis_url: str):
    async with connect(redis_url) as client:
        client.connection_pool.connection_kwargs["socket_timeout"] = 0.2
        channel = Channel(client)
        with pytest.raises(RedisError):
            await channel.call(("XREAD", "BLOCK", 2000, "STREAMS", "silent", "$"))
        assert await channel.call(("ECHO", "mine")) == [b"mine"]
