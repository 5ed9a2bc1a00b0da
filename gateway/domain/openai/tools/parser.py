"""From the text of an answer to text and calls of tools, while it arrives.

One state machine serves all formats; a `Framing` says how a format marks its calls. What is not certain
yet is held back: the beginning of a mark, white space that may lie between calls, a call until its name
and the beginning of its arguments are known. Where a call turns out to be none (an unknown tool, no JSON),
what was held of it is given as text. How the text is cut makes no difference.
"""

import re
import uuid
from collections.abc import Callable
from dataclasses import dataclass

from gateway.domain.openai.parts import Part, Text, ToolArguments, ToolCall
from gateway.domain.openai.tools.call import NamedCall, ObjectCall

_CERTAIN_LEN = 2
"""Characters of the arguments that must be well-formed before a call is told: `{}` or `{"`."""
_NAME = re.compile(r"[a-zA-Z0-9_-]+")
_SPACE = re.compile(r"\s*")


@dataclass(frozen=True)
class Framing:
    """How a model marks its calls."""

    open: str | None = None
    """Opens calls anywhere in the text."""
    close: str | None = None
    """May follow a call."""
    separator: str | None = None
    """May stand between calls."""
    is_bare: bool = False
    """A JSON object (or array) at the beginning of an answer is a call too."""
    has_arrays: bool = False
    """Calls may be items of a JSON array."""
    named: str | None = None
    """After `open` there may be the tool's name, this mark or nothing, and the arguments alone."""


