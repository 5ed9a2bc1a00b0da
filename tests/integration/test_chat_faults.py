"""Clients that leave, workers that fail, die, stand still or have no room: nothing is lost, held or left waiting."""

import signal
import threading
from typing import Any

import httpx
import pytest

from tests.fakes.gateway import (
    GatewayUnderTest,
    LeavingClient,
    assert_error,
    events,
    joined,
)
from tests.fakes.wire import GatewayPeer, wait_until
from tests.integration.conftest import StartGateway
from workers.engine.scripted import EXIT, FAIL, HANG
from workers.protocol import WorkerState, WorkerStatus, encode, requests_stream, worker_key


@pytest.mark.parametrize("stream", [True, False])
def test_c05_more_choices_than_the_model_has_rows(
    peer: GatewayPeer, start_worker: Any, start_gateway: StartGateway, stream: bool
):
    gateway = start_gateway()
    start_worker("a", max_rows="2")
    gateway.wait_for_ready()
    error = assert_error(gateway.chat(n=3, stream=stream), 400, param="n")
    assert "at most 2" in error["message"]
    body = {"model": "m-small", "prompt": "a", "n": 3, "stream": stream}
    assert_error(gateway.client.post("/v1/completions", json=body), 400, param="n")
    assert gateway.chat(n=2).status_code == 200


RESTING = [b"word "] * 3 + [HANG]


@pytest.mark.parametrize("stream", [True, False])
def test_c17_a_client_that_leaves_frees_its_slot(
    peer: GatewayPeer, start_worker: Any, start_gateway: StartGateway, stream: bool
):
    gateway = start_gateway()
    start_worker("a", max_rows="1")
    gateway.wait_for_ready()
    client = LeavingClient(gateway, script=RESTING, stream=stream)
    if stream:
        client.read_until(b"word ")
    wait_until(lambda: _num_running(peer) == 1, "the request runs")
    assert gateway.metric("tpugate_gateway_requests_active") == 1
    client.leave()
    wait_until(lambda: peer.num_entries() == 0, "the entry is acknowledged and removed")
    assert gateway.chat(script=["free"]).json()["choices"][0]["message"]["content"] == "free"
    assert gateway.metric("tpugate_gateway_requests_active") == 0


def test_c17_a_client_that_leaves_the_queue_is_never_served(
    peer: GatewayPeer, start_worker: Any, start_gateway: StartGateway
):
    gateway = start_gateway()
    start_worker("a", max_rows="1")
    gateway.wait_for_ready()
    running = LeavingClient(gateway, script=RESTING)
    wait_until(lambda: peer.num_pending() == 1, "the first request is claimed")
    queued = LeavingClient(gateway, script=RESTING)
    wait_until(lambda: peer.num_entries() == 2, "the second request is queued")
    queued.leave()
    wait_until(lambda: peer.num_entries() == 1, "the second request is off the queue")
    assert peer.num_pending() == 1
    running.leave()
    wait_until(lambda: peer.num_entries() == 0, "the first request is aborted")


def test_c17_nothing_stays_behind_after_many_that_left(
    peer: GatewayPeer, start_worker: Any, start_gateway: StartGateway
):
    gateway = start_gateway()
    start_worker("a")
    gateway.wait_for_ready()
    for number in range(100):
        client = LeavingClient(gateway, script=RESTING, stream=number % 2 == 0)
        if number % 2 == 0:
            client.read_until(b"word ")
        client.leave()
    wait_until(lambda: peer.num_entries() == 0, "every entry is gone")
    wait_until(lambda: gateway.metric("tpugate_gateway_requests_active") == 0, "no request is left")


def _num_running(peer: GatewayPeer) -> int:
    return sum(status.num_running for status in peer.statuses().values())


def test_c25_an_engine_that_fails_in_mid_stream(shared_gateway: GatewayUnderTest):
    options = {"stream": True, "stream_options": {"include_usage": True}}
    failures = shared_gateway.metric("tpugate_request_failures_total")
    response = shared_gateway.chat(script=[b"go ", b"on ", FAIL], **options)
    assert response.status_code == 200
    *chunks, last = events(response.text)
    assert joined(chunks) == "go on "
    assert set(last) == {"error"}
    assert set(last["error"]) == {"message", "type", "param", "code"}
    assert all(chunk["choices"][0]["finish_reason"] is None for chunk in chunks)
    assert shared_gateway.metric("tpugate_request_failures_total") == failures + 1
    assert_error(shared_gateway.chat(script=[FAIL]), 500, type="server_error")


