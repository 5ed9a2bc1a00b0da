"""A worker process against a real Valkey: each request is answered once and to its end, whatever
happens to workers, to Redis or to the request's client; and no entry stays behind."""

import signal
import time
from collections.abc import Callable

import pytest

from tests.fakes.processes import WorkerUnderTest
from tests.fakes.wire import GatewayPeer, wait_until
from workers.engine.interface import EXPIRED
from workers.engine.scripted import FAIL, HANG
from workers.engine_thread import terminal
from workers.intake import GIVEN_UP
from workers.protocol import (
    REQUEST_GROUP,
    FinishReason,
    ModelCard,
    WorkerState,
    card_key,
    decode,
    encode,
    requests_stream,
    worker_key,
)

Start = Callable[..., WorkerUnderTest]
WORDS = [b"one ", b"two ", b"three"]
SLOW = {"step_delay_s": "0.05"}
LONG = [b"%d " % i for i in range(40)]
LONG_TEXT = b"".join(LONG).decode()


def ending(peer: GatewayPeer, request_id: str) -> FinishReason | None:
    return peer.wait_for_end(request_id)[-1].delta.finish_reason


def assert_nothing_left(peer: GatewayPeer) -> None:
    wait_until(lambda: peer.num_entries() == 0, "every entry is gone")
    assert peer.num_pending() == 0


def test_a_request_is_answered_acknowledged_and_removed(peer: GatewayPeer, start_worker: Start):
    start_worker("a")
    request_id = peer.enqueue(WORDS)
    heard = peer.wait_for_end(request_id)
    assert [h.delta.text for h in heard] == ["one ", "two ", "three"]
    assert [h.delta.seq for h in heard] == [0, 1, 2]
    assert {h.worker_id for h in heard} == {"a"}
    assert heard[-1].delta.finish_reason is FinishReason.STOP
    assert heard[-1].delta.usage is not None
    assert heard[-1].delta.usage.completion_tokens == 3
    assert_nothing_left(peer)
    assert 0 < peer.redis.ttl(peer.reply_to) <= 300


def test_requests_enqueued_before_any_worker_are_answered(peer: GatewayPeer, start_worker: Start):
    ids = [peer.enqueue([b"%d" % i]) for i in range(50)]
    start_worker("a")
    assert [peer.text(request_id) for request_id in ids] == [str(i) for i in range(50)]
    assert_nothing_left(peer)


def test_a_ready_worker_announces_its_state_and_the_models_card(
    peer: GatewayPeer, start_worker: Start
):
    start_worker("a")
    peer.wait_for_ready("a")
    status = peer.statuses()["a"]
    assert (status.model, status.engine, status.num_running) == ("m-small", "scripted", 0)
    card = decode(ModelCard, peer.redis.get(card_key("m-small")))
    assert (card.context_len, card.engine) == (8192, "scripted")
    assert 0 < peer.redis.ttl(worker_key("a")) <= 5


def test_a_killed_workers_request_is_answered_once_by_another(
    peer: GatewayPeer, start_worker: Start
):
    first = start_worker("a", **SLOW)
    request_id = peer.enqueue(LONG)
    assert peer.wait_for_start(request_id).worker_id == "a"
    first.kill()
    start_worker("b")
    heard = peer.wait_for_end(request_id)
    of_second = [h.delta for h in heard if h.worker_id == "b"]
    assert "".join(delta.text for delta in of_second) == LONG_TEXT
    assert [delta.seq for delta in of_second] == list(range(len(LONG)))
    assert sum(h.delta.usage is not None for h in heard) == 1
    assert_nothing_left(peer)


def test_sigterm_finishes_what_runs_and_leaves_the_rest_to_others(
    peer: GatewayPeer, start_worker: Start
):
    first = start_worker("a", max_rows="1", **SLOW)
    running = peer.enqueue(LONG)
    peer.wait_for_start(running)
    first.send(signal.SIGTERM)
    waiting = peer.enqueue(WORDS)
    assert peer.text(running) == LONG_TEXT
    assert first.wait() == 0
    assert peer.statuses() == {}
    start_worker("b")
    assert {h.worker_id for h in peer.wait_for_end(waiting)} == {"b"}
    assert {h.worker_id for h in peer.heard[running]} == {"a"}
    assert_nothing_left(peer)


def test_a_draining_worker_says_so_until_it_is_done(peer: GatewayPeer, start_worker: Start):
    worker = start_worker("a", **SLOW)
    request_id = peer.enqueue(LONG)
    peer.wait_for_start(request_id)
    worker.send(signal.SIGINT)
    wait_until(lambda: peer.statuses()["a"].state is WorkerState.DRAINING, "it is draining")
    assert peer.text(request_id) == LONG_TEXT
    assert worker.wait() == 0


