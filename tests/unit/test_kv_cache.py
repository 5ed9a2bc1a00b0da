"""Protects the books of the KV cache: no block is lost or given twice, a shared block holds exactly the
tokens that its reader expects, and at least one token of a prompt is always left to compute."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from workers.engine.kv_cache import BlockPool, BlockTable, hash_block

BLOCK_LEN = 4
NUM_BLOCKS = 12


def filled(pool: BlockPool, tokens: list[int], salt: bytes = b"") -> BlockTable:
    """A table whose tokens are all computed."""
    table = BlockTable(pool, BLOCK_LEN, salt)
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
    second = BlockTable(pool, BLOCK_LEN)
    assert second.match([*range(8), 77, 78]) == 8
    assert second.blocks == first.blocks[:2]
    first.clear()
    second.clear()
    third = BlockTable(pool, BLOCK_LEN)
    assert third.match(tokens) == 8


@pytest.mark.parametrize("length", range(1, 14))
def test_the_last_token_is_never_taken_from_the_cache(length: int):
    pool, tokens = BlockPool(NUM_BLOCKS), list(range(length))
    filled(pool, tokens)
    assert BlockTable(pool, BLOCK_LEN).match(tokens) == (length - 1) // BLOCK_LEN * BLOCK_LEN


def test_equal_tokens_after_unequal_ones_are_not_the_same():
    pool = BlockPool(NUM_BLOCKS)
    filled(pool, [1, 1, 1, 1, 5, 5, 5, 5, 9])
    assert BlockTable(pool, BLOCK_LEN).match([2, 2, 2, 2, 5, 5, 5, 5, 9]) == 0
    assert hash_block(b"a", [5]) != hash_block(b"b", [5])


def test_tenants_with_other_salts_share_nothing():
    pool, tokens = BlockPool(NUM_BLOCKS), list(range(9))
    filled(pool, tokens, b"one")
    assert BlockTable(pool, BLOCK_LEN, b"two").match(tokens) == 0
    assert BlockTable(pool, BLOCK_LEN, b"one").match(tokens) == 8


def test_only_full_blocks_of_known_tokens_are_named():
    pool, tokens = BlockPool(NUM_BLOCKS), list(range(9))
    table = BlockTable(pool, BLOCK_LEN)
    table.grow(9)
    table.publish(tokens, 7)
    assert BlockTable(pool, BLOCK_LEN).match(tokens) == 4
    table.publish(tokens[:6], 9)
    assert BlockTable(pool, BLOCK_LEN).match(tokens) == 4


def test_the_least_recently_freed_name_is_evicted_first_and_ends_before_beginnings():
    pool = BlockPool(5)
    old, new = filled(pool, [1] * 8), filled(pool, [2] * 8)
    old.clear()
    new.clear()
    for _ in range(2):
        pool.allocate()
    assert BlockTable(pool, BLOCK_LEN).match([1] * 9) == 0
    kept = BlockTable(pool, BLOCK_LEN)
    assert kept.match([2] * 9) == 8
    kept.clear()
    pool.allocate()
    assert BlockTable(pool, BLOCK_LEN).match([2] * 9) == 4


def test_blocks_without_a_name_are_used_up_first():
    pool = BlockPool(4)
    named = filled(pool, [1] * 4)
    nameless = pool.allocate()
    named.clear()
    pool.release(nameless)
    pool.allocate()
    pool.allocate()
    assert BlockTable(pool, BLOCK_LEN).match([1] * 5) == 4


def test_a_lost_cache_has_nothing_to_find():
    pool, tokens = BlockPool(NUM_BLOCKS), list(range(9))
    table = filled(pool, tokens)
    pool.forget_all()
    assert BlockTable(pool, BLOCK_LEN).match(tokens) == 0
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


class Tables(RuleBasedStateMachine):
    """Tables come, grow and go at random; a model remembers which tokens each block was filled with."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS)
        self.tables: list[tuple[BlockTable, list[int]]] = []
        self.content: dict[int, tuple[int, ...]] = {}
        """Per block, all tokens from the start of the text to the block's end."""

    def write(self, table: BlockTable, tokens: list[int], start: int) -> None:
        for index in range(start // BLOCK_LEN, len(table.blocks)):
            self.content[table.blocks[index]] = tuple(tokens[: (index + 1) * BLOCK_LEN])

    # Two letters make equal beginnings likely.
    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=20))
    def start(self, tokens: list[int]) -> None:
        table = BlockTable(self.pool, BLOCK_LEN)
        cached = table.match(tokens)
        assert cached < len(tokens)
        for index, block in enumerate(table.blocks):
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
        assert sum(table.blocks[-1] in other.blocks for other, _ in self.tables) == 1, (
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
            for block in table.blocks:
                held[block] = held.get(block, 0) + 1
        self.pool.check(held)
        assert 0 not in held
        assert self.pool.num_free == NUM_BLOCKS - 1 - len(held)


TestTables = Tables.TestCase
TestTables.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
