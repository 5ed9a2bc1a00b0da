"""Bodies of Anthropic's Messages API. Unknown fields are ignored, an explicit null means 'not given'."""

from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, Discriminator, Field, Tag, model_validator
from pydantic_core import PydanticCustomError

from gateway.domain.openai.answer_schemas import CostDetails
from gateway.domain.openai.message_schemas import Body, string_or_list
from gateway.domain.openai.numbers import whole

_NEEDED = {
    # Type of a block: the fields it must have.
    "text": ("text",),
    "tool_use": ("id", "name", "input"),
    "tool_result": ("tool_use_id",),
    "thinking": ("thinking",),
    "redacted_thinking": (),
}


M = TypeVar("M", bound=Body)


class TextBlock(Body):
    """Of a system prompt or of a tool's result."""

    type: str
    text: str | None = None

    @model_validator(mode="after")
    def _is_text(self) -> "TextBlock":
        if self.type != "text":
            raise _unreadable(self.type)
        return _complete(self, ("text",))


TextContent = Annotated[
    Annotated[str, Tag("|string")] | Annotated[list[TextBlock], Tag("|list")],
    Discriminator(string_or_list),
]


class Block(Body):
    """One content block of a message."""

    type: str
    text: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: TextContent | None = None
    thinking: str | None = None

    @model_validator(mode="after")
    def _known(self) -> "Block":
        if self.type not in _NEEDED:
            raise _unreadable(self.type)
        return _complete(self, _NEEDED[self.type])


class InputMessage(Body):
    role: Literal["user", "assistant", "system"]
    content: Annotated[
        Annotated[str, Tag("|string")]
        | Annotated[Annotated[list[Block], Field(min_length=1)], Tag("|list")],
        Discriminator(string_or_list),
    ]


class Tool(Body):
    type: str | None = None
    name: str
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None

    @model_validator(mode="after")
    def _own(self) -> "Tool":
        if self.type not in (None, "custom"):
            raise PydanticCustomError(
                "unsupported_modality", "This server has no tools of its own; define it as custom."
            )
        return _complete(self, ("input_schema",))


class ToolChoice(Body):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None

    @model_validator(mode="after")
    def _named(self) -> "ToolChoice":
        return _complete(self, ("name",) if self.type == "tool" else ())


class Thinking(Body):
    type: Literal["enabled", "disabled", "adaptive", "between_tools"]


class OutputFormat(Body):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Body):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class CountTokensRequest(Body):
    """What a prompt is made of."""

    model: str = Field(min_length=1)
    messages: list[InputMessage] = Field(min_length=1)
    system: TextContent | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    # Ask for what this server cannot do.
    mcp_servers: list[Any] | None = None
    container: Any = None
    speed: Literal["standard", "fast"] | None = None


class MessagesRequest(CountTokensRequest):
    max_tokens: Annotated[int, Field(ge=1, le=2**63 - 1), whole]
    stream: bool | None = None
    stop_sequences: list[Annotated[str, Field(min_length=1)]] | None = None
    temperature: Annotated[float, Field(ge=0, le=1)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0, le=2**63 - 1), whole] | None = None
    inference_geo: str | None = None
    """Where a request is served: cannot be chosen."""
    # Of no effect on an answer.
    metadata: dict[str, Any] | None = None
    service_tier: Literal["auto", "standard_only"] | None = None


class MessageUsage(BaseModel):
    input_tokens: int
    """Without those that were read from the cache."""
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    cost: float | None
    """US dollars, provisional; with `cost_details` at the end of a stream alone."""
    cost_details: CostDetails


class MessageAnswer(BaseModel):
    """For the OpenAPI document; answers are written by hand."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[dict[str, Any]]
    stop_reason: str | None
    stop_sequence: str | None
    usage: MessageUsage


class TokenCount(BaseModel):
    input_tokens: int


class MessagesErrorDetails(BaseModel):
    type: str
    message: str


class MessagesError(BaseModel):
    """Anthropic's error object."""

    type: Literal["error"]
    error: MessagesErrorDetails
    request_id: str


def _complete(value: M, fields: tuple[str, ...]) -> M:
    for name in fields:
        if getattr(value, name) is None:
            raise PydanticCustomError("missing", "Field required", {"field": name})
    return value


def _unreadable(kind: str) -> PydanticCustomError:
    return PydanticCustomError(
        "unsupported_modality",
        "Blocks of type '{kind}' cannot be read; text, tool_use, tool_result and thinking can.",
        {"kind": kind[:50], "field": "type"},
    )
