"""What hostile or careless clients send and do: an error of OpenAI's kind, and nobody else notices.

Protects bounds of bodies and connections, limits of a key, a client's own timeout, request ids in the log.
"""

import gzip
import json
import socket
from typing import Any

import httpx
import pytest

from tests.fakes.gateway import (
    ADMIN_KEY,
    GatewayUnderTest,
    LeavingClient,
    assert_error,
    chat_body,
    events,
    joined,
)
from tests.fakes.wire import GatewayPeer, wait_until
from tests.integration.conftest import StartGateway
from workers.engine.scripted import HANG

URL = "/v1/chat/completions"
HEAD = f"POST {URL} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {ADMIN_KEY}\r\n"


def send_raw(gateway: GatewayUnderTest, data: bytes) -> bytes:
    """Everything that comes until the gateway closes the connection."""
    with socket.create_connection(("127.0.0.1", gateway.port), timeout=30) as client:
        client.sendall(data)
        received = b""
        while piece := client.recv(65536):
            received += piece
        return received


def post(gateway: GatewayUnderTest, content: bytes, **headers: str) -> httpx.Response:
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    return gateway.client.post(URL, content=content, headers=names)


@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01 no HTTP\r\n\r\n",
        b"BREW /v1/models HTTP/1.1\r\n\r\n",
        f"{HEAD}content-length: -5\r\n\r\n".encode(),
        f"{HEAD}content-length: 1\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n".encode(),
        f"{HEAD}transfer-encoding: chunked\r\n\r\nZZ\r\n{{}}\r\n".encode(),
        f"{HEAD}transfer-encoding: chunked\r\n\r\n2\r\n{{}}no end\r\n".encode(),
    ],
)
def test_what_is_no_http_gets_an_error_object(shared_gateway: GatewayUnderTest, data: bytes):
    head, _, body = send_raw(shared_gateway, data).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ")
    assert b"x-request-id: req_" in head
    assert set(json.loads(body)["error"]) == {"message", "type", "param", "code"}


def test_a_head_without_end(shared_gateway: GatewayUnderTest):
    endless = HEAD.encode() + b"x: " + b"a" * 400_000
    with socket.create_connection(("127.0.0.1", shared_gateway.port), timeout=30) as client:
        client.sendall(endless)
        assert client.recv(65536).startswith(b"HTTP/1.1 431 ")


def test_a_head_that_does_not_arrive(start_gateway: StartGateway):
    gateway = start_gateway(body_timeout_s="0.2")
    assert send_raw(gateway, HEAD.encode()).startswith(b"HTTP/1.1 408 ")
    assert send_raw(gateway, b"") == b""


def test_a_body_of_a_client_that_offers_http_2_is_read(shared_gateway: GatewayUnderTest):
    content = json.dumps(chat_body()).encode()
    offer = (
        "Connection: Upgrade, HTTP2-Settings, close\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n"
    )
    head = f"{HEAD}{offer}content-length: {len(content)}\r\n\r\n"
    assert send_raw(shared_gateway, head.encode() + content).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", URL, 405),
        ("PUT", URL, 405),
        ("HEAD", URL, 405),
        ("GET", "/v1/nothing", 404),
        ("POST", "/", 404),
        ("GET", "/v1/models/%ff%00", 404),
    ],
)
def test_every_answer_has_a_request_id(
    shared_gateway: GatewayUnderTest, method: str, path: str, status: int
):
    response = shared_gateway.client.request(method, path, headers={"x-request-id": "mine-1"})
    assert response.headers["x-request-id"] == "mine-1"
    if method != "HEAD":
        assert_error(response, status, type="invalid_request_error")


def test_a_compressed_body(shared_gateway: GatewayUnderTest):
    content = gzip.compress(json.dumps(chat_body()).encode())
    refused = post(shared_gateway, content, content_encoding="gzip")
    assert_error(refused, 415, param="content-encoding")


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity"])
def test_numbers_that_json_does_not_have(shared_gateway: GatewayUnderTest, number: str):
    text = json.dumps(chat_body(metadata={"a": "?"}))
    assert_error(post(shared_gateway, text.replace('"?"', number).encode()), 400)
    assert post(shared_gateway, text.replace("?", number).encode()).status_code == 200


@pytest.mark.parametrize(
    ("piece", "code"),
    [("{}", "too_many_values"), ("1", "too_many_values"), ('","', "too_many_values")],
)
def test_a_body_of_very_many_values(shared_gateway: GatewayUnderTest, piece: str, code: str):
    content = json.dumps(chat_body(zz="?")).replace('"?"', "[" + ",".join([piece] * 200_000) + "]")
    assert_error(post(shared_gateway, content.encode()), 400, code=code)


