"""The kernel behind paged attention on a device that has one, as a torch operation.

`torch.tpu.pallas.jax_op` takes any JAX function into a traced program: on a TPU that is a Pallas kernel,
on XLA:CPU a custom call whose code is `torchtpu/pjrt_cpu/attention.c`. A kernel reads what each token may
see, where it lies, and nothing else; the matmul form gathers every row's whole context first.
"""

import warnings
from collections.abc import Callable
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor

from torchtpu.ops.attention import Kernel, Layer, head_by_head

TARGET = "tpugate_paged_attention"
"""Name of the custom call; the shim registers it with the plugin."""

Operation = Callable[..., tuple[Tensor, Tensor, Tensor]]
"""All bfloat16 or all float32: takes query [N, heads, dim], key [N, kv_heads, dim], value [N, kv_heads, value_dim]; keys and values
[kv_heads · slots, dim]; slots [N], positions [N], tables [B, blocks], token_tables [N], all int32; sinks
[heads] float32, -inf for none; options [4] float32: block length, scale, soft cap and window, 0 for none.
Gives the answers [N, heads, value_dim], and keys and values with the new ones written in place."""


def kernel() -> Kernel:
    return Kernel("native", _attend, head_by_head)


def _attend(layer: Layer, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    step, index = layer.step, layer.index
    inputs = [query, key, value, step.keys[index], step.values[index]]
    options = step.options(layer.scale, layer.softcap, layer.sliding_window)
    sinks = step.no_sinks(query.shape[1]) if layer.sinks is None else layer.sinks.float()
    answers, step.keys[index], step.values[index] = operation()(
        *(tensor.contiguous() for tensor in inputs), *step.indices(), sinks, options
    )
    return answers


@cache
def operation() -> Operation:
    """Registered with torch at the first call."""
    import jax

    def attend(  # noqa: PLR0913 -- the operands of the custom call
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        keys: jax.Array,
        values: jax.Array,
        slots: jax.Array,
        positions: jax.Array,
        tables: jax.Array,
        token_tables: jax.Array,
        sinks: jax.Array,
        options: jax.Array,
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        shape: Any = jax.ShapeDtypeStruct
        answers = shape((*query.shape[:2], value.shape[2]), query.dtype)
        caches = [shape(cache.shape, cache.dtype) for cache in (keys, values)]
        call = jax.ffi.ffi_call(TARGET, (answers, *caches), input_output_aliases={3: 1, 4: 2})
        inputs = (query, key, value, keys, values, slots, positions, tables, token_tables)
        answer, new_keys, new_values = call(*inputs, sinks, options)
        return answer, new_keys, new_values

    tpu: Any = torch.tpu  # type: ignore[attr-defined]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # it says that it is experimental
        return cast(Operation, tpu.pallas.jax_op(f"tpugate::{TARGET}", attend))
