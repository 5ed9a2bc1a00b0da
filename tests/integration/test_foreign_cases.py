"""More requests that broke other servers, each with the answer it should have had.

A comment names the report, where there is one. The published collection is in test_published_cases.py.
"""

import json
import socket
from typing import Any

import httpx
import pytest

from tests.fakes.gateway import (
    ADMIN_KEY,
    GatewayUnderTest,
    assert_error,
    chat_body,
    events,
    joined,
    script_header,
)

CHAT = "/v1/chat/completions"
PLAIN = "/v1/completions"


def plain(gateway: GatewayUnderTest, **body: Any) -> httpx.Response:
    return gateway.client.post(PLAIN, json={"model": "m-small", **body})


def both_ways(gateway: GatewayUnderTest, script: Any, **body: Any) -> tuple[str, str, str, str]:
    """Text and reason of the same chat, whole and streamed."""
    whole = gateway.chat(script=script, **body).json()["choices"][0]
    chunks = events(gateway.chat(script=script, stream=True, **body).text)
    assert chunks[-1] == "[DONE]"
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks[:-1]]
    return whole["message"]["content"], whole["finish_reason"], joined(chunks), reasons[-1]


@pytest.mark.parametrize("bias", [{"100000": 1}, {"100000": 0}, {"258": -100}])
def test_a_bias_beyond_the_vocabulary_ends_no_engine(
    steady_gateway: GatewayUnderTest, bias: dict[str, int]
):
    # vllm-project/vllm#16529, sgl-project/sglang#7670
    assert_error(steady_gateway.chat(logit_bias=bias), 400, param="logit_bias")
    assert_error(plain(steady_gateway, prompt="a", logit_bias=bias), 400, param="logit_bias")
    assert steady_gateway.chat().status_code == 200


@pytest.mark.parametrize("prompt", ["", [""], ["a", ""], [[]], [[65], []], [], None])
def test_an_empty_prompt_ends_no_engine(steady_gateway: GatewayUnderTest, prompt: Any):
    # vllm-project/vllm#7632, #7283
    for stream in (False, True):
        refused = plain(steady_gateway, prompt=prompt, stream=stream)
        assert_error(refused, 400, param="prompt")
    assert plain(steady_gateway, prompt="a").status_code == 200


