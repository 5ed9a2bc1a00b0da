"""Protects the one array that a step uploads: every field at its place, padding where nothing reads it."""

import math
from itertools import pairwise

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from torchtpu.buckets import NO_PREFILL, Bucket, PrefillShape
from workers.engine.input_batch import BatchLayout
from workers.engine.kv_cache import BlockPool, BlockTable, CacheGroup, KVCache
from workers.engine.output_processor import BytesDetokenizer, ChoiceOutput
from workers.engine.outputs import DecodeRow, PrefillSegment, StepPlan
from workers.engine.request import Sequence, fold_seed
from workers.protocol import GenerateRequest, SamplingParams

BLOCK_LEN = 4
TRASH_ROW = 99
BUCKET = Bucket(rows=3, context=16, prefill=PrefillShape(7, 2, 4))


def sequence(row: int, tokens: list[int], seed: int = 0, **sampling: object) -> Sequence:
    params = SamplingParams(**{"max_tokens": 5, **sampling})
    request = GenerateRequest(
        request_id="r", model="m", reply_to="x", prompt_token_ids=tokens, sampling=params
    )
    table = BlockTable(KVCache([CacheGroup(BlockPool(20))], BLOCK_LEN, max_chunk=8))
    table.grow(len(tokens))
    output = ChoiceOutput(params, BytesDetokenizer(()), frozenset(), 5)
    return Sequence(request, 0, seed, output, table, tokens, arrival=1, row=row)


def unpack(bucket: Bucket, plan: StepPlan) -> dict[str, list[object]]:
    layout = BatchLayout(bucket, BLOCK_LEN, TRASH_ROW)
    packed = layout.pack(plan)
    assert packed.dtype == np.int32
    assert packed.shape == (layout.size,)
    return {name: field.tolist() for name, field in layout.fields(packed).items()}


def test_every_field_of_a_mixed_step():
    decoding, ending, long = (
        sequence(5, [7] * 9),
        sequence(6, [1, 2, 3, 4, 5, 6]),
        sequence(7, list(range(10, 34))),
    )
    plan = StepPlan(
        BUCKET,
        [DecodeRow(decoding, 0, position=8)],
        [
            PrefillSegment(ending, 0, start=4, length=2, samples=True),
            PrefillSegment(long, 0, start=8, length=4, samples=False),
        ],
    )
    assert unpack(BUCKET, plan) == {
        "newest_rows": [5, TRASH_ROW, TRASH_ROW],
        # Three rows, two tokens of one prompt, four of the other, one of padding.
        "positions": [8, 0, 0, 4, 5, 8, 9, 10, 11, 0],
        "slots": [[12, 0, 0, 8, 9, 12, 13, 14, 15, 0]],
        # Of each row, then of each segment. The long one holds six blocks; this bucket looks at four.
        "tables": [[[1, 2, 3, 0], [0] * 4, [0] * 4, [1, 2, 0, 0], [1, 2, 3, 4]]],
        "token_tables": [0, 0, 0, 3, 3, 4, 4, 4, 4, 0],
        "prompt_tokens": [5, 6, 18, 19, 20, 21, 0],
        "grid_places": [0, 1, 4, 5, 6, 7, 0],
        "segment_firsts": [0, 2],
        # The decode row itself, and the last token of the prompt that ends.
        "sample_tokens": [0, 0, 0, 4] + [0] * 7,
        "sample_rows": [5, TRASH_ROW, TRASH_ROW, 6] + [TRASH_ROW] * 7,
    }


def test_an_empty_step_is_all_padding():
    fields = unpack(BUCKET, StepPlan(BUCKET, [], []))
    assert set(fields.pop("newest_rows")) == set(fields.pop("sample_rows")) == {TRASH_ROW}
    assert not any(np.any(value) for value in fields.values())


def test_each_group_of_layers_has_its_own_blocks_and_the_trash_behind_a_window():
    cache = KVCache([CacheGroup(BlockPool(20)), CacheGroup(BlockPool(20), window=4)], BLOCK_LEN, 8)
    row, prompt = sequence(5, [7] * 9), sequence(6, [7] * 12)
    for one in (row, prompt):
        one.table = BlockTable(cache)
        one.table.grow(len(one.token_ids))
        one.table.release_behind(8)
    plan = StepPlan(
        BUCKET, [DecodeRow(row, 0, 8)], [PrefillSegment(prompt, 0, start=8, length=4, samples=True)]
    )
    layout = BatchLayout(BUCKET, BLOCK_LEN, TRASH_ROW, num_groups=2)
    fields = layout.fields(layout.pack(plan))
    assert fields["tables"][:, 0].tolist() == [[1, 2, 3, 0], [0, 2, 3, 0]]
    assert fields["tables"][:, 3].tolist() == [[4, 5, 6, 0], [0, 4, 5, 0]]
    assert fields["slots"][:, :7].tolist() == [
        [12, 0, 0, 24, 25, 26, 27],
        [12, 0, 0, 20, 21, 22, 23],
    ]


@settings(deadline=None)
@given(
    rows=st.integers(1, 40),
    blocks=st.integers(1, 40),
    shape=st.builds(PrefillShape, st.integers(1, 99), st.integers(1, 8), st.integers(1, 64))
    | st.just(NO_PREFILL),
)
def test_fields_follow_each_other_without_gap(rows: int, blocks: int, shape: PrefillShape):
    bucket = Bucket(rows, blocks * BLOCK_LEN, shape)
    layout = BatchLayout(bucket, BLOCK_LEN, TRASH_ROW)
    spans = list(layout.offsets.values())
    assert spans[0][0] == 0
    assert all(before[1] == after[0] for before, after in pairwise(spans))
    assert spans[-1][1] == layout.size
    sizes = [math.prod(shape) for shape in layout.shapes.values()]
    assert [end - start for start, end in spans] == sizes


def test_all_64_bits_of_a_seed_count():
    low = [0, 1, 1234, 2**32 - 1]
    assert [fold_seed(seed) for seed in low] == low
    seeds = [*low, *(seed + (high << 32) for seed in low for high in (1, 2, 2**30)), -7, -(2**63)]
    folded = [fold_seed(seed) for seed in seeds]
    assert len(set(folded)) == len(seeds)
    assert all(0 <= seed < 2**32 for seed in folded)
