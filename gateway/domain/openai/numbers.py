"""Whole numbers of bodies: `5.0` is one too, as in JSON Schema; `5.5`, `"5"` and `true` are none."""

from pydantic import BeforeValidator


def _as_whole(value: object) -> object:
    return int(value) if isinstance(value, float) and value.is_integer() else value


whole = BeforeValidator(_as_whole)
"""Goes after the bounds: `Annotated[int, Field(ge=1), whole]`."""
