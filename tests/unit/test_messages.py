"""Messages become what templates of transformers are written for: plain values, names with results, thoughts by both names."""

from typing import Any

from gateway.domain.openai.message_schemas import ChatMessage
from gateway.domain.openai.messages import chat_len, template_messages

CALL = {"id": "c1", "type": "function", "function": {"name": "tide", "arguments": '{"at": "N"}'}}


def converted(*messages: dict[str, Any]) -> list[dict[str, Any]]:
    return template_messages([ChatMessage.model_validate(message) for message in messages])


def test_a_call_and_its_result():
    turns = converted(
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": "R"},
        {"role": "tool", "tool_call_id": "of none", "content": "R"},
    )
    function = {"name": "tide", "arguments": {"at": "N"}}
    assert turns == [
        {"role": "assistant", "content": "", "tool_calls": [{**CALL, "function": function}]},
        {"role": "tool", "content": "R", "tool_call_id": "c1", "name": "tide"},
        {"role": "tool", "content": "R", "tool_call_id": "of none"},
    ]


def test_the_older_form():
    turns = converted(
        {"role": "assistant", "function_call": {"name": "tide", "arguments": ""}},
        {"role": "function", "name": "tide", "content": "R"},
    )
    assert turns[0]["tool_calls"][0]["function"] == {"name": "tide", "arguments": {}}
    assert turns[1]["tool_call_id"] == turns[0]["tool_calls"][0]["id"]
    assert turns[1]["role"] == "tool"


def test_parts_refusals_and_thoughts():
    parts = [{"type": "text", "text": "a"}, {"type": "refusal", "refusal": "b"}]
    assert converted(
        {"role": "assistant", "content": parts, "tool_calls": None, "name": None},
        {"role": "assistant", "refusal": "no"},
        {"role": "assistant", "content": "x", "refusal": None, "reasoning": "y"},
    ) == [
        {"role": "assistant", "content": "a\nb"},
        {"role": "assistant", "content": "no"},
        {"role": "assistant", "content": "x", "reasoning_content": "y", "thinking": "y"},
    ]


def test_all_text_counts():
    parts = [{"type": "text", "text": "ab"}]
    turns = [
        {"role": "user", "content": parts},
        {"role": "assistant", "content": "c", "reasoning_content": "def", "tool_calls": [CALL]},
    ]
    given = [ChatMessage.model_validate(turn) for turn in turns]
    assert chat_len(given) == 2 + 1 + 3 + len('{"at": "N"}')
