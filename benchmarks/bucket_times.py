"""What a step of each compiled shape costs when it is full, measured on the runner alone."""

import statistics
import time
from collections.abc import Sequence as Items
from dataclasses import dataclass

from torchtpu.buckets import Bucket
from workers.engine.engine import DETOKENIZER_CONTEXT, EngineParts
from workers.engine.kv_cache import BlockTable, KVCache
from workers.engine.output_processor import ChoiceOutput, TokenizerDetokenizer
from workers.engine.outputs import DecodeRow, PrefillSegment, StepPlan
from workers.engine.request import Sequence
from workers.protocol import GenerateRequest, SamplingParams

TOKEN = 1000
"""Any word of the vocabulary: a step costs the same whatever it computes on."""


@dataclass(frozen=True)
class BucketTime:
    bucket: str
    tokens: int
    """Length of the flat row."""
    wall_ms: float
    """Median from dispatch until the tokens are read, with nothing else in flight."""
    cpu_ms: float
    """Median CPU time of all threads, the device's included where that is the CPU."""
    num_runs: int


class _FullSteps:
    """Plans that fill a bucket, over the blocks of a pool of its own."""

    def __init__(self, parts: EngineParts) -> None:
        self._parts = parts

    def plan(self, bucket: Bucket) -> StepPlan:
        """Every row at the context's last place, every segment as long and as late as possible."""
        cache, prefill = self._parts.cache.emptied(), bucket.prefill
        # Fewer requests than rows where the cache does not hold as many whole contexts.
        rows = [
            DecodeRow(sequence, sequence.epoch, bucket.context - 1)
            for index in range(bucket.rows)
            if (sequence := self._sequence(cache, bucket.context, index))
        ]
        lengths = prefill.cut([bucket.context] * prefill.segments)
        segments = [
            PrefillSegment(sequence, sequence.epoch, bucket.context - length, length, samples=True)
            for index, length in enumerate(lengths)
            if (sequence := self._sequence(cache, bucket.context, index))
        ]
        return StepPlan(bucket, rows, segments)

    def _sequence(self, cache: KVCache, context: int, row: int) -> Sequence | None:
        parts = self._parts
        table = BlockTable(cache)
        for end in range(cache.block_len, context + 1, cache.block_len):
            if min(group.pool.num_free for group in cache.groups) == 0:
                table.clear()
                return None
            table.grow(end)
            # A segment of the largest length still looks at what lies before it.
            table.release_behind(max(0, end - cache.max_chunk))
        sampling = SamplingParams(max_tokens=1, temperature=0.0)
        tokens = [TOKEN] * context
        request = GenerateRequest(
            request_id=str(row),
            model="benchmark",
            reply_to="nobody",
            prompt_token_ids=tokens,
            sampling=sampling,
        )
        detokenizer = TokenizerDetokenizer(
            parts.tokenizer, tokens[-DETOKENIZER_CONTEXT:], skip_special_tokens=True
        )
        output = ChoiceOutput(sampling, detokenizer, frozenset(), 1)
        return Sequence(
            request=request,
            choice=0,
            seed=0,
            output=output,
            table=table,
            token_ids=tokens,
            arrival=row,
            row=row,
        )


def measure_buckets(parts: EngineParts, buckets: Items[Bucket], num_runs: int) -> list[BucketTime]:
    """Each bucket `num_runs` times after one run to warm up. The engine must be empty."""
    steps = _FullSteps(parts)
    times = []
    for bucket in buckets:
        plan = steps.plan(bucket)
        parts.runner.dispatch(plan).collect()
        walls, cpus = [], []
        for _ in range(num_runs):
            wall, cpu = time.perf_counter(), time.process_time()
            parts.runner.dispatch(plan).collect()
            walls.append(time.perf_counter() - wall)
            cpus.append(time.process_time() - cpu)
        times.append(
            BucketTime(
                bucket=bucket.name,
                tokens=bucket.num_tokens,
                wall_ms=round(statistics.median(walls) * 1e3, 1),
                cpu_ms=round(statistics.median(cpus) * 1e3, 1),
                num_runs=num_runs,
            )
        )
    return times
