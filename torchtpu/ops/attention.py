"""Paged attention over one flat row of tokens, as a function of transformers' attention interface.

    flat row      [ decode rows 0 … R-1 | segment 0 | segment 1 | … | padding ]    R + T tokens
    KV cache      per layer [kv_heads · slots, head_dim], slot = block * block_len + offset;
                  head by head, so that a head's keys of a block are one contiguous piece

A layer first writes the keys and values of all tokens to their slots, then every decode row attends
over its own blocks, and every segment gathers its blocks once for all of its tokens. So tokens of one
step see each other: two requests that share a prefix may even compute and read it in the same step.
Segments lie without gaps in the flat row; only here are they spread over a grid of P lines of L places.

Several forms give the same answers. Where the device has a kernel (`torchtpu.ops.native_attention` on
XLA:CPU, `torchtpu.ops.packed_attention` on a TPU), it reads keys and values where they lie, and says how
they lie. Everywhere else the products are explicit matmuls with a float32 softmax
over gathered blocks: TorchTPU's own flash attention becomes a custom call that XLA:CPU does not have.
Grouped queries are reshaped, keys are never repeated.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

ATTENTION_NAME = "tpugate_paged"
MASKED = -1e30
"""Score of a key that must not be seen: finite, so that a row of padding does not become NaN."""


@dataclass(frozen=True)
class CacheShape:
    """What one layer keeps of a token."""

    key: tuple[int, int]
    """(kv_heads, head_dim)"""
    value: tuple[int, int]
    window: int | None = None
    """Keys that a token sees, its own included; None is all."""

    def bytes_per_token(self, dtype: torch.dtype) -> int:
        return (self.key[0] * self.key[1] + self.value[0] * self.value[1]) * dtype.itemsize


@dataclass(frozen=True)
class Kernel:
    """A device's own form of attention."""

    name: str
    attend: Callable[["Layer", Tensor, Tensor, Tensor], Tensor]
    """Takes query [N, heads, dim], key and value [N, kv_heads, dim], puts keys and values into the
    step's caches; gives [N, heads, value_dim]."""
    cache_shapes: Callable[[Sequence[CacheShape], int], list[tuple[int, int]]]
    """Of the layers' tensors for a number of slots: first `StepTensors.keys`, then, if it has them
    apart, `StepTensors.values`."""


def head_by_head(layers: Sequence[CacheShape], num_slots: int) -> list[tuple[int, int]]:
    """Shapes of all key caches, then of all value caches."""
    pairs = [layer.key for layer in layers] + [layer.value for layer in layers]
    return [(kv_heads * num_slots, dim) for kv_heads, dim in pairs]


@dataclass(frozen=True)
class StepTensors:
    """What the attention of one step needs beside q, k and v; R rows, T prompt tokens,
    P segments of at most L of them, S context. Indices are int64."""

    keys: list[Tensor]
    """Per layer [kv_heads · slots, head_dim]; written in place or replaced."""
    values: list[Tensor]
    slots: Tensor
    """[R + T]: where each token's key and value go; padding goes to the trash block 0."""
    positions: Tensor
    """[R + T]: a token sees keys 0 … its own position."""
    tables: Tensor
    """[R + P, S / block_len]: the blocks of each row, then of each segment."""
    token_tables: Tensor
    """[R + T]: the table of each token."""
    num_rows: int
    grid_tokens: Tensor
    """[P, L]: the prompt token of each place; any one where a segment has no more."""
    grid_places: Tensor
    """[T]: the place of each prompt token, p · L + l; 0 for padding."""
    block_len: int
    kernel: Kernel | None = None
    """Instead of the matmul form."""
    shared: dict[object, Tensor] = field(default_factory=dict)
    """What layers have in common: traced once a step, not once a layer."""

    def _once(self, name: object, make: Callable[[], Tensor]) -> Tensor:
        if name not in self.shared:
            self.shared[name] = make()
        return self.shared[name]

    def places(self, kv_heads: int, cache: Tensor) -> Tensor:
        """[kv_heads · N]: rows of a layer's cache that take its keys or values [kv_heads, N, dim]."""

        def make() -> Tensor:
            num_slots = cache.shape[0] // kv_heads
            first = torch.arange(kv_heads, device=self.slots.device) * num_slots
            return (first[:, None] + self.slots).flatten()

        return self._once(("places", kv_heads), make)

    def row_positions(self) -> Tensor:
        """[R, 1]."""
        return self._once("row_positions", lambda: self.positions[: self.num_rows, None])

    def grid_positions(self) -> Tensor:
        """[P, L]."""
        prompt = self.positions[self.num_rows :]
        return self._once("grid_positions", lambda: prompt[self.grid_tokens])

    def indices(self) -> list[Tensor]:
        """Slots, positions, tables and the tables' tokens in int32, as a kernel takes them."""
        fields = (self.slots, self.positions, self.tables, self.token_tables)
        return [self._once(("int32", index), field.int) for index, field in enumerate(fields)]

    def options(self, scale: float, softcap: float | None, window: int | None) -> Tensor:
        """A layer's numbers, as a kernel takes them."""
        numbers = (float(self.block_len), scale, softcap or 0.0, float(window or 0))

        def make() -> Tensor:
            # A tensor made from a list would be a constant on another device in the traced graph.
            device = self.slots.device
            return torch.cat([torch.full((1,), number, device=device) for number in numbers])

        return self._once(numbers, make)

    def no_sinks(self, heads: int) -> Tensor:
        device = self.slots.device
        return self._once(
            ("no_sinks", heads), lambda: torch.full((heads,), -torch.inf, device=device)
        )

    def hidden(self, positions: Tensor, context: int, window: int | None) -> Tensor:
        """[B, 1, L, S] bool for queries [B, L]: keys after the query, or out of its window."""

        def make() -> Tensor:
            key_positions = torch.arange(context, device=positions.device)
            hidden = key_positions > positions[..., None]
            if window is not None:
                hidden = hidden | (key_positions <= positions[..., None] - window)
            return hidden[:, None]

        return self._once(("hidden", id(positions), window), make)


