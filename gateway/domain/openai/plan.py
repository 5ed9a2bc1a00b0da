"""What whole and streamed answers share: the plan of an answer, and the account of what comes."""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from gateway.domain.accounting.live import LiveCost
from gateway.domain.openai.logprobs import (
    Echo,
    PromptTokens,
    TextLogprobs,
    TextScorer,
    echo_logprobs,
)
from gateway.domain.openai.parts import PartParser
from gateway.domain.system.services import ModelMetrics
from gateway.errors import EngineError, GatewayError, RefusedError
from gateway.jobs import Exchange, Job
from models.tokenizer import TextTokenizer
from workers.protocol import FinishReason, OutputDelta, Usage

_REASONS = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length"}


@dataclass(frozen=True)
class Total:
    """What a whole answer took, all its prompts and choices together."""

    usage: Usage
    cost: LiveCost

    def fields(self) -> dict[str, object]:
        """OpenAI's usage object, and what it has cost."""
        usage = self.usage
        return {
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
            "completion_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
            **self.cost.fields(),
        }


@dataclass(frozen=True)
class Plan:
    """What all parts of one answer share."""

    id: str
    created_s: int
    model: str
    fingerprint: str | None
    chat: bool
    num_choices: int
    """Of each prompt, in the answer."""
    num_candidates: int
    """Of each prompt, generated; if more than `num_choices`, the best are chosen."""
    include_usage: bool
    started_s: float
    """`time.monotonic()` at the request's arrival."""
    tokenizer: TextTokenizer
    num_logprobs: int | None
    """Alternatives told beside each token; None tells nothing of tokens."""
    num_prompt_logprobs: int | None
    """The same for the field `prompt_logprobs`."""
    skips_special: bool
    cost_of: Callable[[str, Iterable[Usage]], LiveCost]
    """What a model's requests have cost together; asks nobody."""
    echoes: tuple[Echo, ...] = ()
    """The prompts, if answers begin with them."""
    scores_only: bool = False
    """The answer is the prompt alone: the one token that the engine has to draw is not shown."""
    parser: Callable[[], PartParser] | None = None
    """Makes the parser of one choice; None if all that the model writes is text of the answer."""
    boundary: str = ""
    """Text after which tokens are no reasoning any more; "" where they never are."""
    requires_call: bool = False
    """An answer without a call of a tool is none."""

    def envelope(self, object_name: str) -> dict[str, object]:
        return {
            "id": self.id,
            "object": object_name,
            "created": self.created_s,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
        }

    def choice_index(self, exchange: Exchange, choice: int) -> int:
        return exchange.index * self.num_candidates + choice

    def reason(self, reason: FinishReason) -> str:
        """OpenAI's word."""
        return "length" if self.scores_only else _REASONS[reason]

    def echo_text(self, prompt: int) -> str:
        """What the answers to a prompt begin with."""
        return self.echoes[prompt].text if self.echoes else ""

    def echo_logprobs(self, prompt: int, tokens: PromptTokens | None) -> TextLogprobs:
        """Raises `EngineError` if there are none."""
        echo = self.echoes[prompt]
        if tokens is None or len(tokens) != len(echo.token_ids):
            raise EngineError("The server did not score the prompt.")
        return echo_logprobs(self.tokenizer, echo, tokens, self.num_logprobs or 0)

    def scorer(self, prompt: int) -> TextScorer:
        """For one choice of a plain completion with `logprobs`."""
        return TextScorer(
            self.tokenizer,
            self.num_logprobs or 0,
            len(self.echo_text(prompt)),
            skips_special=self.skips_special,
        )


class Ledger:
    """Counts tokens, times and reasons while an answer passes by."""

    def __init__(self, plan: Plan, metrics: ModelMetrics, *, streaming: bool) -> None:
        """Times between tokens are those of streams: whole answers are read at their end."""
        self._plan = plan
        self._metrics = metrics
        self._streaming = streaming
        self._last_s: dict[int, float] = {}
        self._usages: dict[int, Usage] = {}

    def note(self, exchange: Exchange, delta: OutputDelta) -> None:
        """Raises `EngineError` if the worker ended the choice with an error or an abort of its own."""
        if delta.finish_reason in (FinishReason.ERROR, FinishReason.ABORT):
            sentence = delta.error or "The server stopped working on this request."
            if delta.param is not None:
                raise RefusedError(f"Invalid '{delta.param}': {sentence}", param=delta.param)
            raise EngineError(sentence)
        if delta.usage is not None:
            self._usages[exchange.index] = delta.usage
        if delta.num_tokens and (self._streaming or not self._last_s):
            index = self._plan.choice_index(exchange, delta.choice)
            now_s = time.monotonic()
            last_s = self._last_s.get(index)
            if last_s is not None:
                self._metrics.between_tokens.observe(now_s - last_s)
            elif not self._last_s:
                self._metrics.first_token.observe(now_s - self._plan.started_s)
            self._last_s[index] = now_s

    def forget(self, exchange: Exchange) -> None:
        self._usages.pop(exchange.index, None)

    def is_complete(self, job: Job) -> bool:
        return len(self._usages) == len(job.exchanges)

    def total(self, reasoning_tokens: int = 0) -> Total:
        usages = self._usages.values()
        tokens = sum(usage.completion_tokens for usage in usages)
        usage = Usage(
            prompt_tokens=sum(usage.prompt_tokens for usage in usages),
            completion_tokens=0 if self._plan.scores_only else tokens,
            cached_tokens=sum(usage.cached_tokens for usage in usages),
            reasoning_tokens=reasoning_tokens,
        )
        return Total(usage, self._plan.cost_of(self._plan.model, usages))

    def succeed(self, reason: str, total: Total) -> None:
        self._metrics.succeeded(reason, total.usage, time.monotonic() - self._plan.started_s)

    def fail(self, error: GatewayError) -> None:
        self._metrics.failed(error.code or type(error).__name__)
