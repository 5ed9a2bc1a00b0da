"""Protects how many blocks each kind of layer gets: all rows' contexts if memory allows it, one at least, and
for layers that see a window what windows hold."""

from dataclasses import dataclass

import pytest

from torchtpu.buckets import BucketLadder, PrefillShape
from workers.engine.cache_plan import (
    REMEMBERED,
    CachePlan,
    given_sizes,
    group_layers,
    max_chunk,
    pool_sizes,
)
from workers.engine.kv_cache import most_held

BLOCK_LEN, CONTEXT, ROWS, CHUNK = 16, 1024, 8, 64
LADDER = BucketLadder(
    rows=(ROWS,),
    mixed_rows=(ROWS,),
    prefill=(PrefillShape(128, 4, 32), PrefillShape(64, 1, CHUNK)),
    contexts=(CONTEXT,),
    mixed_contexts=(CONTEXT,),
)
WHOLE = CONTEXT // BLOCK_LEN


@dataclass
class Layer:
    window: int | None = None


def groups_of(*windows: int | None):
    return group_layers([Layer(window) for window in windows], LADDER, BLOCK_LEN)


def test_layers_that_see_everything_are_one_group():
    (group,) = groups_of(None, None, None)
    assert (group.window, group.layers) == (None, (0, 1, 2))
    assert (group.least, group.most) == (WHOLE, ROWS * WHOLE)


def test_layers_with_a_window_have_a_group_for_each_length():
    whole, wide, narrow = groups_of(128, None, 32, 128)
    assert [g.window for g in (whole, wide, narrow)] == [None, 128, 32]
    assert [g.layers for g in (whole, wide, narrow)] == [(1,), (0, 3), (2,)]
    held = most_held(128, BLOCK_LEN, CHUNK)
    assert (wide.least, wide.most) == (held, REMEMBERED * held * ROWS)


@pytest.mark.parametrize("window", [CONTEXT - CHUNK, CONTEXT, 10 * CONTEXT])
def test_a_window_that_holds_about_the_whole_context_is_none(window: int):
    (group,) = groups_of(window, None)
    assert (group.window, group.layers, group.least) == (None, (0, 1), WHOLE)


def test_a_model_may_see_windows_alone():
    (group,) = groups_of(64, 64)
    assert group.window == 64


def test_all_rows_have_room_if_memory_allows_it():
    groups = groups_of(None, 64)
    sizes = pool_sizes(groups, [100, 100], 10**9, ROWS)
    assert sizes == (groups[0].most + 1, groups[1].most + 1)


def test_less_memory_means_fewer_whole_contexts_and_never_less_than_one():
    groups, block_bytes = groups_of(None, 64), [100, 300]
    least = sum((g.least + 1) * b for g, b in zip(groups, block_bytes, strict=True))
    assert pool_sizes(groups, block_bytes, least - 1, ROWS) is None
    for memory in range(least, 8 * least, least // 3):
        sizes = pool_sizes(groups, block_bytes, memory, ROWS)
        assert sum(n * b for n, b in zip(sizes, block_bytes, strict=True)) <= memory
        assert all(n > group.least for n, group in zip(sizes, groups, strict=True))
        assert (sizes[0] - 1) % WHOLE == 0


def test_a_chosen_number_of_blocks_is_for_whole_contexts():
    groups = groups_of(None, 64)
    assert given_sizes(groups, 70) == (71, min(70, groups[1].most) + 1)
    assert given_sizes(groups, 10_000) == (10_001, groups[1].most + 1)
    small = groups_of(None, 512)
    assert given_sizes(small, WHOLE)[1] > small[1].least


def test_a_plan_says_where_each_layer_s_blocks_are():
    groups = groups_of(64, None, 64)
    plan = CachePlan(BLOCK_LEN, max_chunk(LADDER), groups, (100, 20))
    assert plan.layer_groups == [1, 0, 1]
    cache = plan.new_cache()
    assert [(g.pool.num_blocks, g.window) for g in cache.groups] == [(100, None), (20, 64)]
    assert (cache.block_len, cache.max_chunk, cache.num_blocks) == (BLOCK_LEN, CHUNK, 99)
