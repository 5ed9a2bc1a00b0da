"""The choices of a chat whose text may be more than text: each has a parser, until it is plain."""

from gateway.domain.openai.parts import Part, PartParser, Text
from gateway.domain.openai.plan import Plan
from gateway.errors import EngineError
from workers.protocol import OutputDelta


class ParsedChoices:
    """Of one answer; choices are told by their index in it."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._parsers: dict[int, PartParser] = {}
        self._plain: set[int] = set()

    def parts(self, choice: int, delta: OutputDelta) -> list[Part] | None:
        """What a delta brings; None if that is its text as it stands, which costs no more than to ask."""
        if choice in self._plain:
            return None
        parser = self._parsers.get(choice)
        if parser is None:
            assert self._plan.parser is not None, "plain chats have no parsed choices"
            parser = self._parsers[choice] = self._plan.parser()
        parts, start = [], 0
        for length, num_tokens in delta.pieces or ((len(delta.text), delta.num_tokens),):
            parts += parser.feed(delta.text[start : start + length], num_tokens)
            start += length
            if parser.is_plain:
                self._plain.add(choice)
                break
        if start < len(delta.text):
            parts.append(Text(delta.text[start:]))
        if delta.finish_reason is not None:
            parts += parser.finish()
        return parts

    def reason(self, choice: int, delta: OutputDelta) -> str:
        """OpenAI's word for why the choice ended. Raises `EngineError` if a call that was required is missing."""
        assert delta.finish_reason is not None, "only a last delta has a reason"
        reason = self._plan.reason(delta.finish_reason)
        if reason != "stop":
            return reason
        if self._parsers[choice].has_calls:
            return "tool_calls"
        if self._plan.requires_call and delta.stop_reason is None:
            raise EngineError("The model called no tool although it had to.", code="no_tool_call")
        return reason

    def forget(self, choice: int) -> None:
        """It starts over."""
        self._parsers.pop(choice, None)
        self._plain.discard(choice)

    @property
    def num_reasoning_tokens(self) -> int:
        """Of all choices so far."""
        return sum(parser.num_reasoning_tokens for parser in self._parsers.values())
