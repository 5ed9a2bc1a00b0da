"""Linear layers in bfloat16 on a processor with matrix units, as a torch operation.

XLA:CPU widens bfloat16 to float32 and packs each weight anew at every call. The custom call
`torchtpu/pjrt_cpu/linear.c` reads a weight once, where it lies, and leaves the product to AMX. A TPU needs
nothing of the kind: XLA:TPU's own products run on its matrix units.
"""

import warnings
from collections.abc import Callable
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

TARGET = "tpugate_linear"
"""Name of the custom call; the shim registers it with the plugin where the processor can."""
DEPTH = 32
SIDE = 16

Operation = Callable[[Tensor, Tensor], Tensor]
"""Takes x [M, K] and weight [N, K], bfloat16, K a multiple of DEPTH and N of SIDE; gives x · weightᵀ [M, N],
summed in float32."""


StepFunction = Callable[..., tuple[Tensor, ...]]


def replacing(function: StepFunction) -> StepFunction:
    """`function`, with every linear layer whose shape allows it as the custom call."""

    def replaced(*inputs: Tensor) -> tuple[Tensor, ...]:
        with _Replacing():
            return function(*inputs)

    return replaced


class _Replacing(TorchFunctionMode):
    def __torch_function__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> object:
        if func is torch.nn.functional.linear:
            return _linear(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:  # noqa: A002 -- torch's name
    if not _fits(input, weight):
        return torch.nn.functional.linear(input, weight, bias)
    rows = input.reshape(-1, weight.shape[1]).contiguous()
    answer = operation()(rows, weight).view(*input.shape[:-1], weight.shape[0])
    return answer if bias is None else answer + bias


def _fits(x: Tensor, weight: Tensor) -> bool:
    num_out, num_in = weight.shape if weight.dim() == 2 else (0, 0)
    return (
        x.dtype is torch.bfloat16
        and weight.dtype is torch.bfloat16
        and weight.is_contiguous()
        and num_out > 0
        and num_out % SIDE == 0
        and num_in % DEPTH == 0
    )


@cache
def operation() -> Operation:
    """Registered with torch at the first call."""
    import jax

    def linear(x: jax.Array, weight: jax.Array) -> jax.Array:
        shape: Any = jax.ShapeDtypeStruct
        answer = shape((x.shape[0], weight.shape[0]), x.dtype)
        call: Callable[..., jax.Array] = jax.ffi.ffi_call(TARGET, answer)
        return call(x, weight)

    tpu: Any = torch.tpu  # type: ignore[attr-defined]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # it says that it is experimental
        return cast(Operation, tpu.pallas.jax_op(f"tpugate::{TARGET}", linear))
