"""How the layers of a model share pools of blocks, and how many blocks each pool gets. Plain Python.

Layers that see the same window of a text keep the same tokens of it, so they have one pool and one block
table for each text; a window that holds the whole context is none. A pool of a window is small: while
it computes, a text holds what its window reaches, and as much again is there for prefixes of others.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torchtpu.buckets import BucketLadder
from workers.engine.kv_cache import BlockPool, CacheGroup, KVCache, most_held

REMEMBERED = 2
"""A window's pool, in what the texts of all rows hold at most."""


class Layer(Protocol):
    """What `torchtpu.ops.attention.CacheShape` says of a layer."""

    @property
    def window(self) -> int | None: ...


@dataclass(frozen=True)
class GroupNeeds:
    """Layers that keep the same tokens; blocks are counted without the trash."""

    window: int | None
    layers: tuple[int, ...]
    least: int
    """Blocks for one text."""
    most: int
    """Blocks for the texts of all rows."""


@dataclass(frozen=True)
class CachePlan:
    block_len: int
    max_chunk: int
    """The most tokens of one text that a step computes."""
    groups: tuple[GroupNeeds, ...]
    num_blocks: tuple[int, ...]
    """Of each group's pool, the trash included."""

    @property
    def layer_groups(self) -> list[int]:
        """The group of each layer."""
        group_of = {layer: i for i, group in enumerate(self.groups) for layer in group.layers}
        return [group_of[layer] for layer in sorted(group_of)]

    def new_cache(self) -> KVCache:
        pairs = zip(self.groups, self.num_blocks, strict=True)
        groups = [CacheGroup(BlockPool(size), group.window) for group, size in pairs]
        return KVCache(groups, self.block_len, self.max_chunk)


def max_chunk(ladder: BucketLadder) -> int:
    return max(shape.segment_len for shape in ladder.prefill)


def group_layers(
    layers: Sequence[Layer], ladder: BucketLadder, block_len: int
) -> tuple[GroupNeeds, ...]:
    """Layers by window, those that see everything first."""
    context, rows = ladder.max_context, ladder.max_rows
    whole = -(-context // block_len)
    members: dict[int, list[int]] = {}
    for index, layer in enumerate(layers):
        members.setdefault(min(layer.window or context, context), []).append(index)
    groups = []
    for reach in sorted(members, reverse=True):
        held = most_held(reach, block_len, max_chunk(ladder))
        is_window = reach < context and held < whole
        groups.append(
            GroupNeeds(
                window=reach if is_window else None,
                layers=tuple(members[reach]),
                least=held if is_window else whole,
                most=min(REMEMBERED * held, whole) * rows if is_window else whole * rows,
            )
        )
    return _joined(groups)


def _joined(groups: list[GroupNeeds]) -> tuple[GroupNeeds, ...]:
    """Groups that keep everything are one."""
    whole = [group for group in groups if group.window is None]
    if len(whole) < 2:
        return tuple(groups)
    layers = tuple(sorted(layer for group in whole for layer in group.layers))
    first = GroupNeeds(None, layers, whole[0].least, whole[0].most)
    return (first, *(group for group in groups if group.window is not None))


def pool_sizes(
    groups: Sequence[GroupNeeds], block_bytes: Sequence[int], num_bytes: int, num_rows: int
) -> tuple[int, ...] | None:
    """Blocks of each pool, the trash included, for as many rows as memory allows; None if not for one.

    Whole rows, because the numbers are part of the kept programs' names, and free memory varies.
    """
    for rows in range(num_rows, -1, -1):
        # With 0 it is what one text needs.
        sizes = [1 + max(group.least, group.most * rows // num_rows) for group in groups]
        if sum(n * b for n, b in zip(sizes, block_bytes, strict=True)) <= num_bytes:
            return tuple(sizes)
    return None


def given_sizes(groups: Sequence[GroupNeeds], num_blocks: int) -> tuple[int, ...]:
    """The same for a number of blocks that somebody chose; windows need no more than they hold."""
    return tuple(
        1 + (num_blocks if group.window is None else max(group.least, min(group.most, num_blocks)))
        for group in groups
    )
