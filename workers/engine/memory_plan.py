"""How much of a device's memory the KV cache may have: what weights and programs leave of it.

    memory of the device    |<------------------- memory_share ------------------->|  others
                            | weights | programs: code, temporaries |   KV cache   |

Nothing has run yet when this is decided, because the cache's size is part of every program's shape. So
the temporaries are those of one forward pass over the largest step, run without computing anything.
"""

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from torchtpu.buckets import BucketLadder
from torchtpu.ops import attention
from workers.engine.sampler import state_bytes

if TYPE_CHECKING:
    from transformers import PreTrainedModel

GIB = 1 << 30
PROGRAM_BYTES = 55_000_000
"""Code and books of one program; measured on XLA:CPU with 30 layers."""
LOGITS_COPIES = 6
"""Sampling's temporaries, as float32 copies of a step's logits: processed, scaled, their order as integers,
probabilities, what a threshold lets through, noise."""
GATHER_COPIES = 2
"""A layer's keys and values of all rows: gathered, and laid out for the product."""


@dataclass(frozen=True)
class MemoryPlan:
    """All in bytes."""

    memory: int
    """Of the device, before anything was loaded."""
    share: float
    """Of it that this process may use, 0 … 1."""
    weights: int
    programs: int

    @property
    def cache(self) -> int:
        """What is left for the KV cache; 0 or less if nothing is."""
        return int(self.memory * self.share) - self.weights - self.programs

    def __str__(self) -> str:
        return (
            f"of {self.memory / GIB:.1f} GiB of memory {self.share:.0%} may be used, the weights take "
            f"{self.weights / GIB:.1f} GiB and the programs about {self.programs / GIB:.1f} GiB"
        )


def weights_bytes(model: "PreTrainedModel") -> int:
    """Of all parameters and buffers; tied ones once."""
    return sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))


def programs_bytes(
    model: "PreTrainedModel", ladder: BucketLadder, kv_bytes: int, vocab_size: int
) -> int:
    """Code of all programs, temporaries of the largest, and what sampling keeps.

    `kv_bytes` are what one layer gathers of a token; a kernel of attention gathers nothing: 0.
    """
    num_samples = max(bucket.num_samples for bucket in ladder.buckets)
    num_tokens = max(bucket.num_tokens for bucket in ladder.buckets)
    gathered = GATHER_COPIES * kv_bytes * ladder.max_rows * ladder.max_context
    sampling = LOGITS_COPIES * 4 * num_samples * vocab_size
    sampling += state_bytes(ladder.max_rows, vocab_size)
    code = PROGRAM_BYTES * len(ladder.buckets)
    return code + forward_bytes(model, num_tokens, num_samples) + gathered + sampling


def forward_bytes(model: "PreTrainedModel", num_tokens: int, num_samples: int) -> int:
    """The most that a forward pass holds at once beside the weights, attention's own share aside."""

    def attend(
        module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, *_: object, **__: object
    ) -> tuple[Tensor, None]:
        return value.new_empty(1, query.shape[2], query.shape[1], value.shape[3]), None

    live = _LiveBytes()
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    with attention.replaced(attend), torch.no_grad(), fake, live:
        tokens = torch.zeros(1, num_tokens, dtype=torch.long, device=model.device)
        positions = torch.arange(num_tokens, device=model.device)[None]
        model(
            input_ids=tokens,
            position_ids=positions,
            attention_mask=None,
            use_cache=False,
            logits_to_keep=torch.arange(num_samples, device=model.device),
        )
    return live.peak


class _LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes that the results of operations hold while they live."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = 0
        self._now = 0

    def __torch_dispatch__(
        self,
        func: Any,  # noqa: ANN401 -- torch's signature
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        results = func(*args, **(kwargs or {}))
        # A view, or an input that was changed in place, holds nothing of its own.
        if not any(value.alias_info for value in func._schema.returns):
            for result in tree_leaves(results):
                if isinstance(result, Tensor):
                    self._add(result)
        return results

    def _add(self, result: Tensor) -> None:
        storage = result.untyped_storage()
        size = storage.nbytes()
        self._now += size
        self.peak = max(self.peak, self._now)
        weakref.finalize(storage, self._remove, size)

    def _remove(self, size: int) -> None:
        self._now -= size