class CallParser:
    """A `PartParser` of one choice."""

    def __init__(
        self,
        framing: Framing,
        names: frozenset[str],
        *,
        parallel: bool = True,
        is_required: bool = False,
    ) -> None:
        """`names` are those that may be called. Without `parallel` nothing after the first call counts.

        `is_required`: what is held back at the end is no text, but a call that was cut.
        """
        self.num_reasoning_tokens = 0
        self.is_plain = False
        self._framing = framing
        self._names = names
        self._parallel = parallel
        self._is_required = is_required
        self._state: Callable[[], bool] = self._begin
        self._out: list[Part] = []
        self._buffer = ""
        """What is not looked at yet."""
        self._blank = ""
        """White space before text or a call, whichever comes."""
        self._has_text = False
        """Text has been given since the beginning or the last call: white space after it is text."""
        self._raw = ""
        """Of a call that is not told yet: all of its text, with what led to it."""
        self._call: NamedCall | ObjectCall | None = None
        self._is_told = False
        self._in_array = False
        self._is_bare = False
        self._arguments = ""
        self._num_calls = 0
        self._num_complete = 0

    @property
    def has_calls(self) -> bool:
        return self._num_complete > 0

    def feed(self, text: str, num_tokens: int = 0) -> list[Part]:
        self._buffer += text
        while self._buffer and self._state():
            pass
        out, self._out = self._out, []
        return out

    def finish(self) -> list[Part]:
        if not self._is_required:
            self._give_rest()
        self._state, self._buffer, self._raw = self._ignore, "", ""
        out, self._out = self._out, []
        return out

    # Each state takes something off the buffer and is True, or is False for want of more text.

    def _begin(self) -> bool:
        if self._framing.is_bare:
            blank, rest = _split_blank(self._buffer)
            if not rest:
                return False
            if rest[0] == "{" or rest[0] == "[" and self._framing.has_arrays:
                self._raw, self._buffer = blank, rest
                self._is_bare, self._state = True, self._opened
                return True
        self._state = self._in_text
        return True

    def _in_text(self) -> bool:
        mark = self._framing.open
        if mark is None:
            self._write(self._take(len(self._buffer)))
            return False
        at = self._buffer.find(mark)
        if at < 0:
            self._write(self._take(len(self._buffer) - overlap(self._buffer, mark)))
            return False
        self._write(self._take(at))
        self._raw, self._blank = self._blank + self._take(len(mark)), ""
        self._is_bare, self._state = False, self._opened
        return True

    def _opened(self) -> bool:
        """A call is to come."""
        blank, rest = _split_blank(self._buffer)
        if not rest:
            return False
        self._raw, self._buffer = self._raw + blank, rest
        if rest[0] == "{":
            self._start(ObjectCall(self._names, knows_all_keys=self._is_bare))
        elif rest[0] == "[" and self._framing.has_arrays and not self._in_array:
            self._raw += self._take(1)
            self._in_array = True
        elif self._framing.named is not None and _NAME.match(rest):
            self._state = self._named
        else:
            self._give_up()
        return True

    def _named(self) -> bool:
        """A name, perhaps a mark, then arguments."""
        found = _NAME.match(self._buffer)
        end = found.end() if found else 0
        mark = self._framing.named or ""
        rest = self._buffer[end:]
        if not rest or len(rest) < len(mark) and mark.startswith(rest):
            return False
        skipped = len(mark) if rest.startswith(mark) else 0
        if len(rest) == skipped:
            return False
        name = self._buffer[:end]
        if name not in self._names or rest[skipped] != "{":
            self._give_up()
            return True
        self._raw += self._take(end + skipped)
        self._start(NamedCall(name))
        return True

    def _start(self, call: NamedCall | ObjectCall) -> None:
        self._call, self._is_told, self._arguments = call, False, ""
        self._state = self._in_call

    def _in_call(self) -> bool:
        call = self._call
        if call is None:
            return False
        end = call.feed(self._buffer, 0)
        taken = self._take(end)
        if not self._is_told:
            self._raw += taken
        self._arguments += call.take()
        self._tell(call)
        if call.is_complete:
            self._num_complete += 1
            self._raw, self._is_told, self._has_text = "", False, False
            self._state = self._between if self._parallel else self._ignore
        elif call.is_broken:
            self._give_up()
        return bool(self._buffer)

    def _between(self) -> bool:
        """After a call: its end mark, another one, or text."""
        blank, rest = _split_blank(self._buffer)
        if not rest:
            return False
        framing = self._framing
        if self._in_array and rest[0] in ",]":
            self._take(len(blank) + 1)
            if rest[0] == "]":
                self._in_array = False
            else:
                self._state = self._opened
            return True
        if not self._in_array and rest[0] == "{":
            self._take(len(blank))
            self._state = self._opened
            return True
        marks = [(framing.close, self._in_text), (framing.open, self._opened)]
        marks.append((framing.separator, self._opened))
        for mark, state in marks:
            if mark and rest.startswith(mark):
                self._take(len(blank) + len(mark))
                self._state, self._is_bare = state, False
                return True
        if any(mark and mark.startswith(rest) for mark, _ in marks):
            return False
        self._in_array = False
        self._state = self._in_text
        return True

    def _ignore(self) -> bool:
        self._buffer = ""
        return False

    def _tell(self, call: NamedCall | ObjectCall) -> None:
        """Pass on what is certain of a call."""
        if call.name is None:
            return
        if not self._is_told:
            if len("".join(self._arguments.split())) < _CERTAIN_LEN:
                return
            self._is_told, self._blank = True, ""
            self._out.append(ToolCall(self._num_calls, new_call_id(), call.name))
            self._num_calls += 1
        if self._arguments:
            self._out.append(ToolArguments(self._num_calls - 1, self._arguments))
            self._arguments = ""

    def _give_up(self) -> None:
        """This is no call: what was held of it is text, and so is what follows."""
        self._in_array = False
        self._state = self._in_text
        if not self._is_told:
            self._give(self._raw)
        self._raw, self._is_told = "", False

    def _give_rest(self) -> None:
        """What was held back, at the end."""
        if self._state in (self._opened, self._named, self._in_call) and not self._is_told:
            self._give(self._raw + self._buffer)
        elif self._state in (self._begin, self._in_text):
            self._write(self._buffer)
            if not self._num_calls and self._blank:
                self._give(self._blank)

    def _write(self, text: str) -> None:
        """Give text, but hold back white space that nothing but a call may follow."""
        if not self._has_text:
            blank, text = _split_blank(self._blank + text)
            self._blank = blank
            if text:
                self._give(blank + text)
        elif text:
            self._give(text)

    def _give(self, text: str) -> None:
        self._blank, self._has_text = "", True
        if text:
            self._out.append(Text(text))

    def _take(self, length: int) -> str:
        taken, self._buffer = self._buffer[:length], self._buffer[length:]
        return taken


def new_call_id() -> str:
    return "call_" + uuid.uuid4().hex[:24]


def overlap(text: str, mark: str) -> int:
    """Length of the longest end of `text` that begins `mark` and is not all of it."""
    longest = min(len(mark) - 1, len(text))
    return next((n for n in range(longest, 0, -1) if text.endswith(mark[:n])), 0)


def _split_blank(text: str) -> tuple[str, str]:
    found = _SPACE.match(text)
    end = found.end() if found else 0
    return text[:end], text[end:]
