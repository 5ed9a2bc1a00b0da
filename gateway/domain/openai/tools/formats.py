"""How the formats mark their calls.

hermes   `<tool_call>{"name": …, "arguments": {…}}</tool_call>`: Hermes, Qwen 2.5 and 3, SmolLM and many more
llama3   `{"name": …, "parameters": {…}}` at the beginning of an answer, or after `<|python_tag|>`
mistral  `[TOOL_CALLS][{"name": …, "arguments": {…}}]`, since its version 11 `[TOOL_CALLS]name[ARGS]{…}`
json     such an object or an array of them at the beginning of an answer, without marks
"""

from dataclasses import replace

from gateway.domain.openai.tools.parser import Framing
from models.chat_format import ToolFormat

FRAMINGS: dict[ToolFormat, Framing] = {
    "hermes": Framing(open="<tool_call>", close="</tool_call>"),
    "llama3": Framing(open="<|python_tag|>", separator=";", is_bare=True),
    "mistral": Framing(open="[TOOL_CALLS]", has_arrays=True, named="[ARGS]"),
    "json": Framing(is_bare=True, has_arrays=True),
}


def framing(tools: ToolFormat, *, is_bound: bool) -> Framing:
    """Of an answer; calls that a grammar forces may come as a bare array in every format."""
    found = FRAMINGS[tools]
    return replace(found, is_bare=True, has_arrays=True) if is_bound else found
