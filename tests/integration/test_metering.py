"""Protects what a ledger is written from: a worker process tells all of its chip-time over a real Valkey, hashed
in a chain, and what Valkey forgets is sent again until an accountant has said that it is kept."""

import signal
from collections.abc import Callable, Iterator

import pytest
import redis

from tests.fakes.processes import WorkerUnderTest
from tests.fakes.valkey import OwnValkey
from tests.fakes.wire import GatewayPeer, wait_until
from workers.attribution import shares
from workers.chip_time import (
    CHIP_TIME_STREAM,
    AnyEntry,
    Batch,
    Coefficients,
    Fits,
    Opened,
    Released,
    Span,
    Spent,
    Step,
    chain,
    committed_key,
    decode_batch,
    decode_entry,
    encode,
    first_hash,
    fits_key,
)
from workers.protocol import PAYLOAD_FIELD

Start = Callable[..., WorkerUnderTest]


@pytest.fixture
def restartable() -> Iterator[OwnValkey]:
    with OwnValkey() as valkey:
        yield valkey


def told(client: redis.Redis, group: str = "a") -> list[AnyEntry]:
    """All entries of a group that are in the stream, each once; its chain is checked on the way."""
    payloads: dict[int, bytes] = {}
    heads: dict[int, bytes] = {}
    for _, fields in client.xrange(CHIP_TIME_STREAM):
        batch = decode_batch(fields[PAYLOAD_FIELD])
        if batch.group != group:
            continue
        payloads |= {batch.first + i: payload for i, payload in enumerate(batch.payloads)}
        heads[batch.first + len(batch.payloads) - 1] = batch.head
    in_order = [payloads[number] for number in sorted(payloads)]
    if 0 in payloads and len(payloads) == 1 + max(payloads):
        hashes = chain(first_hash(group), in_order)
        assert all(hashes[number] == head for number, head in heads.items())
    return [decode_entry(payload) for payload in in_order]


def wait_for(client: redis.Redis, kind: type[AnyEntry], group: str = "a") -> list[AnyEntry]:
    return wait_until(
        lambda: [e for e in [told(client, group)] if any(isinstance(x, kind) for x in e)],
        f"a {kind.__name__} is told",
    )[0]


def assert_tiled(entries: list[AnyEntry]) -> None:
    assert [entry.number for entry in entries] == list(range(len(entries)))
    ends = [entry.end_ns for entry in entries]
    assert [entry.begin_ns for entry in entries] == [0, *ends[:-1]]


def test_the_whole_life_of_a_worker_is_told_and_each_answer_its_part(
    peer: GatewayPeer, start_worker: Start
):
    worker = start_worker("a", step_delay_s="0.005", sku="v6e", num_chips="4", region="here")
    ids = [peer.enqueue([b"x"] * n, fair_key=f"key-{n}", tag="t") for n in (3, 7, 1)]
    usages = {i: peer.wait_for_end(i)[-1].delta.usage for i in ids}
    worker.send(signal.SIGTERM)
    assert worker.wait() == 0
    entries = told(peer.redis)
    assert_tiled(entries)
    opened = entries[0]
    assert isinstance(opened, Opened)
    assert (opened.model, opened.sku, opened.num_chips, opened.region) == (
        "m-small",
        "v6e",
        4,
        "here",
    )
    assert isinstance(entries[-1], Released)
    joined = {j.request_id: j for e in entries for j in e.joined}
    ended = {j.request_id: j for e in entries for j in e.ended}
    assert set(joined) == set(ended) == set(ids)
    assert [joined[i].key_id for i in ids] == ["key-3", "key-7", "key-1"]
    assert [ended[i].num_output_tokens for i in ids] == [3, 7, 1]
    booked = dict.fromkeys(ids, 0)
    for step in (e for e in entries if isinstance(e, Step)):
        for member, part in zip(
            step.members, shares(4 * step.length_ns, step.members, None), strict=True
        ):
            booked[member.request_id] += part
    for request_id, usage in usages.items():
        assert usage is not None
        assert usage.prefill_chip_ns + usage.decode_chip_ns == booked[request_id] > 0
        assert (usage.sku, usage.region) == ("v6e", "here")


