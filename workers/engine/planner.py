"""What an engine would need on a TPU that is not here: its own step programs, compiled for that chip.

Everything up to the compiler is the engine's own code: the same ladder, the same memory budget, the same
step function. The model has no weights (`models.empty`), so a machine plans what it could never load.
"""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from models.catalogue import FolderSource
from models.library import LocalModel, resolve
from models.references import parse_reference
from models.settings import ModelSettings
from torchtpu.ahead_of_time.capture import Capture, Capturer
from torchtpu.ahead_of_time.chips import Chip
from torchtpu.ahead_of_time.compile import Compiled, compile_programs
from torchtpu.ahead_of_time.hlo_cost import Groups
from torchtpu.buckets import NO_PREFILL, Bucket, BucketLadder
from torchtpu.device import Device
from workers.engine.build import EngineBuilder, EngineConfig
from workers.engine.interface import Progress

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class PlannedStep:
    bucket: Bucket
    compiled: Compiled
    live_bytes: int
    """All weights, and keys and values of every request of the bucket, each with its whole context:
    what a step cannot do without reading."""

    @property
    def hbm_ratio(self) -> float | None:
        """HBM bytes that the program moves, to those it must; None if it does not fit."""
        cost = self.compiled.cost
        return None if cost is None else cost.hbm_bytes / self.live_bytes


@dataclass(frozen=True)
class Plan:
    chip: Chip
    weights_bytes: int
    cache_bytes: int
    num_blocks: int
    """Of the largest pool of the KV cache, the trash block included."""
    steps: list[PlannedStep]

    @property
    def fits(self) -> bool:
        return all(step.compiled.fits for step in self.steps)


@dataclass(frozen=True)
class Captured:
    """Step programs of an engine before XLA, the same for every chip."""

    buckets: list[Bucket]
    captures: list[Capture]
    groups: Groups
    weights_bytes: int
    cache_bytes: int
    num_blocks: int
    live_kv: list[int]
    """Bytes of keys and values that each program's requests see, each with its whole context."""


def plan_engine(
    config: EngineConfig,
    chip: Chip,
    device: Device,
    progress: Progress,
    *,
    every_bucket: bool = False,
) -> Plan:
    """Capture and compile the largest decode and prefill steps, or all of them.

    `device` only has to have TorchTPU loaded.

    Raises ModelError, TorchTpuError, LoadError or ValueError, each with a sentence for the user.
    """
    local = _find(config.model, progress)
    progress("tracing the programs", 0.2)
    captured = capture_steps(config, chip, device, local, every if every_bucket else largest)
    progress(f"compiling {len(captured.buckets)} programs for {chip.name}", 0.4)
    return compile_steps(captured, chip)


def _find(model: str, progress: Progress) -> LocalModel:
    """A folder needs no more than its config.json; other models are fetched."""
    reference = parse_reference(model)
    if isinstance(reference.source, FolderSource):
        return LocalModel(reference.id, Path(reference.source.path), None, None)
    return resolve(model, ModelSettings.from_environment(), progress)


def capture_steps(
    config: EngineConfig,
    chip: Chip,
    device: Device,
    local: LocalModel,
    choose: Callable[[BucketLadder], Sequence[Bucket]],
) -> Captured:
    """`device` only has to have TorchTPU loaded; memory and kernels are those of `chip`."""
    import torch

    stand_in = dataclasses.replace(
        device,
        platform="tpu",
        torch_device=torch.device("meta"),
        memory_bytes=chip.hbm_bytes,
        has_native_attention=False,
        has_native_linear=False,
    )
    return _Planner(config, stand_in, local, lambda what, share: None).capture(choose)


def every(ladder: BucketLadder) -> Sequence[Bucket]:
    return ladder.buckets


def largest(ladder: BucketLadder) -> Sequence[Bucket]:
    """The decode step and the step with prefill that decide whether all fit."""
    decode = [bucket for bucket in ladder.buckets if bucket.prefill == NO_PREFILL]
    mixed = [bucket for bucket in ladder.buckets if bucket.prefill != NO_PREFILL]
    return decode[-1], mixed[-1]


def compile_steps(captured: Captured, chip: Chip) -> Plan:
    compiled = compile_programs(chip, captured.captures, captured.groups)
    steps = [
        PlannedStep(bucket, program, captured.weights_bytes + live_kv)
        for bucket, program, live_kv in zip(
            captured.buckets, compiled, captured.live_kv, strict=True
        )
    ]
    facts = (captured.weights_bytes, captured.cache_bytes, captured.num_blocks)
    return Plan(chip, *facts, steps)


class _Planner(EngineBuilder):
    """Builds the engine's runner with an empty model and a compiler that only listens."""

    def capture(self, choose: Callable[[BucketLadder], Sequence[Bucket]]) -> Captured:
        self._capturer = Capturer()
        runner, cache = self._runner()
        buckets = list(choose(self._ladder))
        for bucket in buckets:
            runner.start_step(bucket)
        captures, num_caches = self._capturer.captures, runner.num_caches
        sizes = captures[0].input_bytes  # packed, newest, caches, weights
        first_weight = 2 + num_caches
        return Captured(
            buckets=buckets,
            captures=captures,
            groups=[(0, "other"), (2, "kv"), (first_weight, "weights")],
            weights_bytes=self._weights_bytes,
            cache_bytes=sum(sizes[2:first_weight]),
            num_blocks=max(cache.num_blocks),
            live_kv=[
                (bucket.rows + bucket.prefill.segments) * runner.kv_bytes(bucket.context)
                for bucket in buckets
            ],
        )

    def _load(self, attention_name: str) -> "PreTrainedModel":
        from models.empty import empty_model
        from workers.engine.memory_plan import weights_bytes

        model = empty_model(self._local.path, self._dtype(), self._load_options(attention_name))
        self._weights_bytes = weights_bytes(model)  # before any is padded
        return model

    def _compiler(self, identity: dict[str, object]) -> Capturer:
        return self._capturer
