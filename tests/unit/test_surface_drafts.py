"""Reasoning, text and calls become what the official clients' own types read, whole and event by event."""

import json
from typing import Any

import pytest
from anthropic.types import Message
from anthropic.types import RawMessageStreamEvent as AnthropicEvent
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from gateway.domain.accounting.live import NOT_METERED
from gateway.domain.messages.answers import MessageDraft
from gateway.domain.openai.events import Finish, Restart
from gateway.domain.openai.parts import Part, Reasoning, Text, ToolArguments, ToolCall
from gateway.domain.openai.plan import Plan, Total
from gateway.domain.responses.answers import Draft
from gateway.domain.responses.schemas import ResponsesRequest
from models.tokenizer import TextTokenizer
from workers.engine.scripted import scripted_tokenizer
from workers.protocol import Usage

PARTS: list[Part] = [
    Reasoning("Let me "),
    Reasoning("look."),
    Text("I look"),
    Text(" twice."),
    ToolCall(0, "call_1", "look"),
    ToolArguments(0, '{"at": '),
    ToolArguments(0, '"it"}'),
    ToolCall(1, "call_2", "look"),
    ToolArguments(1, "{}"),
]
TOTAL = Total(Usage(prompt_tokens=10, completion_tokens=20, cached_tokens=4), NOT_METERED)


@pytest.fixture(scope="module")
def plan() -> Plan:
    return Plan(
        id="chatcmpl-1",
        created_s=1,
        model="m-small",
        fingerprint=None,
        chat=True,
        num_choices=1,
        num_candidates=1,
        include_usage=False,
        started_s=0.0,
        tokenizer=TextTokenizer(scripted_tokenizer().to_str().encode()),
        num_logprobs=None,
        num_prompt_logprobs=None,
        skips_special=True,
        cost_of=lambda model, usages: NOT_METERED,
    )


def told(blocks: list[bytes]) -> list[dict[str, Any]]:
    lines = b"".join(blocks).decode().splitlines()
    return [json.loads(line[6:]) for line in lines if line.startswith("data: ")]


def test_a_response_of_everything(plan: Plan):
    body = ResponsesRequest.model_validate({"model": "m-small", "input": "x"})
    draft = Draft(body, plan)
    blocks = [draft.begin()]
    for part in PARTS:
        blocks += draft.take([part])
    blocks += draft.take(Finish("tool_calls")) + draft.take(TOTAL)
    found = told([*blocks, draft.end()])
    adapter: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
    events = [adapter.validate_python(event) for event in found]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    response = Response.model_validate(draft.response)
    assert [item.type for item in response.output] == [
        "reasoning",
        "message",
        "function_call",
        "function_call",
    ]
    done = [event["item"] for event in found if event["type"] == "response.output_item.done"]
    assert done == draft.output
    calls = [item for item in draft.output if item["type"] == "function_call"]
    assert [json.loads(call["arguments"]) for call in calls] == [{"at": "it"}, {}]
    assert response.output_text == "I look twice."
    assert response.status == "completed"
    assert response.usage is not None
    assert response.usage.input_tokens_details.cached_tokens == 4
    for kind in ("output_text", "reasoning_text", "function_call_arguments"):
        pieces = [event for event in found if event["type"] == f"response.{kind}.delta"]
        assert all(piece["item_id"] == done[piece["output_index"]]["id"] for piece in pieces)
        assert len(pieces) >= 2


def test_a_message_of_everything(plan: Plan):
    draft = MessageDraft(plan, 10, 100)
    blocks = []
    for part in PARTS:
        blocks += draft.take([part])
    blocks += draft.take(Finish("tool_calls")) + draft.take(TOTAL)
    found = told([*blocks, draft.end()])
    adapter: TypeAdapter[Any] = TypeAdapter(AnthropicEvent)
    for event in found:
        adapter.validate_python(event)
    message = Message.model_validate(draft.whole())
    assert [block.type for block in message.content] == ["thinking", "text", "tool_use", "tool_use"]
    assert [block.input for block in message.content if block.type == "tool_use"] == [
        {"at": "it"},
        {},
    ]
    assert message.stop_reason == "tool_use"
    assert (message.usage.input_tokens, message.usage.cache_read_input_tokens) == (6, 4)
    starts = [event["index"] for event in found if event["type"] == "content_block_start"]
    stops = [event["index"] for event in found if event["type"] == "content_block_stop"]
    assert starts == stops == [0, 1, 2, 3]
    pieces = [
        event["delta"]["partial_json"]
        for event in found
        if event["type"] == "content_block_delta" and event["index"] == 2
    ]
    assert json.loads("".join(pieces)) == {"at": "it"}


def test_arguments_that_were_cut(plan: Plan):
    draft = MessageDraft(plan, 10, 20)
    draft.take([ToolCall(0, "call_1", "look"), ToolArguments(0, '{"at": ')])
    draft.take(Finish("length"))
    draft.take(TOTAL)
    message = Message.model_validate(draft.whole())
    assert message.content[0].type == "tool_use"
    assert message.content[0].input == {}
    assert message.stop_reason == "max_tokens"


def test_a_whole_answer_that_starts_over(plan: Plan):
    body = ResponsesRequest.model_validate({"model": "m-small", "input": "x"})
    response, message = Draft(body, plan), MessageDraft(plan, 10, 20)
    for draft in (response, message):
        draft.take([Text("lost")])
        draft.take(Restart())
        draft.take([Text("kept")])
        draft.take(Finish("stop"))
    assert [item["content"][0]["text"] for item in response.output] == ["kept"]
    assert [block["text"] for block in message.whole()["content"]] == ["kept"]
