"""Texts of grammars from what clients send: what a gateway needs, without the library that compiles them."""

import json
from collections.abc import Iterable
from typing import Any

MAX_TEXT_BYTES = 128 * 1024
"""Of a grammar's text, a schema as JSON."""
OPTIONS_KEY = "x-guidance"
"""Field of a schema with the compiler's options; a client's own is replaced."""
_WHITESPACE = r" ?|\n {0,32}"
"""Between the marks of JSON: as it is usually printed, and never without end, which small models like."""


def schema_text(schema: dict[str, Any], *, strict: bool) -> str:
    """A JSON schema as a grammar's text. Unless `strict`, keywords that cannot be enforced are ignored."""
    options = {
        "whitespace_pattern": _WHITESPACE,
        "coerce_one_of": True,
        "lenient": not strict,
    }
    return json.dumps({**schema, OPTIONS_KEY: options}, ensure_ascii=False)


def choice_text(choices: Iterable[str]) -> str:
    """Lark text of a grammar that matches exactly these."""
    words = [json.dumps(choice, ensure_ascii=False) for choice in choices]
    return f"start: CHOICE\nCHOICE: {' | '.join(words)}\n"
