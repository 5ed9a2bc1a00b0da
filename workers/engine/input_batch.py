"""A step plan as one packed int32 array: one upload a step instead of a dozen.

The same layout packs on the host (numpy) and unpacks inside the traced program (slices at constant
offsets), so the two cannot drift apart:

    [ row_slots R | row_positions R | row_blocks R·n | segment_tokens P·L | segment_starts P | … ]

Padding rows and tokens point at block 0 and at the trash row, which nothing reads.
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


@dataclass(frozen=True)
class BatchLayout:
    """Names, offsets and shapes of a bucket's packed inputs, all int32."""

    bucket: Bucket
    block_len: int
    trash_row: int

    @cached_property
    def shapes(self) -> Mapping[str, Shape]:
        rows, prefill = self.bucket.rows, self.bucket.prefill
        blocks = self.bucket.context // self.block_len
        return {
            "row_slots": (rows,),
            "row_positions": (rows,),
            "row_blocks": (rows, blocks),
            "segment_tokens": (prefill.segments, prefill.segment_len),
            "segment_starts": (prefill.segments,),
            "segment_lens": (prefill.segments,),
            "segment_blocks": (prefill.segments, blocks),
            # Where each sampled token goes; only a finished prefill and a decode row have a place.
            "sample_slots": (self.bucket.num_samples,),
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

    def pack(self, plan: StepPlan) -> NDArray[np.int32]:
        """[size] int32."""
        packed = np.zeros(self.size, np.int32)
        fields = {
            name: packed[start:end].reshape(self.shapes[name])
            for name, (start, end) in self.offsets.items()
        }
        fields["row_slots"][:] = self.trash_row
        fields["sample_slots"][:] = self.trash_row
        for index, row in enumerate(plan.rows):
            self._pack_row(fields, index, row)
        for index, segment in enumerate(plan.segments):
            self._pack_segment(fields, index, segment)
        return packed

    def _pack_row(
        self, fields: Mapping[str, NDArray[np.int32]], index: int, row: DecodeRow
    ) -> None:
        sequence = row.sequence
        fields["row_slots"][index] = sequence.row
        fields["row_positions"][index] = row.position
        blocks = sequence.table.blocks
        fields["row_blocks"][index, : len(blocks)] = blocks
        fields["sample_slots"][index] = sequence.row

    def _pack_segment(
        self, fields: Mapping[str, NDArray[np.int32]], index: int, segment: PrefillSegment
    ) -> None:
        sequence, end = segment.sequence, segment.start + segment.length
        fields["segment_tokens"][index, : segment.length] = sequence.token_ids[segment.start : end]
        fields["segment_starts"][index] = segment.start
        fields["segment_lens"][index] = segment.length
        # A long prompt holds blocks beyond what this bucket looks at.
        blocks = sequence.table.blocks[: fields["segment_blocks"].shape[1]]
        fields["segment_blocks"][index, : len(blocks)] = blocks
        if segment.samples:
            fields["sample_slots"][self.bucket.rows + index] = sequence.row


def pack_sampling(plan: StepPlan) -> NDArray[np.int32]:
    """[num_samples, 6] int32: temperature, top_p and min_p as float bits, top_k, seed, position.

    Rows that are padding or greedy have temperature 0.
    """
    packed = np.zeros((plan.bucket.num_samples, 6), np.int32)
    floats = packed.view(np.float32)
    samples = [(i, row.sequence, row.position + 1) for i, row in enumerate(plan.rows)]
    samples += [
        (plan.bucket.rows + i, segment.sequence, segment.start + segment.length)
        for i, segment in enumerate(plan.segments)
        if segment.samples
    ]
    for index, sequence, position in samples:
        sampling = sequence.request.sampling
        floats[index, :3] = sampling.temperature, sampling.top_p, sampling.min_p
        packed[index, 3:] = sampling.top_k, np.uint32(sequence.seed).view(np.int32), position
    return packed