def test_a_claimed_request_that_has_not_begun_is_given_back_at_a_drain(
    peer: GatewayPeer, start_worker: Start
):
    # Both are read at once, as one entry may fit; with two choices each, only one of them does.
    first = peer.enqueue(LONG, n=2)
    second = peer.enqueue(WORDS, n=2)
    worker = start_worker("a", max_rows="2", **SLOW)
    peer.wait_for_start(first)
    worker.send(signal.SIGTERM)
    start_worker("b")
    assert {h.worker_id for h in peer.wait_for_end(second)} == {"b"}
    assert {h.worker_id for h in peer.wait_for_end(first)} == {"a"}
    assert worker.wait() == 0
    assert_nothing_left(peer)


def test_the_drain_timeout_ends_what_still_runs_with_an_error(
    peer: GatewayPeer, start_worker: Start
):
    worker = start_worker("a", drain_timeout_s="0.1")
    request_id = peer.enqueue([b"begun ", HANG])
    peer.wait_for_start(request_id)
    worker.send(signal.SIGTERM)
    assert ending(peer, request_id) is FinishReason.ERROR
    assert worker.wait() == 0
    assert_nothing_left(peer)


def test_a_second_signal_ends_the_process_at_once(peer: GatewayPeer, start_worker: Start):
    worker = start_worker("a")
    peer.wait_for_start(peer.enqueue([b"begun ", HANG]))
    worker.send(signal.SIGTERM)
    wait_until(lambda: "stopping" in worker.output, "the first signal is seen")
    worker.send(signal.SIGTERM)
    assert worker.wait() == 128 + signal.SIGTERM


def test_a_full_worker_does_not_read(peer: GatewayPeer, start_worker: Start):
    start_worker("full", max_rows="1")
    held = peer.enqueue([b"begun ", HANG])
    assert peer.wait_for_start(held).worker_id == "full"
    ids = [peer.enqueue(WORDS) for _ in range(5)]
    start_worker("free")
    assert {h.worker_id for i in ids for h in peer.wait_for_end(i)} == {"free"}
    peer.abort(held)
    assert ending(peer, held) is FinishReason.ABORT
    assert_nothing_left(peer)


def test_rows_go_to_keys_in_turn_and_not_to_whoever_asked_first(
    peer: GatewayPeer, start_worker: Start
):
    start_worker("a", max_rows="2", **SLOW)
    many = [peer.enqueue(WORDS, fair_key="many") for _ in range(60)]
    peer.wait_for_end(many[0])
    one = peer.enqueue(WORDS, fair_key="one")
    urgent = peer.enqueue(WORDS, fair_key="many", priority=-1)
    peer.wait_for_end(one)
    peer.wait_for_end(urgent)
    assert sum(bool(peer.heard[i]) for i in many) < 30
    for request_id in many:
        assert peer.text(request_id) == "one two three"
    assert_nothing_left(peer)


def test_two_workers_share_a_backlog(peer: GatewayPeer, start_worker: Start):
    ids = [peer.enqueue(WORDS, fair_key=str(index % 3)) for index in range(60)]
    for name in ("a", "b"):
        start_worker(name, max_rows="2", **SLOW)
    heard = [peer.wait_for_end(i) for i in ids]
    assert {h.worker_id for answer in heard for h in answer} == {"a", "b"}
    assert all(len({h.worker_id for h in answer}) == 1 for answer in heard)
    assert_nothing_left(peer)


def test_what_is_over_before_its_turn_takes_no_row(peer: GatewayPeer, start_worker: Start):
    start_worker("a", max_rows="1", **SLOW)
    first = peer.enqueue(LONG)
    peer.wait_for_start(first)
    waiting = [peer.enqueue(LONG) for _ in range(5)]
    aborted = peer.enqueue(WORDS)
    late = peer.enqueue(WORDS, deadline_s=time.time() + 0.01)
    peer.abort(aborted)
    assert ending(peer, aborted) is FinishReason.ABORT
    assert peer.wait_for_end(late)[-1].delta.error == EXPIRED
    assert not peer.heard[waiting[-1]]
    for request_id in (first, *waiting):
        peer.wait_for_end(request_id)
    assert_nothing_left(peer)


def test_an_abort_frees_the_slot_of_a_running_request(peer: GatewayPeer, start_worker: Start):
    start_worker("a", max_rows="1")
    held = peer.enqueue([b"begun ", HANG])
    peer.wait_for_start(held)
    next_id = peer.enqueue(WORDS)
    peer.abort(held)
    last = peer.wait_for_end(held)[-1].delta
    assert last.finish_reason is FinishReason.ABORT
    assert last.usage is not None
    assert last.usage.completion_tokens == 1
    assert peer.text(next_id) == "one two three"
    assert_nothing_left(peer)


