"""Cases about tools and reasoning: every form of `tool_choice`, a call that is cut, thoughts apart from text."""

import json
from typing import Any

import httpx
import pytest

from tests.fakes.gateway import GatewayUnderTest, assert_error, events, joined

TIDE: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "lookup_tide",
        "description": "Tide height for a harbour",
        "parameters": {
            "type": "object",
            "properties": {"harbour": {"type": "string"}},
            "required": ["harbour"],
            "additionalProperties": False,
        },
    },
}
MOON: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "lookup_moon",
        "parameters": {
            "type": "object",
            "properties": {"day": {"type": "string"}},
            "required": ["day"],
            "additionalProperties": False,
        },
    },
}
MESSAGES = [{"role": "user", "content": "Tide at Port Ness?"}]
COMING = pytest.mark.xfail(reason="chat completions refuse tools by name", strict=False)


def call(name: str, arguments: dict[str, str]) -> list[str]:
    text = json.dumps({"name": name, "arguments": arguments})
    return [
        "<tool_call>",
        "\n",
        *(text[at : at + 5] for at in range(0, len(text), 5)),
        "\n</tool_call>",
    ]


def ask(gateway: GatewayUnderTest, script: list[str], **body: Any) -> httpx.Response:
    return gateway.chat(script=script, messages=MESSAGES, **body)


def whole_and_streamed(gateway: GatewayUnderTest, script: list[str], **body: Any) -> list[Any]:
    """Content, calls and reason of the same request both ways."""
    answer = ask(gateway, script, **body)
    assert answer.status_code == 200, answer.text
    choice = answer.json()["choices"][0]
    calls = choice["message"].get("tool_calls") or []
    told = [
        (choice["message"]["content"] or "", [_bare(c) for c in calls], choice["finish_reason"])
    ]
    assert len({c["id"] for c in calls}) == len(calls)
    assert all(c["id"] for c in calls)
    chunks = events(ask(gateway, script, **body, stream=True).text)
    assert chunks[-1] == "[DONE]"
    deltas = [chunk["choices"][0] for chunk in chunks[:-1]]
    told.append((joined(chunks), _gathered(deltas), deltas[-1]["finish_reason"]))
    return told


def _bare(given: dict[str, Any]) -> tuple[str, str]:
    return given["function"]["name"], given["function"]["arguments"]


def _gathered(deltas: list[Any]) -> list[tuple[str, str]]:
    names: dict[int, str] = {}
    arguments: dict[int, str] = {}
    for delta in deltas:
        for piece in delta["delta"].get("tool_calls") or []:
            function, index = piece["function"], piece["index"]
            if index not in names:
                assert piece["id"]
                assert piece["type"] == "function"
                names[index] = function["name"]
            else:
                assert not function.get("name")
            arguments[index] = arguments.get(index, "") + (function.get("arguments") or "")
    assert sorted(names) == list(range(len(names)))
    return [(names[index], arguments[index]) for index in sorted(names)]


PORT_NESS = ("lookup_tide", '{"harbour": "Port Ness"}')
TIDE_CALL = call("lookup_tide", {"harbour": "Port Ness"})


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_c07_a_call(steady_gateway: GatewayUnderTest, choice: str):
    for content, calls, reason in whole_and_streamed(
        steady_gateway, TIDE_CALL, tools=[TIDE], tool_choice=choice
    ):
        assert (content, reason) == ("", "tool_calls")
        ((name, arguments),) = calls
        assert name == "lookup_tide"
        assert json.loads(arguments) == {"harbour": "Port Ness"}


def test_c07_text_where_a_call_was_possible(steady_gateway: GatewayUnderTest):
    told = whole_and_streamed(steady_gateway, ["It is ", "high."], tools=[TIDE], tool_choice="auto")
    assert told == [("It is high.", [], "stop")] * 2


def test_c07_no_call_wanted(steady_gateway: GatewayUnderTest):
    script = ["Use ", "<tools>", ' for {"name": 1}']
    told = whole_and_streamed(steady_gateway, script, tools=[TIDE], tool_choice="none")
    assert told == [("".join(script), [], "stop")] * 2


