"""Paged attention over one flat row of tokens, as a function of transformers' attention interface.

    flat row      [ decode rows 0 … R-1 | segment 0, L tokens | segment 1, L tokens | … ]
    KV cache      per layer [slots, kv_heads, head_dim], slot = block * block_len + offset

A layer first writes the keys and values of all tokens to their slots, then every decode row attends
over its own blocks, and every segment gathers its blocks once for all of its tokens. So tokens of one
step see each other: two requests that share a prefix may even compute and read it in the same step.

The products are explicit matmuls with a float32 softmax. TorchTPU's own flash attention becomes a
custom call that XLA:CPU does not have; on a TPU a ragged paged attention kernel takes this place behind
the same function. Grouped queries are reshaped, keys are never repeated.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

ATTENTION_NAME = "tpugate_paged"
MASKED = -1e30
"""Score of a key that must not be seen: finite, so that a row of padding does not become NaN."""


@dataclass(frozen=True)
class StepTensors:
    """What the attention of one step needs beside q, k and v; R rows, P segments of L tokens, S context."""

    keys: list[Tensor]
    """Per layer [slots, kv_heads, head_dim]; written in place."""
    values: list[Tensor]
    slots: Tensor
    """[R + P·L] int64: where each token's key and value go; padding goes to the trash block 0."""
    row_blocks: Tensor
    """[R, S / block_len] int64."""
    row_positions: Tensor
    """[R] int64: a row sees keys 0 … its own position."""
    segment_blocks: Tensor
    """[P, S / block_len] int64."""
    segment_positions: Tensor
    """[P, L] int64."""
    block_len: int


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


def paged_attention(
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
    keys[step.slots] = key[0].transpose(0, 1)
    values[step.slots] = value[0].transpose(0, 1)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    spec = _Spec(scale, sliding_window, softcap, s_aux)
    num_rows = step.row_positions.shape[0]
    flat = query[0].transpose(0, 1)  # [N, heads, dim]
    parts = [
        _attend(
            flat[:num_rows, None],
            keys,
            values,
            step.row_blocks,
            step.row_positions[:, None],
            step.block_len,
            spec,
        )
    ]
    num_segments, segment_len = step.segment_positions.shape
    if num_segments:
        segments = flat[num_rows:].reshape(num_segments, segment_len, *flat.shape[1:])
        parts.append(
            _attend(
                segments,
                keys,
                values,
                step.segment_blocks,
                step.segment_positions,
                step.block_len,
                spec,
            )
        )
    outputs = [part.reshape(-1, *part.shape[2:]) for part in parts]
    return torch.cat(outputs)[None] if len(outputs) > 1 else outputs[0][None], None


@dataclass(frozen=True)
class _Spec:
    """How a layer scores: what transformers passes to the attention function."""

    scale: float
    sliding_window: int | None
    softcap: float | None
    sinks: Tensor | None


def _attend(  # noqa: PLR0913 -- the operands of one formula
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    blocks: Tensor,
    positions: Tensor,
    block_len: int,
    spec: _Spec,
) -> Tensor:
    """query [B, L, heads, dim], blocks [B, S / block_len], positions [B, L]; gives [B, L, heads, value_dim]."""
    batch, length, heads, dim = query.shape
    kv_heads = keys.shape[1]
    group = heads // kv_heads
    context = blocks.shape[1] * block_len
    k = _gather(keys, blocks, block_len)  # [B, S, kv_heads, dim]
    v = _gather(values, blocks, block_len)
    # [B, kv_heads, group·L, dim]: each key head serves its group of query heads in one product
    q = query.reshape(batch, length, kv_heads, group, dim).permute(0, 2, 3, 1, 4)
    q = q.reshape(batch, kv_heads, group * length, dim)
    scores = torch.matmul(q, k.permute(0, 2, 3, 1)).float() * spec.scale
    if spec.softcap is not None:
        scores = spec.softcap * torch.tanh(scores / spec.softcap)
    scores = scores.view(batch, kv_heads, group, length, context)
    key_positions = torch.arange(context, device=query.device)
    seen = key_positions <= positions[..., None]  # [B, L, S]
    if spec.sliding_window is not None:
        seen = seen & (key_positions > positions[..., None] - spec.sliding_window)
    scores = scores.masked_fill(~seen[:, None, None], MASKED)
    weights = _softmax(scores, spec.sinks).to(v.dtype)
    weights = weights.reshape(batch, kv_heads, group * length, context)
    out = torch.matmul(weights, v.permute(0, 2, 1, 3))
    out = out.view(batch, kv_heads, group, length, -1).permute(0, 3, 1, 2, 4)
    return out.reshape(batch, length, heads, -1)


def _gather(cache: Tensor, blocks: Tensor, block_len: int) -> Tensor:
    """[slots, kv_heads, dim] and [B, n] blocks to [B, n · block_len, kv_heads, dim]."""
    tail = cache.shape[1:]
    gathered = cache.view(-1, block_len, *tail)[blocks]
    return gathered.reshape(blocks.shape[0], blocks.shape[1] * block_len, *tail)


def _softmax(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Over the last dimension of [B, kv_heads, group, L, S]; a sink takes its share and gives nothing."""
    if sinks is None:
        return scores.softmax(-1)
    batch, kv_heads, group, length, _ = scores.shape
    column = sinks.float().view(1, kv_heads, group, 1, 1).expand(batch, -1, -1, length, 1)
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
