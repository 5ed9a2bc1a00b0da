"""What a worker's service knows of an engine; the real engine and the scripted one both answer to it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from workers.protocol import GenerateRequest, ModelCard, OutputDelta

if TYPE_CHECKING:
    from workers.engine.step_log import StepSink

Progress = Callable[[str, float], None]
"""`progress(what, share)`: a short phrase and 0 … 1; called from the loading thread."""

EXPIRED = "The request waited past its deadline and was not started."


@dataclass(frozen=True)
class EngineStats:
    """A snapshot for the heartbeat, whose record has all of these fields; counters only grow."""

    num_running: int = 0
    num_waiting: int = 0
    kv_usage: float = 0.0
    """Share of KV blocks in use, 0 … 1."""
    steps: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    num_compiles_after_warmup: int = 0
    num_ready_buckets: int = 0
    padding_ratio: float = 0.0
    """Padded rows over all rows computed, 0 … 1."""
    host_seconds: float = 0.0
    """Host work of all steps; waiting for the device is not."""
    device_seconds: float = 0.0
    """Time that steps had the device."""
    num_prefix_queries: int = 0
    """Prompt tokens looked up in the prefix cache."""
    num_prefix_hits: int = 0
    """Those of them that were there."""
    num_preemptions: int = 0
    block_len: int = 0
    """Tokens of a KV block; 0 without blocks."""
    num_blocks: int = 0
    num_computed: int = 0
    """Tokens that steps computed for requests."""
    num_padded: int = 0
    """Tokens that they computed for nobody."""


class Engine(Protocol):
    """A continuous-batching loop body. Not thread-safe: one thread calls all of it."""

    @property
    def capacity(self) -> int:
        """Choices that can run at once (`n` of a request counts n times)."""
        ...

    def add(self, request: GenerateRequest) -> None:
        """Take a request in; it starts at a later step, or ends with `EXPIRED` if its deadline passes first.

        Raises `workers.errors.RequestError` if it can never run.
        """
        ...

    def abort(self, request_id: str) -> list[OutputDelta]:
        """Free the request's slots by the next step; returns its terminal deltas. Unknown ids are ignored."""
        ...

    def has_work(self) -> bool:
        """Whether `step` would do anything."""
        ...

    def step(self) -> list[OutputDelta]:
        """Schedule, execute, update, emit. Blocks for the device; every request ends with exactly one terminal delta.

        An exception from here is the engine's own failure, never one request's.
        """
        ...

    def fail_all(self, error: str) -> list[OutputDelta]:
        """Terminal error deltas for everything resident; the engine is empty afterwards."""
        ...

    def stats(self) -> EngineStats: ...


@dataclass(frozen=True)
class LoadedEngine:
    """An engine whose programs are all compiled, and the card its gateways read."""

    engine: Engine
    card: ModelCard


EngineFactory = Callable[[Progress, "StepSink"], LoadedEngine]
"""Loads weights and compiles every bucket; the sink gets a record of each step. Raises `workers.errors.LoadError`
with one clear sentence."""
