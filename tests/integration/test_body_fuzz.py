"""Whatever a body is made of, it gets an answer of its surface's own kind: no 5xx, no hang, nothing left behind.

Bodies are good ones with something wrong: another value, a field that is there twice, numbers that JSON has not,
depth, length, other bytes, another encoding.
"""

import gzip
import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest
import redis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fakes.gateway import GatewayUnderTest
from tests.fakes.wire import wait_until
from workers.protocol import requests_stream

CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
TURNS = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c", "content": "3"},
    {"role": "user", "content": "three"},
]
SAMPLING = {
    "temperature": 0.5,
    "top_p": 0.9,
    "n": 2,
    "seed": 1,
    "stop": ["END"],
    "logit_bias": {"65": 1},
    "stream": True,
    "stream_options": {"include_usage": True},
    "min_p": 0.1,
    "stop_token_ids": [3],
    "priority": 1,
    "chat_template_kwargs": {"a": [1]},
}
GOOD: dict[str, list[dict[str, Any]]] = {
    "/v1/chat/completions": [
        {"messages": TURNS, **SAMPLING, "max_completion_tokens": 5},
        {
            "messages": TURNS[-1:],
            "logprobs": True,
            "top_logprobs": 2,
            "tools": [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}],
            "tool_choice": {"type": "function", "function": {"name": "f"}},
            "metadata": {"a": "b"},
        },
        {
            "messages": TURNS[-1:],
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "a", "schema": SCHEMA, "strict": True},
            },
        },
    ],
    "/v1/completions": [
        {"prompt": ["a b", "c"], **SAMPLING, "max_tokens": 5, "logprobs": 1},
        {"prompt": [[65, 66], [67]], "echo": True, "best_of": 3, "max_tokens": 3},
    ],
    "/v1/responses": [
        {
            "input": [
                {"role": "user", "content": [{"type": "input_text", "text": "one"}]},
                {"type": "reasoning", "id": "r", "summary": []},
                {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c", "output": "3"},
            ],
            "instructions": "Be brief.",
            "metadata": {"a": "b"},
            "text": {"format": {"type": "text"}},
            "reasoning": {"effort": "low"},
            "stream": True,
            "store": False,
        },
        {"input": "x", "tools": [{"type": "function", "name": "f", "parameters": SCHEMA}]},
    ],
    "/v1/messages": [
        {
            "max_tokens": 5,
            "system": [{"type": "text", "text": "Be brief."}],
            "messages": [
                {"role": "user", "content": "one"},
                {
                    "role": "assistant",
                    "content": [{"type": "tool_use", "id": "c", "name": "f", "input": {"a": 1}}],
                },
                {
                    "role": "user",
                    "content": [{"type": "tool_result", "tool_use_id": "c", "content": "3"}],
                },
            ],
            "stop_sequences": ["END"],
            "thinking": {"type": "enabled", "budget_tokens": 1024},
            "stream": True,
        },
        {
            "max_tokens": 5,
            "messages": [{"role": "user", "content": "one"}],
            "tools": [{"name": "f", "input_schema": SCHEMA}],
            "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}},
        },
    ],
    "/v1/messages/count_tokens": [{"messages": [{"role": "user", "content": "one"}]}],
    "/tokenize": [
        {"prompt": "a", "add_special_tokens": True, "return_token_strs": True},
        {"messages": TURNS, "chat_template_kwargs": {"a": 1}},
    ],
    "/detokenize": [{"tokens": [65, 66, 255]}],
}
LITERALS = [
    *("null", "true", "false", "0", "-1", "1.5", "1e999", "-1e999", "5e-324", "9" * 30, "-0"),
    *("9223372036854775807", "9223372036854775808", "NaN", "Infinity", "-Infinity", "01", "1."),
    *('""', '"x"', '"\\u0000"', '"\\ud800"', '"\\udc00\\ud800"', '"\\ud83e\\udd80"', '"\\x"', '"'),
    *("[]", "{}", "[null]", "[[]]", '{"":null}', '{"type":"text"}', "[1,2,3]", '["a","a"]', "'a'"),
    *("[" * 150 + "]" * 150, "[" * 9000, '{"a":' * 150 + "1" + "}" * 150, '{"a":' * 9000),
    *('"' + "x" * 100_000 + '"', '"' + "🦀" * 20_000 + '"', "[" + "0," * 70_000 + "0]"),
    *("/**/1", "1 //", "undefined", "0x10", "1_000", "+1", ".5", "\u00a01", "tru"),
]
PIECES = [
    *(
        b"",
        b"\x00",
        b"\xff",
        b"\xf0\x9f",
        b"\xc0\x80",
        b"\xed\xa0\x80",
        b"\xef\xbb\xbf",
        b"}",
        b"]",
    ),
    *(b'"', b",", b":", b"{", b"\\", b"NaN", b"\r\n", b" " * 1000, b"\xe2\x80\xa8"),
]
NO_CALL = "The model called no tool although it had to."
Writer = Callable[[bytes], tuple[bytes, dict[str, str]]]
WRITERS: dict[str, Writer] = {
    "as it is": lambda body: (body, {}),
    "twice": lambda body: (body + body, {}),
    "in lines": lambda body: (body + b"\n" + body, {}),
    "as a form": lambda body: (
        b"body=" + body,
        {"content-type": "application/x-www-form-urlencoded"},
    ),
    "as parts": lambda body: (body, {"content-type": "multipart/form-data; boundary=x"}),
    "compressed": lambda body: (gzip.compress(body), {}),
    "compressed and told": lambda body: (gzip.compress(body), {"content-encoding": "gzip"}),
    "not compressed but told": lambda body: (body, {"content-encoding": "br"}),
    "in UTF-16": lambda body: (body.decode("utf-8", "replace").encode("utf-16"), {}),
    "as a string": lambda body: (json.dumps(body.decode("utf-8", "replace")).encode(), {}),
    "as an item": lambda body: (b"[" + body + b"]", {}),
}


