"""One call of a tool as models write it, read while it arrives."""

import json
from collections.abc import Callable

from gateway.domain.openai.tools.json_text import JsonText

_SPACE = " \t\n\r"
_NAME_KEYS = ("name",)
_ARGUMENT_KEYS = ("arguments", "parameters")
_KEYS = frozenset((*_NAME_KEYS, *_ARGUMENT_KEYS, "id", "type"))


class NamedCall:
    """The arguments of a call whose name is known: `{…}`."""

    def __init__(self, name: str) -> None:
        self.name: str | None = name
        self.is_complete = False
        self.is_broken = False
        self._value = JsonText()
        self._arguments = ""

    def feed(self, text: str, at: int) -> int:
        """Go on with `text[at:]`; the index of the first character that does not belong to the call."""
        end = self._value.feed(text, at)
        self._arguments += text[at:end]
        self.is_complete, self.is_broken = self._value.is_complete, self._value.is_broken
        return end

    def take(self) -> str:
        """The arguments' text that came since the last `take`."""
        taken, self._arguments = self._arguments, ""
        return taken


class ObjectCall:
    """`{"name": …, "arguments": {…}}`, keys in any order; arguments may be an object written as a string."""

    def __init__(self, names: frozenset[str], *, knows_all_keys: bool) -> None:
        """Of one of the tools `names`. With `knows_all_keys` an object with another key is no call."""
        self.name: str | None = None
        self.is_complete = False
        self.is_broken = False
        self._names = names
        self._knows_all_keys = knows_all_keys
        self._state: Callable[[str, int], int] = self._open
        self._value = JsonText()
        self._text = ""
        """Of the key, name or quoted arguments that is being read."""
        self._key = ""
        self._arguments = ""
        self._has_arguments = False
        self._streams = False
        """What is being read are arguments that can be passed on as they come."""

    def feed(self, text: str, at: int) -> int:
        """Go on with `text[at:]`; the index of the first character that does not belong to the call."""
        while at < len(text) and not self.is_complete and not self.is_broken:
            at = self._state(text, at)
        return at

    def take(self) -> str:
        """The arguments' text that came since the last `take`."""
        taken, self._arguments = self._arguments, ""
        return taken

    def _open(self, text: str, at: int) -> int:
        if text[at] != "{":
            return self._break(at)
        self._state = self._first_key
        return at + 1

    def _first_key(self, text: str, at: int) -> int:
        return self._after(text, at) if text[at] == "}" else self._before_key(text, at)

    def _before_key(self, text: str, at: int) -> int:
        if text[at] in _SPACE:
            return at + 1
        if text[at] != '"':
            return self._break(at)
        self._begin(self._in_key)
        return at

    def _in_key(self, text: str, at: int) -> int:
        at = self._read(text, at)
        if self._value.is_complete:
            self._key = json.loads(self._text)
            if self._knows_all_keys and self._key not in _KEYS:
                return self._break(at)
            self._state = self._colon
        return at

    def _colon(self, text: str, at: int) -> int:
        if text[at] in _SPACE:
            return at + 1
        if text[at] != ":":
            return self._break(at)
        self._state = self._before_value
        return at + 1

    def _before_value(self, text: str, at: int) -> int:
        if text[at] in _SPACE:
            return at + 1
        is_argument = self._key in _ARGUMENT_KEYS
        is_twice = self._has_arguments if is_argument else self.name is not None
        if is_twice and self._key in (*_NAME_KEYS, *_ARGUMENT_KEYS):
            return self._break(at)
        if is_argument and text[at] not in '{"n':
            return self._break(at)
        self._streams = is_argument and text[at] == "{"
        self._has_arguments |= is_argument
        self._begin(self._in_value)
        return at

    def _in_value(self, text: str, at: int) -> int:
        at = self._read(text, at)
        if self._value.is_complete:
            self._state = self._after
            if not self._accept():
                return self._break(at)
        return at

    def _accept(self) -> bool:
        """Take in the value that is complete; False if it is not what its key asks for."""
        if self._streams:
            self._streams = False
            return True
        if self._key not in (*_NAME_KEYS, *_ARGUMENT_KEYS):
            return True
        value = json.loads(self._text)
        if self._key in _ARGUMENT_KEYS:
            self._arguments = _object_text(value or "{}")
            return bool(self._arguments)
        self.name = value if isinstance(value, str) and value in self._names else None
        return self.name is not None

    def _after(self, text: str, at: int) -> int:
        if text[at] in _SPACE:
            return at + 1
        if text[at] == ",":
            self._state = self._before_key
        elif text[at] == "}" and self.name is not None:
            self.is_complete = True
            if not self._has_arguments:
                self._arguments = "{}"
        else:
            return self._break(at)
        return at + 1

    def _begin(self, state: Callable[[str, int], int]) -> None:
        self._value, self._text, self._state = JsonText(), "", state

    def _read(self, text: str, at: int) -> int:
        end = self._value.feed(text, at)
        if self._streams:
            self._arguments += text[at:end]
        else:
            self._text += text[at:end]
        self.is_broken = self._value.is_broken
        return end

    def _break(self, at: int) -> int:
        self.is_broken = True
        return at


def _object_text(text: str) -> str:
    """`text` without the white space around it if it is a JSON object, else ""."""
    text = text.strip(_SPACE)
    value = JsonText()
    is_object = text.startswith("{") and value.feed(text, 0) == len(text) and value.is_complete
    try:
        text.encode()
    except UnicodeEncodeError:  # half of a surrogate pair
        return ""
    return text if is_object else ""
