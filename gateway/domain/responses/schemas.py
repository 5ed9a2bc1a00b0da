"""Bodies of OpenAI's Responses API. Unknown fields are ignored, an explicit null means 'not given'."""

from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    Discriminator,
    Field,
    Tag,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from gateway.domain.openai.message_schemas import Body, string_or_list
from gateway.domain.openai.numbers import whole
from gateway.domain.openai.schemas import Metadata

_TEXTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text")
_NEEDED = {
    # Type of an item: the fields it must have.
    "message": ("role", "content"),
    "function_call": ("call_id", "name", "arguments"),
    "function_call_output": ("call_id", "output"),
    "reasoning": (),
}


class ContentPart(Body):
    """Text, or a refusal of an earlier turn."""

    type: str
    text: str | None = None
    refusal: str | None = None

    @field_validator("type")
    @classmethod
    def _readable(cls, value: str) -> str:
        if value not in (*_TEXTS, "refusal"):
            raise PydanticCustomError(
                "unsupported_modality",
                "Parts of type '{kind}' cannot be read; text can.",
                {"kind": value[:50]},
            )
        return value

    @model_validator(mode="after")
    def _has_text(self) -> "ContentPart":
        name = "refusal" if self.type == "refusal" else "text"
        if getattr(self, name) is None:
            raise PydanticCustomError("missing", "Field required", {"field": name})
        return self

    def as_text(self) -> str:
        return (self.refusal if self.type == "refusal" else self.text) or ""


Content = Annotated[
    Annotated[str, Tag("|string")] | Annotated[list[ContentPart], Tag("|list")],
    Discriminator(string_or_list),
]


class InputItem(Body):
    """A message, a call, its result, or reasoning."""

    type: str | None = None
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: Content | None = None
    id: str | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: Content | None = None
    summary: list[ContentPart] | None = None

    @property
    def kind(self) -> str:
        if self.type is not None:
            return self.type
        return "item_reference" if self.role is None and self.id is not None else "message"

    @model_validator(mode="after")
    def _known(self) -> "InputItem":
        if self.kind == "item_reference":
            raise PydanticCustomError(
                "unsupported_modality",
                "Items cannot be referred to; send the item, or previous_response_id.",
            )
        if self.kind not in _NEEDED:
            raise PydanticCustomError(
                "unsupported_modality",
                "Items of type '{kind}' cannot be read.",
                {"kind": self.kind[:50]},
            )
        for name in _NEEDED[self.kind]:
            if getattr(self, name) is None:
                raise PydanticCustomError("missing", "Field required", {"field": name})
        return self


class FunctionTool(Body):
    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    @field_validator("type")
    @classmethod
    def _own(cls, value: str) -> str:
        if value != "function":
            raise PydanticCustomError(
                "unsupported_modality",
                "This server has no tool '{kind}'; functions are supported.",
                {"kind": value[:50]},
            )
        return value

    @model_validator(mode="after")
    def _named(self) -> "FunctionTool":
        if self.name is None:
            raise PydanticCustomError("missing", "Field required", {"field": "name"})
        return self


class TextFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class TextConfig(Body):
    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ReasoningConfig(Body):
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None


Includable = Literal[
    "web_search_call.action.sources",
    "web_search_call.results",
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
]


class ResponsesRequest(Body):
    model: str = Field(min_length=1)
    input: Annotated[
        Annotated[str, Tag("|string")]
        | Annotated[Annotated[list[InputItem], Field(min_length=1)], Tag("|list")],
        Discriminator(string_or_list),
    ]
    instructions: str | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    background: bool | None = None
    store: bool | None = None
    previous_response_id: Annotated[str, Field(max_length=200)] | None = None
    max_output_tokens: Annotated[int, Field(ge=1, le=2**63 - 1), whole] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    tools: list[FunctionTool] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    metadata: Metadata | None = None
    # Harmless values alone are taken.
    truncation: Literal["auto", "disabled"] | None = None
    include: list[Includable] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20), whole] | None = None
    service_tier: str | None = None
    conversation: Any = None
    prompt: Any = None
    context_management: Any = None
    moderation: Any = None
    access_programs: Any = None
    background_options: Any = None
    # Of no effect on an answer.
    max_tool_calls: Annotated[int, Field(ge=1), whole] | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    prompt_cache_retention: str | None = None
    safety_identifier: str | None = None
    user: str | None = None


class ResponseAnswer(BaseModel):
    """For the OpenAPI document; answers are written by hand."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["completed", "failed", "in_progress", "cancelled", "incomplete"]
    error: dict[str, Any] | None
    incomplete_details: dict[str, Any] | None
    instructions: str | None
    model: str
    output: list[dict[str, Any]]
    parallel_tool_calls: bool
    previous_response_id: str | None
    usage: dict[str, Any] | None


class DeletedResponse(BaseModel):
    id: str
    object: Literal["response"] = "response"
    deleted: Literal[True] = True


class ItemList(BaseModel):
    object: Literal["list"] = "list"
    data: list[dict[str, Any]]
    first_id: str
    last_id: str
    has_more: bool