def test_a_prompt_is_scored_without_an_answer(steady_gateway: GatewayUnderTest):
    # vllm-project/vllm#6521
    answer = plain(steady_gateway, prompt="Yes", echo=True, max_tokens=0, logprobs=1).json()
    (choice,) = answer["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("Yes", "length")
    assert choice["logprobs"]["tokens"] == [*"Yes"]
    assert choice["logprobs"]["token_logprobs"][0] is None
    assert answer["usage"]["completion_tokens"] == 0


@pytest.mark.parametrize(
    ("limits", "reason"), [({}, "stop"), ({"max_tokens": 3}, "length")], ids=["end", "length"]
)
def test_a_stop_string_that_is_never_completed_is_text(
    steady_gateway: GatewayUnderTest, limits: dict[str, int], reason: str
):
    # ggml-org/llama.cpp#9867, #15007
    script = ["On Mars", "?<<", "EN"]
    told = both_ways(steady_gateway, script, stop=["<<END>>", "\n"], **limits)
    assert told == ("On Mars?<<EN", reason) * 2


def test_a_stop_string_in_the_last_token_that_is_allowed(steady_gateway: GatewayUnderTest):
    # EndlessInternational/intelligence#2
    told = both_ways(steady_gateway, ["a ", "b ", "END", "c"], stop="END", max_tokens=3)
    assert told == ("a b ", "stop") * 2


def test_overlapping_stop_strings(steady_gateway: GatewayUnderTest):
    told = both_ways(steady_gateway, ["x", "aa", "ab", "c"], stop=["aab", "abc"])
    assert told == ("xa", "stop") * 2


def test_a_character_that_is_cut_is_not_shown(steady_gateway: GatewayUnderTest):
    script = [b"crab ", b"\xf0\x9f", b"\xa6", b"\x80"]
    told = both_ways(steady_gateway, script, max_tokens=3)
    assert told == ("crab ", "length") * 2


def test_log_probabilities_without_alternatives(steady_gateway: GatewayUnderTest):
    # sgl-project/sglang#2301
    (choice,) = plain(steady_gateway, prompt="ab", logprobs=0).json()["choices"]
    assert choice["logprobs"]["tokens"]
    assert len(choice["logprobs"]["token_logprobs"]) == len(choice["logprobs"]["tokens"])


def test_offsets_of_a_streamed_echo(steady_gateway: GatewayUnderTest):
    # vllm-project/vllm#47815
    ask: Any = {"prompt": "the cat sat", "echo": True, "logprobs": 1, "max_tokens": 6}
    whole = plain(steady_gateway, **ask).json()["choices"][0]
    chunks = events(plain(steady_gateway, **ask, stream=True).text)[:-1]
    choices = [chunk["choices"][0] for chunk in chunks]
    assert "".join(choice["text"] for choice in choices) == whole["text"]
    offsets = [at for c in choices if c["logprobs"] for at in c["logprobs"]["text_offset"]]
    assert offsets == whole["logprobs"]["text_offset"]
    assert offsets == sorted(offsets)


LONE = [
    ('{"model":"m-small","messages":[{"role":"user","content":"a\\ud800b"}]}', CHAT),
    ('{"model":"m-small","messages":[{"role":"user","content":"a","name":"\\udc00"}]}', CHAT),
    ('{"model":"m-small","stop":"\\ud800","messages":[{"role":"user","content":"a"}]}', CHAT),
    ('{"model":"m-small","prompt":"\\ud800"}', PLAIN),
    ('{"model":"\\ud800","prompt":"a"}', PLAIN),
    ('{"model":"m-small","input":"\\ud800"}', "/v1/responses"),
    ('{"model":"m-small","prompt":"\\ud800"}', "/tokenize"),
]


@pytest.mark.parametrize(("body", "path"), LONE)
def test_half_a_surrogate_pair(steady_gateway: GatewayUnderTest, body: str, path: str):
    # raullenchai/Rapid-MLX#730, MadSkittles/Router-Maestro#37
    for text in (body, body[:-1] + ',"stream":true}'):
        assert_error(steady_gateway.client.post(path, content=text), 400)


def test_a_surrogate_pair_is_a_character(steady_gateway: GatewayUnderTest):
    text = '{"model":"m-small","messages":[{"role":"user","content":"\\ud83e\\udd80"}]}'
    answer = steady_gateway.client.post(CHAT, content=text)
    assert answer.json()["choices"][0]["message"]["content"] == "\U0001f980"


@pytest.mark.parametrize("text", ["a\x00b", "\ufeffa", "\u2028", "e\u0301", "\x7f\x1b[31m", "\r\n"])
def test_odd_characters_pass_unchanged(steady_gateway: GatewayUnderTest, text: str):
    told = both_ways(steady_gateway, [text.encode()])
    assert told == (text, "stop") * 2
    assert steady_gateway.chat(messages=[{"role": "user", "content": text}]).status_code == 200


def test_text_that_looks_like_the_end_of_a_stream(steady_gateway: GatewayUnderTest):
    script = ["\n\n", "data: [DONE]", "\n\ndata: {", "\r\r: ping"]
    answer = steady_gateway.chat(script=script, stream=True)
    assert joined(events(answer.text)) == "".join(script)
    assert answer.text.count("\ndata: [DONE]") == 1


def test_an_answer_is_accepted_as_a_turn(steady_gateway: GatewayUnderTest):
    """Agents append the message that they got, with all its fields, and some with the fields of others."""
    message = steady_gateway.chat().json()["choices"][0]["message"]
    question = {"role": "user", "content": "and then?"}
    others = {"tool_calls": None, "function_call": None, "audio": None, "annotations": []}
    for turn in (message, {**message, **others}, {**message, "reasoning_content": None}):
        assert steady_gateway.chat(messages=[question, turn, question]).status_code == 200


def test_an_answer_of_responses_is_accepted_as_input(steady_gateway: GatewayUnderTest):
    ask: Any = {"model": "m-small", "input": "one", "store": False}
    output = steady_gateway.client.post("/v1/responses", json=ask).json()["output"]
    question = {"role": "user", "content": "and then?"}
    again = {**ask, "input": [question, *output, question]}
    answer = steady_gateway.client.post("/v1/responses", json=again)
    assert answer.status_code == 200, answer.text


def test_an_answer_of_messages_is_accepted_as_a_turn(steady_gateway: GatewayUnderTest):
    question = {"role": "user", "content": "one"}
    ask: Any = {"model": "m-small", "max_tokens": 9, "messages": [question]}
    content = steady_gateway.client.post("/v1/messages", json=ask).json()["content"]
    ask["messages"] += [{"role": "assistant", "content": content}, question]
    answer = steady_gateway.client.post("/v1/messages", json=ask)
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("tool_calls", [None, []])
def test_a_turn_without_calls_may_say_so(steady_gateway: GatewayUnderTest, tool_calls: Any):
    # openai/openai-openapi#348, mlflow/mlflow#14410
    turn = {"role": "assistant", "content": "x", "tool_calls": tool_calls}
    messages = [{"role": "user", "content": "a"}, turn, {"role": "user", "content": "b"}]
    assert steady_gateway.chat(messages=messages).status_code == 200


@pytest.mark.parametrize("arguments", ["", "{}", '{"a": 1}'])
def test_a_conversation_with_a_call(steady_gateway: GatewayUnderTest, arguments: str):
    # lmstudio-ai/lmstudio-bug-tracker#261, mistralai/mistral-common#324
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "42.69"},
    ]
    assert steady_gateway.chat(messages=messages).status_code == 200


