"""What the text of a chat answer consists of: plain text, reasoning, calls of tools.

A parser cuts one choice's text into parts while it arrives; every surface (chat completions, responses,
messages) writes parts in its own words.
"""

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Text:
    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """What the model thinks before it answers."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call begins; its arguments follow."""

    index: int
    """0, 1, 2 … within the choice."""
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ToolArguments:
    """The next piece of a call's arguments: all pieces together are the text of a JSON object."""

    index: int
    text: str


Part = Text | Reasoning | ToolCall | ToolArguments


class PartParser(Protocol):
    """Of one choice. Text that may still become a mark of the model's format is held back."""

    def feed(self, text: str, num_tokens: int = 0) -> list[Part]:
        """The parts that are certain now; `num_tokens` were generated for this text."""
        ...

    def finish(self) -> list[Part]:
        """What was held back, when the choice has ended."""
        ...

    @property
    def has_calls(self) -> bool:
        """Whether a complete call was seen: a choice that stopped then ended because of it."""
        ...

    @property
    def num_reasoning_tokens(self) -> int:
        """Of the tokens so far, those that the model spent on thinking."""
        ...

    @property
    def is_plain(self) -> bool:
        """Whether all that follows is one plain text: the parser need not be asked any more."""
        ...
