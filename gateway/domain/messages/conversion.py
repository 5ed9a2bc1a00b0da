"""From a body of the Messages API to the chat body that asks for the same."""

import json
import re
from typing import Any

from gateway.domain.messages.schemas import (
    Block,
    CountTokensRequest,
    InputMessage,
    MessagesRequest,
    TextBlock,
    ToolChoice,
)
from gateway.domain.openai.converted import Names

_FIELDS = (
    (re.compile(r"tools\[(\d+)\]\.function\.parameters"), r"tools[\1].input_schema"),
    (re.compile(r"tools\[(\d+)\]\.function"), r"tools[\1]"),
    (re.compile(r"response_format(\.json_schema)?"), "output_config.format"),
    (re.compile(r"max_completion_tokens"), "max_tokens"),
    (re.compile(r"stop(?=$|\[)"), "stop_sequences"),
    (re.compile(r"reasoning_effort"), "output_config.effort"),
    (re.compile(r"chat_template_kwargs"), "thinking"),
    (re.compile(r"parallel_tool_calls"), "tool_choice.disable_parallel_tool_use"),
)
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def chat_fields(body: CountTokensRequest) -> tuple[dict[str, Any], Names]:
    """The chat body's fields, and what they are called here."""
    messages: list[dict[str, Any]] = []
    places: list[str] = []
    if body.system:
        messages.append({"role": "system", "content": _text(body.system)})
        places.append("system")
    for index, message in enumerate(body.messages):
        for converted in _messages(message):
            messages.append(converted)
            places.append(f"messages[{index}].content")
    fields: dict[str, Any] = {"model": body.model, "messages": messages}
    if messages[-1]["role"] == "assistant" and "tool_calls" not in messages[-1]:
        # The answer goes on where the last turn ends.
        fields |= {"continue_final_message": True, "add_generation_prompt": False}
    if body.tools:
        fields["tools"] = [
            {
                "type": "function",
                "function": {
                    "name": tool.name,
                    "description": tool.description,
                    "parameters": tool.input_schema,
                    "strict": tool.strict,
                },
            }
            for tool in body.tools
        ]
        if body.tool_choice is not None:
            fields["tool_choice"] = _tool_choice(body.tool_choice)
            fields["parallel_tool_calls"] = not body.tool_choice.disable_parallel_tool_use
    if body.thinking is not None:
        is_on = body.thinking.type != "disabled"
        fields["chat_template_kwargs"] = {"enable_thinking": is_on}
    fields |= _output_fields(body)
    if isinstance(body, MessagesRequest):
        fields |= {
            "max_completion_tokens": body.max_tokens,
            "stop": body.stop_sequences or None,
            "temperature": body.temperature,
            "top_p": body.top_p,
            "top_k": body.top_k,
        }
    return fields, Names(_FIELDS, places)


def _output_fields(body: CountTokensRequest) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    config = body.output_config
    if config is not None and config.effort is not None:
        fields["reasoning_effort"] = config.effort
    if config is not None and config.format is not None:
        schema = {"name": "answer", "schema": config.format.schema_, "strict": True}
        fields["response_format"] = {"type": "json_schema", "json_schema": schema}
    return fields


def _tool_choice(choice: ToolChoice) -> object:
    if choice.type == "tool":
        return {"type": "function", "function": {"name": choice.name}}
    return _CHOICES[choice.type]


def _messages(message: InputMessage) -> list[dict[str, Any]]:
    """A turn as chat messages: each result of a tool is one of its own, before what the user says."""
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    if message.role == "assistant":
        return [_assistant(message.content)]
    results = [
        {"role": "tool", "tool_call_id": block.tool_use_id, "content": _text(block.content or "")}
        for block in message.content
        if block.type == "tool_result"
    ]
    texts = [block.text or "" for block in message.content if block.type == "text"]
    said = [{"role": message.role, "content": "\n".join(texts)}] if texts or not results else []
    return results + said


def _assistant(blocks: list[Block]) -> dict[str, Any]:
    texts = [block.text or "" for block in blocks if block.type == "text"]
    thoughts = [block.thinking or "" for block in blocks if block.type == "thinking"]
    calls = [
        {
            "id": block.id,
            "type": "function",
            "function": {"name": block.name, "arguments": json.dumps(block.input)},
        }
        for block in blocks
        if block.type == "tool_use"
    ]
    message: dict[str, Any] = {"role": "assistant", "content": "\n".join(texts)}
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _text(content: str | list[TextBlock]) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(block.text or "" for block in content)
