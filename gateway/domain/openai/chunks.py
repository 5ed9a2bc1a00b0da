"""From the deltas of a job to the chunks of a stream."""

import asyncio
from collections.abc import AsyncGenerator

from gateway.domain.openai.choices import ParsedChoices
from gateway.domain.openai.logprobs import TextScorer, chat_fields
from gateway.domain.openai.parts import Part, Reasoning, Text, ToolCall
from gateway.domain.openai.plan import Ledger, Plan
from gateway.domain.system.services import ModelMetrics
from gateway.errors import EngineError, GatewayError
from gateway.jobs import Exchange, Item, Job
from gateway.sse import DONE, PING, ChunkEncoder, encoded
from workers.protocol import OutputDelta


async def stream(
    job: Job, plan: Plan, metrics: ModelMetrics, ping_interval_s: float
) -> AsyncGenerator[bytes, None]:
    """Blocks of events, one for all deltas that came together; raises the `GatewayError` that ended it."""
    ledger = Ledger(plan, metrics, streaming=True)
    writer = _ChunkWriter(plan, ledger)
    try:
        while not ledger.is_complete(job):
            items = await job.take(ping_interval_s)
            if any(delta is not None and delta.prompt_logprobs for _, delta in items):
                # Twenty alternatives of each token of a long prompt take a while to be named.
                block = await asyncio.to_thread(writer.write, items)
            else:
                block = writer.write(items) if items else PING
            if writer.error is None and ledger.is_complete(job):
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
    """Turns items into events, with the role before the first of a choice, or the prompt if it is echoed."""

    def __init__(self, plan: Plan, ledger: Ledger) -> None:
        self._plan = plan
        self._ledger = ledger
        name = "chat.completion.chunk" if plan.chat else "text_completion"
        self._encoder = ChunkEncoder(
            plan.envelope(name), chat=plan.chat, include_usage=plan.include_usage
        )
        self._begun: set[int] = set()
        self._parsed = None if plan.parser is None else ParsedChoices(plan)
        self._scorers: dict[int, TextScorer] = {}
        self._scores_echo = bool(plan.echoes) and plan.num_logprobs is not None
        self._echoes: dict[int, bytes] = {}
        """Of prompts whose scores are known: what is sent of each."""
        self._held: dict[int, list[OutputDelta]] = {}
        """Deltas of prompts whose scores are not known yet."""
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
                for ready in self._ready(exchange, delta):
                    self._add(events, exchange, ready)
            except EngineError as error:
                self.error = error
                break
        return b"".join(events)

    def end(self) -> bytes:
        """What follows the last choice's finish."""
        num_reasoning = self._parsed.num_reasoning_tokens if self._parsed else 0
        total = self._ledger.total(num_reasoning)
        self._ledger.succeed(self._reason, total)
        return (self._encoder.usage(total.fields()) if self._plan.include_usage else b"") + DONE

    def _ready(self, exchange: Exchange, delta: OutputDelta) -> list[OutputDelta]:
        """The deltas that can be sent now: those of all choices wait for the prompt's scores, which choice 0 has."""
        prompt = exchange.index
        if not self._scores_echo or prompt in self._echoes:
            return [delta]
        if delta.choice != 0:
            self._held.setdefault(prompt, []).append(delta)
            return []
        logprobs = self._plan.echo_logprobs(prompt, delta.prompt_logprobs)
        self._echoes[prompt] = encoded(logprobs)
        return [delta, *self._held.pop(prompt, [])]

    def _add(self, events: list[bytes], exchange: Exchange, delta: OutputDelta) -> None:
        index = self._plan.choice_index(exchange, delta.choice)
        if self._parsed is not None:
            parts = self._parsed.parts(index, delta)
            if parts is not None:
                self._add_parts(events, index, exchange, delta, parts)
                return
        if not delta.text and delta.finish_reason is None and not delta.logprobs:
            return
        if index not in self._begun:
            self._begun.add(index)
            events.append(self._beginning(index, exchange.index))
        if not self._plan.scores_only:
            if delta.logprobs:
                logprobs = self._logprobs(index, exchange.index, delta)
                events.append(self._encoder.scored_text(index, delta.text, logprobs))
            elif delta.text:
                events.append(self._encoder.text(index, delta.text))
        if delta.finish_reason is not None:
            self._finish(events, index, delta)

    def _add_parts(
        self,
        events: list[bytes],
        index: int,
        exchange: Exchange,
        delta: OutputDelta,
        parts: list[Part],
    ) -> None:
        if not parts and delta.finish_reason is None and not delta.logprobs:
            return
        if index not in self._begun:
            self._begun.add(index)
            # An answer that is calls alone has no content, not an empty one.
            is_call = bool(parts) and isinstance(parts[0], ToolCall)
            events.append(self._encoder.role(index, b"null" if is_call else b'""'))
        fields = [_delta_fields(part) for part in parts]
        if delta.logprobs:
            logprobs = self._logprobs(index, exchange.index, delta)
            first = fields.pop(0) if fields else {}
            events.append(self._encoder.delta(index, first, logprobs))
        events += [self._encoder.delta(index, part) for part in fields]
        if delta.finish_reason is not None:
            self._finish(events, index, delta)

    def _finish(self, events: list[bytes], index: int, delta: OutputDelta) -> None:
        if self._parsed is not None:
            self._reason = self._parsed.reason(index, delta)
        elif delta.finish_reason is not None:
            self._reason = self._plan.reason(delta.finish_reason)
        events.append(self._encoder.finish(index, self._reason))

    def _beginning(self, index: int, prompt: int) -> bytes:
        if not self._plan.echoes:
            return self._encoder.role(index)
        text = self._plan.echo_text(prompt)
        if self._scores_echo:
            return self._encoder.scored_text(index, text, self._echoes[prompt])
        return self._encoder.text(index, text)

    def _logprobs(self, index: int, prompt: int, delta: OutputDelta) -> bytes:
        tokens = delta.logprobs or ()
        if self._plan.chat:
            fields = chat_fields(self._plan.tokenizer, tokens, self._plan.num_logprobs or 0)
            return encoded(fields)
        scorer = self._scorers.get(index)
        if scorer is None:
            scorer = self._scorers[index] = self._plan.scorer(prompt)
        return encoded(scorer.score(tokens))


def _delta_fields(part: Part) -> dict[str, object]:
    """A part in OpenAI's words; reasoning has two names, as clients read one or the other."""
    if isinstance(part, Text):
        return {"content": part.text}
    if isinstance(part, Reasoning):
        return {"reasoning": part.text, "reasoning_content": part.text}
    if isinstance(part, ToolCall):
        function = {"name": part.name, "arguments": ""}
        call = {"index": part.index, "id": part.id, "type": "function", "function": function}
    else:
        call = {"index": part.index, "function": {"arguments": part.text}}
    return {"tool_calls": [call]}
