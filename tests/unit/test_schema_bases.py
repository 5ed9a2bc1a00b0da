"""A schema that only endless JSON matches is refused: a model would fill it until its tokens are spent."""

from typing import Any

import pytest

from models.schema_bases import has_base


def endless(schema: dict[str, Any]) -> dict[str, Any]:
    """An object that must hold another one of itself."""
    return {"type": "object", "properties": {"a": schema}, "required": ["a"]}


NODE: dict[str, Any] = {"$ref": "#/$defs/node"}


def of_node(schema: object) -> dict[str, Any]:
    return {**NODE, "$defs": {"node": schema}}


@pytest.mark.parametrize(
    "schema",
    [
        endless({"$ref": "#"}),
        of_node(NODE),
        of_node(endless(NODE)),
        of_node({"type": "array", "items": NODE, "minItems": 1}),
        of_node({"type": "array", "prefixItems": [True, NODE], "minItems": 2}),
        of_node({"anyOf": [endless(NODE), {"type": "array", "items": NODE, "minItems": 2}]}),
        of_node({"allOf": [{"type": "object"}, endless(NODE)]}),
        {"$ref": "#/$defs/a", "$defs": {"a": endless({"$ref": "#/$defs/b~1c"}), "b/c": {"$ref": "#/$defs/a"}}},
    ],
)  # fmt: skip
def test_recursion_without_a_base(schema: dict[str, Any]):
    assert not has_base(schema)


@pytest.mark.parametrize(
    "schema",
    [
        {},
        True,
        {"type": "object", "required": ["a"]},
        endless({"anyOf": [{"$ref": "#"}, {"type": "null"}]}),
        of_node({"type": "array", "items": NODE}),
        of_node({"type": "array", "prefixItems": [True], "items": NODE, "minItems": 1}),
        of_node({"type": "object", "properties": {"a": NODE}, "required": []}),
        of_node({"anyOf": [endless(NODE), {"const": 1}]}),
        {"$ref": "#/$defs/a", "$defs": {
            "a": {"anyOf": [{"$ref": "#/$defs/b"}, endless({"$ref": "#/$defs/a"})]},
            "b": {"anyOf": [endless({"$ref": "#/$defs/a"}), {"type": "string"}]},
        }},
        {"$ref": "https://example.com/schema"},
        {"$ref": "#/$defs/missing"},
        # Nonsense is the compiler's to judge.
        {"anyOf": 3, "required": 4, "properties": [], "allOf": {}, "$ref": 1},
        {"$ref": "#/$defs/d0", "$defs": {
            **{f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(50)}, "d50": {"type": "null"},
        }},
    ],
)  # fmt: skip
def test_recursion_with_one(schema: dict[str, Any]):
    assert has_base(schema)
