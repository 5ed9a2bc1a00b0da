"""Does this device compute what the CPU computes? Small programs of the operations the engine needs.

All numbers are small integers, exact in every floating-point format (bfloat16 included) whatever the
order of summation, so results must be equal and not merely close.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from torchtpu.device import Device
from torchtpu.errors import SelfTestError

if TYPE_CHECKING:
    import torch

    Program = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], list[torch.Tensor]]


def run_self_test(device: Device) -> None:
    """Run the programs eagerly, and on an XLA device also compiled. Raises SelfTestError.

    Takes a second or two, most of it for compiling.
    """
    import torch

    _check(device, "eager", _multiply_add)
    if device.is_xla:
        _check(device, "compiled", torch.compile(_all_operations, backend="tpu"))


def _multiply_add(
    left: torch.Tensor, right: torch.Tensor, rows: torch.Tensor
) -> list[torch.Tensor]:
    return [left @ right + left]


def _all_operations(
    left: torch.Tensor, right: torch.Tensor, rows: torch.Tensor
) -> list[torch.Tensor]:
    """What a decode step is made of, without transcendental functions: those may round differently."""
    import torch

    gathered = left[rows]
    written = right.index_put((rows,), gathered)
    product = (gathered.bfloat16() @ written.bfloat16()).float()
    masked = torch.where(product > 0, product, -1.0)
    bits = masked.view(torch.int32)
    mixed = (bits ^ (bits >> 7)) * 3
    return [
        left @ right + left,
        written,
        masked,
        mixed,
        masked.argmax(dim=-1),
        masked.amax(dim=-1, keepdim=True),
        torch.cat([masked, gathered]).sum(dim=0),
    ]


def _check(device: Device, mode: str, program: Program) -> None:
    import torch

    left = (torch.arange(64) % 7).float().reshape(8, 8)
    right = (torch.arange(64) % 5 - 2).float().reshape(8, 8)
    rows = torch.tensor([5, 0, 3, 6])
    expected = (_multiply_add if mode == "eager" else _all_operations)(left, right, rows)
    try:
        with torch.no_grad():
            arguments = [tensor.to(device.torch_device) for tensor in (left, right, rows)]
            results = [result.cpu() for result in program(*arguments)]
    except RuntimeError as error:
        reason = str(error).strip().partition("\n")[0]
        raise SelfTestError(
            f"Device {device.kind} ({device.platform}) failed the {mode} self-test: {reason}"
        ) from error
    if not all(torch.equal(a, b) for a, b in zip(results, expected, strict=True)):
        raise SelfTestError(
            f"Device {device.kind} ({device.platform}) gives wrong results in {mode} mode."
        )
