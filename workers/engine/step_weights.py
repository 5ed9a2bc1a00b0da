"""A model's weights as inputs of the step programs, in the form that the device reads best.

XLA:TPU keeps a matrix whose rows do not fill whole lanes (a hidden size of 576, say) with its columns
running along the lanes. The product with the logits likes that; the lookup of a token's row does not, and
lays the whole table out anew at every step. So such a table is kept with its rows padded, and the program
cuts the padding off, which costs nothing: the lookup and the product both read what they need.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from torchtpu.ops.lanes import pad_rows, whole_lanes

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class StepWeights:
    """All parameters and buffers of a model, tied ones once."""

    names: list[str]
    tensors: list[Tensor]
    """As the program takes them."""
    widths: list[int | None]
    """What to cut a padded one to."""

    def by_name(self, inputs: Sequence[Tensor]) -> dict[str, Tensor]:
        """The program's inputs as the model knows them."""
        cut = [t if n is None else t[:, :n] for t, n in zip(inputs, self.widths, strict=True)]
        return dict(zip(self.names, cut, strict=True))


def plain_weights(model: "PreTrainedModel") -> StepWeights:
    """The model's own tensors."""
    named = [*model.named_parameters(), *model.named_buffers()]
    names, tensors = [name for name, _ in named], [tensor.detach() for _, tensor in named]
    return StepWeights(names, tensors, [None] * len(names))


def tpu_weights(model: "PreTrainedModel") -> StepWeights:
    """With padded lookup tables. The model lets go of what was padded, so that nothing is held twice."""
    plain = plain_weights(model)
    padded: dict[str, Tensor] = {}
    for name, parameter in list(model.named_parameters()):
        if _is_table(model, parameter) and parameter.shape[1] != whole_lanes(parameter.shape[1]):
            padded[name] = pad_rows(parameter.detach())
            _let_go(model, parameter)
    tensors = [padded.get(n, t) for n, t in zip(plain.names, plain.tensors, strict=True)]
    widths = [
        tensor.shape[1] if name in padded else None
        for name, tensor in zip(plain.names, plain.tensors, strict=True)
    ]
    return StepWeights(plain.names, tensors, widths)


def _is_table(model: nn.Module, parameter: Tensor) -> bool:
    return any(
        isinstance(module, nn.Embedding) and module.weight is parameter
        for module in model.modules()
    )


def _let_go(model: nn.Module, parameter: nn.Parameter) -> None:
    """Put a stand-in without memory wherever the model holds `parameter`: programs give it another."""
    stand_in = nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=False)
    for module in model.modules():
        for name, held in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if held is parameter:
                setattr(module, name, stand_in)
