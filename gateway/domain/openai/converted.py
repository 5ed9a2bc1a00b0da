"""Chats that were asked for in the words of another surface: converted bodies, and refusals in its words."""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import msgspec

from gateway.domain.openai.schemas import ChatCompletionRequest
from gateway.domain.openai.validation import parse
from gateway.errors import BadRequestError

_MESSAGE = re.compile(r"messages\[(\d+)\](.*)")


@dataclass(frozen=True)
class Names:
    """What the fields of a chat body are called where it came from."""

    fields: Sequence[tuple[re.Pattern[str], str]]
    """Beginnings of places, and what stands there instead; the first that matches counts."""
    messages: Sequence[str]
    """The place that each message came from."""

    def of(self, place: str) -> str:
        message = _MESSAGE.fullmatch(place)
        if message is not None and int(message[1]) < len(self.messages):
            return self.messages[int(message[1])]
        for pattern, name in self.fields:
            if pattern.match(place):
                return pattern.sub(name, place, count=1)
        return place

    @contextmanager
    def spoken(self) -> Iterator[None]:
        """Refusals that are raised inside name the surface's own fields."""
        try:
            yield
        except BadRequestError as error:
            if error.param is not None:
                name = self.of(error.param)
                error.message = error.message.replace(f"'{error.param}'", f"'{name}'")
                error.param = name
            raise


def chat_request(fields: dict[str, Any], names: Names) -> ChatCompletionRequest:
    """The chat body with these fields, checked like one that was sent. Raises `BadRequestError`."""
    with names.spoken():
        return parse(ChatCompletionRequest, msgspec.json.encode(fields))