@pytest.mark.parametrize(
    "content_type",
    ["application/json; charset=utf-8", "application/json;charset=UTF-8", "text/plain", "x", None],
)
def test_any_content_type(steady_gateway: GatewayUnderTest, content_type: str | None):
    # openai/openai-openapi#194
    headers = {} if content_type is None else {"content-type": content_type}
    body = json.dumps(chat_body()).encode()
    assert steady_gateway.client.post(CHAT, content=body, headers=headers).status_code == 200


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-32-le", "latin-1"])
def test_a_body_in_another_encoding(steady_gateway: GatewayUnderTest, encoding: str):
    text = json.dumps(chat_body(messages=[{"role": "user", "content": "é"}]), ensure_ascii=False)
    assert_error(steady_gateway.client.post(CHAT, content=text.encode(encoding)), 400)


SCHEMA = '{"type": "object", "properties": {"a": {"type": "number", "maximum": ?}}}'
HELLO = '"messages": [{"role": "user", "content": "x"}]'
NUMBERS = [
    (CHAT, f'{HELLO}, "zz": [?]'),
    (PLAIN, '"prompt": "x", "zz": {"a": ?}'),
    ("/v1/responses", '"input": "x", "store": false, "zz": ?'),
    (
        "/v1/responses",
        f'"input": "x", "tools": [{{"type": "function", "name": "f", "parameters": {SCHEMA}}}]',
    ),
    ("/v1/messages", f'{HELLO}, "max_tokens": 5, "zz": ?'),
    (
        "/v1/messages",
        f'{HELLO}, "max_tokens": 5, "tools": [{{"name": "f", "input_schema": {SCHEMA}}}]',
    ),
    ("/v1/messages/count_tokens", f'{HELLO}, "zz": ?'),
    ("/tokenize", '"prompt": "x", "zz": ?'),
    ("/detokenize", '"tokens": [65], "zz": ?'),
]


