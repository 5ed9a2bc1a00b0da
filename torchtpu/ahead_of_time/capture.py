"""A step function becomes StableHLO, without weights and without a compiler.

`Capturer` stands where `torchtpu.compiler.ProgramCompiler` does, so what it sees is exactly what the
engine would compile. Inputs may be on `meta`: only shapes and dtypes count.
"""

import warnings
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from torchtpu.compiler import CompileCounters, Program, StepFunction, trace


@dataclass(frozen=True)
class Capture:
    """A program before XLA: what TorchTPU hands to the compiler."""

    name: str
    stablehlo: str
    input_bytes: tuple[int, ...]
    donated: tuple[int, ...]
    """Inputs whose memory the last outputs take, in order."""


class Capturer:
    """Keeps the StableHLO of each program that is asked for; there is nothing to run."""

    def __init__(self) -> None:
        self.captures: list[Capture] = []
        self.counters = CompileCounters()

    def start(
        self,
        name: str,
        function: StepFunction,
        inputs: Sequence[Tensor],
        donated: Sequence[int],
        *,
        has_model: bool = True,
    ) -> "Future[Program]":
        """As of `ProgramCompiler`, but the program never comes."""
        with FakeTensorMode():
            fakes = [
                torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="tpu")
                for t in inputs
            ]
        text = _lower(trace(function, fakes), fakes)
        sizes = tuple(tensor.nbytes for tensor in inputs)
        self.captures.append(Capture(name, text, sizes, tuple(donated)))
        return Future()

    def total_compilations(self) -> int:
        return 0


def _lower(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> str:
    """The StableHLO text of a traced graph, after the passes that TorchTPU runs before XLA."""
    from torch_tpu._internal import export
    from torch_tpu._internal.compile import compiler, tpu_torch_compile

    texts: list[str] = []

    class Lowering(compiler.StaticCompiler):  # type: ignore[misc]
        def _compile(self, graph_module: torch.fx.GraphModule, *_: object, **__: object) -> None:
            texts.append(_stablehlo(graph_module, inputs, export.export, tpu_torch_compile))

    with torch.no_grad():
        Lowering()(graph, inputs)
    return texts[0]


def _stablehlo(
    graph: torch.fx.GraphModule,
    inputs: list[Tensor],
    export: Any,  # noqa: ANN401 -- modules of torch_tpu
    lowering: Any,  # noqa: ANN401
) -> str:
    """As `export.fx_to_mlir`, without the compilation at its end and without random number state."""
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    with unset_fake_temporarily():
        placeholders = [lowering.placeholder_like(tensor, False) for tensor in inputs]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # it says that it is experimental
            mode = export.execution_mode.set_eager_mode(export.EagerMode._INTERNAL_COMPILE_FX_GRAPH)
        with mode:
            # Copies, so that writing in place leaves the placeholders alone; the graph drops them.
            copies = [placeholder.clone() for placeholder in placeholders]
            outputs = export.EagerLikeFxInterpreter(graph).run(*copies)
            results = export._process_fx_outputs(graph, outputs)[0]
            return str(lowering.serialize_mlir_text(lowering.build_mlir(results, placeholders)))
