"""The width of a TPU's memory tiles, and tensors whose rows fill it."""

import torch
from torch import Tensor

LANES = 128


def whole_lanes(width: int) -> int:
    """`width` rounded up."""
    return -(-width // LANES) * LANES


def pad_rows(tensor: Tensor) -> Tensor:
    """[n, width] with zeros up to whole lanes."""
    return torch.nn.functional.pad(tensor, (0, whole_lanes(tensor.shape[1]) - tensor.shape[1]))
