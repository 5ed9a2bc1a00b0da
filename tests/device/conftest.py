"""The real engine: built once, its weights and programs shared by all tests."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from torch import Tensor
from transformers import PreTrainedModel

from models.loader import load_model
from tests.device.driving import LADDER, MODEL, build_parts, fresh_engine
from tests.device.reference import Reference
from torchtpu.compiler import Program, ProgramCompiler
from torchtpu.device import Device
from workers.engine.engine import EngineParts, ModelEngine


@pytest.fixture(scope="session")
def parts(tpu_device: Device, smollm2_dir: Path) -> EngineParts:
    """Weights of the default model in float32 and its compiled programs."""
    return build_parts(MODEL, LADDER)


@pytest.fixture
def engine(parts: EngineParts) -> ModelEngine:
    """An engine with an empty cache."""
    return fresh_engine(parts)


@pytest.fixture(scope="session")
def tokenizer(parts: EngineParts) -> Tokenizer:
    return parts.tokenizer


@pytest.fixture(scope="session")
def reference_model(tpu_device: Device, smollm2_dir: Path) -> PreTrainedModel:
    """The same weights in plain PyTorch on the CPU."""
    return load_model(smollm2_dir, torch.float32)


@pytest.fixture(scope="session")
def ties() -> list[str]:
    """Of the test that runs."""
    return []


@pytest.fixture(autouse=True)
def tell_ties(ties: list[str], record_property: Callable[[str, object], None]) -> Iterator[None]:
    """A tie fails no test; the summary has a line for it."""
    ties.clear()
    yield
    for tie in ties:
        record_property("tie", tie)


@pytest.fixture(scope="session")
def report(ties: list[str]) -> Callable[[str], None]:
    return ties.append


@pytest.fixture(scope="session")
def reference(reference_model: PreTrainedModel, report: Callable[[str], None]) -> Reference:
    return Reference(reference_model, report)


@pytest.fixture(scope="module")
def compiled(tpu_device: Device) -> Callable[..., Program]:
    """`compiled(function, inputs, donated)`: the program; inputs and outputs are on the host."""
    compiler = ProgramCompiler(tpu_device, {}, cache_dir=None)

    def build(
        function: Callable[..., tuple[Tensor, ...]],
        inputs: list[Tensor],
        donated: tuple[int, ...] = (),
    ) -> Program:
        def place(tensors: list[Tensor]) -> list[Tensor]:
            return [tensor.to(tpu_device.torch_device) for tensor in tensors]

        program = compiler.start(function.__name__, function, place(inputs), donated).result()
        return lambda tensors: tuple(out.cpu() for out in program(place(tensors)))

    return build