def test_a_killed_worker_leaves_all_but_its_last_moments(peer: GatewayPeer, start_worker: Start):
    worker = start_worker("a")
    peer.text(peer.enqueue([b"x"]))
    wait_for(peer.redis, Step)
    worker.kill()
    entries = told(peer.redis)
    assert_tiled(entries)
    assert not any(isinstance(entry, Released) for entry in entries)


def test_what_a_restart_of_redis_forgot_is_sent_again_unless_it_is_committed(
    restartable: OwnValkey, start_worker: Start
):
    worker = start_worker("a", url=restartable.url)
    peer = GatewayPeer(restartable.url)
    peer.text(peer.enqueue([b"x"]))
    before = wait_for(peer.redis, Step)
    peer.redis.set(committed_key("a"), 1)
    wait_until(lambda: peer.redis.xlen(CHIP_TIME_STREAM), "a batch is there")
    # Two looks of the writer, so that it has seen what is committed.
    wait_until(lambda: [e for e in told(peer.redis) if e.number > len(before)], "idle time is told")
    restartable.stop()
    wait_until(lambda: "Redis does not answer" in worker.output, "the worker notices")
    restartable.start()
    peer.wait_for_ready("a")
    after = GatewayPeer(restartable.url)
    after.text(after.enqueue([b"y"]))
    again = wait_until(
        lambda: (seen := told(after.redis)) and seen[0].number == 1 and seen, "it is sent again"
    )
    assert [entry.number for entry in again] == list(range(1, 1 + len(again)))
    assert again[: len(before) - 1] == before[1:]


def test_what_redis_forgot_unnoticed_is_sent_again_when_the_worker_stops(
    peer: GatewayPeer, start_worker: Start
):
    """No write fails, and others have written meanwhile: the stream is not empty."""
    worker = start_worker("a")
    peer.text(peer.enqueue([b"x"]))
    before = wait_for(peer.redis, Step)
    peer.redis.set(committed_key("a"), 1)
    # Two looks of the writer, so that it has seen what is committed.
    wait_until(lambda: [e for e in told(peer.redis) if e.number > len(before)], "idle time is told")
    with peer.redis.pipeline(transaction=True) as pipe:
        pipe.delete(CHIP_TIME_STREAM, committed_key("a"))
        pipe.xadd(CHIP_TIME_STREAM, {PAYLOAD_FIELD: encode(Batch("other", 0, [], b""))})
        pipe.execute()
    worker.send(signal.SIGTERM)
    assert worker.wait() == 0
    again = wait_for(peer.redis, Released)
    assert [entry.number for entry in again] == list(range(1, 1 + len(again)))
    assert again[: len(before) - 1] == before[1:]


def test_steps_are_shared_by_the_fit_that_is_published(peer: GatewayPeer, start_worker: Start):
    fits = Fits("f1", {"script": Coefficients(1, 2, 3, 4, 5)})
    peer.redis.set(fits_key("m-small"), encode(fits))
    start_worker("a")

    def fitted() -> list[Step]:
        peer.text(peer.enqueue([b"x"]))
        return [e for e in told(peer.redis) if isinstance(e, Step) and e.fit == "f1"]

    assert {step.bucket for step in wait_until(fitted, "a step is shared by it")} == {"script"}


def test_idle_time_is_told_while_nothing_runs(peer: GatewayPeer, start_worker: Start):
    start_worker("a")
    peer.wait_for_ready("a")
    entries = wait_until(
        lambda: [e for e in told(peer.redis) if isinstance(e, Span) and e.spent is Spent.IDLE],
        "idle time is told",
    )
    assert all(entry.end_ns - entry.begin_ns <= 5_000_000_000 for entry in entries)
