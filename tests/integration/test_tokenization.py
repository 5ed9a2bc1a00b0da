"""/tokenize and /detokenize tell what a model reads: the same tokens that a completion of the prompt counts."""

from typing import Any

import pytest

from tests.fakes.gateway import GatewayUnderTest, assert_error

MESSAGES = [{"role": "user", "content": "Grüße 🗼"}]


def tokenize(gateway: GatewayUnderTest, **body: Any) -> Any:
    return gateway.client.post("/tokenize", json={"model": "m-small", **body})


def detokenize(gateway: GatewayUnderTest, tokens: Any) -> Any:
    return gateway.client.post("/detokenize", json={"model": "m-small", "tokens": tokens})


def test_a_text_and_back(shared_gateway: GatewayUnderTest):
    body = tokenize(shared_gateway, prompt="Grüße 🗼").json()
    assert body["count"] == len(body["tokens"]) == len("Grüße 🗼".encode())
    assert body["max_model_len"] == 8192
    assert body["token_strs"] is None
    assert detokenize(shared_gateway, body["tokens"]).json() == {"prompt": "Grüße 🗼"}


def test_a_chat_has_the_tokens_that_its_completion_counts(shared_gateway: GatewayUnderTest):
    body = tokenize(shared_gateway, messages=MESSAGES).json()
    usage = shared_gateway.chat(messages=MESSAGES).json()["usage"]
    assert body["count"] == usage["prompt_tokens"]
    text = detokenize(shared_gateway, body["tokens"]).json()["prompt"]
    assert text == "<|im_start|>user\nGrüße 🗼<|im_end|>\n<|im_start|>assistant\n"
    bare = tokenize(shared_gateway, messages=MESSAGES, add_generation_prompt=False).json()
    assert bare["count"] < body["count"]


def test_the_texts_of_tokens(shared_gateway: GatewayUnderTest):
    body = tokenize(shared_gateway, prompt="aé", return_token_strs=True).json()
    assert body["token_strs"] == ["a", "\\xc3", "\\xa9"]


def test_what_is_longer_than_the_context_is_counted_too(shared_gateway: GatewayUnderTest):
    assert tokenize(shared_gateway, prompt="a" * 20_000).json()["count"] == 20_000
    assert tokenize(shared_gateway, prompt="").json()["tokens"] == []
    assert detokenize(shared_gateway, []).json() == {"prompt": ""}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"),
        ({"prompt": "a", "messages": MESSAGES}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": "a", "model": 5}, "model"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "nobody", "content": "a"}]}, "messages[0].role"),
        ({"prompt": "a", "add_special_tokens": "yes"}, "add_special_tokens"),
    ],
)
def test_what_is_wrong_is_named(shared_gateway: GatewayUnderTest, body: Any, param: str):
    assert_error(tokenize(shared_gateway, **body), 400, param=param)


@pytest.mark.parametrize("tokens", [None, "a", [-1], [258], [2**63], [1.5], [True]])
def test_tokens_that_are_none(shared_gateway: GatewayUnderTest, tokens: Any):
    error = assert_error(detokenize(shared_gateway, tokens), 400)
    assert error["param"].startswith("tokens")


def test_unknown_models_and_keys(shared_gateway: GatewayUnderTest):
    unknown = tokenize(shared_gateway, prompt="a", model="nope")
    assert_error(unknown, 404, code="model_not_found")
    for path in ("/tokenize", "/detokenize"):
        stranger = shared_gateway.client.post(path, json={}, headers={"authorization": ""})
        assert_error(stranger, 401)
