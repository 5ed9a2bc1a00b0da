"""Bodies of OpenAI's API as Pydantic models, and the 400 each wrong field gets.

Unknown fields are ignored, an explicit null means 'not given', types are strict ("5" is no integer).
Tags of unions begin with "|" so that they can be left out when an error's place becomes `param`.
"""

from collections.abc import Callable
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_core import ErrorDetails, PydanticCustomError

from gateway.errors import BadRequestError

MAX_CHOICES = 128
MAX_PROMPTS = 128
_INT64_MAX = 2**63 - 1
_MODALITIES = {
    "image_url": "images",
    "input_audio": "audio",
    "file": "files",
    "video_url": "video",
}

Int64 = Annotated[int, Field(ge=-(2**63), le=_INT64_MAX)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
StopString = Annotated[str, Field(min_length=1)]


def _string_or_list(value: object) -> str | None:
    if isinstance(value, str):
        return "|string"
    return "|list" if isinstance(value, list) else None


class _Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False, frozen=True)


class ContentPart(_Body):
    """One typed part of a message; only text can be served."""

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
            raise PydanticCustomError("missing", "The part has no text.", {"field": "text"})
        return self

    def as_text(self) -> str | None:
        return self.text if self.type == "text" else self.refusal


class FunctionCall(_Body):
    name: str
    arguments: str


class ToolCall(_Body):
    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


Content = Annotated[
    Annotated[str, Tag("|string")]
    | Annotated[Annotated[list[ContentPart], Field(min_length=1)], Tag("|list")],
    Discriminator(_string_or_list),
]


class ChatMessage(_Body):
    role: Literal["developer", "system", "user", "assistant", "tool"]
    content: Content | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None

    @model_validator(mode="after")
    def _complete(self) -> "ChatMessage":
        if self.content is None and not (self.role == "assistant" and self.tool_calls):
            raise PydanticCustomError(
                "missing", "The message has no content.", {"field": "content"}
            )
        if self.role == "tool" and self.tool_call_id is None:
            raise PydanticCustomError(
                "missing", "A tool message needs tool_call_id.", {"field": "tool_call_id"}
            )
        return self

    def text(self) -> str | None:
        """All parts as one string, a line each."""
        if self.content is None or isinstance(self.content, str):
            return self.content
        return "\n".join(part.as_text() or "" for part in self.content)


class StreamOptions(_Body):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class GenerationBody(_Body):
    """What chat and plain completions share."""

    model: str = Field(min_length=1)
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = None
    seed: Int64 | None = None
    stop: (
        Annotated[
            Annotated[StopString, Tag("|string")]
            | Annotated[
                Annotated[list[StopString], Field(min_length=1, max_length=4)], Tag("|list")
            ],
            Discriminator(_string_or_list),
        ]
        | None
    ) = None
    # Extensions that users of other servers know.
    top_k: Annotated[int, Field(ge=-1, le=_INT64_MAX)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0)] | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[Annotated[int, Field(ge=0)]] | None = None
    priority: Int64 | None = None
    skip_special_tokens: bool | None = None
    # Asked for by name and not possible yet: any value but a harmless one gets a 400.
    prompt_logprobs: Any = None
    logits_processors: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    structured_outputs: Any = None
    bad_words: Any = None
    allowed_token_ids: Any = None
    truncate_prompt_tokens: Any = None
    use_beam_search: Any = None

    @property
    def num_choices(self) -> int:
        return self.n or 1

    @property
    def stop_strings(self) -> tuple[str, ...]:
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def wants_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)


class ChatCompletionRequest(GenerationBody):
    messages: list[ChatMessage] = Field(min_length=1)
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    """Wins over `max_tokens`."""
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    """Given to the chat template as a variable."""
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    logprobs: bool | None = None
    tools: Any = None
    tool_choice: Any = None
    functions: Any = None
    function_call: Any = None
    response_format: Any = None
    modalities: Any = None
    audio: Any = None
    web_search_options: Any = None
    service_tier: Any = None
    store: Any = None
    verbosity: Any = None
    moderation: Any = None
    chat_template: Any = None
    documents: Any = None
    continue_final_message: Any = None
    mm_processor_kwargs: Any = None


class CompletionRequest(GenerationBody):
    prompt: Any = None
    """A string, a list of strings, token ids, or a list of lists of token ids."""
    logprobs: Annotated[int, Field(ge=0, le=5)] | None = None
    echo: bool | None = None
    suffix: str | None = None
    best_of: Annotated[int, Field(ge=1, le=20)] | None = None
    response_format: Any = None

    @field_validator("prompt")
    @classmethod
    def _known_shape(cls, value: object) -> object:
        if value is None or isinstance(value, str) or is_token_ids(value):
            return value
        if isinstance(value, list) and 0 < len(value) <= MAX_PROMPTS:
            all_text = all(isinstance(item, str) for item in value)
            if all_text or all(is_token_ids(item) for item in value):
                return value
        raise PydanticCustomError(
            "invalid_type",
            "A prompt is a string, a list of token ids, or a list of up to {limit} of either.",
            {"limit": MAX_PROMPTS},
        )

    def prompts(self) -> list[str | list[int]]:
        """Each prompt apart. Raises `BadRequestError` if there is none."""
        if self.prompt is None:
            raise BadRequestError(
                "You must provide a prompt.", param="prompt", code="missing_required_parameter"
            )
        if isinstance(self.prompt, str) or is_token_ids(self.prompt):
            return [self.prompt]
        return list(self.prompt)


