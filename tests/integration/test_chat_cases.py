"""Requests that broke other servers, each with the answer that OpenAI's published API asks for."""

import json
import threading
from typing import Any

import httpx
import pytest

from tests.fakes.gateway import (
    GatewayUnderTest,
    assert_error,
    chat_body,
    events,
    joined,
)

URL = "/v1/chat/completions"


def both_ways(gateway: GatewayUnderTest, script: Any = None, **body: Any) -> tuple[Any, list[Any]]:
    """The same request without and with streaming: the JSON body, and the events."""
    whole = gateway.chat(script=script, **body)
    assert whole.status_code == 200, whole.text
    streamed = gateway.chat(script=script, stream=True, **body)
    assert streamed.status_code == 200, streamed.text
    assert "�" not in streamed.text
    return whole.json(), events(streamed.text)


def test_c01_a_character_of_several_tokens_is_never_cut(shared_gateway: GatewayUnderTest):
    script = [b"Crab ", b"\xf0\x9f", b"\xa6", b"\x80"]
    whole, chunks = both_ways(shared_gateway, script, max_tokens=8)
    assert joined(chunks) == "Crab \U0001f980" == whole["choices"][0]["message"]["content"]
    assert whole["usage"]["completion_tokens"] == 4
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks[:-1]]
    assert reasons[-1] == "stop"
    assert set(reasons[:-1]) == {None}


@pytest.mark.parametrize("stop", [["<<END>>"], "<<END>>"])
def test_c02_no_part_of_a_stop_string_leaks(shared_gateway: GatewayUnderTest, stop: Any):
    script = ["first ", "<<", "EN", "D>", ">", " second"]
    whole, chunks = both_ways(shared_gateway, script, stop=stop, max_tokens=20)
    assert whole["choices"][0]["message"]["content"] == "first " == joined(chunks)
    assert whole["choices"][0]["finish_reason"] == "stop"
    assert whole["usage"]["completion_tokens"] == 5
    assert not any("<" in json.dumps(chunk) for chunk in chunks)


def test_c04_usage_comes_once_and_last_if_it_was_asked_for(shared_gateway: GatewayUnderTest):
    asked = {"stream": True, "stream_options": {"include_usage": True}, "max_tokens": 4}
    response = shared_gateway.chat(**asked)
    chunks = events(response.text)
    assert response.headers["content-type"].startswith("text/event-stream")
    assert chunks[-1] == "[DONE]"
    assert chunks[-2]["choices"] == []
    assert all(chunk["usage"] is None and chunk["choices"] for chunk in chunks[:-2])
    whole = shared_gateway.chat(max_tokens=4).json()["usage"]
    assert chunks[-2]["usage"].keys() == whole.keys()
    assert chunks[-2]["usage"]["cost_details"].keys() == whole.pop("cost_details").keys()
    assert {name: chunks[-2]["usage"][name] for name in whole} == whole
    plain = events(shared_gateway.chat(stream=True).text)
    assert all(chunk["choices"] and "usage" not in chunk for chunk in plain[:-1])
    refused = shared_gateway.chat(stream_options={"include_usage": True})
    assert_error(refused, 400, param="stream_options")


def test_c05_every_choice_has_one_role_and_one_finish(shared_gateway: GatewayUnderTest):
    options = {"stream_options": {"include_usage": True}}
    chunks = events(shared_gateway.chat(n=3, stream=True, seed=5, max_tokens=6, **options).text)
    seen: dict[int, list[Any]] = {}
    for chunk in chunks[:-2]:
        for choice in chunk["choices"]:
            seen.setdefault(choice["index"], []).append(choice)
    assert set(seen) == {0, 1, 2}
    for choices in seen.values():
        assert ["role" in choice["delta"] for choice in choices] == [True] + [False] * (
            len(choices) - 1
        )
        assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + [
            "stop"
        ]
    assert len({(c["id"], c["created"], c["model"]) for c in chunks[:-1]}) == 1
    assert chunks[-2]["usage"]["completion_tokens"] == 9
    one = shared_gateway.chat().json()["usage"]["prompt_tokens"]
    assert chunks[-2]["usage"]["prompt_tokens"] == one


@pytest.mark.parametrize("n", [0, 129])
def test_c05_n_out_of_range(shared_gateway: GatewayUnderTest, n: int):
    assert_error(shared_gateway.chat(n=n), 400, param="n")


def test_c08_parts_reach_the_prompt_in_order(shared_gateway: GatewayUnderTest):
    parts = [{"type": "text", "text": "Part one: 2 "}, {"type": "text", "text": "part two"}]
    system = {"role": "system", "content": [{"type": "text", "text": "One word."}]}
    body = shared_gateway.chat(messages=[system, {"role": "user", "content": parts}]).json()
    assert body["choices"][0]["message"]["content"] == "Part one: 2 \npart two"


