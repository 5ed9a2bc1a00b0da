"""A small model that was never taught to call tools calls them where it must: arguments always match the schema."""

import json
from typing import Any

import pytest

from tests.fakes.model_server import MODEL, ModelServer

TIDE: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "tide",
        "parameters": {
            "type": "object",
            "properties": {"day": {"type": "integer", "minimum": 1, "maximum": 31}},
            "required": ["day"],
            "additionalProperties": False,
        },
    },
}
NAMED = {"type": "function", "function": {"name": "tide"}}
ASK: dict[str, Any] = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "Tide?"}],
    "tools": [TIDE],
    "parallel_tool_calls": False,
}


def matches(name: str, arguments: str) -> bool:
    given = json.loads(arguments)
    return name == "tide" and set(given) == {"day"} and 1 <= given["day"] <= 31


@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
def test_a_call_that_must_come(model_server: ModelServer, choice: Any):
    answer = model_server.client().chat.completions.create(
        **ASK, tool_choice=choice, temperature=1.2, n=3, seed=1
    )
    for given in answer.choices:
        assert given.finish_reason == "tool_calls"
        assert given.message.content is None
        (call,) = given.message.tool_calls or []
        assert call.type == "function"
        assert matches(call.function.name, call.function.arguments)


def test_a_streamed_call_is_the_same(model_server: ModelServer):
    ask = {**ASK, "tool_choice": "required", "temperature": 0}
    client = model_server.client()
    (whole,) = client.chat.completions.create(**ask).choices
    with client.chat.completions.stream(**ask) as stream:
        for _ in stream:
            pass
        (streamed,) = stream.get_final_completion().choices
    assert streamed.finish_reason == whole.finish_reason == "tool_calls"
    functions = [
        (call.function.name, call.function.arguments)
        for choice in (whole, streamed)
        for call in choice.message.tool_calls or []
        if call.type == "function"
    ]
    assert functions[0] == functions[1]
    assert matches(*functions[0])
    assert len(functions) == 2


def test_a_call_that_must_come_and_is_cut(model_server: ModelServer):
    answer = model_server.client().chat.completions.create(
        **ASK, tool_choice="required", max_tokens=8
    )
    assert answer.choices[0].finish_reason == "length"
    assert "tool_call" not in (answer.choices[0].message.content or "")


def test_strict_tools_that_may_be_called(model_server: ModelServer):
    tool = {**TIDE, "function": {**TIDE["function"], "strict": True}}
    answer = model_server.client().chat.completions.create(
        **{**ASK, "tools": [tool]}, temperature=1.2, n=4, seed=2
    )
    for given in answer.choices:
        for call in given.message.tool_calls or []:
            assert call.type == "function"
            if given.finish_reason == "tool_calls":
                assert matches(call.function.name, call.function.arguments)
        assert "<tool_call>" not in (given.message.content or "")


def test_the_tools_are_shown_where_they_may_be_called(model_server: ModelServer):
    client = model_server.client()
    ask = {**ASK, "temperature": 0, "max_tokens": 20}
    shown = client.chat.completions.create(**ask)
    hidden = client.chat.completions.create(**ask, tool_choice="none")
    assert shown.choices[0].message.content or shown.choices[0].message.tool_calls
    assert hidden.choices[0].message.tool_calls is None
    assert shown.usage is not None
    assert hidden.usage is not None
    assert shown.usage.prompt_tokens > hidden.usage.prompt_tokens + 100
