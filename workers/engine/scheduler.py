"""Who computes what in the next step. Plain Python; the device is not known here.

Each step takes one token of every decoding sequence, and beside them prefill segments of sequences that
are not decoding yet, in order of priority and arrival. A sequence starts when a row is free and its
tokens have room in the KV cache. If a decoding sequence needs a block and none is free, the last one in
order is preempted: it gives its blocks back and computes its tokens again later. The first in order is
never preempted for another, so the engine always moves on.
"""

import bisect
from dataclasses import dataclass

from torchtpu.buckets import NO_PREFILL, BucketLadder, PrefillShape
from workers.engine.kv_cache import BlockPool
from workers.engine.outputs import DecodeRow, PrefillSegment, StepPlan
from workers.engine.request import Sequence, Status


@dataclass(frozen=True)
class SchedulerConfig:
    ladder: BucketLadder
    prefill_overhead_tokens: int = 64
    """What a step costs beside its prefill tokens, in tokens: weighs few against many segments."""


class Scheduler:
    """Owns the waiting and the running sequences, their rows and their blocks."""

    def __init__(self, config: SchedulerConfig, pool: BlockPool) -> None:
        self._config = config
        self._pool = pool
        self._free_rows = list(reversed(range(config.ladder.max_rows)))
        self._max_segments = max(shape.segments for shape in config.ladder.prefill)
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.num_preemptions = 0

    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, sequence: Sequence) -> None:
        bisect.insort(self.waiting, sequence, key=lambda s: s.order)

    def remove(self, sequence: Sequence) -> None:
        """Finish or abort: its row and blocks are free for the next step."""
        if sequence.status is Status.RUNNING:
            self._give_back(sequence)
            self.running.remove(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
        sequence.status = Status.FINISHED

    def schedule(self) -> StepPlan | None:
        """The next step, or None if nothing can run now (all wait for results in flight).

        Marks the scheduled tokens as computed: dispatch the plan, or `preempt_all` if that fails.
        """
        rows = self._decode_rows()
        self._admit()
        candidates = [s for s in self.running if s.num_to_prefill][: self._max_segments]
        segments, shape = self._prefill_segments(candidates)
        if not rows and not segments:
            return None
        reach = [row.position + 1 for row in rows] + [s.start + s.length for s in segments]
        bucket = self._config.ladder.choose(len(rows), max(reach), shape)
        return StepPlan(bucket, rows, segments)

    def preempt_all(self) -> None:
        """The device lost the cache: every running sequence starts again from its tokens."""
        for sequence in list(self.running):
            self._preempt(sequence)
        self._pool.forget_all()

    def check_integrity(self) -> None:
        """Raise AssertionError if blocks or rows are lost or held twice; for idle moments and tests."""
        held: dict[int, int] = {}
        for sequence in self.running:
            for block in sequence.table.blocks:
                held[block] = held.get(block, 0) + 1
        self._pool.check(held)
        rows = sorted([s.row for s in self.running] + self._free_rows)
        assert rows == list(range(self._config.ladder.max_rows)), "rows are lost"
        assert all(not s.table.blocks for s in self.waiting), "a waiting sequence holds blocks"

    def _decode_rows(self) -> list[DecodeRow]:
        rows: list[DecodeRow] = []
        for sequence in list(self.running):
            if not (sequence.is_decoding and sequence.may_generate):
                continue
            if not self._make_room(sequence):
                continue
            rows.append(DecodeRow(sequence, sequence.epoch, sequence.num_computed))
            sequence.num_computed += 1
            sequence.num_in_flight += 1
        return rows

    def _make_room(self, sequence: Sequence) -> bool:
        """Room for one more token, taken from the last in order if need be; False if that is itself."""
        while sequence.table.num_missing(sequence.num_computed + 1) > self._pool.num_free:
            victim = self.running[-1]
            self._preempt(victim)
            if victim is sequence:
                return False
        sequence.table.grow(sequence.num_computed + 1)
        return True

    def _admit(self) -> None:
        """Start waiting sequences while rows and blocks last; never more than one step can begin."""
        pending = sum(1 for s in self.running if s.num_to_prefill)
        while self.waiting and self._free_rows and pending < self._max_segments:
            sequence = self.waiting[0]
            cached = sequence.table.match(sequence.token_ids)
            if sequence.table.num_missing(len(sequence.token_ids) + 1) > self._pool.num_free:
                sequence.table.clear()
                return
            sequence.table.grow(len(sequence.token_ids))
            del self.waiting[0]
            sequence.status = Status.RUNNING
            sequence.row = self._free_rows.pop()
            sequence.start_len = len(sequence.token_ids)
            sequence.num_computed = cached
            if sequence.epoch == 0:
                sequence.num_cached = cached
            bisect.insort(self.running, sequence, key=lambda s: s.order)
            pending += 1

    def _prefill_segments(
        self, candidates: list[Sequence]
    ) -> tuple[list[PrefillSegment], PrefillShape]:
        if not candidates:
            return [], NO_PREFILL
        shape = self._config.ladder.choose_prefill(
            [s.num_to_prefill for s in candidates], self._config.prefill_overhead_tokens
        )
        segments = []
        lengths = shape.cut([s.num_to_prefill for s in candidates])
        for sequence, length in zip(candidates, lengths, strict=False):
            last = length == sequence.num_to_prefill
            start = sequence.num_computed
            segments.append(PrefillSegment(sequence, sequence.epoch, start, length, samples=last))
            sequence.num_computed += length
            sequence.num_in_flight += last
            sequence.table.publish(sequence.token_ids, sequence.num_computed)
        return segments, shape

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