_current: Sequence[StepTensors] = ()
"""Of each layer."""


class bound_step:  # noqa: N801 -- used as a context manager, like torch.no_grad
    """Makes the tensors of a step known to the attention layers while the model is traced or run.

    Layers whose keys lie in other blocks have other slots and tables: `groups` says which of the steps
    each layer takes.
    """

    def __init__(self, *steps: StepTensors, groups: Sequence[int] | None = None) -> None:
        groups = [0] * len(steps[0].keys) if groups is None else groups
        self._layers = [steps[group] for group in groups]

    def __enter__(self) -> None:
        global _current
        _current = self._layers

    def __exit__(self, *_: object) -> None:
        global _current
        _current = ()


def paged_attention(  # noqa: PLR0913 -- transformers' signature
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """query [1, heads, N, dim], key and value [1, kv_heads, N, dim]; gives [1, N, heads, value_dim].

    The signature is transformers'; `s_aux` are attention sinks, one logit a head (GPT-OSS).
    """
    assert _current, "paged attention runs inside bound_step only"
    index = module.layer_idx
    assert isinstance(index, int)
    step = _current[index]
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    layer = Layer(step, index, key.shape[1], scale, sliding_window, softcap, s_aux)
    tokens = [heads[0].transpose(0, 1) for heads in (query, key, value)]  # [N, heads, dim]
    answers = step.kernel.attend(layer, *tokens) if step.kernel else layer.attend(*tokens)
    return answers[None], None


@dataclass(frozen=True)
class Layer:
    """One layer's cache, and how it scores: what transformers passes to the attention function."""

    step: StepTensors
    index: int
    kv_heads: int
    scale: float
    sliding_window: int | None
    softcap: float | None
    sinks: Tensor | None

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """With matmuls: query [N, heads, dim], key and value [N, kv_heads, dim]; gives [N, heads, value_dim]."""
        step, num_rows = self.step, self.step.num_rows
        keys, values = step.keys[self.index], step.values[self.index]
        places = step.places(self.kv_heads, keys)
        keys[places] = key.transpose(0, 1).reshape(-1, key.shape[-1])
        values[places] = value.transpose(0, 1).reshape(-1, value.shape[-1])
        rows = query[:num_rows, None]
        answers = self._attend(rows, step.tables[:num_rows], step.row_positions())
        if not step.grid_tokens.numel():
            return answers.flatten(0, 1)
        # What lies behind a segment's end in its line of the grid is computed and never fetched.
        grid = query[num_rows:][step.grid_tokens]
        on_grid = self._attend(grid, step.tables[num_rows:], step.grid_positions())
        return torch.cat([answers.flatten(0, 1), on_grid.flatten(0, 1)[step.grid_places]])

    def _attend(self, query: Tensor, blocks: Tensor, positions: Tensor) -> Tensor:
        """query [B, L, heads, dim], blocks [B, S / block_len], positions [B, L]; gives [B, L, heads, value_dim]."""
        step = self.step
        batch, length, heads, dim = query.shape
        group, context = heads // self.kv_heads, blocks.shape[1] * step.block_len
        keys = self._gather(step.keys[self.index], blocks)
        values = self._gather(step.values[self.index], blocks)
        # Each key head serves its group of query heads in one product.
        q = query.reshape(batch, length, self.kv_heads, group, dim).permute(2, 0, 3, 1, 4)
        q = q.reshape(self.kv_heads * batch, group * length, dim)
        scores = torch.bmm(q, keys.transpose(1, 2)).float() * self.scale
        if self.softcap is not None:
            scores = self.softcap * torch.tanh(scores / self.softcap)
        scores = scores.view(self.kv_heads, batch, group, length, context)
        hidden = step.hidden(positions, context, self.sliding_window)
        scores = scores.masked_fill(hidden, MASKED)
        weights = _softmax(scores, self.sinks).to(values.dtype)
        weights = weights.view(self.kv_heads * batch, group * length, context)
        out = torch.bmm(weights, values)
        out = out.view(self.kv_heads, batch, group, length, -1).permute(1, 3, 0, 2, 4)
        return out.reshape(batch, length, heads, -1)

    def _gather(self, cache: Tensor, blocks: Tensor) -> Tensor:
        """Blocks [B, n] of a cache to [kv_heads · B, n · block_len, dim]."""
        dim = cache.shape[-1]
        by_block = cache.view(self.kv_heads, -1, self.step.block_len * dim)
        return by_block[:, blocks].reshape(self.kv_heads * blocks.shape[0], -1, dim)


def _softmax(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Over the last dimension of [kv_heads, B, group, L, S]; a sink takes its share and gives nothing."""
    if sinks is None:
        return scores.softmax(-1)
    kv_heads, batch, group, length, _ = scores.shape
    column = sinks.float().view(kv_heads, 1, group, 1, 1).expand(-1, batch, -1, length, 1)
    return torch.cat([scores, column], -1).softmax(-1)[..., :-1]


def register() -> None:
    """Make the name known to transformers; a second call changes nothing."""
    ALL_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, paged_attention)


@contextmanager
def replaced(function: Callable[..., tuple[Tensor, None]]) -> Iterator[None]:
    """Another function under our name, to look at what the layers pass."""
    ALL_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, function)
    try:
        yield
    finally:
        register()
