"""A call of a tool as the scripted model makes it where it must: the least that the tool's schema wants."""

import json
from typing import Any

from gateway.domain.openai.tools.grammar import call_text
from gateway.domain.openai.tools.offer import ToolOffer
from models.chat_format import ChatFormat

_MOST_VALUES = 256
_MOST_REPEATS = 64


def example_call(form: ChatFormat, offer: ToolOffer) -> str:
    """The text of one call of the first tool that may be called."""
    function = offer.callable[0]
    arguments = _Example(function.parameters or {}).value()
    return call_text(form, function.name, json.dumps(arguments, ensure_ascii=False))


class _Example:
    """Of a JSON schema of an object; what goes beyond the plain keywords is not looked at."""

    def __init__(self, root: dict[str, Any]) -> None:
        self._root = root
        self._num_left = _MOST_VALUES

    def value(self) -> object:
        return self._of({"type": "object", **self._root})

    def _of(self, schema: object) -> object:
        self._num_left -= 1
        if not isinstance(schema, dict) or self._num_left < 0:
            return {}
        if "$ref" in schema:
            return self._of(self._target(str(schema["$ref"])))
        for name in ("anyOf", "oneOf", "allOf", "enum"):
            among = schema.get(name)
            if isinstance(among, list) and among:
                return among[0] if name == "enum" else self._of(among[0])
        return schema["const"] if "const" in schema else self._of_type(schema)

    def _of_type(self, schema: dict[str, Any]) -> object:
        kind = schema.get("type")
        if isinstance(kind, list):
            kind = kind[0] if kind else None
        if kind == "array":
            return [self._of(schema.get("items")) for _ in range(_repeats(schema, "minItems"))]
        if kind == "string":
            return "x" * _repeats(schema, "minLength")
        if kind in ("integer", "number"):
            return schema.get("minimum", 0)
        if kind in ("boolean", "null"):
            return False if kind == "boolean" else None
        members, required = schema.get("properties"), schema.get("required")
        if not isinstance(required, list):
            return {}
        known = members if isinstance(members, dict) else {}
        return {name: self._of(known.get(name)) for name in required if isinstance(name, str)}

    def _target(self, pointer: str) -> object:
        """What a reference within the schema means."""
        found: object = self._root
        for key in pointer.removeprefix("#").split("/")[1:]:
            found = found.get(key) if isinstance(found, dict) else None
        return found


def _repeats(schema: dict[str, Any], name: str) -> int:
    least = schema.get(name)
    return min(least, _MOST_REPEATS) if isinstance(least, int) else 0
