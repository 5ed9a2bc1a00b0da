"""A step plan as one packed int32 array: one upload a step instead of a dozen.

The same layout packs on the host (numpy) and unpacks inside the traced program (slices at constant
offsets), so the two cannot drift apart. N = R + T tokens make one flat row:

    flat row   [ R decode rows | segment 0 | segment 1 | … | padding ]      T prompt tokens
    packed     [ newest_rows R | positions N | slots N | tables (R + P)·n | token_tables N | … ]

Padding points at block 0 and at the trash row, which nothing reads.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod

import numpy as np
from numpy.typing import NDArray

from torchtpu.buckets import Bucket
from workers.engine.outputs import DecodeRow, PrefillSegment, StepPlan

Shape = tuple[int, ...]
Fields = Mapping[str, NDArray[np.int32]]


@dataclass(frozen=True)
class BatchLayout:
    """Names, offsets and shapes of a bucket's packed inputs, all int32."""

    bucket: Bucket
    block_len: int
    trash_row: int
    num_groups: int = 1
    """Of layers whose keys lie in blocks of their own (`workers.engine.kv_cache`)."""

    @cached_property
    def shapes(self) -> Mapping[str, Shape]:
        rows, prefill = self.bucket.rows, self.bucket.prefill
        blocks = self.bucket.context // self.block_len
        return {
            # Which of the newest tokens on the device each decode row takes.
            "newest_rows": (rows,),
            "positions": (self.bucket.num_tokens,),
            # Where each token's key and value go, for each group of layers.
            "slots": (self.num_groups, self.bucket.num_tokens),
            # The blocks of each row, then of each segment, and which of these a token looks at.
            "tables": (self.num_groups, rows + prefill.segments, blocks),
            "token_tables": (self.bucket.num_tokens,),
            "prompt_tokens": (prefill.tokens,),
            # Each prompt token's place in the attention grid, segment * segment_len + offset.
            "grid_places": (prefill.tokens,),
            # Where each segment begins in the run of prompt tokens.
            "segment_firsts": (prefill.segments,),
            # The tokens of the flat row that get logits, and where each sampled token goes: decode
            # rows, finished prompts, and prompt tokens that are scored, which sample nothing.
            "sample_tokens": (self.bucket.num_samples,),
            "sample_rows": (self.bucket.num_samples,),
        }

    @cached_property
    def offsets(self) -> Mapping[str, tuple[int, int]]:
        """First and one-past-last index of each field."""
        offsets, start = {}, 0
        for name, shape in self.shapes.items():
            offsets[name] = (start, start + prod(shape))
            start += prod(shape)
        return offsets

    @property
    def size(self) -> int:
        return max(end for _, end in self.offsets.values())

    def fields(self, packed: NDArray[np.int32]) -> Fields:
        """Views of `packed` [size], field by field."""
        return {
            name: packed[start:end].reshape(self.shapes[name])
            for name, (start, end) in self.offsets.items()
        }

    def pack(self, plan: StepPlan) -> NDArray[np.int32]:
        """[size] int32."""
        packed = np.zeros(self.size, np.int32)
        fields = self.fields(packed)
        fields["newest_rows"][:] = self.trash_row
        fields["sample_rows"][:] = self.trash_row
        for index, row in enumerate(plan.rows):
            self._pack_row(fields, index, row)
        first = 0
        for index, segment in enumerate(plan.segments):
            self._pack_segment(fields, index, first, segment)
            first += segment.length
        for token in plan.scored:
            fields["sample_tokens"][token.place] = self.bucket.rows + token.source
        return packed

    def _pack_row(self, fields: Fields, index: int, row: DecodeRow) -> None:
        sequence = row.sequence
        fields["newest_rows"][index] = sequence.row
        fields["positions"][index] = row.position
        block, offset = divmod(row.position, self.block_len)
        for group, blocks in enumerate(sequence.table.blocks):
            fields["slots"][group, index] = blocks[block] * self.block_len + offset
            fields["tables"][group, index, : len(blocks)] = blocks
        fields["token_tables"][index] = index
        fields["sample_tokens"][index] = index
        fields["sample_rows"][index] = sequence.row

    def _pack_segment(
        self, fields: Fields, index: int, first: int, segment: PrefillSegment
    ) -> None:
        """`first` is its place in the run of prompt tokens."""
        sequence, rows = segment.sequence, self.bucket.rows
        start, end, last = segment.start, segment.start + segment.length, first + segment.length
        positions = np.arange(start, end, dtype=np.int32)
        place = index * self.bucket.prefill.segment_len
        fields["prompt_tokens"][first:last] = sequence.token_ids[start:end]
        fields["positions"][rows + first : rows + last] = positions
        for group, held in enumerate(sequence.table.blocks):
            blocks = np.asarray(held[: fields["tables"].shape[2]], np.int32)
            fields["slots"][group, rows + first : rows + last] = (
                blocks[positions // self.block_len] * self.block_len + positions % self.block_len
            )
            fields["tables"][group, rows + index, : len(blocks)] = blocks
        fields["grid_places"][first:last] = np.arange(place, place + segment.length)
        fields["segment_firsts"][index] = first
        fields["token_tables"][rows + first : rows + last] = rows + index
        if segment.samples:
            fields["sample_tokens"][rows + index] = rows + last - 1
            fields["sample_rows"][rows + index] = sequence.row
