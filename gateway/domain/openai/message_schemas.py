"""Messages of a chat as Pydantic models."""

from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

MAX_PARTS = 4096
MAX_CALLS = 512
"""Of one turn."""
_MODALITIES = {
    # Type of a part: what a model that reads text cannot do with it.
    "image_url": "images",
    "input_image": "images",
    "image": "images",
    "input_audio": "audio",
    "audio_url": "audio",
    "file": "files",
    "input_file": "files",
    "video_url": "video",
}


def string_or_list(value: object) -> str | None:
    """The discriminator of a union of both."""
    if isinstance(value, str):
        return "|string"
    return "|list" if isinstance(value, list) else None


class Body(BaseModel):
    """Base of what comes from outside."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False, frozen=True)


class ContentPart(Body):
    """One typed part of a message; only text can be served, and what the others point to is never fetched."""

    type: str
    text: str | None = None
    refusal: str | None = None

    @field_validator("type")
    @classmethod
    def _text_only(cls, value: str) -> str:
        if value in _MODALITIES:
            raise PydanticCustomError(
                "unsupported_modality",
                "This model reads text only, not {modality} ('{part}').",
                {"modality": _MODALITIES[value], "part": value},
            )
        if value not in ("text", "refusal"):
            raise PydanticCustomError(
                "invalid_value", "Unknown type of a content part; 'text' is supported."
            )
        return value

    @model_validator(mode="after")
    def _has_text(self) -> "ContentPart":
        if self.as_text() is None:
            raise PydanticCustomError("missing", "The part has no text.", {"field": self.type})
        return self

    def as_text(self) -> str | None:
        return self.text if self.type == "text" else self.refusal


class FunctionCall(Body):
    name: str
    arguments: str
    """JSON, if the model wrote it well."""


class MessageToolCall(Body):
    id: str
    type: Literal["function"] | None = None
    function: FunctionCall


Content = Annotated[
    Annotated[str, Tag("|string")]
    | Annotated[
        Annotated[list[ContentPart], Field(min_length=1, max_length=MAX_PARTS, fail_fast=True)],
        Tag("|list"),
    ],
    Discriminator(string_or_list),
]


class ChatMessage(Body):
    role: Literal["developer", "system", "user", "assistant", "tool", "function"]
    content: Content | None = None
    refusal: str | None = None
    """What an assistant said instead of `content`."""
    reasoning: str | None = None
    reasoning_content: str | None = None
    """The same as `reasoning`: thoughts of an earlier turn, for templates that show them."""
    name: str | None = None
    tool_calls: Annotated[list[MessageToolCall], Field(max_length=MAX_CALLS)] | None = None
    tool_call_id: str | None = None
    function_call: FunctionCall | None = None
    """The older form of one tool call; `role` "function" is that of its result."""
    audio: Any = None

    @field_validator("audio")
    @classmethod
    def _no_audio(cls, value: object) -> object:
        if value is not None:
            raise PydanticCustomError(
                "unsupported_modality", "This model reads text only, not audio."
            )
        return value

    @model_validator(mode="after")
    def _complete(self) -> "ChatMessage":
        if self.content is None and not self._may_be_silent():
            raise PydanticCustomError(
                "missing", "The message has no content.", {"field": "content"}
            )
        if self.role == "tool" and self.tool_call_id is None:
            raise PydanticCustomError(
                "missing", "A tool message needs tool_call_id.", {"field": "tool_call_id"}
            )
        if self.role == "function" and self.name is None:
            raise PydanticCustomError(
                "missing", "A function message needs a name.", {"field": "name"}
            )
        return self

    def _may_be_silent(self) -> bool:
        return self.role == "assistant" and bool(
            self.tool_calls or self.function_call or self.refusal is not None
        )

    def text(self) -> str:
        """All parts as one string, a line each; what an assistant refused with counts too."""
        if isinstance(self.content, str):
            return self.content
        if self.content is None:
            return self.refusal or ""
        return "\n".join(part.as_text() or "" for part in self.content)
