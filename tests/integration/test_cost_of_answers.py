"""Every surface tells what an answer has cost, takes a tag for it, and its ids lead to the ledger's."""

import json
from typing import Any

import pytest
import redis

from gateway.request_ids import quoted_id, wire_id
from tests.fakes.gateway import ADMIN_KEY, GatewayUnderTest, assert_error
from tests.fakes.wire import wait_until
from workers.engine.scripted import HANG
from workers.protocol import PAYLOAD_FIELD, GenerateRequest, decode, requests_stream

TURNS = [{"role": "user", "content": "one two three"}]
SURFACES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": TURNS},
    "/v1/completions": {"prompt": ["x y", "z"]},
    "/v1/responses": {"input": "one two three"},
    "/v1/messages": {"messages": TURNS, "max_tokens": 20},
}
each_surface = pytest.mark.parametrize("path", SURFACES)


def ask(gateway: GatewayUnderTest, path: str, headers: Any = None, **fields: Any) -> Any:
    body = {"model": "m-small", **SURFACES[path], **fields}
    return gateway.client.post(path, json=body, headers=headers)


def on_the_wire(gateway: GatewayUnderTest, tag: str) -> list[GenerateRequest]:
    """The requests with a tag that are queued or running."""
    with redis.Redis.from_url(gateway.redis_url) as client:
        entries = client.xrange(requests_stream("m-small"))
    found = [decode(GenerateRequest, fields[PAYLOAD_FIELD]) for _, fields in entries]
    return [request for request in found if request.tag == tag]


@each_surface
def test_tag_and_ids_reach_the_wire(shared_gateway: GatewayUnderTest, path: str):
    tag = "wire" + path
    headers = {
        "x-tpugate-tag": tag,
        "x-model-script-hex": json.dumps([b"a ".hex(), HANG.hex()]),
        "authorization": f"Bearer {ADMIN_KEY}",
    }
    body = {"model": "m-small", **SURFACES[path], "stream": True}
    with shared_gateway.client.stream("POST", path, json=body, headers=headers) as answer:
        requests = wait_until(lambda: on_the_wire(shared_gateway, tag), "it is queued")
        own = quoted_id(answer.headers["x-request-id"])
        assert own is not None
        prompts = SURFACES[path].get("prompt", [""])
        wanted = {wire_id(own, number) for number in range(len(prompts))}
        assert {request.request_id for request in requests} == wanted


@each_surface
def test_an_answers_id_is_that_of_its_request(shared_gateway: GatewayUnderTest, path: str):
    answer = ask(shared_gateway, path)
    assert answer.status_code == 200, answer.text
    own = quoted_id(answer.headers["x-request-id"])
    assert own is not None
    assert quoted_id(answer.json()["id"]) == own
    named = ask(shared_gateway, path, {"x-request-id": "mine"})
    assert named.headers["x-request-id"] == "mine"
    assert quoted_id(named.json()["id"]) not in (None, own)


@each_surface
@pytest.mark.parametrize("tag", ["", "a b", "=1", "x" * 65])
def test_a_bad_tag_is_named(shared_gateway: GatewayUnderTest, path: str, tag: str):
    refused = ask(shared_gateway, path, {"x-tpugate-tag": tag})
    if path == "/v1/messages":
        assert refused.status_code == 400
        assert "x-tpugate-tag" in refused.json()["error"]["message"]
    else:
        assert_error(refused, 400, param="x-tpugate-tag", code="invalid_value")
