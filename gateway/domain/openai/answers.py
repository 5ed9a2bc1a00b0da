"""From the deltas of a job to what the client reads: one JSON body, or a stream of chunks."""

import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field

import msgspec

from gateway.dispatch import Exchange, Item, Job
from gateway.domain.system.services import ModelMetrics
from gateway.errors import EngineError, GatewayError
from gateway.sse import DONE, PING, ChunkEncoder, usage_fields
from workers.protocol import FinishReason, OutputDelta, Usage

_REASONS = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length"}


@dataclass(frozen=True)
class Plan:
    """What all parts of one answer share."""

    id: str
    created_s: int
    model: str
    fingerprint: str | None
    chat: bool
    num_choices: int
    """Of each prompt."""
    include_usage: bool
    started_s: float
    """`time.monotonic()` at the request's arrival."""

    def envelope(self, object_name: str) -> dict[str, object]:
        return {
            "id": self.id,
            "object": object_name,
            "created": self.created_s,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
        }

    def choice_index(self, exchange: Exchange, choice: int) -> int:
        return exchange.index * self.num_choices + choice


class _Ledger:
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
            raise EngineError(delta.error or "The server stopped working on this request.")
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

    def total(self) -> Usage:
        return Usage(
            prompt_tokens=sum(usage.prompt_tokens for usage in self._usages.values()),
            completion_tokens=sum(usage.completion_tokens for usage in self._usages.values()),
            cached_tokens=sum(usage.cached_tokens for usage in self._usages.values()),
            # Several prompts run side by side.
            prefill_s=max((usage.prefill_s for usage in self._usages.values()), default=0.0),
            decode_s=max((usage.decode_s for usage in self._usages.values()), default=0.0),
        )

    def succeed(self, reason: str) -> Usage:
        usage = self.total()
        self._metrics.succeeded(reason, usage, time.monotonic() - self._plan.started_s)
        return usage

    def fail(self, error: GatewayError) -> None:
        self._metrics.failed(error.code or type(error).__name__)


@dataclass
class _Choice:
    parts: list[str] = field(default_factory=list)
    reason: str | None = None


async def collect(job: Job, plan: Plan, metrics: ModelMetrics) -> bytes:
    """The whole answer as OpenAI's JSON object; raises the `GatewayError` that ended it."""
    ledger = _Ledger(plan, metrics, streaming=False)
    choices: dict[int, _Choice] = {}
    try:
        while not ledger.is_complete(job):
            for exchange, delta in await job.take(3600.0):
                if delta is None:
                    _drop(choices, ledger, exchange, plan)
                    continue
                ledger.note(exchange, delta)
                choice = choices.setdefault(plan.choice_index(exchange, delta.choice), _Choice())
                if delta.text:
                    choice.parts.append(delta.text)
                if delta.finish_reason is not None:
                    choice.reason = _REASONS[delta.finish_reason]
    except GatewayError as error:
        ledger.fail(error)
        raise
    usage = ledger.succeed(choices[0].reason or "stop" if 0 in choices else "stop")
    return _body(plan, choices, usage)


def _drop(choices: dict[int, _Choice], ledger: _Ledger, exchange: Exchange, plan: Plan) -> None:
    ledger.forget(exchange)
    for choice in range(plan.num_choices):
        choices.pop(plan.choice_index(exchange, choice), None)


def _body(plan: Plan, choices: dict[int, _Choice], usage: Usage) -> bytes:
    body = plan.envelope("chat.completion" if plan.chat else "text_completion")
    body["choices"] = [
        _choice_fields(plan, index, choices.get(index, _Choice())) for index in sorted(choices)
    ]
    body["usage"] = usage_fields(usage)
    return msgspec.json.encode(body)


def _choice_fields(plan: Plan, index: int, choice: _Choice) -> dict[str, object]:
    text = "".join(choice.parts)
    fields: dict[str, object] = {"index": index}
    if plan.chat:
        fields["message"] = {"role": "assistant", "content": text, "refusal": None}
    else:
        fields["text"] = text
    fields["logprobs"] = None
    fields["finish_reason"] = choice.reason or "stop"
    return fields


async def stream(
    job: Job, plan: Plan, metrics: ModelMetrics, ping_interval_s: float
) -> AsyncGenerator[bytes, None]:
    """Blocks of events, one for all deltas that came together; raises the `GatewayError` that ended it."""
    ledger = _Ledger(plan, metrics, streaming=True)
    writer = _ChunkWriter(plan, ledger)
    try:
        while not ledger.is_complete(job):
            items = await job.take(ping_interval_s)
            block = writer.write(items) if items else PING
            if ledger.is_complete(job):
                break
            if block:
                yield block
            if writer.error is not None:
                raise writer.error
    except GatewayError as error:
        ledger.fail(error)
        raise
    yield block + writer.end()


class _ChunkWriter:
    """Turns items into events, with the role before the first of a choice."""

    def __init__(self, plan: Plan, ledger: _Ledger) -> None:
        self._plan = plan
        self._ledger = ledger
        name = "chat.completion.chunk" if plan.chat else "text_completion"
        self._encoder = ChunkEncoder(
            plan.envelope(name), chat=plan.chat, include_usage=plan.include_usage
        )
        self._begun: set[int] = set()
        self._reason = "stop"
        self.error: EngineError | None = None

    def write(self, items: list[Item]) -> bytes:
        """Events of all items up to the first that reports a failure, which is kept in `error`."""
        events: list[bytes] = []
        for exchange, delta in items:
            if delta is None:
                self._ledger.forget(exchange)
                continue
            try:
                self._ledger.note(exchange, delta)
            except EngineError as error:
                self.error = error
                break
            self._add(events, self._plan.choice_index(exchange, delta.choice), delta)
        return b"".join(events)

    def end(self) -> bytes:
        """What follows the last choice's finish."""
        usage = self._ledger.succeed(self._reason)
        return (self._encoder.usage(usage) if self._plan.include_usage else b"") + DONE

    def _add(self, events: list[bytes], index: int, delta: OutputDelta) -> None:
        if not delta.text and delta.finish_reason is None:
            return
        if index not in self._begun:
            self._begun.add(index)
            events.append(self._encoder.role(index))
        if delta.text:
            events.append(self._encoder.text(index, delta.text))
        if delta.finish_reason is not None:
            self._reason = _REASONS[delta.finish_reason]
            events.append(self._encoder.finish(index, self._reason))
