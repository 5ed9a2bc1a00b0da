"""What a model thinks before it answers, told from the answer by the marks around it."""

from collections.abc import Callable

from gateway.domain.openai.parts import Part, PartParser, Reasoning, Text
from gateway.domain.openai.tools.parser import overlap


class PlainText:
    """The `PartParser` of an answer that is text and nothing else."""

    has_calls = False
    num_reasoning_tokens = 0
    is_plain = True

    def feed(self, text: str, num_tokens: int = 0) -> list[Part]:
        return [Text(text)] if text else []

    def finish(self) -> list[Part]:
        return []


class ReasoningParser:
    """Cuts the reasoning at an answer's beginning off and gives the rest to another parser.

    White space around the marks is nobody's text.
    """

    def __init__(
        self, marks: tuple[str, str], answer: PartParser, *, is_open: bool, is_shown: bool = True
    ) -> None:
        """`is_open`: the prompt ends with the opening mark. Reasoning that is not shown is counted all the same."""
        self._open, self._close = marks
        self._answer = answer
        self._is_shown = is_shown
        self._state: Callable[[], list[Part]] = self._thinking if is_open else self._before
        self._buffer = ""
        self._begun = False
        """Reasoning has been given."""
        self._num_pending = 0
        """Tokens of which it is not known yet what they are."""
        self.num_reasoning_tokens = 0

    @property
    def has_calls(self) -> bool:
        return self._answer.has_calls

    @property
    def is_plain(self) -> bool:
        return self._state == self._answering and self._answer.is_plain

    def feed(self, text: str, num_tokens: int = 0) -> list[Part]:
        if self._state == self._answering:
            return self._answer.feed(text, num_tokens)
        if self._state == self._before and not self._buffer and self._is_answer(text):
            self._state = self._answering
            return self._answer.feed(text, num_tokens)
        self._buffer += text
        self._num_pending += num_tokens
        parts: list[Part] = []
        state = None
        while self._buffer and state != self._state:
            state = self._state
            parts += state()
        return self._counted(parts)

    def finish(self) -> list[Part]:
        rest, self._buffer = self._buffer, ""
        if self._state == self._thinking:
            # A closing mark that was cut off is text as much as what came before it.
            return self._counted([Reasoning(rest)] if rest.strip() else [])
        if self._state == self._after:
            rest = ""
        return [*self._answer.feed(rest), *self._answer.finish()]

    def _is_answer(self, text: str) -> bool:
        """Whether an answer that begins so has no reasoning, told by one look; most have none."""
        return text[:1] not in ("", self._open[0]) and not text[0].isspace()

    def _before(self) -> list[Part]:
        """Nothing but white space has come."""
        start = self._buffer.lstrip()
        if start.startswith(self._open):
            self._buffer, self._state = start[len(self._open) :], self._thinking
            if not self._buffer.strip():
                self._num_pending = 0  # they are the mark
        elif not self._open.startswith(start):
            self._state = self._answering
        return []

    def _thinking(self) -> list[Part]:
        if not self._begun:
            self._buffer = self._buffer.lstrip()
        at = self._buffer.find(self._close)
        if at >= 0:
            thought, self._buffer = self._buffer[:at], self._buffer[at + len(self._close) :]
            self._state = self._after
        else:
            end = len(self._buffer) - overlap(self._buffer, self._close)
            end = len(self._buffer[:end].rstrip())
            thought, self._buffer = self._buffer[:end], self._buffer[end:]
        thought = thought.rstrip() if at >= 0 else thought
        self._begun |= bool(thought)
        return [Reasoning(thought)] if thought else []

    def _after(self) -> list[Part]:
        """Between the closing mark and the answer."""
        self._buffer = self._buffer.lstrip()
        if self._buffer:
            self._state = self._answering
        return []

    def _answering(self) -> list[Part]:
        text, self._buffer = self._buffer, ""
        return self._answer.feed(text)

    def _counted(self, parts: list[Part]) -> list[Part]:
        """Count the tokens that reasoning came with; those of the marks alone are not."""
        if any(isinstance(part, Reasoning) for part in parts):
            self.num_reasoning_tokens += self._num_pending
            self._num_pending = 0
        elif self._state != self._thinking:
            self._num_pending = 0
        if self._is_shown:
            return parts
        return [part for part in parts if not isinstance(part, Reasoning)]
