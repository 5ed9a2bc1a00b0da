"""Blocks of the KV cache: who holds which, and which prefixes they spell. Plain Python.

The cache is one pool of blocks of `block_len` tokens. A full block of known tokens is named by a hash
that chains its tokens to all tokens before it, so equal prefixes have equal names and are computed
once. A block that nobody holds keeps its name until it is needed again, least recently used first:

    pool     [ trash | A:held by 2 | B:held by 1 | C:free, still named | D:free ]
    free     D, C                     allocate takes D, then evicts C
    names    hash(prompt 0-15) -> A,  hash(A, prompt 16-31) -> B, …

Layers that see a sliding window have a pool of their own (`CacheGroup`): there a text keeps only the blocks
that its next token still reaches. What falls behind the window is free for others, and its place in
the text's table is taken by the trash, which the window hides:

    every key       7  3  9  4  1
    window of 32    0  0  0  6  2       the next token looks at the last two

Block 0 is the trash: padding is written there and nothing reads it. See vLLM's prefix caching and its
hybrid cache, which work alike.
"""

import hashlib
import sys
from array import array
from collections import OrderedDict
from collections.abc import Iterable
from collections.abc import Sequence as Tokens
from dataclasses import dataclass

BlockHash = bytes
TRASH = 0


def salt_of(tenant: str) -> BlockHash:
    """What the first block of a tenant's texts is named after: equal texts of others have other names."""
    return hashlib.blake2b(tenant.encode(), digest_size=16).digest()


def hash_block(parent: BlockHash, tokens: Tokens[int]) -> BlockHash:
    """The name of a full block after `parent` (the salt of the tenant for the first block)."""
    return hashlib.blake2b(array("q", tokens).tobytes(), key=parent, digest_size=16).digest()


class BlockPool:
    """Reference-counted blocks with names. Ask (`num_free`) before you act (`allocate`)."""

    def __init__(self, num_blocks: int) -> None:
        """`num_blocks` includes the trash block; raises ValueError below 2."""
        if num_blocks < 2:
            raise ValueError("a KV cache needs at least one block beside the trash")
        self.num_blocks = num_blocks
        self._holders = [0] * num_blocks
        self._names: list[BlockHash | None] = [None] * num_blocks
        self._by_name: dict[BlockHash, int] = {}
        self._free: OrderedDict[int, None] = OrderedDict((i, None) for i in range(1, num_blocks))

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def usage(self) -> float:
        """Share of blocks held by somebody, 0 … 1."""
        return 1 - self.num_free / (self.num_blocks - 1)

    def allocate(self) -> int:
        """A block of one's own; its old name is evicted. Raises IndexError if none is free."""
        if not self._free:
            raise IndexError("no free block")
        block, _ = self._free.popitem(last=False)
        self._forget(block)
        self._holders[block] = 1
        return block

    def find(self, name: BlockHash) -> int | None:
        """The block of that name, held or not; None if it is not cached."""
        return self._by_name.get(name)

    def hold(self, block: int) -> None:
        """One more holder; a free block leaves the free list and keeps its content."""
        if self._holders[block] == 0:
            del self._free[block]
        self._holders[block] += 1

    def release(self, block: int) -> None:
        """One holder less; the last one frees the block, named ones to be reused last."""
        assert self._holders[block] > 0, f"block {block} is released more often than held"
        self._holders[block] -= 1
        if self._holders[block] == 0:
            self._free[block] = None
            if self._names[block] is None:
                self._free.move_to_end(block, last=False)

    def name(self, block: int, name: BlockHash) -> None:
        """Publish a full block. If the name is taken already the block stays private."""
        if self._names[block] is None and name not in self._by_name:
            self._names[block] = name
            self._by_name[name] = block

    def forget_all(self) -> None:
        """The device lost the cache: no content can be found any more."""
        for block in list(self._by_name.values()):
            self._forget(block)

    def check(self, held: dict[int, int]) -> None:
        """Raise AssertionError unless the books agree with `held` (holders of each block in use)."""
        for block in range(1, self.num_blocks):
            holders = self._holders[block]
            assert holders == held.get(block, 0), f"block {block}: {holders} holders on the books"
            assert (holders == 0) == (block in self._free), f"block {block} is lost"
        for name, block in self._by_name.items():
            assert self._names[block] == name, f"block {block} has another name"

    def _forget(self, block: int) -> None:
        name, self._names[block] = self._names[block], None
        if name is not None:
            del self._by_name[name]


