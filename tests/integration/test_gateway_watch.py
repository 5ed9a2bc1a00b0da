"""A request is given up when its gateway has long been missing, and not for a missed beat or an outage."""

import pytest
from redis.asyncio import Redis

from workers.gateway_watch import MAX_MISSES, GatewayWatch
from workers.link import connect
from workers.protocol import GenerateRequest, SamplingParams, gateway_key


def request(gateway_id: str) -> GenerateRequest:
    return GenerateRequest(
        request_id=f"of-{gateway_id}",
        model="m-small",
        reply_to="r",
        prompt_token_ids=[1],
        sampling=SamplingParams(max_tokens=1),
        gateway_id=gateway_id,
    )


@pytest.fixture
async def redis(redis_url: str):
    client = connect(redis_url)
    yield client
    await client.aclose()


async def test_only_what_is_missing_for_long_is_an_orphan(redis: Redis):
    watch = GatewayWatch(redis)
    requests = [request("alive"), request("gone"), request("")]
    await redis.set(gateway_key("alive"), b"")
    for _ in range(MAX_MISSES - 1):
        assert await watch.orphans(requests) == []
    assert await watch.orphans(requests) == [requests[1]]
    await redis.set(gateway_key("gone"), b"")
    assert await watch.orphans(requests) == []
    await redis.delete(gateway_key("gone"))
    assert await watch.orphans(requests) == []


async def test_an_outage_is_no_look():
    away = connect("redis://127.0.0.1:1")
    watch = GatewayWatch(away)
    for _ in range(MAX_MISSES + 1):
        assert await watch.orphans([request("gone")]) == []
    await away.aclose()
