"""From a body's messages to those that chat templates render."""

import json
from collections.abc import Iterator, Sequence
from typing import Any

from gateway.domain.openai.message_schemas import ChatMessage, FunctionCall

_LEGACY_ID = "call_of_a_function"
"""Calls of the older form have no ids; a result belongs to the call before it."""


def template_messages(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """Dictionaries of plain values: `content` is a string, and arguments are objects where they are any.

    Results get the name of what was called, which some templates show.
    """
    changed: list[dict[str, Any]] = []
    names: dict[str, str] = {}
    for message in messages:
        fields = _template_message(message)
        for call in fields.get("tool_calls", ()):
            names[call["id"]] = call["function"]["name"]
        if message.tool_call_id in names:
            fields.setdefault("name", names[message.tool_call_id])
        changed.append(fields)
    return changed


def chat_len(messages: Sequence[ChatMessage]) -> int:
    """Characters of all that is said, called and thought."""
    return sum(_lengths(messages))


def _lengths(messages: Sequence[ChatMessage]) -> Iterator[int]:
    for message in messages:
        content = message.content
        yield len(content) if isinstance(content, str) else len(message.text())
        yield len(message.reasoning_content or message.reasoning or "")
        for _, call in _calls(message):
            yield len(call.arguments)


def _template_message(message: ChatMessage) -> dict[str, Any]:
    role = "tool" if message.role == "function" else message.role
    fields: dict[str, Any] = {"role": role, "content": message.text()}
    if message.name is not None:
        fields["name"] = message.name
    if message.role == "function":
        fields["tool_call_id"] = _LEGACY_ID
    elif message.tool_call_id is not None:
        fields["tool_call_id"] = message.tool_call_id
    thoughts = message.reasoning_content or message.reasoning
    if thoughts:
        # Templates know them by either name.
        fields["reasoning_content"] = fields["thinking"] = thoughts
    calls = _calls(message)
    if calls:
        fields["tool_calls"] = [_template_call(call_id, call) for call_id, call in calls]
    return fields


def _calls(message: ChatMessage) -> list[tuple[str, FunctionCall]]:
    if message.tool_calls:
        return [(call.id, call.function) for call in message.tool_calls]
    return [] if message.function_call is None else [(_LEGACY_ID, message.function_call)]


def _template_call(call_id: str, call: FunctionCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": _arguments(call.arguments)}
    return {"id": call_id, "type": "function", "function": function}


def _arguments(text: str) -> object:
    """Templates iterate over the arguments, OpenAI sends JSON text; what a model has written wrong stays text."""
    try:
        arguments = json.loads(text or "{}")
    except (ValueError, RecursionError):
        return text
    return arguments if isinstance(arguments, dict) else text
