"""Protects linear layers on matrix units: the product of every shape, and that others are left alone."""

import pytest
import torch
from torch import Tensor

from torchtpu.compiler import ProgramCompiler, trace
from torchtpu.device import Device
from torchtpu.ops import native_linear

# Tokens: one, part of a tile, one tile and more, three pairs of tiles; rows of the weight: a single tile, what no
# item's size divides, several items.
TOKENS = [1, 8, 33, 96]
WEIGHTS = [(16, 32), (112, 64), (192, 576)]


@pytest.fixture(scope="module")
def device(tpu_device: Device) -> Device:
    if not tpu_device.has_native_linear:
        pytest.skip("this processor, or this system, has no matrix units (AMX) for bfloat16")
    return tpu_device


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> tuple[Tensor, ...]:
    return (torch.nn.functional.linear(x, weight, bias),)


def numbers(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def operations(*inputs: Tensor) -> list[str]:
    graph = trace(native_linear.replacing(linear), inputs).graph
    return [str(node.target) for node in graph.nodes if node.op == "call_function"]


def test_products_are_those_of_plain_arithmetic_rounded_once(device: Device):
    compiler = ProgramCompiler(device, {}, None)
    cases = [
        (numbers(1, tokens, num_in), numbers(num_out, num_in), numbers(num_out))
        for tokens in TOKENS
        for num_out, num_in in WEIGHTS
    ]

    def all_of_them(*inputs: Tensor) -> tuple[Tensor, ...]:
        grouped = zip(inputs[::3], inputs[1::3], strict=False)
        return tuple(linear(x, weight)[0] for x, weight in grouped)

    inputs = [tensor.to(device.torch_device) for case in cases for tensor in case]
    assert operations(*inputs[:2]).count(f"tpugate.{native_linear.TARGET}.default") == 1
    program = compiler.start("linear", native_linear.replacing(all_of_them), inputs, []).result()
    for (x, weight, _), answer in zip(cases, program(inputs), strict=True):
        expected = x.double() @ weight.double().T
        # Half a unit in the last place of bfloat16, and what float32 sums differ by.
        torch.testing.assert_close(answer.cpu().double(), expected, rtol=2**-8, atol=1e-4)


def test_a_bias_is_added(device: Device):
    inputs = [
        tensor.to(device.torch_device)
        for tensor in (numbers(2, 3, 64), numbers(32, 64), numbers(32))
    ]
    program = ProgramCompiler(device, {}, None).start(
        "bias", native_linear.replacing(linear), inputs, []
    )
    (answer,) = program.result()(inputs)
    x, weight, bias = (tensor.cpu().float() for tensor in inputs)
    assert answer.shape == (2, 3, 32)
    torch.testing.assert_close(answer.cpu().float(), x @ weight.T + bias, rtol=2**-6, atol=0.05)


@pytest.mark.parametrize(
    ("num_out", "num_in", "dtype"),
    [(16, 48, torch.bfloat16), (24, 32, torch.bfloat16), (16, 32, torch.float32)],
)
def test_what_does_not_fit_is_left_to_xla(
    device: Device, num_out: int, num_in: int, dtype: torch.dtype
):
    inputs = [numbers(4, num_in, dtype=dtype), numbers(num_out, num_in, dtype=dtype)]
    found = operations(*(tensor.to(device.torch_device) for tensor in inputs))
    assert not any(native_linear.TARGET in name for name in found)