def is_token_ids(value: object) -> bool:
    """Whether it is a non-empty list of integers."""
    return (
        isinstance(value, list)
        and len(value) > 0
        and all(type(item) is int and 0 <= item <= _INT64_MAX for item in value)
    )


Harmless = Callable[[Any], bool]


def _is_falsy(value: object) -> bool:
    return not value


def _one_of(*values: object) -> Harmless:
    return lambda value: any(value is item or value == item for item in values)


def _is_text_format(value: object) -> bool:
    return isinstance(value, dict) and value.get("type") == "text"


_UNSUPPORTED: dict[str, Harmless] = {
    # Field: the values that ask for nothing we cannot do. null is always one.
    "frequency_penalty": _is_falsy,
    "presence_penalty": _is_falsy,
    "logit_bias": _is_falsy,
    "repetition_penalty": _one_of(1),
    "top_logprobs": _is_falsy,
    "tool_choice": _one_of("none", "auto"),
    "functions": _is_falsy,
    "function_call": _one_of("none", "auto"),
    "response_format": _is_text_format,
    "modalities": _one_of(["text"]),
    "audio": _is_falsy,
    "service_tier": _one_of("auto", "default"),
    "store": _is_falsy,
    "verbosity": _one_of("medium"),
    "continue_final_message": _is_falsy,
    "documents": _is_falsy,
    "bad_words": _is_falsy,
    "use_beam_search": _is_falsy,
    "echo": _is_falsy,
    "suffix": _is_falsy,
    **dict.fromkeys(
        (
            "web_search_options",
            "moderation",
            "chat_template",
            "mm_processor_kwargs",
            "prompt_logprobs",
            "logits_processors",
            "guided_json",
            "guided_regex",
            "guided_choice",
            "guided_grammar",
            "structured_outputs",
            "allowed_token_ids",
            "truncate_prompt_tokens",
        ),
        _one_of(),
    ),
}

B = TypeVar("B", bound=GenerationBody)


def parse(kind: type[B], body: bytes) -> B:
    """The request in `body`. Raises `BadRequestError` naming the field that is wrong or not supported."""
    try:
        request = kind.model_validate_json(body)
    except ValidationError as error:
        raise _bad_request(error.errors(include_input=False, include_url=False)[0]) from error
    for name in sorted(request.model_fields_set & _UNSUPPORTED.keys()):
        value = getattr(request, name)
        if value is not None and not _UNSUPPORTED[name](value):
            raise unsupported(name)
    _check_together(request)
    return request


def unsupported(name: str) -> BadRequestError:
    return BadRequestError(
        f"This server does not support the given value of '{name}'.",
        param=name,
        code="unsupported_parameter",
    )


def _check_together(request: GenerationBody) -> None:
    if request.stream_options is not None and not request.stream:
        raise BadRequestError(
            "'stream_options' is only allowed when 'stream' is true.",
            param="stream_options",
            code="invalid_value",
        )
    if isinstance(request, ChatCompletionRequest):
        if request.logprobs:
            raise unsupported("logprobs")
        if request.tools and request.tool_choice != "none":
            raise unsupported("tools")
    if isinstance(request, CompletionRequest):
        if request.logprobs is not None:
            raise unsupported("logprobs")
        if request.best_of is not None and request.best_of != request.num_choices:
            raise unsupported("best_of")


_CODES = {"missing": "missing_required_parameter", "unsupported_modality": "unsupported_value"}


def _bad_request(details: ErrorDetails) -> BadRequestError:
    kind = details["type"]
    if kind == "json_invalid" or not details["loc"] and kind == "model_type":
        return BadRequestError(f"The body must be a JSON object: {details['msg']}"[:300])
    param = _param(details)
    if kind == "missing" and "input" not in details and details["msg"] == "Field required":
        message = f"Missing required parameter: '{param}'."
    else:
        message = f"Invalid '{param}': {_sentence(details)}"
    fallback = "invalid_type" if kind.endswith("_type") or "tag" in kind else "invalid_value"
    return BadRequestError(message[:500], param=param, code=_CODES.get(kind, fallback))


def _sentence(details: ErrorDetails) -> str:
    if details["type"] == "union_tag_not_found":
        return "Input should be a string or a list."
    return details["msg"]


def _param(details: ErrorDetails) -> str:
    """`messages[0].content[0].type` of `("messages", 0, "content", "|list", 0, "type")`."""
    place = [part for part in details["loc"] if not str(part).startswith("|")]
    field = details.get("ctx", {}).get("field")
    if field is not None and details["type"] == "missing":
        place.append(field)
    text = ""
    for part in place:
        text += f"[{part}]" if isinstance(part, int) else f".{part}"
    return text.lstrip(".")[:200]


class ModelInfo(BaseModel):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str
    max_model_len: int | None = None
    """Context length in tokens; None while no worker has announced it."""


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[ModelInfo]
