"""A running chat job as surfaces beside chat completions see it: parts, finishes and the total, in order.

Chat completions have a writer of their own (`chunks`), which does less for each token of plain text.
"""

from collections.abc import AsyncGenerator
from dataclasses import dataclass

from gateway.domain.openai.choices import ParsedChoices
from gateway.domain.openai.parts import Part, Text
from gateway.domain.openai.plan import Ledger, Plan, Total
from gateway.domain.system.services import ModelMetrics
from gateway.errors import EngineError, GatewayError
from gateway.jobs import Exchange, Item, Job
from workers.protocol import OutputDelta


@dataclass(frozen=True, slots=True)
class Finish:
    """A choice is complete."""

    reason: str
    """stop, length or tool_calls."""
    stop_string: str | None = None
    """The stop string that ended it."""


@dataclass(frozen=True, slots=True)
class Restart:
    """Another worker starts over: what the choice has given is void. Never after a stream has got anything."""


Event = list[Part] | Finish | Restart | Total
Batch = list[tuple[int, Event]]
"""(choice, what it gives), in order."""


async def events(
    job: Job, plan: Plan, metrics: ModelMetrics, silence_s: float, *, streaming: bool
) -> AsyncGenerator[Batch, None]:
    """All that came together, as one batch; an empty one after `silence_s` of silence. The last is the total alone.

    Raises the `GatewayError` that ended the job, after what came before it.
    """
    ledger = Ledger(plan, metrics, streaming=streaming)
    reader = _Reader(plan, ledger)
    try:
        while not ledger.is_complete(job):
            items = await job.take(silence_s)
            batch = reader.read(items)
            if batch or not items:
                yield batch
            if reader.error is not None:
                raise reader.error
    except GatewayError as error:
        ledger.fail(error)
        raise
    total = ledger.total(reader.num_reasoning_tokens)
    ledger.succeed(reader.reason, total)
    yield [(0, total)]


class _Reader:
    """Turns items into events, each choice's text through a parser of its own."""

    def __init__(self, plan: Plan, ledger: Ledger) -> None:
        self._plan = plan
        self._ledger = ledger
        self._parsed = None if plan.parser is None else ParsedChoices(plan)
        self.reason = "stop"
        self.error: EngineError | None = None

    @property
    def num_reasoning_tokens(self) -> int:
        return self._parsed.num_reasoning_tokens if self._parsed else 0

    def read(self, items: list[Item]) -> Batch:
        """Events of all items up to the first that reports a failure, which is kept in `error`."""
        batch: Batch = []
        for exchange, delta in items:
            if delta is None:
                self._ledger.forget(exchange)
                batch += self._restart(exchange)
                continue
            try:
                self._ledger.note(exchange, delta)
                self._add(batch, self._plan.choice_index(exchange, delta.choice), delta)
            except EngineError as error:
                self.error = error
                break
        return batch

    def _restart(self, exchange: Exchange) -> Batch:
        first = self._plan.choice_index(exchange, 0)
        choices = range(first, first + self._plan.num_candidates)
        if self._parsed is not None:
            for choice in choices:
                self._parsed.forget(choice)
        return [(choice, Restart()) for choice in choices]

    def _add(self, batch: Batch, choice: int, delta: OutputDelta) -> None:
        parts = self._parsed.parts(choice, delta) if self._parsed else None
        if parts is None:
            parts = [Text(delta.text)] if delta.text else []
        if parts:
            batch.append((choice, parts))
        if delta.finish_reason is None:
            return
        if self._parsed is None:
            self.reason = self._plan.reason(delta.finish_reason)
        else:
            self.reason = self._parsed.reason(choice, delta)
        stopped_by = delta.stop_reason if isinstance(delta.stop_reason, str) else None
        batch.append((choice, Finish(self.reason, stopped_by)))
