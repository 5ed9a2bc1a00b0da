"""Paged attention over one flat row of tokens, as a function of transformers' attention interface.

    flat row      [ decode rows 0 … R-1 | segment 0 | segment 1 | … | padding ]    R + T tokens
    KV cache      per layer [kv_heads · slots, head_dim], slot = block * block_len + offset;
                  head by head, so that a head's keys of a block are one contiguous piece

A layer first writes the keys and values of all tokens to their slots, then every decode row attends
over its own blocks, and every segment gathers its blocks once for all of its tokens. So tokens of one
step see each other: two requests that share a prefix may even compute and read it in the same step.
Segments lie without gaps in the flat row; only here are they spread over a grid of P lines of L places.

The products are explicit matmuls with a float32 softmax. TorchTPU's own flash attention becomes a
custom call that XLA:CPU does not have; on a TPU a ragged paged attention kernel takes this place behind
the same function. Grouped queries are reshaped, keys are never repeated.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

ATTENTION_NAME = "tpugate_paged"
MASKED = -1e30
"""Score of a key that must not be seen: finite, so that a row of padding does not become NaN."""


@dataclass(frozen=True)
class StepTensors:
    """What the attention of one step needs beside q, k and v; R rows, T prompt tokens,
    P segments of at most L of them, S context."""

    keys: list[Tensor]
    """Per layer [kv_heads · slots, head_dim]; written in place."""
    values: list[Tensor]
    slots: Tensor
    """[R + T] int64: where each token's key and value go; padding goes to the trash block 0."""
    row_blocks: Tensor
    """[R, S / block_len] int64."""
    row_positions: Tensor
    """[R, 1] int64: a row sees keys 0 … its own position."""
    grid_tokens: Tensor
    """[P, L] int64: the prompt token of each place; any one where a segment has no more."""
    grid_places: Tensor
    """[T] int64: the place of each prompt token, p · L + l; 0 for padding."""
    grid_positions: Tensor
    """[P, L] int64."""
    segment_blocks: Tensor
    """[P, S / block_len] int64."""
    block_len: int
    shared: dict[object, Tensor] = field(default_factory=dict)
    """What layers have in common: traced once a step, not once a layer."""

    def places(self, kv_heads: int, cache: Tensor) -> Tensor:
        """[kv_heads · N]: rows of a layer's cache that take its keys or values [kv_heads, N, dim]."""
        if kv_heads not in self.shared:
            num_slots = cache.shape[0] // kv_heads
            first = torch.arange(kv_heads, device=self.slots.device) * num_slots
            self.shared[kv_heads] = (first[:, None] + self.slots).flatten()
        return self.shared[kv_heads]

    def hidden(self, positions: Tensor, context: int, window: int | None) -> Tensor:
        """[B, 1, L, S] bool for queries [B, L]: keys after the query, or out of its window."""
        key = (id(positions), window)
        if key not in self.shared:
            key_positions = torch.arange(context, device=positions.device)
            hidden = key_positions > positions[..., None]
            if window is not None:
                hidden = hidden | (key_positions <= positions[..., None] - window)
            self.shared[key] = hidden[:, None]
        return self.shared[key]


_current: StepTensors | None = None


class bound_step:  # noqa: N801 -- used as a context manager, like torch.no_grad
    """Makes the tensors of a step known to the attention layers while the model is traced or run."""

    def __init__(self, step: StepTensors) -> None:
        self._step = step

    def __enter__(self) -> None:
        global _current
        _current = self._step

    def __exit__(self, *_: object) -> None:
        global _current
        _current = None


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
    step = _current
    assert step is not None, "paged attention runs inside bound_step only"
    index = module.layer_idx
    assert isinstance(index, int)
    keys, values = step.keys[index], step.values[index]
    places = step.places(key.shape[1], keys)
    keys[places] = key[0].reshape(-1, key.shape[-1])
    values[places] = value[0].reshape(-1, value.shape[-1])
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    layer = _Layer(step, keys, values, key.shape[1], scale, sliding_window, softcap, s_aux)
    num_rows = step.row_positions.shape[0]
    flat = query[0].transpose(0, 1)  # [N, heads, dim]
    outputs = layer.attend(flat[:num_rows, None], step.row_blocks, step.row_positions).flatten(0, 1)
    if step.grid_tokens.numel():
        grid = flat[num_rows:][step.grid_tokens]
        answers = layer.attend(grid, step.segment_blocks, step.grid_positions)
        outputs = torch.cat([outputs, answers.flatten(0, 1)[step.grid_places]])
    return outputs[None], None


@dataclass(frozen=True)
class _Layer:
    """One layer's cache, and how it scores: what transformers passes to the attention function."""

    step: StepTensors
    keys: Tensor
    values: Tensor
    kv_heads: int
    scale: float
    sliding_window: int | None
    softcap: float | None
    sinks: Tensor | None

    def attend(self, query: Tensor, blocks: Tensor, positions: Tensor) -> Tensor:
        """query [B, L, heads, dim], blocks [B, S / block_len], positions [B, L]; gives [B, L, heads, value_dim]."""
        batch, length, heads, dim = query.shape
        group, context = heads // self.kv_heads, blocks.shape[1] * self.step.block_len
        keys, values = self._gather(self.keys, blocks), self._gather(self.values, blocks)
        # Each key head serves its group of query heads in one product.
        q = query.reshape(batch, length, self.kv_heads, group, dim).permute(2, 0, 3, 1, 4)
        q = q.reshape(self.kv_heads * batch, group * length, dim)
        scores = torch.bmm(q, keys.transpose(1, 2)).float() * self.scale
        if self.softcap is not None:
            scores = self.softcap * torch.tanh(scores / self.softcap)
        scores = scores.view(self.kv_heads, batch, group, length, context)
        hidden = self.step.hidden(positions, context, self.sliding_window)
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
