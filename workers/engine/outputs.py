"""What the scheduler decides for one step: the runner reads this and nothing else."""

from dataclasses import dataclass

from torchtpu.buckets import Bucket
from workers.engine.request import Sequence


@dataclass(frozen=True)
class DecodeRow:
    """One token of a running sequence; its id lies in the sequence's row on the device."""

    sequence: Sequence
    epoch: int
    position: int
    """Of the input token, 0 for the first token of the prompt."""


@dataclass(frozen=True)
class PrefillSegment:
    """Tokens `start … start + length - 1` of a sequence, all known on the host."""

    sequence: Sequence
    epoch: int
    start: int
    length: int
    samples: bool
    """Whether this is the last one, whose last token yields the next."""


@dataclass(frozen=True)
class StepPlan:
    """One step: at most `bucket.rows` rows and `bucket.prefill.segments` segments."""

    bucket: Bucket
    rows: list[DecodeRow]
    segments: list[PrefillSegment]

    @property
    def num_tokens(self) -> int:
        """Tokens computed that are not padding."""
        return len(self.rows) + sum(segment.length for segment in self.segments)

    @property
    def needs_sampling(self) -> bool:
        """Whether any token is drawn at random; a wholly greedy step skips the sampling program."""
        sampling = [row.sequence for row in self.rows]
        sampling += [segment.sequence for segment in self.segments if segment.samples]
        return any(sequence.request.sampling.temperature > 0 for sequence in sampling)
