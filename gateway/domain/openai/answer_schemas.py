"""Shapes of the answers, for the OpenAPI document alone: answers are written by hand (answers.py, sse.py)."""

from typing import Any, Literal

from pydantic import BaseModel, Field

from gateway.domain.accounting.live import Unknown
from gateway.domain.accounting.prices import NoPriceReason


class PromptTokensDetails(BaseModel):
    cached_tokens: int


class CompletionTokensDetails(BaseModel):
    reasoning_tokens: int


class CostDetails(BaseModel):
    """How `cost` came about; what cannot be computed is null."""

    provisional: Literal[True]
    active: float | None
    """US dollars of the request's own chip-time."""
    loaded: float | None
    """The same with its share of idle time: `cost`."""
    kappa: float | None
    prefill_chip_seconds: float | None
    decode_chip_seconds: float | None
    price_id: str | None
    """Of the price book; several, and below too, with commas between, where prompts ran on different chips."""
    sku: str | None
    term: str | None
    reason: Unknown | NoPriceReason | None
    """Why `cost` is null."""


class UsageFields(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails
    cost: float | None
    """US dollars, provisional."""
    cost_details: CostDetails


class ScoredToken(BaseModel):
    token: str
    logprob: float
    bytes: list[int] | None


class ChatToken(ScoredToken):
    top_logprobs: list[ScoredToken]


class ChatLogprobs(BaseModel):
    content: list[ChatToken] | None
    refusal: list[ChatToken] | None


class CalledFunction(BaseModel):
    name: str
    arguments: str
    """The text of a JSON object."""


class MessageToolCall(BaseModel):
    id: str
    type: Literal["function"]
    function: CalledFunction


class AnswerMessage(BaseModel):
    role: Literal["assistant"]
    content: str | None
    refusal: str | None
    reasoning: str | None = None
    reasoning_content: str | None = None
    """The same as `reasoning`, by the name that other clients read."""
    tool_calls: list[MessageToolCall] = Field(default=[])


class ChatChoice(BaseModel):
    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"]


class ChatCompletion(BaseModel):
    id: str
    object: Literal["chat.completion"]
    created: int
    """Unix time, seconds."""
    model: str
    system_fingerprint: str | None
    choices: list[ChatChoice]
    usage: UsageFields
    prompt_logprobs: list[dict[str, Any] | None] = Field(default=[])
    """Only if asked for."""


class TextLogprobsFields(BaseModel):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class TextChoice(BaseModel):
    index: int
    text: str
    logprobs: TextLogprobsFields | None
    finish_reason: Literal["stop", "length"]
    prompt_logprobs: list[dict[str, Any] | None] = Field(default=[])
    """Only if asked for."""


class Completion(BaseModel):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str | None
    choices: list[TextChoice]
    usage: UsageFields
