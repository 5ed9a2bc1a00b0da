"""Who computes what in the next step. Plain Python; the device is not known here.

Each step takes one token of every decoding sequence, and beside them prefill segments of sequences that
are not decoding yet, in order of priority and start. A sequence starts when its turn has come
(`fair_queue`), a row is free and its tokens have room in the KV cache. The room is reserved then, but
blocks are taken as the prefill gets there: until then another sequence may compute the same ones.

If a decoding sequence needs a block and none is free, the last one in order is preempted: it gives its
blocks back and computes its tokens again later. The first in order is never preempted for another, and
a request that the whole cache could not hold is refused at once, so the engine always moves on.
"""

import bisect
import sys
from dataclasses import dataclass

from torchtpu.buckets import NO_PREFILL, SEGMENT_SAMPLES, BucketLadder, PrefillShape
from workers.engine.fair_queue import FairQueue
from workers.engine.kv_cache import KVCache
from workers.engine.outputs import DecodeRow, PrefillSegment, StepPlan
from workers.engine.request import Sequence, Status


@dataclass(frozen=True)
class SchedulerConfig:
    ladder: BucketLadder
    prefill_overhead_tokens: int = 64
    """What a step costs beside its prefill tokens, in tokens: weighs few against many segments."""
    max_step_tokens: int | None = None
    """The most tokens of a step, decode rows and prefill together; None is what the ladder holds."""

    def __post_init__(self) -> None:
        if self.max_step_tokens is not None and self.max_step_tokens <= self.ladder.max_rows:
            raise ValueError(
                f"a step of {self.max_step_tokens} tokens has no room for {self.ladder.max_rows} "
                "rows and a token of a prompt"
            )


