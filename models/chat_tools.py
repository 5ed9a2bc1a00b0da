"""Tools, calls and results in words, for chat templates that know none of them."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from models.template_traits import Message

_TOOLS_TEXT = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

{format}"""
_CALL_TEXT = {
    # By the names of `models.chat_format`.
    "hermes": """For each function call, return a json object with function name and arguments within \
<tool_call></tool_call> XML tags:
<tool_call>
{"name": <function-name>, "arguments": <args-json-object>}
</tool_call>""",
    "llama3": """To call a function, answer with nothing but a json object:
{"name": <function-name>, "parameters": <args-json-object>}""",
    "mistral": """To call functions, answer with nothing but [TOOL_CALLS] and a json array:
[TOOL_CALLS][{"name": <function-name>, "arguments": <args-json-object>}]""",
    "json": """To call functions, answer with nothing but a json array:
[{"name": <function-name>, "arguments": <args-json-object>}]""",
}


def tools_told(
    messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], tool_format: str
) -> Sequence[Message]:
    """The messages with the tools, and how to call them, at the end of the first system message."""
    lines = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    text = _TOOLS_TEXT.replace("{format}", _CALL_TEXT[tool_format]).replace("{tools}", lines)
    if messages[0]["role"] in ("system", "developer"):
        first = {**messages[0], "content": joined(messages[0]["content"], text)}
        return [first, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]


def tools_as_text(messages: Sequence[Message]) -> Sequence[Message]:
    """Calls as text of the assistant's turns, the results that follow as one turn of the user's."""
    changed: list[Message] = []
    results: list[str] = []
    for message in messages:
        if message["role"] == "tool":
            results.append(f"<tool_response>\n{message['content']}\n</tool_response>")
            continue
        if results:
            changed.append({"role": "user", "content": "\n".join(results)})
            results = []
        changed.append(_with_calls_as_text(message))
    if results:
        changed.append({"role": "user", "content": "\n".join(results)})
    return changed


def _with_calls_as_text(message: Message) -> Message:
    calls = message.get("tool_calls")
    if not calls:
        return message
    texts = [
        f'<tool_call>\n{{"name": {json.dumps(call["function"]["name"], ensure_ascii=False)}, '
        f'"arguments": {arguments_text(call)}}}\n</tool_call>'
        for call in calls
    ]
    rest = {name: value for name, value in message.items() if name != "tool_calls"}
    return {**rest, "content": "\n".join(filter(None, [message["content"], *texts]))}


def arguments_text(call: Message) -> str:
    """The arguments of a call as JSON text."""
    arguments = call["function"]["arguments"]
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def joined(first: str, second: str) -> str:
    """Two texts, a paragraph each."""
    return f"{first}\n\n{second}" if first and second else first or second
