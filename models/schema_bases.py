"""Whether a JSON schema has an instance that ends: recursion needs a base.

A compiler of grammars follows `{"a": {"a": {"a": …` for as long as it is asked to. Here a schema counts as having a
base unless it is certain that it has none, which is decided by objects' required fields, arrays' least
lengths, references and combinations; other keywords are not looked at.
"""

from typing import Any
from urllib.parse import unquote

_MISSING = object()


def has_base(schema: Any) -> bool:  # noqa: ANN401  any JSON
    """Raises `RecursionError` if it is nested too deeply."""
    return _Bases(schema).all_found()


class _Bases:
    """The least answer for all references together: none has a base until one is found."""

    def __init__(self, root: Any) -> None:  # noqa: ANN401
        self._root = root
        self._found: dict[str, bool] = {}

    def all_found(self) -> bool:
        found = self._has(self._root)
        while not found:
            num_found = sum(self._found.values())
            for ref in [ref for ref, is_found in self._found.items() if not is_found]:
                self._found[ref] = self._has(self._target(ref))
            found = self._has(self._root)
            if not found and sum(self._found.values()) == num_found:
                return False
        return True

    def _has(self, schema: Any) -> bool:  # noqa: ANN401
        if not isinstance(schema, dict):
            return schema is not False
        ref = schema.get("$ref")
        if isinstance(ref, str) and not self._follow(ref):
            return False
        for name in ("anyOf", "oneOf"):
            options = schema.get(name)
            if isinstance(options, list) and not any(self._has(option) for option in options):
                return False
        parts = schema.get("allOf")
        if isinstance(parts, list) and not all(self._has(part) for part in parts):
            return False
        if schema.get("type") == "object":
            return self._object_has(schema)
        return schema.get("type") != "array" or self._array_has(schema)

    def _object_has(self, schema: dict[str, Any]) -> bool:
        fields, required = schema.get("properties"), schema.get("required")
        if not isinstance(fields, dict) or not isinstance(required, list):
            return True
        wanted = {name for name in required if isinstance(name, str)}
        return all(self._has(fields[name]) for name in wanted & fields.keys())

    def _array_has(self, schema: dict[str, Any]) -> bool:
        least = schema.get("minItems", 0)
        if not isinstance(least, int) or least < 1:
            return True
        prefix = schema.get("prefixItems")
        firsts = prefix[:least] if isinstance(prefix, list) else []
        rest = [schema.get("items", True)] if least > len(firsts) else []
        return all(self._has(item) for item in (*firsts, *rest))

    def _follow(self, ref: str) -> bool:
        if ref not in self._found:
            self._found[ref] = False
            self._found[ref] = self._has(self._target(ref))
        return self._found[ref]

    def _target(self, ref: str) -> Any:  # noqa: ANN401
        """What a reference within the document points to; the compiler judges all others."""
        if ref != "#" and not ref.startswith("#/"):
            return True
        node = self._root
        for part in ref.split("/")[1:]:
            name = unquote(part).replace("~1", "/").replace("~0", "~")
            if isinstance(node, dict):
                node = node.get(name, _MISSING)
            elif isinstance(node, list) and name.isdecimal() and int(name) < len(node):
                node = node[int(name)]
            else:
                return True
        return True if node is _MISSING else node
