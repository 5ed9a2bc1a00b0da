"""Calls of tools and reasoning on all three surfaces: the same whole and streamed, nothing lost, nothing invented."""

import json
from pathlib import Path
from typing import Any

import pytest
from anthropic import AsyncAnthropic
from openai import AsyncOpenAI

from tests.fakes.gateway import ADMIN_KEY, GatewayUnderTest, assert_error, events, script_header
from tests.fakes.processes import WorkerUnderTest
from tests.fakes.wire import wait_until
from workers.protocol import FinishReason

TIDE = {"harbour": "Port Ness 🌊", "at": [1, None]}
MOON: dict[str, Any] = {}


def function(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}


TOOLS = [function("tide"), function("moon")]


def call(name: str, arguments: Any) -> str:
    text = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{text}\n</tool_call>"


def tokens(text: str, size: int = 3) -> list[bytes]:
    """Of a few bytes each, so that characters are cut."""
    data = text.encode()
    return [data[at : at + size] for at in range(0, len(data), size)]


def whole(gateway: GatewayUnderTest, script: list[bytes], **body: Any) -> Any:
    answer = gateway.chat(script=script, **{"tools": TOOLS, **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


def streamed(gateway: GatewayUnderTest, script: list[bytes], **body: Any) -> Any:
    """What the chunks of a stream add up to, in the shape of a whole answer."""
    options = {"include_usage": True}
    body = {"tools": TOOLS, "stream": True, "stream_options": options, **body}
    chunks = events(gateway.chat(script=script, **body).text)
    assert chunks[-1] == "[DONE]"
    choices: dict[int, Any] = {}
    for chunk in chunks[:-2]:
        (piece,) = chunk["choices"]
        choice = choices.setdefault(piece["index"], {"message": {}, "finish_reason": None})
        assert choice["finish_reason"] is None
        choice["finish_reason"] = piece["finish_reason"]
        _add(choice["message"], piece["delta"])
    return {"choices": [choices[i] for i in sorted(choices)], "usage": chunks[-2]["usage"]}


def _add(message: dict[str, Any], delta: dict[str, Any]) -> None:
    for name, value in delta.items():
        if name == "tool_calls":
            calls = message.setdefault(name, [])
            for piece in value:
                if piece["index"] == len(calls):
                    assert piece["id"]
                    assert piece["type"] == "function"
                    assert piece["function"]["arguments"] == ""
                    calls.append(json.loads(json.dumps(piece)))
                else:
                    assert set(piece) == {"index", "function"}
                    function = calls[piece["index"]]["function"]
                    function["arguments"] += piece["function"]["arguments"]
        elif value is None or name == "role":
            message.setdefault(name, value)
        else:
            message[name] = (message.get(name) or "") + value


def bare(answer: Any) -> Any:
    """Without ids and places."""
    choices = [
        (
            # Before reasoning it is not known yet whether calls are all that follows.
            choice["message"]["content"]
            or ("" if not choice["message"].get("tool_calls") else None),
            choice["message"].get("reasoning_content"),
            [
                (item["function"]["name"], item["function"]["arguments"])
                for item in choice["message"].get("tool_calls", [])
            ],
            choice["finish_reason"],
        )
        for choice in answer["choices"]
    ]
    # What two runs of the same took differs.
    costs = ("cost", "cost_details")
    return choices, {name: told for name, told in answer["usage"].items() if name not in costs}


def same_both_ways(gateway: GatewayUnderTest, text: str, **body: Any) -> list[Any]:
    script = tokens(text)
    told = bare(whole(gateway, script, **body))
    assert bare(streamed(gateway, script, **body)) == told
    assert told[1]["completion_tokens"] <= len(script) * body.get("n", 1)
    return told[0]


def written(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


@pytest.mark.parametrize("n", [1, 2])
def test_parallel_calls_after_text(shared_gateway: GatewayUnderTest, n: int):
    text = "Ich sehe nach 🔭.\n" + call("tide", TIDE) + "\n" + call("moon", MOON)
    choices = same_both_ways(shared_gateway, text, n=n)
    calls = [("tide", written(TIDE)), ("moon", "{}")]
    assert choices == [("Ich sehe nach 🔭.\n", None, calls, "tool_calls")] * n
    ids = [
        item["id"]
        for choice in whole(shared_gateway, tokens(text), n=n)["choices"]
        for item in choice["message"]["tool_calls"]
    ]
    assert len(set(ids)) == 2 * n


def test_calls_alone_have_no_content(shared_gateway: GatewayUnderTest):
    choices = same_both_ways(shared_gateway, call("tide", TIDE))
    assert choices == [(None, None, [("tide", written(TIDE))], "tool_calls")]


def test_one_call_where_no_more_are_wanted(shared_gateway: GatewayUnderTest):
    text = call("tide", TIDE) + call("moon", MOON)
    for body in ({"parallel_tool_calls": False}, {"tool_choice": TOOLS[0]}):
        choices = same_both_ways(shared_gateway, text, **body)
        assert choices == [(None, None, [("tide", written(TIDE))], "tool_calls")]


@pytest.mark.parametrize(
    "text",
    [
        "An element <tool_call> opens, </tool_call> closes.",
        call("unknown", {}),
        '<tool_call>\n{"name": "tide", "arguments": 5}\n</tool_call>',
        '{"name": "tide", "arguments": {}}',
        "<tool_",
        " \n",
    ],
)
def test_what_only_looks_like_a_call_is_text(shared_gateway: GatewayUnderTest, text: str):
    assert same_both_ways(shared_gateway, text) == [(text, None, [], "stop")]


def test_a_call_that_is_cut(shared_gateway: GatewayUnderTest):
    cut = len(tokens(call("tide", TIDE))) - 12
    ((content, _, calls, reason),) = same_both_ways(
        shared_gateway, call("tide", TIDE), max_tokens=cut
    )
    assert (content, reason) == (None, "length")
    ((name, arguments),) = calls
    assert name == "tide"
    assert written(TIDE).startswith(arguments)
    assert arguments != written(TIDE)
    complete = call("moon", MOON) + "\n" + call("tide", TIDE)
    choices = same_both_ways(shared_gateway, complete, max_tokens=len(tokens(complete)) - 12)
    assert choices[0][3] == "length"


def test_a_stop_string_within_the_arguments(shared_gateway: GatewayUnderTest):
    choices = same_both_ways(shared_gateway, call("tide", TIDE), stop=["Ness"])
    assert choices == [(None, None, [("tide", '{"harbour": "Port ')], "stop")]


def test_the_scripted_model_calls_what_it_must(shared_gateway: GatewayUnderTest):
    """Without a script of its own, with arguments that match the schema."""
    schemas: list[tuple[Any, Any]] = [
        (None, {}),
        ({"properties": {"a": {"type": "string"}}, "required": ["a"]}, {"a": ""}),
        (
            {
                "properties": {
                    "unit": {"enum": ["m", "ft"]},
                    "at": {"type": "array", "items": {"$ref": "#/$defs/n"}, "minItems": 2},
                    "deep": {"type": "object", "properties": {}, "required": []},
                    "or": {"anyOf": [{"type": "null"}, {"type": "boolean"}]},
                    "some": {"type": ["boolean", "null"]},
                    "only": {"const": "x"},
                    "word": {"type": "string", "minLength": 3},
                },
                "required": ["unit", "at", "deep", "or", "some", "only", "word"],
                "$defs": {"n": {"type": "integer", "minimum": 5}},
            },
            {
                "unit": "m", "at": [5, 5], "deep": {}, "or": None, "some": False,
                "only": "x", "word": "xxx",
            },
        ),
        ({"$defs": {"t": {"properties": {"t": {"$ref": "#/$defs/t"}}, "required": []}}}, {}),
    ]  # fmt: skip
    for parameters, expected in schemas:
        tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
        for choice in ("required", tools[0]):
            answer = shared_gateway.chat(tools=tools, tool_choice=choice).json()["choices"][0]
            assert answer["finish_reason"] == "tool_calls"
            (made,) = answer["message"]["tool_calls"]
            assert json.loads(made["function"]["arguments"]) == expected


@pytest.mark.parametrize("choice", ["required", TOOLS[0]])
@pytest.mark.parametrize("stream", [False, True])
def test_a_call_that_does_not_come_is_a_failure(
    shared_gateway: GatewayUnderTest, choice: Any, stream: bool
):
    answer = shared_gateway.chat(script=["no"], tools=TOOLS, tool_choice=choice, stream=stream)
    if stream:
        *_, last = events(answer.text)
        assert last["error"]["code"] == "no_tool_call"
    else:
        assert_error(answer, 500, code="no_tool_call")


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({"type": "object", "properties": {"a": {"type": "nothing"}}}, "Invalid type: nothing."),
        ({"type": "object", "properties": {"a": {"$ref": "#/$defs/none"}}}, "does not exist."),
        ({"$ref": "#"}, "nothing that ends matches it"),
        ({"type": "object", "properties": 5}, "must be an object."),
    ],
)
def test_a_schema_that_cannot_bind_arguments_is_named(
    shared_gateway: GatewayUnderTest, parameters: Any, words: str
):
    wrong = {"type": "function", "function": {"name": "wrong", "parameters": parameters}}
    tools = [TOOLS[0], wrong]
    refused = shared_gateway.chat(script=["x"], tools=tools, tool_choice="required")
    error = assert_error(refused, 400, param="tools[1].function.parameters")
    assert words in error["message"]
    assert "|" not in error["message"]
    refused = shared_gateway.chat(script=["x"], tools=tools, tool_choice=wrong)
    assert_error(refused, 400, param="tools[1].function.parameters")
    assert shared_gateway.chat(script=["x"], tools=tools).status_code == 200
    wrong["function"]["strict"] = True
    refused = shared_gateway.chat(script=["x"], tools=tools)
    assert_error(refused, 400, param="tools[1].function.parameters")


def test_schemas_may_be_so_large_and_no_larger(shared_gateway: GatewayUnderTest):
    large = {f"p{i}": {"enum": ["x" * 99] * 9} for i in range(200)}
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"properties": large}}}]
    refused = shared_gateway.chat(script=["x"], tools=tools, tool_choice="required")
    assert "131072 bytes" in assert_error(refused, 400, param="tools")["message"]


