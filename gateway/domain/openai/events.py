"""A running chat job as surfaces beside chat completions see it: parts, finishes and usage, in order.

Chat completions have a writer of their own (`chunks`), which does less for each token of plain text.
"""

from collections.abc import AsyncGenerator
from dataclasses import dataclass

from gateway.dispatch import Exchange, Item, Job
from gateway.domain.openai.parts import Part, PartParser, Text
from gateway.domain.openai.plan import Ledger, Plan
from gateway.domain.system.services import ModelMetrics
from gateway.errors import EngineError, GatewayError
from workers.protocol import OutputDelta, Usage


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


Event = list[Part] | Finish | Restart | Usage
Batch = list[tuple[int, Event]]
"""(choice, what it gives), in order."""


async def events(
    job: Job, plan: Plan, metrics: ModelMetrics, silence_s: float, *, streaming: bool
) -> AsyncGenerator[Batch, None]:
    """All that came together, as one batch; an empty one after `silence_s` of silence. The last is the usage alone.

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
    yield [(0, ledger.succeed(reader.reason))]


class _Reader:
    """Turns items into events, each choice's text through a parser of its own."""

    def __init__(self, plan: Plan, ledger: Ledger) -> None:
        self._plan = plan
        self._ledger = ledger
        self._parsers: dict[int, PartParser] = {}
        self.reason = "stop"
        self.error: EngineError | None = None

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
            except EngineError as error:
                self.error = error
                break
            self._add(batch, self._plan.choice_index(exchange, delta.choice), delta)
        return batch

    def _restart(self, exchange: Exchange) -> Batch:
        first = self._plan.choice_index(exchange, 0)
        choices = range(first, first + self._plan.num_candidates)
        for choice in choices:
            self._parsers.pop(choice, None)
        return [(choice, Restart()) for choice in choices]

    def _add(self, batch: Batch, choice: int, delta: OutputDelta) -> None:
        parser = self._parser(choice)
        if delta.text:
            parts: list[Part] = parser.feed(delta.text) if parser else [Text(delta.text)]
            if parts:
                batch.append((choice, parts))
        if delta.finish_reason is None:
            return
        rest = parser.finish() if parser else []
        if rest:
            batch.append((choice, rest))
        reason = self._plan.reason(delta.finish_reason)
        if reason == "stop" and parser is not None and parser.has_calls:
            reason = "tool_calls"
        self.reason = reason
        stopped_by = delta.stop_reason if isinstance(delta.stop_reason, str) else None
        batch.append((choice, Finish(reason, stopped_by)))

    def _parser(self, choice: int) -> PartParser | None:
        if self._plan.parser is None:
            return None
        parser = self._parsers.get(choice)
        if parser is None:
            parser = self._parsers[choice] = self._plan.parser()
        return parser
