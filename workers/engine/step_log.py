"""What every step did and when, as records for whoever wants them: a trace, a ledger of device time.

All times are seconds of one monotonic clock. A step's results are read one step late, so two steps are
open at once; on the host and on the device they look like this:

    host    schedule k │ dispatch k │ collect k-1 … │ emit k-1 │ schedule k+1 │ dispatch k+1 │ collect k …
    device      step k-1 ───────────────────────────┤ step k ──────────────────────────────────────────┤
                                       completed k-1 ┘ = began k                            completed k ┘

A step has the device from its dispatch or from the completion of the step before, whichever is later, to
its own completion. So no moment is counted twice, and what lies between two steps is a gap in which the
device waited. Completion is seen by the host: it is when the results had been read.
"""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

import msgspec

from workers.engine.outputs import DecodeRow, PrefillSegment, StepPlan, is_current
from workers.protocol import FinishReason

Clock = Callable[[], float]


class StepMember(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """One sequence's part in a step."""

    request_id: str
    choice: int
    phase: Literal["prefill", "decode"]
    num_tokens: int
    """Tokens computed for it in this step."""
    context_len: int
    """Tokens whose keys and values were in the cache before them: its own, and shared ones, some of which
    another request may have computed since this one's last segment."""
    num_cached: int = 0
    """Prompt tokens found in the prefix cache; on the sequence's first segment only, so that they add up."""
    num_preemptions: int = 0
    """How often it had been preempted: prefill above 0 computes again what was lost."""
    samples: bool = True
    """Whether a token was drawn; false for all but the last segment of a prefill."""
    is_kept: bool = True
    """Whether that token joined the answer: not if the answer had ended or was preempted meanwhile."""
    arrived_s: float = 0.0
    """When the engine got the request."""


class ChoiceEnd(msgspec.Struct, frozen=True, array_like=True):
    """A choice that left the engine."""

    request_id: str
    choice: int
    reason: FinishReason
    ended_s: float


class StepRecord(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """One dispatched step, failed ones included. Records come in the order of dispatch."""

    number: int
    """0, 1, 2 … in this engine."""
    bucket: str
    rows: int
    """Decode rows of the bucket."""
    num_tokens: int
    """Tokens computed for members: the sum of theirs."""
    num_padded: int
    """Tokens computed for nobody."""
    draw: str
    """How tokens were chosen: which sampling program ran beside the step's own, if any."""
    members: tuple[StepMember, ...]
    is_failed: bool
    """The device lost it, or the engine gave it up: its results were not used."""
    scheduled_s: float
    """The host began to schedule it."""
    dispatched_s: float
    """Scheduling was done, packing and upload began."""
    launched_s: float
    """The dispatch call returned."""
    collected_s: float
    """The host began to wait for its results."""
    completed_s: float
    """The results had been read."""
    emitted_s: float
    """Its tokens had become text; the record is written now."""
    began_s: float
    """The device was its own from here to `completed_s`."""
    previous_s: float
    """Completion of the step before, or of the engine's start; the gap ends at `began_s`."""
    resident_s: float
    """Since when the engine had not been empty: the part of the gap before it is idle time."""
    completed_unix_s: float
    """`completed_s` on the wall clock."""
    num_running: int
    num_waiting: int
    kv_usage: float
    """Share of KV blocks in use, 0 … 1, after the step."""
    num_compiles: int = 0
    """Compilations since the record before, warm-up aside: not the fault of the members."""
    ended: tuple[ChoiceEnd, ...] = ()
    """Choices that left the engine since the record before, with or without this step."""

    @property
    def device_s(self) -> float:
        """Length of the step on the device."""
        return self.completed_s - self.began_s

    @property
    def host_s(self) -> float:
        """Host work for this step; waiting for the device is not."""
        return self.launched_s - self.scheduled_s + self.emitted_s - self.completed_s


class StepSink(Protocol):
    """Takes the records. Called by the engine's thread between two steps: be quick, never raise."""

    def record(self, step: StepRecord) -> None: ...


@dataclass(frozen=True)
class Sinks:
    """Several of them, as one."""

    sinks: tuple[StepSink, ...]

    def record(self, step: StepRecord) -> None:
        for sink in self.sinks:
            sink.record(step)


@dataclass(frozen=True)
class StepWork:
    """What a step computes, whichever engine runs it."""

    bucket: str
    rows: int
    num_padded: int
    draw: str
    members: tuple[StepMember, ...]


@dataclass(frozen=True)
class EngineLoad:
    """The engine beside its steps."""

    num_running: int
    num_waiting: int
    kv_usage: float
    num_compiles: int = 0
    """Compilations since the warm-up."""


@dataclass
class _OpenStep:
    number: int
    describe: Callable[[], StepWork]
    scheduled_s: float
    dispatched_s: float
    launched_s: float = 0.0
    collected_s: float = 0.0
    completed_s: float = 0.0
    began_s: float = 0.0
    previous_s: float = 0.0
    work: StepWork | None = None


class StepLog:
    """Times the steps of one engine, and writes records if there is a sink.

    The engine calls, for each step: `begin`, `scheduled`, `launched`; and, for the step before it,
    `collected`, `emitted`. Without a sink that is a handful of clock readings.
    """

    def __init__(
        self,
        sink: StepSink | None = None,
        clock: Clock = time.monotonic,
        unix_clock: Clock = time.time,
    ) -> None:
        self._sink, self._clock, self._unix_clock = sink, clock, unix_clock
        self._open: deque[_OpenStep] = deque()
        self._num_steps = 0
        self._mark_s = self.completed_s = self._resident_s = clock()
        self._ended: list[ChoiceEnd] = []
        self._num_compiles = 0
        self.host_s = 0.0
        """Host work of all steps."""
        self.device_s = 0.0
        """Time that steps had the device."""
        self.dispatched_s = self.completed_s
        """Of the step that was collected last."""

    def now(self) -> float:
        return self._clock()

    def resident(self) -> None:
        """The engine was empty and has got a request."""
        self._resident_s = self._clock()

    def ended(self, request_id: str, choice: int, reason: FinishReason) -> None:
        if self._sink is not None:
            self._ended.append(ChoiceEnd(request_id, choice, reason, self._clock()))

    def begin(self) -> None:
        """Scheduling begins."""
        self._mark_s = self._clock()

    def scheduled(self, describe: Callable[[], StepWork]) -> None:
        """There is a step, and it is dispatched now. `describe` is asked once its results are there."""
        now_s = self._clock()
        self._open.append(_OpenStep(self._num_steps, describe, self._mark_s, now_s))
        self._num_steps += 1
        self.host_s += now_s - self._mark_s

    def launched(self) -> None:
        """The newest step is on its way."""
        step = self._open[-1]
        self._mark_s = step.launched_s = self._clock()
        self.host_s += step.launched_s - step.dispatched_s

    def drawn(self) -> None:
        """After `launched`: its tokens are bound by a grammar, and the drawing is on its way only now.

        The step before may have been collected and emitted meanwhile.
        """
        now_s = self._clock()
        self.host_s += now_s - self._mark_s
        self._mark_s = now_s

    def collected(self) -> None:
        """The results of the oldest open step are read, its tokens not yet handed out."""
        step, now_s = self._open[0], self._clock()
        step.collected_s = max(self._mark_s, step.launched_s)
        self._complete(step, now_s)

    def emitted(self, load: Callable[[], EngineLoad]) -> None:
        """That step is over."""
        step, now_s = self._open.popleft(), self._clock()
        self._mark_s = now_s
        self.host_s += now_s - step.completed_s
        self._write(step, now_s, load, is_failed=False)

    def lost(self, load: Callable[[], EngineLoad]) -> None:
        """No result of any open step will be used."""
        now_s = self._clock()
        while self._open:
            step = self._open.popleft()
            step.launched_s = step.launched_s or now_s
            step.collected_s = now_s
            self._complete(step, now_s)
            self._write(step, now_s, load, is_failed=True)

    def _complete(self, step: _OpenStep, now_s: float) -> None:
        step.completed_s, step.previous_s = now_s, self.completed_s
        step.began_s = max(step.dispatched_s, step.previous_s)
        self.device_s += now_s - step.began_s
        self.dispatched_s, self.completed_s = step.dispatched_s, now_s
        if self._sink is not None:
            step.work = step.describe()

    def _write(
        self, step: _OpenStep, now_s: float, load: Callable[[], EngineLoad], *, is_failed: bool
    ) -> None:
        if self._sink is None or step.work is None:
            return
        work, beside = step.work, load()
        ended, self._ended = tuple(self._ended), []
        before, self._num_compiles = self._num_compiles, beside.num_compiles
        self._sink.record(
            StepRecord(
                number=step.number,
                bucket=work.bucket,
                rows=work.rows,
                num_tokens=sum(member.num_tokens for member in work.members),
                num_padded=work.num_padded,
                draw=work.draw,
                members=work.members,
                is_failed=is_failed,
                scheduled_s=step.scheduled_s,
                dispatched_s=step.dispatched_s,
                launched_s=step.launched_s,
                collected_s=step.collected_s,
                completed_s=step.completed_s,
                emitted_s=now_s,
                began_s=step.began_s,
                previous_s=step.previous_s,
                resident_s=self._resident_s,
                completed_unix_s=self._unix_clock() - (self._clock() - step.completed_s),
                num_running=beside.num_running,
                num_waiting=beside.num_waiting,
                kv_usage=beside.kv_usage,
                num_compiles=beside.num_compiles - before,
                ended=ended,
            )
        )


def describe(plan: StepPlan) -> StepWork:
    """A model's step; asked before its tokens are handed out, when it is known which will be kept."""
    return StepWork(
        bucket=plan.bucket.name,
        rows=plan.bucket.rows,
        num_padded=plan.bucket.num_tokens - plan.num_tokens,
        draw=plan.draw.name.lower(),
        members=tuple(map(_decoding, plan.rows)) + tuple(map(_prefilling, plan.segments)),
    )


def _decoding(row: DecodeRow) -> StepMember:
    sequence = row.sequence
    return StepMember(
        request_id=sequence.request.request_id,
        choice=sequence.choice,
        phase="decode",
        num_tokens=1,
        context_len=row.position,
        num_preemptions=row.epoch,
        is_kept=is_current(row),
        arrived_s=sequence.arrived_s,
    )


def _prefilling(segment: PrefillSegment) -> StepMember:
    sequence = segment.sequence
    return StepMember(
        request_id=sequence.request.request_id,
        choice=sequence.choice,
        phase="prefill",
        num_tokens=segment.length,
        context_len=segment.start,
        num_cached=sequence.num_cached if segment.is_first else 0,
        num_preemptions=segment.epoch,
        samples=segment.samples,
        is_kept=segment.samples and is_current(segment),
        arrived_s=sequence.arrived_s,
    )
