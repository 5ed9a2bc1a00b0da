"""Protects the choice of compiled shapes: whatever fits gets the smallest bucket that holds it, and every
bucket that can be chosen is one of those that were compiled."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchtpu.buckets import (
    MIN_ROWS,
    NO_PREFILL,
    SEGMENT_SAMPLES,
    Bucket,
    BucketLadder,
    PrefillShape,
    default_ladder,
)

LADDER = BucketLadder(
    rows=(8, 16),
    mixed_rows=(16,),
    prefill=(PrefillShape(64, 4, 16), PrefillShape(64, 1, 64), PrefillShape(24, 2, 16)),
    contexts=(32, 64, 128),
    mixed_contexts=(32, 128),
)


@pytest.mark.parametrize(
    ("num_rows", "context", "prefill", "expected"),
    [
        (1, 1, NO_PREFILL, Bucket(8, 32)),
        (8, 32, NO_PREFILL, Bucket(8, 32)),
        (9, 33, NO_PREFILL, Bucket(16, 64)),
        (16, 128, NO_PREFILL, Bucket(16, 128)),
        (0, 16, PrefillShape(64, 4, 16), Bucket(16, 32, PrefillShape(64, 4, 16))),
        # The segment itself must fit into the context, however short its tokens reach.
        (3, 5, PrefillShape(64, 1, 64), Bucket(16, 128, PrefillShape(64, 1, 64))),
    ],
)
def test_the_smallest_bucket_that_holds_the_work(
    num_rows: int, context: int, prefill: PrefillShape, expected: Bucket
):
    assert LADDER.choose(num_rows, context, prefill) == expected


@pytest.mark.parametrize(("num_rows", "context"), [(17, 1), (1, 129)])
def test_work_beyond_the_ladder_is_refused(num_rows: int, context: int):
    with pytest.raises(ValueError, match="no bucket holds"):
        LADDER.choose(num_rows, context)


def test_every_bucket_is_listed_once_and_cheap_ones_come_first():
    buckets = LADDER.buckets
    # 2·3 for decode; 2 contexts of 3 shapes, less the one whose segment is longer than its context.
    assert len(buckets) == len(set(buckets)) == 6 + 5
    sizes = [bucket.num_tokens for bucket in buckets]
    assert sizes == sorted(sizes)


def test_names_are_distinct():
    assert len({bucket.name for bucket in LADDER.buckets}) == len(LADDER.buckets)


def test_a_bucket_counts_its_tokens_and_samples():
    bucket = Bucket(16, 128, PrefillShape(64, 4, 16))
    assert (bucket.num_tokens, bucket.num_samples) == (80, 16 + SEGMENT_SAMPLES)
    assert (Bucket(16, 128).num_tokens, Bucket(16, 128).num_samples) == (16, 16)


@pytest.mark.parametrize(
    ("waiting", "expected"),
    [
        ([10, 12, 9, 14], PrefillShape(64, 4, 16)),
        ([200], PrefillShape(64, 1, 64)),
        ([64, 5], PrefillShape(64, 1, 64)),
        ([16, 16, 16, 16], PrefillShape(64, 4, 16)),
        ([10, 12], PrefillShape(24, 2, 16)),
    ],
)
def test_prefill_takes_the_shape_with_most_useful_tokens(
    waiting: list[int], expected: PrefillShape
):
    assert LADDER.choose_prefill(waiting, overhead_tokens=16) == expected


@pytest.mark.parametrize(
    ("waiting", "lengths"),
    [
        ([10, 12], [10, 12]),
        ([10, 16], [10, 14]),
        ([40, 3], [16, 3]),
        ([16, 8, 5], [16, 8]),
        ([16, 16, 16], [16, 8]),
        ([], []),
    ],
)
def test_a_run_is_cut_in_order_until_it_is_full(waiting: list[int], lengths: list[int]):
    assert PrefillShape(24, 2, 16).cut(waiting) == lengths


@pytest.mark.parametrize(
    "fields",
    [
        {"rows": ()},
        {"rows": (16, 8)},
        {"contexts": (32, 32, 128)},
        {"mixed_rows": (8,)},
        {"mixed_contexts": (32, 64)},
        {"prefill": ()},
        {"prefill": (PrefillShape(64, SEGMENT_SAMPLES + 1, 16),)},
    ],
)
def test_a_ladder_that_makes_no_sense_is_refused(fields: dict[str, object]):
    sound = {name: getattr(LADDER, name) for name in BucketLadder.__dataclass_fields__}
    with pytest.raises(ValueError):  # noqa: PT011 -- the sentence names the field
        BucketLadder(**{**sound, **fields})


@settings(deadline=None)
@given(
    max_rows=st.integers(1, 300),
    context_len=st.integers(1, 9000),
    waiting=st.lists(st.integers(1, 9000), min_size=1, max_size=10),
    data=st.data(),
)
def test_a_default_ladder_has_a_compiled_bucket_for_all_that_it_admits(
    max_rows: int, context_len: int, waiting: list[int], data: st.DataObject
):
    ladder = default_ladder(max_rows, context_len)
    assert ladder.max_rows >= max_rows
    assert ladder.max_context >= context_len
    assert all(rows % MIN_ROWS == 0 for rows in (*ladder.rows, *ladder.mixed_rows))
    shape = data.draw(st.sampled_from([NO_PREFILL, ladder.choose_prefill(waiting, 64)]))
    num_rows = data.draw(st.integers(0, ladder.max_rows))
    reach = data.draw(st.integers(1, ladder.max_context))
    bucket = ladder.choose(num_rows, reach, shape)
    assert bucket in ladder.buckets
    assert bucket.rows >= num_rows
    assert bucket.context >= max(reach, shape.segment_len)
