"""A device that passed its self-test, as `torchtpu.bringup.bring_up` returns it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch

DeviceKind = Literal["tpu", "cpu", "cuda"]
Platform = Literal["tpu", "xla-cpu", "cpu", "cuda"]


@dataclass(frozen=True, slots=True)
class Device:
    """One device of this process.

    `kind` is what the user chose and what torch calls it; `platform` is what computes: kind "tpu"
    is platform "tpu" on a chip and "xla-cpu" without one.
    """

    kind: DeviceKind
    platform: Platform
    torch_device: torch.device
    # Chips (GPUs, or 1 for a CPU) this process can address.
    num_chips: int
    # Memory of one chip; for a CPU what the host could give when the device was brought up.
    memory_bytes: int
    # Versions of all that takes part in compiling and computing: cache keys are made of these.
    versions: Mapping[str, str]
    # Whether the operation of `torchtpu.ops.native_attention` runs here.
    has_native_attention: bool = False
    # Whether that of `torchtpu.ops.native_linear` does: on XLA:CPU, if the processor has matrix units.
    has_native_linear: bool = False

    @property
    def is_xla(self) -> bool:
        """Whether programs are compiled by XLA, so that shapes must be bucketed."""
        return self.kind == "tpu"

    def synchronize(self) -> None:
        """Block until the work dispatched so far is done.

        On "tpu" this has been seen to miss compiled work: to time a program, copy a result to the
        host instead.
        """
        if self.kind == "cpu":
            return
        import torch

        torch.accelerator.synchronize()
