"""Measures a worker's chip-time: entries that tile the life of its chips, and what each request's steps took.

    0 ├─ provision ─┼─ weights ─┼─ compile ─┼─ idle ─┼ gap │ step ┼ gap │ step ┼─ … ┤ released

The engine's thread calls all of it, so an idle piece and a step cannot overlap; only the end of the process
does from another thread, which the lock is for. Readings of one clock become integers in one place, so that
two neighbours agree to the nanosecond on where one ends and the other begins.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from workers.attribution import shares
from workers.chip_time import (
    MAX_SPAN_S,
    AnyEntry,
    Ended,
    Fits,
    Joined,
    Member,
    Opened,
    Released,
    Span,
    Spent,
    Step,
)
from workers.config import Chips
from workers.engine.step_log import StepMember, StepRecord
from workers.protocol import GenerateRequest, OutputDelta

_MAX_SPAN_NS = int(1e9 * MAX_SPAN_S)
_PHASES = (
    (("compil", "warm"), Spent.COMPILE),
    (("load", "weight", "fetch", "download", "read", "convert", "script"), Spent.WEIGHTS),
)
"""How phrases of progress begin, or what words they hold; all else is provisioning."""


@dataclass
class _Spending:
    """What a request's steps have taken so far, nano-chip-seconds."""

    prefill: int = 0
    decode: int = 0