def test_c25_a_worker_that_dies_in_mid_stream(
    peer: GatewayPeer, start_worker: Any, start_gateway: StartGateway
):
    gateway = start_gateway()
    start_worker("a", step_delay_s="0.2")
    gateway.wait_for_ready()
    response = gateway.chat(script=[b"go ", b"on ", EXIT], stream=True)
    *chunks, last = events(response.text)
    assert joined(chunks) == "go on "
    assert last["error"]["code"] == "answer_lost"


def test_x07_a_full_queue_refuses_at_once(
    peer: GatewayPeer, start_worker: Any, start_gateway: StartGateway
):
    gateway = start_gateway(queue_limit="2")
    start_worker("a", max_rows="1")
    gateway.wait_for_ready()
    resting = [peer.enqueue([HANG]) for _ in range(2)]
    for stream in (True, False):
        refused = gateway.chat(stream=stream)
        error = assert_error(refused, 429, code="rate_limit_exceeded")
        assert error["type"] == "rate_limit_error"
        assert int(refused.headers["retry-after"]) >= 1
    for request_id in resting:
        peer.abort(request_id)
    wait_until(lambda: peer.num_entries() == 0, "the queue is empty again")
    assert gateway.chat().status_code == 200


def test_x11_a_worker_that_is_still_compiling(peer: GatewayPeer, start_gateway: StartGateway):
    gateway = start_gateway()
    warming = WorkerStatus(worker_id="w", model="m-small", state=WorkerState.WARMING, progress=0.4)
    peer.redis.set(worker_key("w"), encode(warming))
    peer.redis.sadd("tpugate:workers", "w")
    wait_until(
        lambda: gateway.client.get("/ready").json()["models"] == {"m-small": ["warming 0.40"]},
        "the gateway has seen the worker",
    )
    assert gateway.status_of("/health") == 200
    assert gateway.status_of("/ready") == 503
    for stream in (True, False):
        refused = gateway.chat(stream=stream)
        assert_error(refused, 503, type="server_error", code="model_not_ready")
        assert int(refused.headers["retry-after"]) >= 1
    assert peer.redis.xlen(requests_stream("m-small")) == 0


def test_x11_a_worker_that_stands_still_is_not_ready(
    peer: GatewayPeer, start_worker: Any, start_gateway: StartGateway
):
    gateway = start_gateway()
    worker = start_worker("a")
    gateway.wait_for_ready()
    worker.send(signal.SIGSTOP)
    wait_until(lambda: gateway.status_of("/ready") == 503, "the stopped worker is missed")
    assert_error(gateway.chat(), 503, code="model_not_ready")
    worker.send(signal.SIGCONT)
    gateway.wait_for_ready()
    assert gateway.chat().status_code == 200


def test_x11_no_request_waits_for_ever(
    peer: GatewayPeer, start_worker: Any, start_gateway: StartGateway
):
    gateway = start_gateway(no_worker_timeout_s="1")
    start_worker("a")
    gateway.wait_for_ready()
    refused = gateway.chat(script=[EXIT])
    assert_error(refused, 503, code="model_not_ready")
    wait_until(lambda: gateway.metric("tpugate_gateway_requests_active") == 0, "no request is left")


def test_x11_requests_of_a_killed_worker_are_taken_over(
    peer: GatewayPeer, start_worker: Any, start_gateway: StartGateway
):
    """Nothing was sent to the client yet, so another worker starts the answer over."""
    gateway = start_gateway()
    first = start_worker("a", step_delay_s="0.2")
    gateway.wait_for_ready()
    answers: list[httpx.Response] = []
    script = [b"%d " % i for i in range(20)]
    thread = threading.Thread(target=lambda: answers.append(gateway.chat(script=script)))
    thread.start()
    wait_until(lambda: _generated(peer) >= 2, "the first worker has begun to answer")
    first.send(signal.SIGKILL)
    start_worker("b")
    thread.join()
    assert answers[0].status_code == 200, answers[0].text
    body = answers[0].json()
    assert body["choices"][0]["message"]["content"] == b"".join(script).decode()
    assert body["usage"]["completion_tokens"] == 20
    wait_until(lambda: peer.num_entries() == 0, "the entry is acknowledged and removed")


def _generated(peer: GatewayPeer) -> int:
    return sum(status.generation_tokens for status in peer.statuses().values())


def test_requests_of_a_killed_gateway_are_aborted(
    peer: GatewayPeer, start_worker: Any, start_gateway: StartGateway
):
    gateway = start_gateway()
    start_worker("a", max_rows="1")
    gateway.wait_for_ready()
    client = LeavingClient(gateway, script=RESTING, stream=True)
    client.read_until(b"word ")
    (key,) = peer.redis.keys("tpugate:gateway:*")
    assert peer.redis.ttl(key) > 0
    gateway.send(signal.SIGKILL)
    gateway.wait()
    wait_until(lambda: peer.num_entries() == 0, "the worker has given the request up")
    client.leave()
