"""How a model writes what is more than text: calls of tools, and reasoning.

Its chat template says it, as the template shows the model its own earlier calls and thoughts in the format
that it was trained on. Where a template does not tell, a worker's settings do.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

if TYPE_CHECKING:
    # Workers import this module for the names of formats; they have no use for templates.
    from models.chat_templates import ChatTemplate
    from models.tokenizer import TextTokenizer

ToolFormat = Literal["hermes", "llama3", "mistral", "json"]
TOOL_FORMATS: tuple[ToolFormat, ...] = get_args(ToolFormat)
REASONING_MARKS = {
    "think": ("<think>", "</think>"),
    "mistral": ("[THINK]", "[/THINK]"),
    "seed": ("<seed:think>", "</seed:think>"),
    "cohere": ("<|START_THINKING|>", "<|END_THINKING|>"),
    "kimi": ("\u25c1think\u25b7", "\u25c1/think\u25b7"),
}
"""The marks around reasoning, by the names that settings use."""
_TOOL_MARKS: tuple[tuple[str, ToolFormat], ...] = (
    ("[TOOL_CALLS]", "mistral"),
    ("<tool_call>", "hermes"),
    ("<|python_tag|>", "llama3"),
    ("<|start_header_id|>", "llama3"),
)
"""What a template that renders tools contains, and the format that it belongs to."""


@dataclass(frozen=True)
class ChatFormat:
    tools: ToolFormat = "hermes"
    """Hermes' where the template knows no tools: then the model is told that format in words."""
    reasoning: tuple[str, str] | None = None
    """Opening and closing mark; None for a model that does not reason."""
    special_marks: frozenset[str] = frozenset()
    """Marks that are special tokens of the vocabulary: answers must be decoded with those."""


def chat_format(
    template: "ChatTemplate | None",
    tokenizer: "TextTokenizer",
    tool_parser: str = "auto",
    reasoning_parser: str = "auto",
) -> ChatFormat:
    """`tool_parser` and `reasoning_parser` are names of formats ("none" for no reasoning), or "auto" to look."""
    tools = _tool_format(template, tool_parser)
    marks = _reasoning(template, tokenizer, reasoning_parser)
    spelled = [mark for mark, name in _TOOL_MARKS if name == tools] + list(marks or ())
    return ChatFormat(
        tools=tools,
        reasoning=marks,
        special_marks=frozenset(mark for mark in spelled if _is_special(tokenizer, mark)),
    )


def _tool_format(template: "ChatTemplate | None", given: str) -> ToolFormat:
    for name in TOOL_FORMATS:
        if name == given:
            return name
    if template is None or not template.knows_tools:
        return "hermes"
    return next((name for mark, name in _TOOL_MARKS if mark in template.source), "json")


def _reasoning(
    template: "ChatTemplate | None", tokenizer: "TextTokenizer", given: str
) -> tuple[str, str] | None:
    if given != "auto":
        return REASONING_MARKS.get(given)
    for marks in REASONING_MARKS.values():
        in_vocabulary = all(tokenizer.token_id(mark) is not None for mark in marks)
        # Many templates name the closing mark alone, to cut old thoughts off.
        if in_vocabulary or template is not None and marks[1] in template.source:
            return marks
    return None


def _is_special(tokenizer: "TextTokenizer", mark: str) -> bool:
    token_id = tokenizer.token_id(mark)
    return token_id is not None and tokenizer.is_special(token_id)
