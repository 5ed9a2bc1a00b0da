"""Tools that a chat offers, and what is to be done with them, as Pydantic models."""

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, field_validator
from pydantic_core import PydanticCustomError

from gateway.domain.openai.message_schemas import Body

MAX_TOOLS = 128
NAME = r"^[a-zA-Z0-9_-]{1,64}$"


class FunctionDefinition(Body):
    name: Annotated[str, Field(pattern=NAME)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """A JSON schema of the arguments, which are an object; left out, it is one without members."""
    strict: bool | None = None

    @field_validator("parameters")
    @classmethod
    def _of_an_object(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        if value and value.get("type", "object") != "object":
            raise PydanticCustomError("invalid_value", "The schema must be of type 'object'.")
        return value


class Tool(Body):
    type: str
    function: FunctionDefinition

    @field_validator("type")
    @classmethod
    def _function(cls, value: str) -> str:
        if value != "function":
            raise PydanticCustomError(
                "unsupported_value",
                "Tools of type '{kind}' are not supported; functions are.",
                {"kind": value[:50]},
            )
        return value


class _Name(Body):
    name: str


class NamedTool(Body):
    type: Literal["function"]
    function: _Name


class _AllowedTools(Body):
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(min_length=1, max_length=MAX_TOOLS)]


class AllowedTools(Body):
    type: Literal["allowed_tools"]
    allowed_tools: _AllowedTools


def _kind(value: object) -> str | None:
    if isinstance(value, str):
        return "|mode"
    given = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return {"function": "|function", "allowed_tools": "|allowed_tools"}.get(str(given))


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("|mode")]
    | Annotated[NamedTool, Tag("|function")]
    | Annotated[AllowedTools, Tag("|allowed_tools")],
    Discriminator(
        _kind,
        custom_error_type="invalid_value",
        custom_error_message=(
            "It is 'none', 'auto', 'required', or an object of type 'function' or 'allowed_tools'."
        ),
    ),
]
Tools = Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)]
