"""Paged attention on a TPU: the Pallas kernel of `torchtpu.ops.paged_kernel` as a torch operation.

    KV cache     per layer one tensor [slots, W]: all keys of a token, then all its values, in whole lanes

XLA:TPU lays memory out in tiles of 128 lanes. A cache [kv_heads · slots, head_dim], as the other forms have
it, is laid out anew at every step where head_dim is not 128, and its gathered blocks are copied. Here a
token's new keys and values are one contiguous row, and the kernel fetches whole blocks.
"""

import warnings
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor

from torchtpu.ops.attention import CacheShape, Kernel, Layer, StepTensors
from torchtpu.ops.lanes import LANES, whole_lanes

MOST_BLOCK_TOKENS = 32
"""Prompt tokens that share what they fetch: the kernel reads a context once for each such block."""
MOST_QUERY_NUMBERS = 1 << 20
"""Of a block of tokens, so that it fits into VMEM beside the keys."""
SUBLANES = 8


def kernel(*, interpret: bool = False) -> Kernel:
    """`interpret` computes with plain operations, for a device that is no TPU."""

    def attend(layer: Layer, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return _attend(layer, query, key, value, interpret)

    return Kernel("packed", attend, _cache_shapes)


def _cache_shapes(layers: Sequence[CacheShape], num_slots: int) -> list[tuple[int, int]]:
    widths = [layer.key[0] * layer.key[1] + layer.value[0] * layer.value[1] for layer in layers]
    return [(num_slots, whole_lanes(width)) for width in widths]


def _attend(layer: Layer, query: Tensor, key: Tensor, value: Tensor, interpret: bool) -> Tensor:
    step, heads, width = layer.step, query.shape[1], layer.step.keys[layer.index].shape[1]
    new = torch.cat([key.flatten(1), value.flatten(1)], 1)
    step.keys[layer.index][step.slots] = _padded(new, width)
    padded_heads = -(-heads // SUBLANES) * SUBLANES
    sinks = step.no_sinks(heads) if layer.sinks is None else layer.sinks.float()
    sinks = torch.nn.functional.pad(sinks, (0, padded_heads - heads), value=-torch.inf)
    spread = _padded(_spread(query, layer.kv_heads), width)
    spread = torch.nn.functional.pad(spread, (0, 0, 0, padded_heads - heads))
    key_width, value_width = key[0].numel(), value[0].numel()
    parts = []
    for start, end, block_tokens in _runs(step, query.shape[0], padded_heads * width):
        positions, tables, token_tables = step.indices()[1:]
        parts.append(
            _operation()(
                spread[start:end],
                sinks.clamp(min=-1e30)[:, None],
                step.keys[layer.index].view(-1, step.block_len, width),
                tables,
                token_tables[start:end],
                positions[start:end],
                key_width,
                block_tokens,
                float(layer.scale),
                float(layer.softcap or 0.0),
                int(layer.sliding_window or 0),
                interpret,
            )
        )
    answers = torch.cat(parts)[:, :heads]
    first = key_width % LANES  # the lane row in which values begin may begin with keys
    return _own(answers[..., first : first + value_width], layer.kv_heads)


def _runs(step: StepTensors, num_tokens: int, token_numbers: int) -> list[tuple[int, int, int]]:
    """First and one-past-last token, and tokens of a block: decode rows, then prompt tokens."""
    rows = step.num_rows
    runs = [(0, rows, 1)] if rows else []
    if num_tokens > rows:
        most = max(min(MOST_BLOCK_TOKENS, MOST_QUERY_NUMBERS // token_numbers), 1)
        block = next(n for n in range(most, 0, -1) if (num_tokens - rows) % n == 0)
        runs.append((rows, num_tokens, block))
    return runs


def _padded(tensor: Tensor, width: int) -> Tensor:
    return torch.nn.functional.pad(tensor, (0, width - tensor.shape[-1]))


def _spread(query: Tensor, kv_heads: int) -> Tensor:
    """[N, heads, dim] to [N, heads, kv_heads · dim]: each head's query at its key head's place."""
    num_tokens, heads, dim = query.shape
    grouped = query.reshape(num_tokens, kv_heads, heads // kv_heads, 1, dim)
    own = torch.eye(kv_heads, dtype=query.dtype, device=query.device)[:, None, :, None]
    return (grouped * own).reshape(num_tokens, heads, -1)


def _own(answers: Tensor, kv_heads: int) -> Tensor:
    """[N, heads, kv_heads · dim] to [N, heads, dim]: each head's answer from its value head's place."""
    num_tokens, heads, width = answers.shape
    dim = width // kv_heads
    grouped = answers.reshape(num_tokens, kv_heads, heads // kv_heads, kv_heads, dim)
    # Not a product with zeros: the other places hold other values, which may be infinite.
    own = torch.eye(kv_heads, dtype=torch.bool, device=answers.device)[:, None, :, None]
    return torch.where(own, grouped, 0).sum(3).reshape(num_tokens, heads, dim)


@cache
def _operation() -> Callable[..., Tensor]:
    """Registered with torch at the first call."""
    import jax

    from torchtpu.ops import paged_kernel

    def attend(  # noqa: PLR0913 -- the operands of the kernel
        query: jax.Array,
        sinks: jax.Array,
        cache: jax.Array,
        tables: jax.Array,
        token_tables: jax.Array,
        positions: jax.Array,
        key_width: int,
        block_tokens: int,
        scale: float,
        softcap: float,
        window: int,
        interpret: bool,
    ) -> jax.Array:
        return paged_kernel.attend(
            query,
            sinks,
            cache,
            tables,
            token_tables,
            positions,
            key_width=key_width,
            block_tokens=block_tokens,
            scale=scale,
            softcap=softcap or None,
            window=window or None,
            interpret=interpret,
        )

    tpu: Any = torch.tpu  # type: ignore[attr-defined]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # it says that it is experimental
        operation = tpu.pallas.jax_op("tpugate::packed_paged_attention", attend)
    operation.register_fake(_answers_of)
    return cast(Callable[..., Tensor], operation)


def _answers_of(query: Tensor, *operands: object) -> Tensor:
    """The result's shape; the one that comes with `jax_op` lowers the kernel to find it."""
    key_width = operands[5]
    assert isinstance(key_width, int)
    lanes = query.shape[-1] - key_width // LANES * LANES
    return query.new_empty((*query.shape[:2], lanes))