def test_a_text_of_very_many_commas_is_one_value(shared_gateway: GatewayUnderTest):
    refused = shared_gateway.chat(messages=[{"role": "user", "content": "[,:{" * 200_000}])
    assert_error(refused, 400, code="context_length_exceeded")


def test_too_many_messages_and_parts(shared_gateway: GatewayUnderTest):
    message = {"role": "user", "content": ""}
    assert_error(shared_gateway.chat(messages=[message] * 4097), 400, param="messages")
    parts = [{"type": "text", "text": ""}] * 4097
    refused = shared_gateway.chat(messages=[{"role": "user", "content": parts}])
    assert_error(refused, 400, param="messages[0].content")


def test_a_client_that_leaves_before_its_body_is_no_failure(shared_gateway: GatewayUnderTest):
    with socket.create_connection(("127.0.0.1", shared_gateway.port), timeout=30) as client:
        client.sendall(f"{HEAD}content-length: 100\r\n\r\n{{".encode())
    assert shared_gateway.chat().status_code == 200
    assert "Traceback" not in shared_gateway.output


def test_the_log_has_the_request_id_of_a_failure(shared_gateway: GatewayUnderTest):
    for stream in (False, True):
        name = f"find-me-{stream}"
        shared_gateway.client.post(
            URL,
            json=chat_body(stream=stream),
            headers={"x-request-id": name, "x-model-script": '["a", "\\u0000FAIL"]'},
        )
        assert f"request {name} to {URL} failed" in shared_gateway.output


@pytest.mark.parametrize("timeout", [0, -1, "5"])
def test_a_timeout_that_is_none(shared_gateway: GatewayUnderTest, timeout: Any):
    assert_error(shared_gateway.chat(timeout=timeout), 400, param="timeout")


def test_a_clients_own_timeout(shared_gateway: GatewayUnderTest):
    script = [b"word ", HANG]
    assert_error(shared_gateway.chat(script=script, timeout=0.2), 504, code="request_timeout")
    *chunks, last = events(shared_gateway.chat(script=script, timeout=0.2, stream=True).text)
    assert joined(chunks) == "word "
    assert last["error"]["code"] == "request_timeout"
    assert shared_gateway.chat(timeout=1e9).status_code == 200


def test_one_key_cannot_fill_the_queue(
    peer: GatewayPeer, start_worker: Any, start_gateway: StartGateway
):
    gateway = start_gateway(queue_limit="4")
    start_worker("a")
    gateway.wait_for_ready()
    made = gateway.client.post("/admin/api/keys", json={"name": "other", "role": "member"}).json()
    resting = [LeavingClient(gateway, script=[b"word ", HANG], stream=True) for _ in range(2)]
    for client in resting:
        client.read_until(b"word ")
    for stream in (True, False):
        refused = gateway.chat(stream=stream)
        assert_error(refused, 429, type="rate_limit_error", code="rate_limit_exceeded")
        assert int(refused.headers["retry-after"]) >= 1
    body = {"model": "m-small", "prompt": ["a", "b", "c"]}
    assert_error(gateway.client.post("/v1/completions", json=body), 400, param="prompt")
    others = {"authorization": f"Bearer {made['key']}"}
    assert gateway.client.post(URL, json=chat_body(), headers=others).status_code == 200
    for client in resting:
        client.leave()
    wait_until(lambda: gateway.chat().status_code == 200, "the key has room again")


def test_a_client_that_stops_reading_is_given_up(
    peer: GatewayPeer, start_worker: Any, start_gateway: StartGateway
):
    gateway = start_gateway(stalled_timeout_s="0.5")
    start_worker("a")
    gateway.wait_for_ready()
    words = [{"role": "user", "content": "a " * 2000}]
    content = json.dumps(chat_body(messages=words, n=64, stream=True)).encode()
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", gateway.port))
        client.sendall(f"{HEAD}content-length: {len(content)}\r\n\r\n".encode() + content)
        wait_until(lambda: peer.num_pending() == 1, "the answer has begun")
        assert gateway.chat(script=["others ", "go on"], stream=True).text.endswith("[DONE]\n\n")
        wait_until(lambda: peer.num_entries() == 0, "the request is aborted")
        wait_until(
            lambda: gateway.metric("tpugate_gateway_requests_active") == 0, "the stream is given up"
        )
    assert gateway.metric("vllm:generation_tokens_total") < 64 * 2000
