"""Bodies of OpenAI's API as Pydantic models.

Unknown fields are ignored, an explicit null means 'not given', types are strict ("5" is no integer).
Tags of unions begin with "|" so that they can be left out when an error's place becomes `param`.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Discriminator, Field, Tag, field_validator
from pydantic_core import PydanticCustomError

from gateway.domain.openai.formats import (
    Choices,
    Pattern,
    ResponseFormat,
    SchemaOrText,
    StructuredOutputs,
)
from gateway.domain.openai.message_schemas import Body, ChatMessage, string_or_list
from gateway.domain.openai.numbers import whole
from gateway.domain.openai.tool_schemas import ToolChoice, Tools
from gateway.errors import BadRequestError

MAX_CHOICES = 128
MAX_PROMPTS = 128
MAX_MESSAGES = 4096
MAX_ALTERNATIVES = 20
MAX_BIASES = 300
MAX_STOP_TOKEN_IDS = 128
_INT64_MAX = 2**63 - 1
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
Int64 = Annotated[int, Field(ge=-(2**63), le=_INT64_MAX), whole]
Penalty = Annotated[float, Field(ge=-2, le=2)]
StopString = Annotated[str, Field(min_length=1)]
Count = Annotated[int, Field(ge=1, le=_INT64_MAX), whole]
Alternatives = Annotated[int, Field(ge=0, le=MAX_ALTERNATIVES), whole]
"""How many of the likeliest tokens are told beside the one that is there."""
Metadata = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]],
    Field(max_length=16),
]


class StreamOptions(Body):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class GenerationBody(Body):
    """What chat and plain completions share."""

    model: str = Field(min_length=1)
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES), whole] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Count | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    logit_bias: (
        Annotated[dict[str, Annotated[float, Field(ge=-100, le=100)]], Field(max_length=MAX_BIASES)]
        | None
    ) = None
    """By token id in decimal digits."""
    seed: Int64 | None = None
    stop: (
        Annotated[
            Annotated[StopString, Tag("|string")]
            | Annotated[
                Annotated[list[StopString], Field(min_length=1, max_length=4)], Tag("|list")
            ],
            Discriminator(string_or_list),
        ]
        | None
    ) = None
    # Extensions that users of other servers know.
    top_k: Annotated[int, Field(ge=-1, le=_INT64_MAX), whole] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    min_tokens: Annotated[int, Field(ge=0, le=_INT64_MAX), whole] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    """Bounded so that no logit it touches overflows."""
    ignore_eos: bool | None = None
    stop_token_ids: (
        Annotated[
            list[Annotated[int, Field(ge=0, le=_INT64_MAX)]], Field(max_length=MAX_STOP_TOKEN_IDS)
        ]
        | None
    ) = None
    prompt_logprobs: Alternatives | None = None
    priority: Int64 | None = None
    timeout: Annotated[float, Field(gt=0, le=_INT64_MAX)] | None = None
    """Seconds, after which the request fails; more than the server's own limit is that limit."""
    skip_special_tokens: bool | None = None
    # What the answer must match: one of these.
    response_format: ResponseFormat | None = None
    guided_json: SchemaOrText | None = None
    guided_regex: Pattern | None = None
    guided_choice: Choices | None = None
    guided_grammar: Pattern | None = None
    structured_outputs: StructuredOutputs | None = None
    # Asked for by name and not possible yet: any value but a harmless one gets a 400.
    logits_processors: Any = None
    bad_words: list[Any] | None = None
    allowed_token_ids: Any = None
    truncate_prompt_tokens: Any = None
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    include_stop_str_in_output: bool | None = None
    return_token_ids: bool | None = None
    best_of: Annotated[int, Field(ge=1, le=20), whole] | None = None
    echo: bool | None = None
    # Of no effect on an answer.
    user: str | None = None

    @property
    def limit_field(self) -> str:
        """Name of the field that bounds the answer's length."""
        return "max_tokens"

    @property
    def asked_tokens(self) -> int | None:
        return self.max_tokens

    @property
    def num_choices(self) -> int:
        """Choices of each prompt that the answer has."""
        return self.n or 1

    @property
    def num_candidates(self) -> int:
        """Choices of each prompt that are generated."""
        return self.num_choices

    @property
    def num_logprobs(self) -> int | None:
        """Alternatives to tell beside each generated token; None tells nothing."""
        raise NotImplementedError

    @property
    def echoes(self) -> bool:
        return False

    @property
    def stop_strings(self) -> tuple[str, ...]:
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def wants_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)


class ChatCompletionRequest(GenerationBody):
    messages: Annotated[
        list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)
    ]
    max_completion_tokens: Count | None = None
    """Wins over `max_tokens`."""
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: Effort | None = None
    """Given to the chat template as a variable."""
    top_logprobs: Alternatives | None = None
    logprobs: bool | None = None
    include_reasoning: bool | None = None
    """False leaves the reasoning out of the answer."""
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    """False allows one call at most."""
    functions: list[dict[str, Any]] | None = None
    function_call: Any = None
    modalities: Any = None
    audio: dict[str, Any] | None = None
    web_search_options: Any = None
    service_tier: Any = None
    store: bool | None = None
    metadata: Metadata | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    prompt_cache_retention: str | None = None
    safety_identifier: str | None = None
    prediction: dict[str, Any] | None = None
    verbosity: Any = None
    moderation: Any = None
    chat_template: Any = None
    documents: list[Any] | None = None
    continue_final_message: bool | None = None
    mm_processor_kwargs: Any = None

    @property
    def limit_field(self) -> str:
        return "max_completion_tokens" if self.max_completion_tokens else "max_tokens"

    @property
    def asked_tokens(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        return self.top_logprobs or 0 if self.logprobs else None


class CompletionRequest(GenerationBody):
    prompt: Any = None
    """A string, a list of strings, token ids, or a list of lists of token ids."""
    max_tokens: Annotated[int, Field(ge=0, le=_INT64_MAX), whole] | None = None
    """0 goes with `echo` alone: the prompt is scored and nothing generated."""
    logprobs: Alternatives | None = None
    suffix: str | None = None

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

    @property
    def num_candidates(self) -> int:
        return self.best_of or self.num_choices

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def echoes(self) -> bool:
        return bool(self.echo)

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
