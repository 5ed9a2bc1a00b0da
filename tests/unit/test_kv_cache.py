"""Protects the books of the KV cache: no block is lost or given twice, a shared block holds exactly the
tokens that its reader expects, and at least one token of a prompt is always left to compute."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from workers.engine.kv_cache import (
    TRASH,
    BlockPool,
    BlockTable,
    CacheGroup,
    KVCache,
    hash_block,
    most_held,
)

BLOCK_LEN = 4
NUM_BLOCKS = 12


def new_table(pool: BlockPool, salt: bytes = b"") -> BlockTable:
    return BlockTable(KVCache([CacheGroup(pool)], BLOCK_LEN, max_chunk=8), salt)


def filled(pool: BlockPool, tokens: list[int], salt: bytes = b"") -> BlockTable:
    """A table whose tokens are all computed."""
    table = new_table(pool, salt)
    table.match(tokens)
    table.grow(len(tokens))
    table.publish(tokens, len(tokens))
    return table


def test_a_pool_needs_a_block_beside_the_trash():
    with pytest.raises(ValueError, match="at least one block"):
        BlockPool(1)


def test_the_trash_block_is_never_given():
    pool = BlockPool(4)
    assert sorted(pool.allocate() for _ in range(3)) == [1, 2, 3]
    with pytest.raises(IndexError):
        pool.allocate()


def test_usage_is_the_share_of_held_blocks():
    pool = BlockPool(5)
    assert pool.usage == 0
    block = pool.allocate()
    assert pool.usage == 0.25
    pool.release(block)
    assert pool.usage == 0


def test_a_prefix_is_found_while_held_and_after():
    pool, tokens = BlockPool(NUM_BLOCKS), list(range(10))
    first = filled(pool, tokens)
    second = new_table(pool)
    assert second.match([*range(8), 77, 78]) == 8
    assert second.blocks[0] == first.blocks[0][:2]
    first.clear()
    second.clear()
    third = new_table(pool)
    assert third.match(tokens) == 8


@pytest.mark.parametrize("length", range(1, 14))
def test_the_last_token_is_never_taken_from_the_cache(length: int):
    pool, tokens = BlockPool(NUM_BLOCKS), list(range(length))
    filled(pool, tokens)
    assert new_table(pool).match(tokens) == (length - 1) // BLOCK_LEN * BLOCK_LEN


def test_equal_tokens_after_unequal_ones_are_not_the_same():
    pool = BlockPool(NUM_BLOCKS)
    filled(pool, [1, 1, 1, 1, 5, 5, 5, 5, 9])
    assert new_table(pool).match([2, 2, 2, 2, 5, 5, 5, 5, 9]) == 0
    assert hash_block(b"a", [5]) != hash_block(b"b", [5])


def test_tenants_with_other_salts_share_nothing():
    pool, tokens = BlockPool(NUM_BLOCKS), list(range(9))
    filled(pool, tokens, b"one")
    assert new_table(pool, b"two").match(tokens) == 0
    assert new_table(pool, b"one").match(tokens) == 8


def test_only_full_blocks_of_known_tokens_are_named():
    pool, tokens = BlockPool(NUM_BLOCKS), list(range(9))
    table = new_table(pool)
    table.grow(9)
    table.publish(tokens, 7)
    assert new_table(pool).match(tokens) == 4
    table.publish(tokens[:6], 9)
    assert new_table(pool).match(tokens) == 4


def test_the_least_recently_freed_name_is_evicted_first_and_ends_before_beginnings():
    pool = BlockPool(5)
    old, new = filled(pool, [1] * 8), filled(pool, [2] * 8)
    old.clear()
    new.clear()
    for _ in range(2):
        pool.allocate()
    assert new_table(pool).match([1] * 9) == 0
    kept = new_table(pool)
    assert kept.match([2] * 9) == 8
    kept.clear()
    pool.allocate()
    assert new_table(pool).match([2] * 9) == 4


def test_blocks_without_a_name_are_used_up_first():
    pool = BlockPool(4)
    named = filled(pool, [1] * 4)
    nameless = pool.allocate()
    named.clear()
    pool.release(nameless)
    pool.allocate()
    pool.allocate()
    assert new_table(pool).match([1] * 5) == 4


def test_a_lost_cache_has_nothing_to_find():
    pool, tokens = BlockPool(NUM_BLOCKS), list(range(9))
    table = filled(pool, tokens)
    pool.forget_all()
    assert new_table(pool).match(tokens) == 0
    table.clear()
    pool.check({})


def test_the_check_finds_wrong_books():
    pool = BlockPool(4)
    block = pool.allocate()
    pool.check({block: 1})
    for held in ({}, {block: 2}, {block: 1, 3: 1}):
        with pytest.raises(AssertionError):
            pool.check(held)
    pool.release(block)
    with pytest.raises(AssertionError):
        pool.release(block)


WINDOW = 6
"""The token after 20 others sees positions 15 to 20: of blocks of four, the fourth and later ones."""


def windowed(full: int = NUM_BLOCKS, window: int = NUM_BLOCKS) -> KVCache:
    """Layers that see all and layers that see a window, with so many blocks each."""
    groups = [CacheGroup(BlockPool(full)), CacheGroup(BlockPool(window), WINDOW)]
    return KVCache(groups, BLOCK_LEN, max_chunk=8)


def computed(cache: KVCache, tokens: list[int]) -> BlockTable:
    """A table that has been through all its tokens, four at a time."""
    table = BlockTable(cache)
    done = table.match(tokens)
    while done < len(tokens):
        table.release_behind(done)
        done = min(done + 4, len(tokens))
        table.grow(done)
        table.publish(tokens, done)
    table.release_behind(done)
    cache.check([table])
    return table


def test_blocks_behind_a_window_come_back():
    cache = windowed()
    table = computed(cache, list(range(20)))
    full, window = table.blocks
    assert TRASH not in full
    assert window[:3] == [TRASH] * 3
    assert TRASH not in window[3:]
    assert [group.pool.num_free for group in cache.groups] == [NUM_BLOCKS - 6, NUM_BLOCKS - 3]
    table.clear()
    assert cache.usage == 0
    cache.check([])


@pytest.mark.parametrize("length", range(5, 40))
def test_a_text_never_holds_more_of_a_window_than_is_said(length: int):
    most = most_held(WINDOW, BLOCK_LEN, 8)
    cache = windowed(window=most + 1)
    computed(cache, list(range(length)))
    assert cache.num_tokens == (NUM_BLOCKS - 1) * BLOCK_LEN


def test_a_prefix_needs_of_a_window_only_what_its_next_token_sees():
    cache, tokens = windowed(), list(range(21))
    first = computed(cache, tokens[:20])
    second = BlockTable(cache)
    assert second.match(tokens) == 20
    assert second.blocks[0] == first.blocks[0]
    assert second.blocks[1] == [TRASH] * 3 + first.blocks[1][3:]
    cache.check([first, second])


def test_a_prefix_ends_where_its_window_is_lost():
    cache, tokens = windowed(), list(range(30))
    computed(cache, tokens[:12]).clear()
    computed(cache, tokens[:24]).clear()
    pool = cache.groups[1].pool
    lost = pool.find(computed(cache, tokens)._names[4])
    assert lost is not None
    pool._forget(lost)
    # Until the fifth block all is there; beyond it each token would see what is lost, up to the last one.
    found = BlockTable(cache)
    assert found.match(tokens[:24]) == 16
    found.clear()
    assert found.match(tokens) == 28


def test_where_all_layers_see_a_window_a_prefix_may_begin_with_a_gap():
    pool, tokens = BlockPool(NUM_BLOCKS), list(range(21))
    cache = KVCache([CacheGroup(pool, WINDOW)], BLOCK_LEN, max_chunk=8)
    names = computed(cache, tokens[:20])._names
    for name in names[:3]:
        pool._forget(pool.find(name))
    table = BlockTable(cache)
    assert table.match(tokens) == 20
    assert table.blocks[0][:3] == [TRASH] * 3


def test_a_shared_block_behind_a_window_stays_with_the_others():
    cache, tokens = windowed(), list(range(20))
    first = computed(cache, tokens)
    second = BlockTable(cache)
    second.match([*tokens, 1])
    second.grow(28)
    second.release_behind(28)
    assert second.blocks[1][:5] == [TRASH] * 5
    cache.check([first, second])


class Tables(RuleBasedStateMachine):
    """Tables come, grow and go at random; a model remembers which tokens each block was filled with."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS)
        self.tables: list[tuple[BlockTable, list[int]]] = []
        self.content: dict[int, tuple[int, ...]] = {}
        """Per block, all tokens from the start of the text to the block's end."""

    def write(self, table: BlockTable, tokens: list[int], start: int) -> None:
        for index in range(start // BLOCK_LEN, len(table.blocks[0])):
            self.content[table.blocks[0][index]] = tuple(tokens[: (index + 1) * BLOCK_LEN])

    # Two letters make equal beginnings likely.
    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=20))
    def start(self, tokens: list[int]) -> None:
        table = new_table(self.pool)
        cached = table.match(tokens)
        assert cached < len(tokens)
        for index, block in enumerate(table.blocks[0]):
            assert self.content[block] == tuple(tokens[: (index + 1) * BLOCK_LEN])
        if table.num_missing(len(tokens)) > self.pool.num_free:
            table.clear()
            return
        table.grow(len(tokens))
        self.write(table, tokens, cached)
        table.publish(tokens, len(tokens))
        self.tables.append((table, tokens))

    @precondition(lambda self: self.tables)
    @rule(data=st.data(), token=st.integers(0, 1))
    def append(self, data: st.DataObject, token: int) -> None:
        table, tokens = data.draw(st.sampled_from(self.tables))
        if table.num_missing(len(tokens) + 1) > self.pool.num_free:
            return
        before = len(tokens)
        tokens.append(token)
        table.grow(len(tokens))
        assert sum(table.blocks[0][-1] in other.blocks[0] for other, _ in self.tables) == 1, (
            "a block that is written to is shared"
        )
        self.write(table, tokens, before)
        table.publish(tokens, len(tokens))

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.tables) - 1))
        table, _ = self.tables.pop(index)
        table.clear()

    @rule()
    def lose_the_cache(self) -> None:
        for table, _ in self.tables:
            table.clear()
        self.tables.clear()
        self.pool.forget_all()
        self.content.clear()

    @invariant()
    def the_books_agree(self) -> None:
        held: dict[int, int] = {}
        for table, _ in self.tables:
            for block in table.blocks[0]:
                held[block] = held.get(block, 0) + 1
        self.pool.check(held)
        assert 0 not in held
        assert self.pool.num_free == NUM_BLOCKS - 1 - len(held)


TestTables = Tables.TestCase
TestTables.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