@pytest.mark.parametrize(("path", "fields"), NUMBERS)
def test_numbers_that_json_does_not_have(steady_gateway: GatewayUnderTest, path: str, fields: str):
    for number, status in (("NaN", 400), ("-Infinity", 400), ("1.5", 200), ('"NaN"', 200)):
        if '"maximum"' in fields and number[0] == '"':
            continue
        body = f'{{"model": "m-small", {fields.replace("?", number)}}}'
        answer = steady_gateway.client.post(path, content=body)
        assert answer.status_code == status, (number, answer.text)


def test_a_field_that_is_there_twice(steady_gateway: GatewayUnderTest):
    body = json.dumps(chat_body())[:-1]
    whole = steady_gateway.client.post(CHAT, content=body + ',"stream":true,"stream":false}')
    assert whole.headers["content-type"] == "application/json"
    twice = steady_gateway.client.post(CHAT, content=body + ',"n":2,"n":0}')
    assert_error(twice, 400, param="n")


def test_several_choices_without_chance(steady_gateway: GatewayUnderTest):
    for sampling in ({"temperature": 0}, {"top_k": 1}, {"top_p": 0}):
        answer = steady_gateway.chat(n=3, **sampling).json()
        assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]


def test_the_context_holds_exactly_what_it_says(steady_gateway: GatewayUnderTest):
    body: dict[str, Any] = {"prompt": [65] * 8000, "max_tokens": 192}
    assert plain(steady_gateway, **body).status_code == 200
    refused = plain(steady_gateway, **body | {"max_tokens": 193})
    assert_error(refused, 400, code="context_length_exceeded", param="max_tokens")


def test_a_client_that_waits_for_leave_to_send_its_body(steady_gateway: GatewayUnderTest):
    """As curl does with bodies of more than a kilobyte."""
    content = json.dumps(chat_body()).encode()
    head = (
        f"POST {CHAT} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {ADMIN_KEY}\r\n"
        f"expect: 100-continue\r\nconnection: close\r\ncontent-length: {len(content)}\r\n\r\n"
    )
    with socket.create_connection(("127.0.0.1", steady_gateway.port), timeout=30) as client:
        client.sendall(head.encode())
        assert client.recv(65536).startswith(b"HTTP/1.1 100 ")
        client.sendall(content)
        received = b""
        while piece := client.recv(65536):
            received += piece
    assert received.startswith(b"HTTP/1.1 200 ")


def test_the_key_of_a_client_that_writes_the_scheme_its_own_way(steady_gateway: GatewayUnderTest):
    for scheme in ("Bearer", "bearer", "BEARER"):
        headers = {"authorization": f"{scheme} {ADMIN_KEY}"}
        answer = httpx.post(steady_gateway.url + CHAT, json=chat_body(), headers=headers)
        assert answer.status_code == 200


def test_requests_behind_each_other_on_one_connection(steady_gateway: GatewayUnderTest):
    content = json.dumps(chat_body()).encode()
    fields = {"host": "x", "authorization": f"Bearer {ADMIN_KEY}", **script_header(["right"])}
    lines = [f"{name}: {value}" for name, value in fields.items()]
    head = "\r\n".join([f"POST {CHAT} HTTP/1.1", *lines, f"content-length: {len(content)}", "", ""])
    last = head.replace("host: x", "host: x\r\nconnection: close")
    with socket.create_connection(("127.0.0.1", steady_gateway.port), timeout=30) as client:
        client.sendall((head.encode() + content) * 2 + last.encode() + content)
        received = b""
        while piece := client.recv(65536):
            received += piece
    assert received.count(b"HTTP/1.1 200 ") == 3
    assert received.count(b'"content":"right"') == 3