def test_c07_a_named_function(steady_gateway: GatewayUnderTest):
    choice = {"type": "function", "function": {"name": "lookup_moon"}}
    script = call("lookup_moon", {"day": "today"})
    told = whole_and_streamed(steady_gateway, script, tools=[TIDE, MOON], tool_choice=choice)
    assert told[0][2] == told[1][2]
    for _, calls, reason in told:
        ((name, arguments),) = calls
        assert (name, json.loads(arguments)) == ("lookup_moon", {"day": "today"})
        assert reason in ("stop", "tool_calls")


def test_c07_a_required_call_that_does_not_come(steady_gateway: GatewayUnderTest):
    answer = ask(steady_gateway, ["no"], tools=[TIDE], tool_choice="required")
    if answer.status_code == 200:
        assert answer.json()["choices"][0]["finish_reason"] != "tool_calls"
    else:
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_c07_allowed_tools(steady_gateway: GatewayUnderTest, mode: str):
    named = [{"type": "function", "function": {"name": "lookup_tide"}}]
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": named}}
    both = {"tools": [TIDE, MOON], "tool_choice": choice}
    for _, calls, _ in whole_and_streamed(steady_gateway, TIDE_CALL, **both):
        assert [name for name, _ in calls] == ["lookup_tide"]
    moon = ask(steady_gateway, call("lookup_moon", {"day": "today"}), **both)
    if moon.status_code == 200:
        calls = moon.json()["choices"][0]["message"].get("tool_calls") or []
        assert "lookup_moon" not in [item["function"]["name"] for item in calls]


@pytest.mark.parametrize("tools", [None, []])
@pytest.mark.parametrize("choice", [None, "none", "auto"])
def test_c07_no_tools(steady_gateway: GatewayUnderTest, tools: Any, choice: Any):
    answer = ask(steady_gateway, ["hi"], tools=tools, tool_choice=choice)
    if answer.status_code != 200:
        assert choice == "auto" or tools == []
        assert_error(answer, 400)


def test_c07_an_unknown_function(steady_gateway: GatewayUnderTest):
    choice: dict[str, Any] = {"type": "function", "function": {"name": "no_such"}}
    for stream in (False, True):
        refused = ask(steady_gateway, [], tools=[TIDE], tool_choice=choice, stream=stream)
        error = assert_error(refused, 400)
        assert error["param"].startswith("tool_choice")


def test_x03_a_call_that_is_cut(steady_gateway: GatewayUnderTest):
    for content, calls, reason in whole_and_streamed(
        steady_gateway, TIDE_CALL, tools=[TIDE], tool_choice="required", max_tokens=6
    ):
        assert reason == "length"
        assert "tool_call" not in content
        for name, arguments in calls:
            assert PORT_NESS[0].startswith(name)
            assert PORT_NESS[1].startswith(arguments)


@pytest.mark.parametrize(
    ("script", "limits", "expected"),
    [
        (["<think>", "add", "</think>", "2"], {}, ("add", "2", "stop", 1)),
        (["<think>", "add", " more"], {"max_tokens": 2}, ("add", "", "length", 1)),
    ],
)
def test_x09_thoughts_are_no_text(
    steady_gateway: GatewayUnderTest, script: list[str], limits: Any, expected: Any
):
    thought, content, reason, least = expected
    whole = ask(steady_gateway, script, **limits).json()
    message, usage = whole["choices"][0]["message"], whole["usage"]
    assert message["reasoning_content"] == message["reasoning"] == thought
    assert (message["content"], whole["choices"][0]["finish_reason"]) == (content, reason)
    counted = usage["completion_tokens_details"]["reasoning_tokens"]
    assert least <= counted <= usage["completion_tokens"]
    streamed = ask(steady_gateway, script, **limits, stream=True).text
    assert "think>" not in streamed
    chunks = events(streamed)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks[:-1]]
    assert joined(chunks) == content
    assert "".join(delta.get("reasoning_content") or "" for delta in deltas) == thought
