"""From a body of the Responses API to the chat body that asks for the same."""

import re
from collections.abc import Sequence
from typing import Any

from gateway.domain.openai.converted import Names
from gateway.domain.openai.prompts import new_request_id
from gateway.domain.openai.validation import unsupported
from gateway.domain.responses.schemas import ContentPart, InputItem, ResponsesRequest, TextFormat
from gateway.errors import BadRequestError

_FIELDS = (
    (re.compile(r"tools\[(\d+)\]\.function"), r"tools[\1]"),
    (re.compile(r"response_format(\.json_schema)?"), "text.format"),
    (re.compile(r"max_completion_tokens"), "max_output_tokens"),
    (re.compile(r"reasoning_effort"), "reasoning.effort"),
    (re.compile(r"messages"), "input"),
)
_HARMLESS: dict[str, tuple[object, ...]] = {
    # Field: the values that ask for nothing this server cannot do, beside null.
    "truncation": ("disabled",),
    "top_logprobs": (0,),
    "service_tier": ("auto", "default"),
    "conversation": (),
    "prompt": (),
    "context_management": ([],),
    "moderation": (),
    "access_programs": ({},),
    "background_options": ({},),
}


def check(body: ResponsesRequest) -> None:
    """Raises `BadRequestError` for what this server cannot do, and for what does not go together."""
    for name, harmless in _HARMLESS.items():
        value = getattr(body, name)
        if value is not None and value not in harmless:
            raise unsupported(name)
    if "message.output_text.logprobs" in (body.include or ()):
        raise unsupported("include")
    if body.text is not None and body.text.verbosity not in (None, "medium"):
        raise unsupported("text.verbosity")
    if body.background and body.stream:
        raise unsupported("background")
    if body.background and body.store is False:
        raise BadRequestError(
            "'background' needs 'store', so that the answer can be fetched.", param="store"
        )
    if body.stream_options is not None and not body.stream:
        raise BadRequestError(
            "'stream_options' is only allowed when 'stream' is true.", param="stream_options"
        )


def given_items(body: ResponsesRequest) -> list[dict[str, Any]]:
    """The input as items that can be stored, listed and read again: each with an id, texts as parts."""
    if isinstance(body.input, str):
        return [_stored(InputItem(type="message", role="user", content=body.input))]
    return [_stored(item) for item in body.input]


def chat_fields(
    body: ResponsesRequest, items: Sequence[dict[str, Any]], num_before: int
) -> tuple[dict[str, Any], Names]:
    """The chat body's fields, and what they are called here; the first `num_before` items are an earlier response's."""
    turns = _Turns()
    if body.instructions is not None:
        turns.add({"role": "system", "content": body.instructions}, "instructions")
    for index, item in enumerate(items):
        place = "previous_response_id"
        if index >= num_before:
            place = "input" if isinstance(body.input, str) else f"input[{index - num_before}]"
        turns.take(InputItem.model_validate(item), place)
    for message in turns.messages:
        if "tool_calls" not in message:
            message.setdefault("content", "")
    fields: dict[str, Any] = {
        "model": body.model,
        "messages": turns.messages,
        "max_completion_tokens": body.max_output_tokens,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "reasoning_effort": body.reasoning.effort if body.reasoning else None,
    }
    if body.tools:
        fields["tools"] = [
            {
                "type": "function",
                "function": {
                    "name": tool.name,
                    "description": tool.description,
                    "parameters": tool.parameters,
                    "strict": tool.strict,
                },
            }
            for tool in body.tools
        ]
        fields["parallel_tool_calls"] = body.parallel_tool_calls
    if body.tool_choice is not None:
        fields["tool_choice"] = _tool_choice(body.tool_choice)
    if body.text is not None and body.text.format is not None:
        fields["response_format"] = _response_format(body.text.format)
    return fields, Names(_FIELDS, turns.places)


class _Turns:
    """Chat messages: reasoning, text and calls of one turn of the model are one message."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self.places: list[str] = []
        self._is_open = False

    def add(self, message: dict[str, Any], place: str) -> None:
        self.messages.append(message)
        self.places.append(place)
        self._is_open = False

    def take(self, item: InputItem, place: str) -> None:
        if item.kind == "reasoning":
            turn = self._turn(place, without=("reasoning_content", "tool_calls"))
            turn["reasoning_content"] = _text(item.content) or _text(item.summary)
        elif item.kind == "function_call":
            function = {"name": item.name, "arguments": item.arguments}
            call = {"id": item.call_id, "type": "function", "function": function}
            self._turn(place, without=()).setdefault("tool_calls", []).append(call)
        elif item.kind == "function_call_output":
            result = {"role": "tool", "tool_call_id": item.call_id, "content": _text(item.output)}
            self.add(result, place)
        elif item.role == "assistant":
            turn = self._turn(place, without=("content", "tool_calls"))
            turn["content"] = _text(item.content)
        else:
            self.add({"role": item.role, "content": _text(item.content)}, place)

    def _turn(self, place: str, *, without: tuple[str, ...]) -> dict[str, Any]:
        """The model's turn that is being put together, or a new one if it has one of these already."""
        if not self._is_open or any(name in self.messages[-1] for name in without):
            self.add({"role": "assistant"}, place)
            self._is_open = True
        return self.messages[-1]


def _stored(item: InputItem) -> dict[str, Any]:
    prefix = {"message": "msg_", "reasoning": "rs_", "function_call": "fc_"}.get(item.kind, "fco_")
    fields = item.model_dump(exclude_none=True)
    fields |= {"type": item.kind, "id": item.id or prefix + new_request_id()}
    if item.kind == "message":
        is_output = item.role == "assistant"
        parts = item.content
        if isinstance(parts, str):
            kind = "output_text" if is_output else "input_text"
            fields["content"] = [{"type": kind, "text": parts}]
        for part in fields["content"]:
            if part["type"] == "output_text":
                part["annotations"] = []
    if item.kind == "reasoning":
        fields.setdefault("summary", [])
    return {**fields, "status": "completed"}


def _text(content: str | list[ContentPart] | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(part.as_text() for part in content)


def _response_format(given: TextFormat) -> dict[str, Any]:
    if given.type != "json_schema":
        return {"type": given.type}
    schema = {
        "name": given.name,
        "description": given.description,
        "schema": given.schema_,
        "strict": given.strict,
    }
    return {"type": "json_schema", "json_schema": schema}


def _tool_choice(choice: object) -> object:
    if isinstance(choice, dict) and choice.get("type") == "function":
        return {"type": "function", "function": {"name": choice.get("name")}}
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        given = choice.get("tools")
        tools = [
            {"type": "function", "function": {"name": tool.get("name")}}
            if isinstance(tool, dict) and tool.get("type") == "function"
            else tool
            for tool in (given if isinstance(given, list) else [])
        ]
        return {
            "type": "allowed_tools",
            "allowed_tools": {"mode": choice.get("mode"), "tools": tools},
        }
    return choice