@dataclass(frozen=True)
class CacheGroup:
    """Layers that keep the same tokens of a text."""

    pool: BlockPool
    window: int | None = None
    """Keys that a token sees, its own included; None is all."""


class KVCache:
    """The blocks of all layers."""

    def __init__(self, groups: Iterable[CacheGroup], block_len: int, max_chunk: int) -> None:
        """`max_chunk` is the most tokens of one text that a step computes."""
        self.groups = tuple(groups)
        self.windows = [(i, g) for i, g in enumerate(self.groups) if g.window is not None]
        """The groups that have one, with their places."""
        self.block_len = block_len
        self.max_chunk = max_chunk

    def emptied(self, most: int = sys.maxsize) -> "KVCache":
        """An empty one over the same tensors, which uses at most so many blocks of each pool."""
        groups = [
            CacheGroup(BlockPool(min(group.pool.num_blocks - 1, most) + 1), group.window)
            for group in self.groups
        ]
        return KVCache(groups, self.block_len, self.max_chunk)

    @property
    def usage(self) -> float:
        """Share of blocks held by somebody, 0 … 1."""
        total = sum(group.pool.num_blocks - 1 for group in self.groups)
        return 1 - sum(group.pool.num_free for group in self.groups) / total

    @property
    def num_blocks(self) -> int:
        """Of the largest pool, without the trash."""
        return max(group.pool.num_blocks for group in self.groups) - 1

    @property
    def num_tokens(self) -> int:
        """The longest text that has room while it is alone."""
        return min(
            (group.pool.num_blocks - 1) * self.block_len
            if group.pool.num_blocks - 1 < self.most_held(group)
            else sys.maxsize
            for group in self.groups
        )

    def first_seen(self, group: CacheGroup, num_tokens: int) -> int:
        """Index of the first block that the token after so many others sees."""
        return (
            0 if group.window is None else max(0, num_tokens - group.window + 1) // self.block_len
        )

    def most_held(self, group: CacheGroup) -> int:
        """Blocks that one text holds at most, however long it is."""
        if group.window is None:
            return sys.maxsize
        return most_held(group.window, self.block_len, self.max_chunk)

    def forget_all(self) -> None:
        """The device lost the cache: no content can be found any more."""
        for group in self.groups:
            group.pool.forget_all()

    def check(self, tables: Iterable["BlockTable"]) -> None:
        """Raise AssertionError unless the books agree with the tables in use."""
        held: list[dict[int, int]] = [{} for _ in self.groups]
        for table in tables:
            for books, blocks in zip(held, table.blocks, strict=True):
                for block in blocks:
                    if block != TRASH:
                        books[block] = books.get(block, 0) + 1
        for group, books in zip(self.groups, held, strict=True):
            group.pool.check(books)


