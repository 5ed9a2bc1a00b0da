"""The scripted model does what its page of the documents says, headers and faults included."""

import json

import pytest

from tests.fakes.gateway import GatewayUnderTest, assert_error, chat_body

URL = "/v1/chat/completions"


@pytest.mark.parametrize(
    "headers",
    [
        {"x-model-script": json.dumps(["Hello ", "world"])},
        {"x-model-script-hex": json.dumps([b"Hello ".hex(), b"world".hex()])},
        {"x-model-script-hex": f"{b'Hello '.hex()},{b'world'.hex()}"},
    ],
)
def test_the_headers(shared_gateway: GatewayUnderTest, headers: dict[str, str]):
    answer = shared_gateway.client.post(URL, json=chat_body(), headers=headers).json()
    assert answer["choices"][0]["message"]["content"] == "Hello world"


def test_a_fault_by_header(shared_gateway: GatewayUnderTest):
    headers = {"x-model-script": r'["go ", "\u0000FAIL"]'}
    refused = shared_gateway.client.post(URL, json=chat_body(), headers=headers)
    assert_error(refused, 500, code="engine_error")


def test_a_header_that_is_no_list(shared_gateway: GatewayUnderTest):
    headers = {"x-model-script": "hello"}
    refused = shared_gateway.client.post(URL, json=chat_body(), headers=headers)
    assert_error(refused, 400, param="x-model-script")