def places(node: Any, place: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Ways to all values inside."""
    keys = node if isinstance(node, dict) else range(len(node)) if isinstance(node, list) else ()
    found = []
    for key in keys:
        found += [(*place, key), *places(node[key], (*place, key))]
    return found


def replaced(node: Any, place: tuple[Any, ...], value: Any) -> Any:
    """A copy with another value at one place."""
    if not place:
        return value
    copy = dict(node) if isinstance(node, dict) else list(node)
    copy[place[0]] = replaced(node[place[0]], place[1:], value)
    return copy


@st.composite
def bodies(draw: st.DrawFn, path: str) -> tuple[bytes, dict[str, str]]:
    body: dict[str, Any] = {"model": "m-small", **draw(st.sampled_from(GOOD[path]))}
    raw: list[str] = []
    for number in range(draw(st.integers(0, 3))):
        # What an earlier change has cut off is no place any more.
        place = draw(st.sampled_from(places(body)))
        literal = draw(st.sampled_from(LITERALS))
        if draw(st.integers(0, 5)) == 0:
            # The field is there twice.
            literal = f'{literal}, "{place[-1]}": {draw(st.sampled_from(LITERALS))}'
        raw.append(literal)
        body = replaced(body, place, f"@{number}@")
    text = json.dumps(body)
    for number, literal in enumerate(raw):
        text = text.replace(f'"@{number}@"', literal)
    content = text.encode()
    if draw(st.integers(0, 3)) == 0:
        at = draw(st.integers(0, min(len(content), 3000)))
        gone = draw(st.sampled_from([0, 0, 1, 7, len(content)]))
        content = content[:at] + draw(st.sampled_from(PIECES)) + content[at + gone :]
    writer = draw(st.sampled_from(["as it is"] * 12 + list(WRITERS)))
    return WRITERS[writer](content)


def assert_well_formed(path: str, answer: httpx.Response) -> None:
    kind = answer.headers["content-type"]
    assert answer.headers["x-request-id"]
    if answer.status_code == 200:
        assert kind.startswith(("application/json", "text/event-stream"))
        if NO_CALL in answer.text:
            return
        assert "\nevent: error\n" not in answer.text
        assert 'data: {"error"' not in answer.text
        return
    assert kind == "application/json"
    body = answer.json()
    if path.startswith("/v1/messages"):
        assert set(body) == {"type", "error", "request_id"}
        assert set(body["error"]) == {"type", "message"}
    else:
        assert set(body) == {"error"}
        assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["message"]
    assert len(answer.content) < 4096
    # A body may ask for a limit of its own that is over at once, or for a call that is not in the script.
    if answer.status_code not in (400, 404, 413, 415, 504):
        assert body["error"]["message"] == NO_CALL


@pytest.mark.parametrize("path", GOOD)
def test_every_body_gets_an_answer(steady_gateway: GatewayUnderTest, path: str):
    for good in GOOD[path]:
        answer = steady_gateway.client.post(path, json={"model": "m-small", **good})
        assert_well_formed(path, answer)

    # How fast bodies are drawn says nothing on a busy machine.
    @settings(
        max_examples=150,
        deadline=None,
        derandomize=True,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
    @given(bodies(path))
    def send(body: tuple[bytes, dict[str, str]]) -> None:
        content, headers = body
        answer = steady_gateway.client.post(path, content=content, headers=headers)
        assert_well_formed(path, answer)

    send()
    assert steady_gateway.chat(script=["good"]).json()["choices"][0]["message"]["content"] == "good"
    active = "tpugate_gateway_requests_active"
    wait_until(lambda: steady_gateway.metric(active) == 0, "no request is left")
    with redis.Redis.from_url(steady_gateway.redis_url) as queue:
        wait_until(lambda: queue.xlen(requests_stream("m-small")) == 0, "nothing is queued")
    assert "Traceback" not in steady_gateway.output