@pytest.mark.parametrize(
    ("content", "param", "words"),
    [
        ([{"type": "image_url", "image_url": {"url": "data:"}}], "[0].type", "images"),
        ([{"type": "input_audio", "input_audio": {}}], "[0].type", "audio"),
        ([{"type": "hologram", "x": 1}], "[0].type", "content part"),
        ([{"type": "text"}], "[0].text", "text"),
        ([], "", "at least 1"),
        (None, "", "no content"),
        (5, "", "string or a list"),
    ],
)
def test_c08_parts_that_cannot_be_served_are_named(
    shared_gateway: GatewayUnderTest, content: Any, param: str, words: str
):
    response = shared_gateway.chat(messages=[{"role": "user", "content": content}])
    error = assert_error(response, 400, param=f"messages[0].content{param}")
    assert words in error["message"]


def test_c10_a_system_message_alone(shared_gateway: GatewayUnderTest):
    messages = [{"role": "system", "content": "Greet the visitor."}]
    both_ways(shared_gateway, ["hello"], messages=messages, max_tokens=8)
    for stream in (False, True):
        refused = shared_gateway.chat(messages=[], stream=stream)
        assert_error(refused, 400, param="messages")


@pytest.mark.parametrize(
    "limits",
    [
        {"max_completion_tokens": 5},
        {"max_tokens": 5},
        {"max_tokens": 50, "max_completion_tokens": 5},
    ],
)
def test_c11_both_names_of_the_limit_hold(shared_gateway: GatewayUnderTest, limits: Any):
    whole, chunks = both_ways(shared_gateway, ["a "] * 20, **limits)
    assert whole["usage"]["completion_tokens"] == 5
    assert whole["choices"][0]["finish_reason"] == "length"
    assert joined(chunks) == "a " * 5


@pytest.mark.parametrize(
    ("name", "value"), [("max_completion_tokens", 0), ("max_tokens", -1), ("max_tokens", "5")]
)
def test_c11_limits_that_are_none(shared_gateway: GatewayUnderTest, name: str, value: Any):
    assert_error(shared_gateway.chat(**{name: value}), 400, param=name)


def test_c12_more_than_the_context_is_refused_with_true_numbers(shared_gateway: GatewayUnderTest):
    before = shared_gateway.metric("vllm:prompt_tokens_total")
    response = shared_gateway.chat(max_tokens=1_000_000)
    prompt_len = shared_gateway.chat(max_tokens=1).json()["usage"]["prompt_tokens"]
    error = assert_error(response, 400, code="context_length_exceeded", param="max_tokens")
    assert error["type"] == "invalid_request_error"
    for number in (8192, prompt_len, prompt_len + 1_000_000):
        assert str(number) in error["message"]
    assert shared_gateway.metric("vllm:prompt_tokens_total") == before + prompt_len


@pytest.mark.parametrize(("seed", "status"), [(2**63, 400), (-1, 200), (2**63 - 1, 200)])
def test_c14_seed_is_a_signed_64_bit_integer(
    shared_gateway: GatewayUnderTest, seed: int, status: int
):
    assert shared_gateway.chat(seed=seed).status_code == status


def test_c16_a_prompt_three_times_the_context(shared_gateway: GatewayUnderTest):
    messages = [{"role": "user", "content": "tide " * 5000}]
    response = shared_gateway.chat(messages=messages, max_tokens=4)
    assert_error(response, 400, code="context_length_exceeded", param="messages")
    assert len(response.content) < 4096


def test_c16_a_prompt_that_no_tokens_could_hold(shared_gateway: GatewayUnderTest):
    text = "tide " * 200_000
    refused = shared_gateway.chat(messages=[{"role": "user", "content": text}])
    error = assert_error(refused, 400, code="context_length_exceeded", param="messages")
    assert "characters" in error["message"]
    body = {"model": "m-small", "prompt": ["short", text]}
    refused = shared_gateway.client.post("/v1/completions", json=body)
    assert_error(refused, 400, code="context_length_exceeded", param="prompt")


def test_c12_the_limit_that_counts_is_named(shared_gateway: GatewayUnderTest):
    refused = shared_gateway.chat(max_completion_tokens=1_000_000, max_tokens=5)
    assert_error(refused, 400, code="context_length_exceeded", param="max_completion_tokens")


@pytest.mark.parametrize("name", ["messages", "tools", "documents", "add_generation_prompt"])
def test_variables_of_the_template_that_are_not_the_clients(
    shared_gateway: GatewayUnderTest, name: str
):
    error = assert_error(
        shared_gateway.chat(chat_template_kwargs={name: 1}), 400, param="chat_template_kwargs"
    )
    assert f"'{name}'" in error["message"]