class Meter:
    """A `StepSink`. Entries gather until `take` is called, by whoever ships them."""

    def __init__(
        self,
        chips: Chips,
        opened: Callable[[int], Opened],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """The chips are granted now; `opened(unix_ns)` makes entry 0. `clock` is the step log's."""
        self._clock = clock
        self._zero_s = clock()
        self._chips = chips
        self._lock = threading.Lock()
        self._entries: list[AnyEntry] = [opened(time.time_ns())]
        self._number = 1
        self._end_ns = 0
        """Where the last entry ended."""
        self._phase = Spent.PROVISION
        self._num_steps = 0
        self._emitted_ns = 0
        """When the step before was over for the host."""
        self._spending: dict[str, _Spending] = {}
        self._joined: list[Joined] = []
        self._ended: list[Ended] = []
        self._is_over = False
        self.fits: Fits | None = None
        """By which steps are shared from now on."""
        self.is_draining = False
        self.is_overfull = False
        """Entries cannot be kept any more: steps are told as faults, at full length, without members."""

    # The engine's life

    def progress(self, what: str) -> None:
        """The load goes on: `what` tells on what its time is spent from here."""
        with self._lock:
            phase = _phase_of(what)
            if phase is not self._phase:
                self._span_to(self._now_ns(), self._phase)
                self._phase = phase

    def loaded(self) -> None:
        with self._lock:
            self._span_to(self._now_ns(), self._phase)
            self._phase = Spent.IDLE

    def rest(self) -> None:
        """The engine has no work. Tells the ends that nobody was told of, and what has passed."""
        with self._lock:
            now_ns = self._now_ns()
            if self._joined or self._ended or now_ns - self._end_ns >= _MAX_SPAN_NS:
                self._span_to(now_ns, self._idle)

    def release(self) -> None:
        """The chips are free again: the last entry. What comes after it is not told."""
        with self._lock:
            if self._is_over:
                return
            self._span_to(self._now_ns(), self._idle)
            self._add(Released, self._end_ns)
            self._is_over = True

    # Requests

    def joined(self, request: GenerateRequest) -> None:
        """The engine has taken it in."""
        with self._lock:
            self._spending[request.request_id] = _Spending()
            self._joined.append(
                Joined(
                    request.request_id,
                    request.fair_key,
                    request.tag,
                    len(request.prompt_token_ids),
                    request.n,
                )
            )

    def ended(self, delta: OutputDelta) -> OutputDelta:
        """A request's last delta, with the chip-time of all steps that are over.

        A step that is under way may still compute a token for it, which the ledger books and this does not.
        Its end is told with the entry after, which is that step.
        """
        if delta.usage is None or delta.finish_reason is None:
            return delta
        with self._lock:
            spent = self._spending.pop(delta.request_id, None)
            if spent is None:
                return delta
            self._ended.append(
                Ended(
                    delta.request_id,
                    delta.finish_reason,
                    delta.usage.completion_tokens,
                    delta.usage.cached_tokens,
                )
            )
        usage = msgspec.structs.replace(
            delta.usage,
            prefill_chip_ns=spent.prefill,
            decode_chip_ns=spent.decode,
            sku=self._chips.sku,
            region=self._chips.region,
        )
        return msgspec.structs.replace(delta, usage=usage)

    # Steps

    def record(self, step: StepRecord) -> None:
        """One step is over, and its tokens are about to be handed on."""
        with self._lock:
            if self._is_over:
                return
            end_ns, emitted_ns = self._ns(step.completed_s), self._ns(step.emitted_s)
            if self.is_overfull:
                self._span_to(end_ns, Spent.FAULT)
            else:
                self._step(step, end_ns)
            self._emitted_ns = emitted_ns

    def _step(self, step: StepRecord, end_ns: int) -> None:
        begin_ns = self._end_ns
        began_ns = max(begin_ns, self._ns(step.began_s))
        compile_ns = min(self._compile_ns(step, began_ns), end_ns - began_ns)
        idle_ns = min(max(0, self._ns(step.resident_s) - begin_ns), began_ns - begin_ns)
        fits, coefficients = self.fits, None
        if fits is not None:
            coefficients = fits.buckets.get(step.bucket)
        members = _members(step.members)
        self._add(
            Step,
            end_ns,
            step=self._num_steps,
            bucket=step.bucket,
            idle_ns=idle_ns,
            bubble_ns=began_ns - begin_ns - idle_ns,
            compile_ns=compile_ns,
            is_draining=self.is_draining,
            is_failed=step.is_failed,
            num_padded=step.num_padded,
            fit=fits.id if fits is not None and coefficients is not None else "",
            members=members,
        )
        self._num_steps += 1
        if step.is_failed or not members:
            return
        length = self._chips.num * (end_ns - began_ns - compile_ns)
        for member, share in zip(members, shares(length, members, coefficients), strict=True):
            spending = self._spending.get(member.request_id)
            if spending is None:
                continue
            if member.is_prefill:
                spending.prefill += share
            else:
                spending.decode += share

    def _compile_ns(self, step: StepRecord, began_ns: int) -> int:
        """Of a step that something was compiled in: its own dispatch, or, if that took longer, the next one's."""
        if not step.num_compiles:
            return 0
        launched_ns = self._ns(step.launched_s)
        own = launched_ns - began_ns
        following = self._ns(step.collected_s) - max(launched_ns, self._emitted_ns)
        return max(0, own, following)

    # Entries

    def take(self) -> list[AnyEntry]:
        """What has gathered since the last call, in order."""
        with self._lock:
            entries, self._entries = self._entries, []
        return entries

    @property
    def _idle(self) -> Spent:
        if self._phase is not Spent.IDLE:
            return self._phase
        return Spent.DRAIN if self.is_draining else Spent.IDLE

    def _span_to(self, end_ns: int, spent: Spent) -> None:
        """In pieces, the last of which may be short; one of no length if it has something to tell."""
        if self._is_over:
            return
        while self._end_ns < end_ns:
            self._add(Span, min(end_ns, self._end_ns + _MAX_SPAN_NS), spent=spent)
        if self._joined or self._ended:
            self._add(Span, self._end_ns, spent=spent)

    def _add(self, kind: type[Span | Step | Released], end_ns: int, **fields: object) -> None:
        joined, self._joined = tuple(self._joined), []
        ended, self._ended = tuple(self._ended), []
        entry = kind(
            number=self._number,
            begin_ns=self._end_ns,
            end_ns=end_ns,
            joined=joined,
            ended=ended,
            **fields,  # type: ignore[arg-type]  # checked where it is called: by the wire's own tests
        )
        self._entries.append(entry)
        self._number += 1
        self._end_ns = end_ns

    def _now_ns(self) -> int:
        return self._ns(self._clock())

    def _ns(self, time_s: float) -> int:
        """Nanoseconds since the grant, never before the end of what was told."""
        return max(self._end_ns, round(1e9 * (time_s - self._zero_s)))


def _phase_of(what: str) -> Spent:
    words = what.lower()
    for beginnings, spent in _PHASES:
        if any(word in words for word in beginnings):
            return spent
    return Spent.PROVISION


def _members(members: tuple[StepMember, ...]) -> tuple[Member, ...]:
    return tuple(
        [
            Member(
                member.request_id,
                member.choice,
                is_prefill := member.phase == "prefill",
                member.num_tokens,
                member.context_len,
                member.num_cached,
                member.is_kept or not member.samples,
                is_prefill and member.num_preemptions > 0,
            )
            for member in members
        ]
    )
