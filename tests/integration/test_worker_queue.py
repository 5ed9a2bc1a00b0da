"""The requests stream as workers share it: an entry has one owner, a gone worker's entries find a new one,
and an acknowledgement is never ahead of the answer it stands for."""

import asyncio
from collections.abc import AsyncIterator

import pytest
from redis.asyncio import Redis

from tests.fakes.wire import GatewayPeer
from workers.consumer import RequestQueue
from workers.engine_thread import terminal
from workers.link import connect
from workers.protocol import FinishReason, encode, worker_key
from workers.publisher import REPLIES_TTL_S, Publisher


@pytest.fixture
async def client(redis_url: str) -> AsyncIterator[Redis]:
    client = connect(redis_url)
    yield client
    await client.aclose()


async def queue_of(client: Redis, worker_id: str, *, lives: bool = True) -> RequestQueue:
    queue = RequestQueue(client, "m-small", worker_id)
    await queue.ensure_group()
    if lives:
        await client.set(worker_key(worker_id), b"")
    return queue


def payloads(peer: GatewayPeer, count: int) -> list[bytes]:
    made = [encode(peer.request([b"x"])) for _ in range(count)]
    for payload in made:
        peer.add(payload)
    return made


async def test_two_workers_share_the_entries_of_one_that_is_gone(peer: GatewayPeer, client: Redis):
    gone = await queue_of(client, "gone", lives=False)
    heirs = [await queue_of(client, name) for name in ("a", "b")]
    made = payloads(peer, 20)
    assert len(await gone.read(20)) == 20
    taken = await asyncio.gather(*(heir.reclaim(12) for heir in heirs))
    assert sorted(entry.payload for share in taken for entry in share) == sorted(made)
    assert {entry.num_deliveries for share in taken for entry in share} == {2}
    assert await heirs[0].reclaim(100) == []


async def test_entries_of_a_living_worker_are_left_alone(peer: GatewayPeer, client: Redis):
    owner, other = await queue_of(client, "owner"), await queue_of(client, "other")
    payloads(peer, 3)
    assert len(await owner.read(10)) == 3
    assert await other.reclaim(10) == []


async def test_what_is_given_back_is_taken_at_once_and_not_counted_as_a_failure(
    peer: GatewayPeer, client: Redis
):
    owner, other = await queue_of(client, "owner"), await queue_of(client, "other")
    payloads(peer, 2)
    entries = await owner.read(10)
    await owner.give_back([entry.entry_id for entry in entries])
    given = [entry.entry_id for entry in entries]
    assert await other.reclaim(10) == []
    assert await other.backlog(10) == given
    taken = await other.take(given)
    assert [entry.entry_id for entry in taken] == given
    assert {entry.num_deliveries for entry in taken} == {1}


async def test_what_nobody_has_read_waits_for_its_turn_and_is_taken_once(
    peer: GatewayPeer, client: Redis
):
    one, other = await queue_of(client, "one"), await queue_of(client, "other")
    made = payloads(peer, 5)
    ids = await one.backlog(3)
    assert await other.backlog(3) == ids
    assert await other.backlog(10) == await one.backlog(10)
    assert await one.peek(ids) == made[:3]
    shares = await asyncio.gather(one.take(ids[1:]), other.take(ids[:2]))
    assert sorted(entry.entry_id for share in shares for entry in share) == ids
    assert len(await one.backlog(10)) == 2


@pytest.mark.parametrize("way", ["turn", "given back"])
async def test_a_read_ends_when_another_worker_leaves_entries_to_be_taken_in_turn(
    peer: GatewayPeer, client: Redis, monkeypatch: pytest.MonkeyPatch, way: str
):
    monkeypatch.setattr("workers.consumer.BLOCK_S", 600.0)
    one, other = await queue_of(client, "one"), await queue_of(client, "other")
    payloads(peer, 2)
    if way == "turn":
        # All is out of a read's sight by now, and one has no room for the second.
        await one.take((await one.backlog(10))[:1])
    else:
        await one.give_back([entry.entry_id for entry in await one.read(2)][1:])
    async with asyncio.timeout(60):
        assert await other.read(10) == []
    assert other.may_wait
    assert len(await other.take(await other.backlog(10))) == 1
    payloads(peer, 1)
    assert len(await other.read(10)) == 1
    assert not other.may_wait


async def test_a_waiting_entry_that_was_deleted_is_not_taken(peer: GatewayPeer, client: Redis):
    queue = await queue_of(client, "a")
    payloads(peer, 2)
    gone, there = await queue.backlog(10)
    await client.xdel(queue.stream, gone)
    assert await queue.peek([gone]) == [None]
    assert [entry.entry_id for entry in await queue.take([gone, there])] == [there]
    assert await queue.backlog(10) == []
    assert (await client.xpending(queue.stream, "workers"))["pending"] == 1


async def test_a_gone_workers_entry_that_was_deleted_is_not_taken(peer: GatewayPeer, client: Redis):
    gone, heir = await queue_of(client, "gone", lives=False), await queue_of(client, "heir")
    payloads(peer, 2)
    first, second = await gone.read(10)
    await client.xdel(heir.stream, first.entry_id)
    assert [entry.entry_id for entry in await heir.reclaim(10)] == [second.entry_id]
    assert await gone.read_pending(10) == []


async def test_reclaiming_from_a_stream_that_is_not_there_gives_nothing(client: Redis):
    assert await RequestQueue(client, "no-such-model", "a").reclaim(10) == []


async def test_a_lost_reply_is_found_again_as_pending(peer: GatewayPeer, client: Redis):
    queue = await queue_of(client, "a")
    (made,) = payloads(peer, 1)
    await queue.read(1)
    assert [entry.payload for entry in await queue.read_pending(10)] == [made]


@pytest.mark.parametrize("num_read", [0, 1])
async def test_leaving_removes_the_consumer_unless_something_is_pending(
    peer: GatewayPeer, client: Redis, num_read: int
):
    queue = await queue_of(client, "a")
    await client.xgroup_createconsumer(queue.stream, "workers", "a")
    if num_read:
        payloads(peer, 1)
        await queue.read(1)
    await queue.leave()
    assert await client.xinfo_consumers("tpugate:bell:m-small", "workers") == []
    consumers = await client.xinfo_consumers(queue.stream, "workers")
    assert len(consumers) == num_read


async def test_an_answer_and_its_acknowledgement_are_one_write(peer: GatewayPeer, client: Redis):
    queue = await queue_of(client, "a")
    requests = [peer.request([b"x"]) for _ in range(3)]
    for request in requests:
        peer.add(encode(request))
    entries = await queue.read(10)
    publisher = Publisher(client, queue.stream, "a")
    for request, entry in zip(requests, entries, strict=True):
        for delta in terminal(request, FinishReason.STOP):
            publisher.put(request.reply_to, delta)
        publisher.finish([entry.entry_id])
    assert publisher.unacknowledged == {entry.entry_id for entry in entries}
    assert peer.num_entries() == 3
    running = asyncio.create_task(publisher.run())
    assert await publisher.flush(10.0)
    # One append for the gateway, though three requests ended.
    assert await client.xlen(peer.reply_to) == 1
    assert 0 < await client.ttl(peer.reply_to) <= REPLIES_TTL_S
    assert (peer.num_entries(), peer.num_pending(), publisher.unacknowledged) == (0, 0, set())
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_a_flush_gives_up_when_nothing_can_be_written(peer: GatewayPeer, client: Redis):
    publisher = Publisher(client, "stream", "a")
    publisher.finish([b"1-1"])
    assert not await publisher.flush(0.01)
