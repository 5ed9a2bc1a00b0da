"""A request in the engine: its choices, what was counted and sent of them, and when."""

from dataclasses import dataclass, field

from workers.engine.request import Sequence
from workers.protocol import GenerateRequest, Usage


@dataclass
class Resident:
    request: GenerateRequest
    sequences: list[Sequence]
    next_seq: int = 0
    num_finished: int = 0
    unsent_tokens: list[int] = field(init=False)
    """Per choice, tokens counted but not yet in a delta."""
    started_s: float = 0.0
    """Dispatch of its first step; 0 before."""
    first_token_s: float = 0.0
    """When its first token was read; 0 before."""

    def __post_init__(self) -> None:
        self.unsent_tokens = [0] * len(self.sequences)

    def usage(self, now_s: float) -> Usage:
        begun_s = self.started_s or now_s
        prefilled_s = self.first_token_s or now_s
        return Usage(
            prompt_tokens=len(self.request.prompt_token_ids),
            completion_tokens=sum(s.output.num_tokens for s in self.sequences),
            cached_tokens=min(s.num_cached for s in self.sequences),
            prefill_s=prefilled_s - begun_s,
            decode_s=now_s - prefilled_s,
        )
