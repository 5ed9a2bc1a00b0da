"""What the scheduler decides for one step: the runner reads this and nothing else."""

from dataclasses import dataclass
from enum import IntEnum

from torchtpu.buckets import Bucket
from workers.engine.request import Sequence, Status
from workers.protocol import SamplingParams


class Draw(IntEnum):
    """How a step chooses tokens, the cheapest first."""

    GREEDY = 0
    """No row is random: the step program's own tokens."""
    PLAIN = 1
    """Temperature alone."""
    TRUNCATED = 2
    """Some row has top-k, top-p or min-p."""


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

    @property
    def is_first(self) -> bool:
        """The first one of its sequence ever; a preempted sequence's next start has none."""
        return self.epoch == 0 and self.start == self.sequence.num_cached


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
    def draw(self) -> Draw:
        """The cheapest way to choose this step's tokens that does justice to all of its rows."""
        sequences = [row.sequence for row in self.rows]
        sequences += [segment.sequence for segment in self.segments if segment.samples]
        return max((_draw(s.request.sampling) for s in sequences), default=Draw.GREEDY)


def is_current(entry: DecodeRow | PrefillSegment) -> bool:
    """Whether its sequence still waits for this result: it has not ended or started anew meanwhile."""
    sequence = entry.sequence
    return sequence.epoch == entry.epoch and sequence.status is Status.RUNNING


def _draw(sampling: SamplingParams) -> Draw:
    if sampling.temperature <= 0:
        return Draw.GREEDY
    truncates = sampling.top_k > 0 or sampling.top_p < 1 or sampling.min_p > 0
    return Draw.TRUNCATED if truncates else Draw.PLAIN