def test_c16_a_huge_body_is_refused_unread(shared_gateway: GatewayUnderTest):
    body = json.dumps(chat_body(messages=[{"role": "user", "content": "x" * 30_000_000}]))
    response = shared_gateway.client.post(URL, content=body)
    assert_error(response, 413, code="request_too_large")

    def pieces() -> Any:
        for _ in range(100):
            yield b"x" * 65536

    assert_error(shared_gateway.client.post(URL, content=pieces()), 413)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ('{"model":"m-small","messages":[', None),
        ("[]", None),
        ("null", None),
        ('"text"', None),
        ("123", None),
        ("", None),
        ('{"model":"m-small","messages":"hi"}', "messages"),
        ('{"model":5,"messages":[]}', "model"),
        ('{"messages":[{"role":"user","content":"a"}]}', "model"),
        (
            '{"model":"m-small","messages":[{"role":"user","content":"a"}],"temperature":NaN}',
            "temperature",
        ),
        ('{"model":"m-small","messages":[{"role":"user","content":"\\ud800"}]}', None),
        ("[" * 100_000, None),
    ],
)
def test_c18_bad_json_and_bad_types(shared_gateway: GatewayUnderTest, body: str, param: str | None):
    response = shared_gateway.client.post(URL, content=body)
    assert_error(response, 400, type="invalid_request_error", param=param)


@pytest.mark.parametrize("stream", [True, False])
def test_c19_an_unknown_model(shared_gateway: GatewayUnderTest, stream: bool):
    response = shared_gateway.chat(model="no-such-model", stream=stream)
    assert_error(response, 404, code="model_not_found", param="model")
    assert_error(shared_gateway.client.get("/v1/models/no-such-model"), 404, code="model_not_found")
    assert "no-such-model" not in shared_gateway.client.get("/metrics").text


def test_c23_penalties(shared_gateway: GatewayUnderTest):
    assert shared_gateway.chat(frequency_penalty=0, presence_penalty=0).status_code == 200
    for name in ("frequency_penalty", "presence_penalty"):
        for value in (2.1, -2.1):
            assert_error(shared_gateway.chat(**{name: value}), 400, param=name)
        for value in (2, -2):
            assert shared_gateway.chat(**{name: value}).status_code == 200


def test_c26_the_same_request_id_twice(shared_gateway: GatewayUnderTest):
    headers = {**shared_gateway.client.headers, "x-request-id": "same-id"}
    answers: dict[str, Any] = {}

    def ask(word: str) -> None:
        body = chat_body(messages=[{"role": "user", "content": word}])
        answers[word] = httpx.post(shared_gateway.url + URL, json=body, headers=headers)

    threads = [threading.Thread(target=ask, args=(word,)) for word in ("left", "right")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for word, answer in answers.items():
        assert answer.json()["choices"][0]["message"]["content"] == word
        assert answer.headers["x-request-id"] == "same-id"
    assert len({answer.json()["id"] for answer in answers.values()}) == 2


@pytest.mark.parametrize("given", [b"x" * 129, b"a b", "ü".encode(), b""])
def test_c26_unclean_ids_are_replaced(shared_gateway: GatewayUnderTest, given: bytes):
    headers = [(b"x-request-id", given)]
    for path in ("/health", "/nowhere", "/v1/models"):
        response = shared_gateway.client.get(path, headers=headers)
        assert response.headers["x-request-id"].startswith("req_")


@pytest.mark.parametrize(
    ("authorization", "code"),
    [
        (None, None),
        ("Bearer", None),
        ("Basic abc", None),
        ("Bearer tpg-0123456789abcdef", "invalid_api_key"),
    ],
)
def test_c28_no_key_or_a_wrong_one(
    shared_gateway: GatewayUnderTest, authorization: str | None, code: str | None
):
    headers = {} if authorization is None else {"authorization": authorization}
    for response in (
        httpx.post(shared_gateway.url + URL, json=chat_body(), headers=headers),
        httpx.post(shared_gateway.url + URL, content=b"{bad", headers=headers),
        httpx.post(shared_gateway.url + URL, content=b"x" * 5_000_000, headers=headers),
        httpx.get(shared_gateway.url + "/v1/models", headers=headers),
    ):
        error = assert_error(response, 401, type="invalid_request_error", param=None, code=code)
        assert response.headers["www-authenticate"] == "Bearer"
        assert "0123456789" not in error["message"]
    for path in ("/health", "/ready", "/metrics"):
        assert httpx.get(shared_gateway.url + path).status_code == 200


def test_x01_wire_format_of_chunks(shared_gateway: GatewayUnderTest):
    response = shared_gateway.chat(stream=True, max_tokens=9)
    chunks = events(response.text)
    assert response.text.endswith("data: [DONE]\n\n")
    assert response.headers["cache-control"] == "no-cache"
    assert response.headers["x-accel-buffering"] == "no"
    choices = [chunk["choices"][0] for chunk in chunks[:-1]]
    assert choices[0]["delta"]["role"] == "assistant"
    assert not any("role" in choice["delta"] for choice in choices[1:])
    assert choices[-1]["delta"] == {}
    assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["stop"]
    assert len({(chunk["id"], chunk["created"]) for chunk in chunks[:-1]}) == 1
