"""Whether a text that is still arriving can become JSON, character by character (RFC 8259).

The place where a text stops being the beginning of any JSON value does not depend on how it was cut.
"""

import re
from collections.abc import Callable

_SPACE = " \t\n\r"
_RUN = re.compile(r'[^"\\\x00-\x1f]*')
_INTEGER = r"-?(?:0|[1-9][0-9]*)"
_NUMBER = re.compile(rf"{_INTEGER}(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_NUMBER_BEGUN = re.compile(rf"-|{_INTEGER}(?:\.[0-9]*)?|{_INTEGER}(?:\.[0-9]+)?[eE](?:[+-]?[0-9]*)")
_WORDS = ("true", "false", "null")
_MAX_SCALAR_LEN = 400
"""Of a number; each of its characters has the whole of it looked at."""
_CLOSERS = {"{": "}", "[": "]"}


class JsonText:
    """One JSON value."""

    def __init__(self) -> None:
        self.is_complete = False
        self.is_broken = False
        self._stack: list[str] = []
        """The brackets that are open."""
        self._state: Callable[[str, int], int] = self._value
        self._is_key = False
        self._scalar = ""
        self._hex_left = 0

    def feed(self, text: str, at: int) -> int:
        """Go on with `text[at:]`; the index of the first character that does not belong to the value."""
        while at < len(text) and not self.is_complete and not self.is_broken:
            at = self._state(text, at)
        return at

    def _value(self, text: str, at: int) -> int:
        character = text[at]
        if character in _SPACE:
            return at + 1
        if character == "{":
            self._state = self._first_key
            self._stack.append(character)
        elif character == "[":
            self._state = self._first_item
            self._stack.append(character)
        elif character == '"':
            self._is_key, self._state = False, self._string
        elif _is_scalar(character):
            self._scalar, self._state = character, self._in_scalar
        else:
            return self._break(at)
        return at + 1

    def _first_item(self, text: str, at: int) -> int:
        # White space leaves the state as it is: an empty list may have some.
        return self._after(text, at) if text[at] == "]" else self._value(text, at)

    def _first_key(self, text: str, at: int) -> int:
        return self._after(text, at) if text[at] == "}" else self._key(text, at)

    def _key(self, text: str, at: int) -> int:
        if text[at] in _SPACE:
            return at + 1
        if text[at] != '"':
            return self._break(at)
        self._is_key, self._state = True, self._string
        return at + 1

    def _colon(self, text: str, at: int) -> int:
        if text[at] in _SPACE:
            return at + 1
        if text[at] != ":":
            return self._break(at)
        self._state = self._value
        return at + 1

    def _after(self, text: str, at: int) -> int:
        character = text[at]
        if character in _SPACE:
            return at + 1
        if character == _CLOSERS[self._stack[-1]]:
            self._stack.pop()
            self._end_value()
        elif character == ",":
            self._state = self._key if self._stack[-1] == "{" else self._value
        else:
            return self._break(at)
        return at + 1

    def _string(self, text: str, at: int) -> int:
        found = _RUN.match(text, at)
        at = found.end() if found else at
        if at == len(text):
            return at
        if text[at] == "\\":
            self._state = self._escape
        elif text[at] == '"' and self._is_key:
            self._state = self._colon
        elif text[at] == '"':
            self._end_value()
        else:
            return self._break(at)
        return at + 1

    def _escape(self, text: str, at: int) -> int:
        if text[at] == "u":
            self._hex_left, self._state = 4, self._hex
        elif text[at] in '"\\/bfnrt':
            self._state = self._string
        else:
            return self._break(at)
        return at + 1

    def _hex(self, text: str, at: int) -> int:
        if text[at] not in "0123456789abcdefABCDEF":
            return self._break(at)
        self._hex_left -= 1
        if not self._hex_left:
            self._state = self._string
        return at + 1

    def _in_scalar(self, text: str, at: int) -> int:
        longer = self._scalar + text[at]
        if _is_scalar(longer):
            self._scalar = longer
            return at + 1
        if self._scalar not in _WORDS and not _NUMBER.fullmatch(self._scalar):
            return self._break(at)
        self._end_value()
        return at

    def _end_value(self) -> None:
        self._state = self._after
        self.is_complete = not self._stack

    def _break(self, at: int) -> int:
        self.is_broken = True
        return at


def _is_scalar(text: str) -> bool:
    """Whether it is a number or a word, or the beginning of one."""
    if any(word.startswith(text) for word in _WORDS):
        return True
    return len(text) <= _MAX_SCALAR_LEN and _NUMBER_BEGUN.fullmatch(text) is not None