class Scheduler:
    """Owns the waiting and the running sequences, their rows and their blocks."""

    def __init__(self, config: SchedulerConfig, cache: KVCache) -> None:
        self._config = config
        self._cache = cache
        self._free_rows = list(reversed(range(config.ladder.max_rows)))
        self._max_segments = max(shape.segments for shape in config.ladder.prefill)
        self._num_started = 0
        self.waiting = FairQueue()
        self.running: list[Sequence] = []
        self.num_preemptions = 0

    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, sequence: Sequence) -> None:
        if sequence.status is Status.PREPARING:
            sequence.status = Status.WAITING
        self.waiting.add(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Finish or abort: its row and blocks are free for the next step."""
        if sequence.status is Status.RUNNING:
            self._give_back(sequence)
            self.running.remove(sequence)
        elif sequence.status in (Status.WAITING, Status.PREEMPTED):
            self.waiting.remove(sequence)
        sequence.status = Status.FINISHED

    def schedule(self) -> StepPlan | None:
        """The next step, or None if nothing can run now (all wait for results in flight).

        Marks the scheduled tokens as computed: dispatch the plan, or `preempt_all` if that fails.
        """
        rows = self._decode_rows()
        self._admit()
        segments, shape = self._prefill_segments(len(rows))
        if not rows and not segments:
            return None
        reach = [row.position + 1 for row in rows] + [s.start + s.length for s in segments]
        # Scored tokens take their logits from places in which no row decodes: the more the better.
        scores = any(segment.scores for segment in segments)
        num_rows = self._config.ladder.max_rows if scores else len(rows)
        bucket = self._config.ladder.choose(num_rows, max(reach), shape)
        return StepPlan(bucket, rows, segments)

    def preempt_all(self) -> None:
        """The device lost the cache: every running sequence starts again from its tokens."""
        for sequence in list(self.running):
            self._preempt(sequence)
        self._cache.forget_all()

    def check_integrity(self) -> None:
        """Raise AssertionError if blocks or rows are lost or held twice; for idle moments and tests."""
        self._cache.check(s.table for s in self.running)
        rows = sorted([s.row for s in self.running] + self._free_rows)
        assert rows == list(range(self._config.ladder.max_rows)), "rows are lost"
        assert not any(s.table.blocks[0] for s in self.waiting), "a waiting sequence holds blocks"

    def _unreserved(self) -> list[int]:
        """Free blocks of each pool that no running sequence's prompt is going to need."""
        free = [group.pool.num_free for group in self._cache.groups]
        for sequence in self.running:
            if not sequence.is_decoding:
                needed = sequence.table.num_needed(sequence.start_len)
                free = [n - m for n, m in zip(free, needed, strict=True)]
        return free

    def _decode_rows(self) -> list[DecodeRow]:
        rows: list[DecodeRow] = []
        for sequence in list(self.running):
            if not (sequence.is_decoding and sequence.may_generate):
                continue
            sequence.table.release_behind(sequence.num_computed)
            if not self._make_room(sequence):
                continue
            rows.append(DecodeRow(sequence, sequence.epoch, sequence.num_computed))
            sequence.num_computed += 1
            sequence.num_in_flight += 1
            self.waiting.charge(sequence.request.fair_key, 1)
        return rows

    def _make_room(self, sequence: Sequence) -> bool:
        """Room for one more token, taken from the last in order if need be; False if that is itself."""
        missing = sequence.table.num_missing(sequence.num_computed + 1)
        while missing and min(self._unreserved()) < missing:
            victim = self.running[-1]
            self._preempt(victim)
            if victim is sequence:
                return False
        sequence.table.grow(sequence.num_computed + 1)
        return True

    def _admit(self) -> None:
        """Start waiting sequences while rows and blocks last; never more than one step can begin."""
        pending = sum(1 for s in self.running if s.num_to_prefill)
        while self._free_rows and pending < self._max_segments:
            sequence = self.waiting.first()
            if sequence is None:
                return
            # A token that was computed before has no logits now.
            is_scoring = sequence.logprobs.is_scoring
            cached = 0 if is_scoring else sequence.table.match(sequence.token_ids)
            needed = sequence.table.num_needed(len(sequence.token_ids) + 1)
            if any(n > free for n, free in zip(needed, self._unreserved(), strict=True)):
                sequence.table.clear()
                return
            self.waiting.remove(sequence)
            self._start(sequence, cached)
            pending += 1

    def _start(self, sequence: Sequence, cached: int) -> None:
        sequence.start_len = len(sequence.token_ids)
        sequence.num_computed = cached
        if not sequence.has_started:
            self._num_started += 1
            sequence.turn = self._num_started
            sequence.num_cached = cached
            # At once, or all that start in this step could be one key's.
            self.waiting.charge(sequence.request.fair_key, sequence.num_to_prefill)
        sequence.status = Status.RUNNING
        sequence.row = self._free_rows.pop()
        bisect.insort(self.running, sequence, key=lambda s: s.order)

    def _prefill_segments(self, num_rows: int) -> tuple[list[PrefillSegment], PrefillShape]:
        candidates = [s for s in self.running if s.num_to_prefill][: self._max_segments]
        for sequence in candidates:
            self._catch_up(sequence)
        budget = self._config.max_step_tokens or sys.maxsize
        most = self._most_tokens(candidates, num_rows)
        waiting = _within(budget - num_rows, most)
        if not waiting:
            return [], NO_PREFILL
        shape = self._config.ladder.choose_prefill(waiting, self._config.prefill_overhead_tokens)
        room = min(shape.tokens, budget - num_rows)
        segments: list[PrefillSegment] = []
        for sequence, limit in zip(candidates[: shape.segments], most, strict=False):
            if sequence.status is not Status.RUNNING:
                continue
            # What those before it compute in this very step counts too.
            self._catch_up(sequence)
            length = min(sequence.num_to_prefill, limit, shape.segment_len, room)
            if length and self._make_room_ahead(sequence, length):
                room -= length
                segments.append(self._segment(sequence, length))
        return segments, shape if segments else NO_PREFILL

    def _make_room_ahead(self, sequence: Sequence, length: int) -> bool:
        """Room for the next tokens of a prompt; False if it has to wait for it.

        It was reserved, but a window gives blocks back only as far as nobody else shares them. Then those
        give way that come later in order and have nothing in this step.
        """
        sequence.table.release_behind(sequence.num_computed)
        missing = sequence.table.num_missing(sequence.num_computed + length)
        while missing > min(group.pool.num_free for group in self._cache.groups):
            later = [s for s in self.running if s.num_to_prefill and s.order > sequence.order]
            if not later:
                return False
            self._preempt(later[-1])
        return True

    def _segment(self, sequence: Sequence, length: int) -> PrefillSegment:
        start, is_last = sequence.num_computed, length == sequence.num_to_prefill
        sequence.table.grow(start + length)
        sequence.num_computed += length
        sequence.num_in_flight += is_last
        sequence.table.publish(sequence.token_ids, sequence.num_computed)
        scores = sequence.logprobs.is_scoring
        return PrefillSegment(sequence, sequence.epoch, start, length, is_last, scores)

    def _most_tokens(self, candidates: list[Sequence], num_rows: int) -> list[int]:
        """What each may compute: scored tokens need logits, and there are few beside one a segment."""
        free = self._config.ladder.max_rows - num_rows + SEGMENT_SAMPLES - len(candidates)
        most = []
        for sequence in candidates:
            num_tokens = sequence.num_to_prefill
            if sequence.logprobs.is_scoring:
                num_tokens = min(num_tokens, free + 1)
                free -= num_tokens - 1
            most.append(num_tokens)
        return most

    def _catch_up(self, sequence: Sequence) -> None:
        if sequence.logprobs.is_scoring:
            return
        before = sequence.num_computed
        sequence.num_computed = sequence.table.catch_up(sequence.token_ids, before)
        gained = sequence.num_computed - before
        if sequence.epoch == 0:
            self.waiting.charge(sequence.request.fair_key, -gained)
            if sequence.num_cached == before:
                # Nothing was computed for it yet.
                sequence.num_cached = sequence.num_computed

    def _preempt(self, sequence: Sequence) -> None:
        self._give_back(sequence)
        self.running.remove(sequence)
        sequence.status = Status.PREEMPTED
        sequence.epoch += 1
        sequence.num_computed = sequence.num_in_flight = sequence.start_len = 0
        self.num_preemptions += 1
        self.add(sequence)

    def _give_back(self, sequence: Sequence) -> None:
        self._free_rows.append(sequence.row)
        sequence.row = -1
        sequence.table.clear()


def _within(budget: int, waiting: list[int]) -> list[int]:
    """The part of the waiting tokens of each sequence, in order, that a budget allows."""
    allowed = []
    for num_tokens in waiting:
        if budget <= 0:
            break
        allowed.append(min(num_tokens, budget))
        budget -= allowed[-1]
    return allowed
