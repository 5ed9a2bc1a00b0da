"""Blocks of the KV cache: who holds which, and which prefixes they spell. Plain Python.

The cache is one pool of blocks of `block_len` tokens. A full block of known tokens is named by a hash
that chains its tokens to all tokens before it, so equal prefixes have equal names and are computed
once. A block that nobody holds keeps its name until it is needed again, least recently used first:

    pool     [ trash | A:held by 2 | B:held by 1 | C:free, still named | D:free ]
    free     D, C                     allocate takes D, then evicts C
    names    hash(prompt 0-15) -> A,  hash(A, prompt 16-31) -> B, …

Block 0 is the trash: padding is written there and nothing reads it. See vLLM's prefix caching, which
works alike.
"""

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence as Tokens

BlockHash = bytes


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


class BlockTable:
    """The blocks of one sequence, and the names of the full ones among them."""

    def __init__(self, pool: BlockPool, block_len: int, salt: bytes = b"") -> None:
        self._pool = pool
        self._block_len = block_len
        self._salt = salt
        self.blocks: list[int] = []
        self._hashes: list[BlockHash] = []

    def match(self, tokens: Tokens[int]) -> int:
        """Take over the cached blocks of the longest known prefix; gives its length in tokens.

        At least one token is left to compute, because the last one's logits are needed.
        """
        assert not self.blocks, "a prefix is matched before anything else"
        return self.catch_up(tokens, 0)

    def catch_up(self, tokens: Tokens[int], num_computed: int) -> int:
        """Take over the blocks that others have computed since `match`; gives the new `num_computed`.

        So sequences that begin alike share their blocks even if they start in the same step.
        """
        while num_computed == len(self._hashes) * self._block_len:
            found = self._next_cached(tokens)
            if found is None:
                break
            name, block = found
            self._pool.hold(block)
            index = len(self._hashes)
            for own in self.blocks[index : index + 1]:
                self._pool.release(own)
            self.blocks[index : index + 1] = [block]
            self._hashes.append(name)
            num_computed += self._block_len
        return num_computed

    def num_missing(self, num_tokens: int) -> int:
        """Blocks to allocate before `num_tokens` tokens have room."""
        return max(0, -(-num_tokens // self._block_len) - len(self.blocks))

    def grow(self, num_tokens: int) -> None:
        """Allocate room for `num_tokens` tokens; ask `num_missing` against the pool first."""
        for _ in range(self.num_missing(num_tokens)):
            self.blocks.append(self._pool.allocate())

    def publish(self, tokens: Tokens[int], num_computed: int) -> None:
        """Name the blocks that `num_computed` known tokens fill.

        A block may be named when its step is scheduled: a later step, and even another sequence of the
        same step, reads it after it was written (see `torchtpu.ops.attention`).
        """
        full = min(num_computed, len(tokens)) // self._block_len
        for index in range(len(self._hashes), full):
            name = self._next_name(tokens)
            self._hashes.append(name)
            self._pool.name(self.blocks[index], name)

    def clear(self) -> None:
        """Give all blocks back, the last one first so that prefixes live longest."""
        for block in reversed(self.blocks):
            self._pool.release(block)
        self.blocks.clear()
        self._hashes.clear()

    def _next_name(self, tokens: Tokens[int]) -> BlockHash:
        """Of the first block that has none yet."""
        parent = self._hashes[-1] if self._hashes else self._salt
        start = len(self._hashes) * self._block_len
        return hash_block(parent, tokens[start : start + self._block_len])

    def _next_cached(self, tokens: Tokens[int]) -> tuple[BlockHash, int] | None:
        """Name and block that hold the next full block of `tokens`, unless it holds their last one."""
        if (len(self._hashes) + 1) * self._block_len >= len(tokens):
            return None
        name = self._next_name(tokens)
        block = self._pool.find(name)
        return None if block is None else (name, block)