def _nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "object"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


HOSTILE: dict[str, Any] = {
    "deep": _nested(40),
    "deeper": _nested(64),
    "wide": {"properties": {f"p{i}": {"type": "string"} for i in range(10_000)}},
    "heavy": {"properties": {"a": {"description": "x" * 1_000_000}}},
    "backtracking": {"properties": {"a": {"type": "string", "pattern": "^(a+)+(b|c*)*$"}}},
    "counting": {"properties": {"a": {"type": "string", "pattern": "((a{1,99}){1,99}){1,99}"}}},
    "endless": {"$defs": {"a": {"$ref": "#/$defs/a"}}, "properties": {"a": {"$ref": "#/$defs/a"}}},
    "baseless": {
        "$defs": {"a": {"required": ["a"], "properties": {"a": {"$ref": "#/$defs/a"}}}},
        "properties": {"a": {"$ref": "#/$defs/a"}},
    },
    "foreign": {"properties": {"a": {"$ref": "http://127.0.0.1:9/schema.json"}}},
    "odd": {"properties": {"\u0000\U0001f30a": {"enum": ["\u2028", "</tool_call>", '"']}}},
    "many": {"properties": {"a": {"type": "array", "minItems": 10**9, "items": {}}}},
    "choices": {"anyOf": [{"properties": {f"p{i}": {"const": i}}} for i in range(500)]},
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_schemas_are_refused_or_served(shared_gateway: GatewayUnderTest, name: str):
    function = {"name": "f", "parameters": HOSTILE[name]}
    for extra in ({}, {"strict": True}):
        tools = [{"type": "function", "function": {**function, **extra}}]
        for choice in ("auto", "required"):
            answer = shared_gateway.chat(tools=tools, tool_choice=choice)
            if answer.status_code != 200:
                error = assert_error(answer, 400)
                assert error["param"].startswith(("tools", "messages"))
                assert len(answer.content) < 2048
    assert shared_gateway.chat().status_code == 200


def test_log_probabilities_of_every_token(shared_gateway: GatewayUnderTest):
    script = tokens("See " + call("tide", TIDE))
    body = {"tools": TOOLS, "logprobs": True}
    answer = shared_gateway.chat(script=script, **body).json()
    chunks = events(shared_gateway.chat(script=script, stream=True, **body).text)
    told = [
        token
        for chunk in chunks[:-1]
        for token in (chunk["choices"][0]["logprobs"] or {}).get("content") or []
    ]
    assert len(told) == len(script)
    assert told == answer["choices"][0]["logprobs"]["content"]


THOUGHT = "<think>\nWhich\nharbour? 🤔\n</think>\n\n"


def test_reasoning_before_text_and_calls(shared_gateway: GatewayUnderTest):
    thought = "Which\nharbour? 🤔"
    text = THOUGHT + "It is high."
    choices, usage = bare(whole(shared_gateway, tokens(text), tools=None))
    assert choices == [("It is high.", thought, [], "stop")]
    assert 0 < usage["completion_tokens_details"]["reasoning_tokens"] < usage["completion_tokens"]
    assert same_both_ways(shared_gateway, text, tools=None) == choices
    called = same_both_ways(shared_gateway, THOUGHT + call("moon", MOON))
    assert called == [(None, thought, [("moon", "{}")], "tool_calls")]
    cut = same_both_ways(shared_gateway, text, tools=None, max_tokens=5)
    assert cut == [("", thought[: len(cut[0][1])], [], "length")]


def test_reasoning_may_be_left_out(shared_gateway: GatewayUnderTest):
    text = THOUGHT + "High."
    choices, usage = bare(whole(shared_gateway, tokens(text), include_reasoning=False))
    assert choices == [("High.", None, [], "stop")]
    assert usage["completion_tokens_details"]["reasoning_tokens"] > 0
    assert same_both_ways(shared_gateway, text, include_reasoning=False) == choices


def test_tokens_of_reasoning_are_counted_as_they_came(shared_gateway: GatewayUnderTest):
    for script, expected in [
        (["<think>", "a", "dd", "</think>", "2"], 2),
        (["<think>a", "b</think>c", "d"], 2),
        (["2", " <think>", "3"], 0),
    ]:
        raw = [token.encode() for token in script]
        for answer in (whole(shared_gateway, raw, n=2), streamed(shared_gateway, raw, n=2)):
            details = answer["usage"]["completion_tokens_details"]
            assert details["reasoning_tokens"] == 2 * expected


def test_formats_that_a_worker_is_told(shared_gateway: GatewayUnderTest, tmp_path: Path):
    settings = {"model": "m-other", "tool_parser": "mistral", "reasoning_parser": "mistral"}
    with WorkerUnderTest(shared_gateway.redis_url, "other", tmp_path / "worker.log", **settings):
        ask = {"model": "m-other", "tools": TOOLS}
        wait_until(lambda: shared_gateway.chat(**ask).status_code == 200, "the model is ready")
        text = (
            f'[THINK]Which?[/THINK][TOOL_CALLS][{{"name": "tide", "arguments": {written(TIDE)}}}]'
        )
        choices = same_both_ways(shared_gateway, text, **ask)
        assert choices == [(None, "Which?", [("tide", written(TIDE))], "tool_calls")]
        assert same_both_ways(shared_gateway, "<think>", **ask) == [("<think>", None, [], "stop")]
        required = shared_gateway.chat(**ask, tool_choice="required").json()["choices"]
        assert required[0]["message"]["tool_calls"][0]["function"]["name"] == "tide"


RESPONSES_TOOLS = [{"type": "function", "name": "tide", "parameters": {"type": "object"}}]


def test_a_response_with_calls(shared_gateway: GatewayUnderTest):
    headers = script_header(tokens(THOUGHT + "I look." + call("tide", TIDE)))
    body = {"model": "m-small", "input": "Tide?", "tools": RESPONSES_TOOLS}
    answer = shared_gateway.client.post("/v1/responses", json=body, headers=headers).json()
    assert [item["type"] for item in answer["output"]] == ["reasoning", "message", "function_call"]
    assert json.loads(answer["output"][2]["arguments"]) == TIDE
    assert answer["usage"]["output_tokens_details"]["reasoning_tokens"] > 0
    for choice in ("required", {"type": "function", "name": "tide"}):
        ask = {**body, "tool_choice": choice, "stream": True}
        text = shared_gateway.client.post("/v1/responses", json=ask, headers=headers).text
        told = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: ")]
        kinds = [event["type"] for event in told]
        assert kinds.count("response.function_call_arguments.done") == 1
        pieces = [e["delta"] for e in told if e["type"] == "response.function_call_arguments.delta"]
        assert len(pieces) > 1
        assert json.loads("".join(pieces)) == TIDE
        assert kinds[-1] == "response.completed"
    unknown = {**body, "tool_choice": {"type": "function", "name": "sun"}}
    assert_error(
        shared_gateway.client.post("/v1/responses", json=unknown), 400, param="tool_choice"
    )


def test_a_message_with_calls(shared_gateway: GatewayUnderTest):
    headers = script_header(tokens(THOUGHT + "I look." + call("tide", TIDE)))
    body = {
        "model": "m-small",
        "max_tokens": 500,
        "messages": [{"role": "user", "content": "Tide?"}],
        "tools": [{"name": "tide", "input_schema": {"type": "object"}}],
    }
    for choice in ("auto", "any", "tool"):
        ask = {**body, "tool_choice": {"type": choice, "name": "tide"}}
        answer = shared_gateway.client.post("/v1/messages", json=ask, headers=headers).json()
        assert [block["type"] for block in answer["content"]] == ["thinking", "text", "tool_use"]
        assert answer["content"][2]["input"] == TIDE
        assert answer["stop_reason"] == "tool_use"
    ask = {**body, "stream": True}
    text = shared_gateway.client.post("/v1/messages", json=ask, headers=headers).text
    told = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: ")]
    pieces = [
        event["delta"]["partial_json"]
        for event in told
        if event["type"] == "content_block_delta" and "partial_json" in event["delta"]
    ]
    assert len(pieces) > 1
    assert json.loads("".join(pieces)) == TIDE


async def test_official_clients_put_streams_together(shared_gateway: GatewayUnderTest):
    headers = script_header(tokens(THOUGHT + "I look." + call("tide", TIDE) + call("tide", MOON)))
    options: Any = {"api_key": ADMIN_KEY, "max_retries": 0, "_strict_response_validation": True}
    ask: Any = {"model": "m-small", "extra_headers": headers}
    async with AsyncOpenAI(base_url=shared_gateway.url + "/v1", **options) as client:
        tools: Any = RESPONSES_TOOLS
        async with client.responses.stream(**ask, input="Tide?", tools=tools) as stream:
            response = await stream.get_final_response()
        calls = [item for item in response.output if item.type == "function_call"]
        assert [json.loads(item.arguments) for item in calls] == [TIDE, MOON]
    async with AsyncAnthropic(base_url=shared_gateway.url, **options) as client:
        messages: Any = [{"role": "user", "content": "Tide?"}]
        tools = [{"name": "tide", "input_schema": {"type": "object"}}]
        async with client.messages.stream(
            **ask, max_tokens=500, messages=messages, tools=tools
        ) as stream:
            message = await stream.get_final_message()
        kinds = [block.type for block in message.content]
        assert kinds == ["thinking", "text", "tool_use", "tool_use"]
        used = [block.input for block in message.content if block.type == "tool_use"]
        assert used == [TIDE, MOON]
        assert message.stop_reason == "tool_use"


def test_nothing_but_a_complete_call_ends_with_one():
    """The engine knows no such reason: it is told from the text."""
    assert {reason.value for reason in FinishReason} == {"stop", "length", "abort", "error"}