def test_an_abort_seen_before_the_claim_keeps_the_request_from_starting(
    peer: GatewayPeer, start_worker: Start
):
    start_worker("a", max_rows="1")
    held = peer.enqueue([b"begun ", HANG])
    peer.wait_for_start(held)
    queued = peer.enqueue(WORDS)
    peer.abort(queued)
    peer.abort(held)
    heard = peer.wait_for_end(queued)
    assert [(h.delta.text, h.delta.finish_reason) for h in heard] == [("", FinishReason.ABORT)]
    assert_nothing_left(peer)


def test_an_entry_deleted_by_the_gateway_is_skipped(peer: GatewayPeer, start_worker: Start):
    entry_id = peer.add(encode(peer.request(WORDS)))
    peer.redis.xdel(peer.stream, entry_id)
    start_worker("a")
    assert peer.text(peer.enqueue(WORDS)) == "one two three"
    assert_nothing_left(peer)


@pytest.mark.parametrize("payload", [b"", b"\xc1", b"\x93\x01\x02\x03", b"\xa3abc"])
def test_an_entry_that_is_no_request_is_dropped(
    peer: GatewayPeer, start_worker: Start, payload: bytes
):
    peer.add(payload)
    peer.redis.xadd(peer.stream, {"another field": payload})
    worker = start_worker("a")
    assert peer.text(peer.enqueue(WORDS)) == "one two three"
    assert_nothing_left(peer)
    assert worker.output.count("is no request") == 2


def test_a_request_past_its_deadline_is_not_started(peer: GatewayPeer, start_worker: Start):
    late = peer.enqueue(WORDS, deadline_s=time.time() - 1)
    timely = peer.enqueue(WORDS, deadline_s=time.time() + 1000)
    start_worker("a")
    (only,) = peer.wait_for_end(late)
    assert (only.delta.finish_reason, only.delta.error) == (FinishReason.ERROR, EXPIRED)
    assert peer.text(timely) == "one two three"
    assert_nothing_left(peer)


@pytest.mark.parametrize(
    "fields", [{"prompt_token_ids": [1] * 9000}, {"n": 300}, {"n": 0}, {"script": None}]
)
def test_a_request_that_can_never_run_ends_alone(
    peer: GatewayPeer, start_worker: Start, fields: dict[str, object]
):
    script = fields.pop("script", WORDS)
    start_worker("a")
    refused = peer.enqueue(script, **fields)
    beside = peer.enqueue(WORDS)
    last = peer.wait_for_end(refused)[-1].delta
    assert last.finish_reason is FinishReason.ERROR
    assert last.error
    assert peer.text(beside) == "one two three"
    assert_nothing_left(peer)


def test_a_failing_request_ends_alone(peer: GatewayPeer, start_worker: Start):
    start_worker("a")
    failing = peer.enqueue([b"begun ", FAIL, b"never"])
    beside = peer.enqueue(WORDS)
    assert peer.text(failing) == "begun "
    assert ending(peer, failing) is FinishReason.ERROR
    assert peer.text(beside) == "one two three"
    assert_nothing_left(peer)


def test_a_request_that_several_workers_died_of_is_given_up(peer: GatewayPeer, start_worker: Start):
    request_id = peer.enqueue(WORDS)
    stream = requests_stream("m-small")
    peer.redis.xgroup_create(stream, REQUEST_GROUP, id="0")
    ((_, entries),) = peer.redis.xreadgroup(REQUEST_GROUP, "died", {stream: ">"})
    peer.redis.xclaim(
        stream, REQUEST_GROUP, "died too", 0, [entries[0][0]], retrycount=3, justid=True
    )
    start_worker("a")
    (only,) = peer.wait_for_end(request_id)
    assert only.delta.error == GIVEN_UP
    assert_nothing_left(peer)


def test_the_same_request_enqueued_twice_runs_once(peer: GatewayPeer, start_worker: Start):
    request = peer.request(LONG)
    peer.add(encode(request))
    peer.add(encode(request))
    start_worker("a", **SLOW)
    heard = peer.wait_for_end(request.request_id)
    assert [h.delta.seq for h in heard] == list(range(len(LONG)))
    assert_nothing_left(peer)


def test_terminal_deltas_of_a_request_that_never_began(peer: GatewayPeer):
    deltas = terminal(peer.request(WORDS, n=3), FinishReason.ABORT)
    assert [(d.seq, d.choice, d.usage is not None) for d in deltas] == [
        (0, 0, False),
        (1, 1, False),
        (2, 2, True),
    ]
