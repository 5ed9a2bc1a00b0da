"""What an answer's text may be asked to match, as fields of bodies."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

MAX_CHOICES_OF_TEXT = 2048
"""More texts of `guided_choice` are refused."""


def _schema_or_text(value: object) -> object:
    if not isinstance(value, dict | str):
        raise PydanticCustomError("invalid_type", "Input should be an object, or its JSON text.")
    return value


class _Format(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", frozen=True, populate_by_name=True)


class NamedSchema(_Format):
    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
    description: str | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    """A JSON schema; without it, any JSON object."""
    strict: bool | None = None
    """Whether keywords that cannot be enforced are refused; otherwise they are ignored."""


class ResponseFormat(_Format):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None

    @model_validator(mode="after")
    def _has_schema(self) -> "ResponseFormat":
        if self.type == "json_schema" and self.json_schema is None:
            raise PydanticCustomError("missing", "The schema is missing.", {"field": "json_schema"})
        return self


SchemaOrText = Annotated[dict[str, Any] | str, BeforeValidator(_schema_or_text)]
Choices = Annotated[list[str], Field(min_length=1, max_length=MAX_CHOICES_OF_TEXT)]
Pattern = Annotated[str, Field(min_length=1)]


_KINDS = {"json", "regex", "choice", "grammar", "json_object", "structural_tag"}


class StructuredOutputs(_Format):
    """One of them, as vLLM has it."""

    json_: Annotated[SchemaOrText | None, Field(alias="json")] = None
    regex: Pattern | None = None
    choice: Choices | None = None
    grammar: Pattern | None = None
    json_object: bool | None = None
    structural_tag: Any = None
    """Not supported."""

    @model_validator(mode="before")
    @classmethod
    def _names_one(cls, given: object) -> object:
        """A misspelt kind would bind nothing, and nobody would see it."""
        if isinstance(given, dict) and given and not given.keys() & _KINDS:
            raise PydanticCustomError(
                "no_kind", "It names none of: {kinds}.", {"kinds": ", ".join(sorted(_KINDS))}
            )
        return given