def most_held(window: int, block_len: int, max_chunk: int) -> int:
    """Blocks that a window reaches while a chunk of tokens is computed, wherever it begins."""
    return -(-(window - 1 + max_chunk) // block_len) + 1


class BlockTable:
    """The blocks of one sequence, and the names of the full ones among them.

    Its tokens only ever grow at their end: names that were computed once stay right.
    """

    def __init__(self, cache: KVCache, salt: bytes = b"") -> None:
        self._cache = cache
        self._salt = salt
        self.blocks: list[list[int]] = [[] for _ in cache.groups]
        """For each group a block for each `block_len` tokens, equally many; the trash behind a window."""
        self._first_held = [0] * len(cache.groups)
        self._names: list[BlockHash] = []
        self._num_named = 0
        """Blocks that were matched or published."""

    def match(self, tokens: Tokens[int]) -> int:
        """Take over the cached blocks of the longest known prefix; gives its length in tokens.

        At least one token is left to compute, because the last one's logits are needed.
        """
        assert not self.blocks[0], "a prefix is matched before anything else"
        return self.catch_up(tokens, 0)

    def catch_up(self, tokens: Tokens[int], num_computed: int) -> int:
        """Take over the blocks that others have computed since `match`; gives the new `num_computed`.

        So sequences that begin alike share their blocks even if they start in the same step.
        """
        if num_computed != self._num_named * self._cache.block_len:
            return num_computed
        found = self._find(tokens)
        self._num_named += len(found)
        num_computed += len(found) * self._cache.block_len
        for group, blocks, own in zip(
            self._cache.groups, self.blocks, zip(*found, strict=True), strict=False
        ):
            first = self._cache.first_seen(group, num_computed) - len(blocks)
            blocks += [block if place >= first else TRASH for place, block in enumerate(own)]
            for block in own[max(first, 0) :]:
                group.pool.hold(block)
        self.release_behind(num_computed)
        return num_computed

    def num_missing(self, num_tokens: int) -> int:
        """Blocks to allocate from each pool before `num_tokens` tokens have room."""
        return max(0, -(-num_tokens // self._cache.block_len) - len(self.blocks[0]))

    def num_needed(self, num_tokens: int) -> list[int]:
        """The same for each group, if what falls behind a window meanwhile is given back."""
        missing = self.num_missing(num_tokens)
        needed = []
        for group, first in zip(self._cache.groups, self._first_held, strict=True):
            held = len(self.blocks[0]) - first
            needed.append(min(missing, max(0, self._cache.most_held(group) - held)))
        return needed

    def grow(self, num_tokens: int) -> None:
        """Allocate room for `num_tokens` tokens; ask `num_missing` against each pool first."""
        for _ in range(self.num_missing(num_tokens)):
            for group, blocks in zip(self._cache.groups, self.blocks, strict=True):
                blocks.append(group.pool.allocate())

    def release_behind(self, num_tokens: int) -> None:
        """Give back what the token after `num_tokens` others, and those after it, do not see."""
        for index, group in self._cache.windows:
            blocks, first = self.blocks[index], self._first_held[index]
            end = min(self._cache.first_seen(group, num_tokens), len(blocks))
            for place in range(first, end):
                if blocks[place] != TRASH:
                    group.pool.release(blocks[place])
                    blocks[place] = TRASH
            self._first_held[index] = max(first, end)

    def publish(self, tokens: Tokens[int], num_computed: int) -> None:
        """Name the blocks that `num_computed` known tokens fill.

        A block may be named when its step is scheduled: a later step, and even another sequence of the
        same step, reads it after it was written (see `torchtpu.ops.attention`).
        """
        full = min(num_computed, len(tokens)) // self._cache.block_len
        for index in range(self._num_named, full):
            name = self._name(tokens, index)
            for group, blocks in zip(self._cache.groups, self.blocks, strict=True):
                if blocks[index] != TRASH:
                    group.pool.name(blocks[index], name)
        self._num_named = max(self._num_named, full)

    def clear(self) -> None:
        """Give all blocks back, the last one first so that prefixes live longest."""
        for group, blocks in zip(self._cache.groups, self.blocks, strict=True):
            for block in reversed(blocks):
                if block != TRASH:
                    group.pool.release(block)
            blocks.clear()
        self._first_held = [0] * len(self.blocks)
        self._num_named = 0

    def _name(self, tokens: Tokens[int], index: int) -> BlockHash:
        """Of the full block with that index."""
        while len(self._names) <= index:
            start = len(self._names) * self._cache.block_len
            parent = self._names[-1] if self._names else self._salt
            self._names.append(hash_block(parent, tokens[start : start + self._cache.block_len]))
        return self._names[index]

    def _find(self, tokens: Tokens[int]) -> list[list[int]]:
        """The blocks of each group, index by index, of the longest cached text from here on.

        A window needs no more than its own blocks at the end; the trash stands for others.
        """
        cache, start = self._cache, self._num_named
        columns: list[list[int]] = []
        runs = [0] * len(cache.groups)  # blocks found without a gap up to here
        num_found = 0
        for index in range(start, (len(tokens) - 1) // cache.block_len):
            name = self._name(tokens, index)
            column = [group.pool.find(name) or TRASH for group in cache.groups]
            runs = [run + 1 if block else 0 for run, block in zip(runs, column, strict=True)]
            # Only at the very start is it worth looking for an island behind a gap.
            if any(
                block == TRASH and (start or group.window is None)
                for group, block in zip(cache.groups, column, strict=True)
            ):
                break
            columns.append(column)
            seen = [cache.first_seen(g, (index + 1) * cache.block_len) for g in cache.groups]
            if all(run > index - max(start, first) for run, first in zip(runs, seen, strict=True)):
                num_found = len(columns)
        return columns[:num_found]
