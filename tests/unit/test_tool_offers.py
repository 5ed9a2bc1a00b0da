"""What a request says of tools is checked as OpenAI's document has it, and becomes one offer."""

import json
from typing import Any

import pytest

from gateway.domain.openai.schemas import ChatCompletionRequest
from gateway.domain.openai.tools.offer import ToolOffer, tool_offer
from gateway.domain.openai.validation import parse
from gateway.errors import BadRequestError


def tool(name: str = "tide", **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **fields}}


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def allowed(mode: str, *names: str) -> dict[str, Any]:
    tools = [named(name) for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


def offer(**fields: Any) -> ToolOffer | None:
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}], **fields}
    return tool_offer(parse(ChatCompletionRequest, json.dumps(body).encode()))


BOTH = [tool("tide"), tool("moon")]


@pytest.mark.parametrize(
    ("choice", "names", "num_shown", "is_required", "parallel"),
    [
        (None, {"tide", "moon"}, 2, False, True),
        ("auto", {"tide", "moon"}, 2, False, True),
        ("required", {"tide", "moon"}, 2, True, True),
        (named("moon"), {"moon"}, 2, True, False),
        (allowed("auto", "tide"), {"tide"}, 1, False, True),
        (allowed("required", "tide", "tide", "moon"), {"tide", "moon"}, 2, True, True),
    ],
)
def test_every_choice(choice: Any, names: Any, num_shown: int, is_required: bool, parallel: bool):
    found = offer(tools=BOTH, tool_choice=choice)
    assert found is not None
    assert found.names == names
    assert len(found.template_tools) == num_shown
    assert (found.is_required, found.parallel) == (is_required, parallel)
    alone = offer(tools=BOTH, tool_choice=choice, parallel_tool_calls=False)
    assert alone is not None
    assert alone.parallel is False


@pytest.mark.parametrize(
    "fields",
    [{}, {"tools": None}, {"tools": []}, {"tools": BOTH, "tool_choice": "none"}]
    + [{"tools": [], "tool_choice": choice} for choice in (None, "none", "auto")],
)
def test_nothing_is_offered(fields: dict[str, Any]):
    assert offer(**fields) is None


def test_what_is_left_out_is_filled_in_for_templates():
    found = offer(tools=[tool("tide", strict=True)])
    assert found is not None
    assert found.template_tools == [
        tool("tide", description="", parameters={"type": "object", "properties": {}})
    ]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [tool("a b")]}, "tools[0].function.name"),
        ({"tools": [tool("x" * 65)]}, "tools[0].function.name"),
        ({"tools": [tool("")]}, "tools[0].function.name"),
        ({"tools": [tool("tide\n")]}, "tools[0].function.name"),
        ({"tools": [tool(parameters={"type": "array"})]}, "tools[0].function.parameters"),
        ({"tools": [tool(parameters=[])]}, "tools[0].function.parameters"),
        ({"tools": [tool(), {"type": "function"}]}, "tools[1].function"),
        ({"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools[0].type"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [tool(str(i)) for i in range(129)]}, "tools"),
        ({"tools": [tool("moon"), tool("moon")]}, "tools[1].function.name"),
        ({"tools": BOTH, "tool_choice": named("sun")}, "tool_choice"),
        ({"tools": BOTH, "tool_choice": allowed("auto", "tide", "sun")}, "tool_choice"),
        ({"tools": BOTH, "tool_choice": allowed("any", "tide")}, None),
        ({"tools": BOTH, "tool_choice": allowed("auto")}, None),
        ({"tools": BOTH, "tool_choice": "any"}, "tool_choice"),
        ({"tools": BOTH, "tool_choice": {"type": "function"}}, "tool_choice.function"),
        ({"tools": BOTH, "tool_choice": {"type": "custom", "custom": {}}}, "tool_choice"),
        ({"tools": BOTH, "tool_choice": 5}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [], "tool_choice": named("tide")}, "tool_choice"),
        ({"tools": BOTH, "parallel_tool_calls": 1}, "parallel_tool_calls"),
        ({"functions": [{"name": "tide"}]}, "functions"),
        ({"function_call": {"name": "tide"}}, "function_call"),
    ],
)
def test_what_is_wrong_is_named(fields: dict[str, Any], param: str | None):
    with pytest.raises(BadRequestError) as caught:
        offer(**fields)
    assert param is None or caught.value.param == param
    assert "tool_choice" in str(caught.value.param) or param is not None
    assert len(caught.value.message) < 600


def test_hosted_tools_are_refused_by_their_type():
    with pytest.raises(BadRequestError) as caught:
        offer(tools=[{"type": "web_search"}])
    assert "'web_search'" in caught.value.message
    assert caught.value.code == "unsupported_value"


def test_128_tools_may_be_offered():
    found = offer(tools=[tool(f"tool_{i}") for i in range(128)])
    assert found is not None
    assert len(found.names) == 128
