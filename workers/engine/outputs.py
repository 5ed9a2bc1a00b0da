"""What the scheduler decides for one step: the runner reads this and nothing else."""

from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from typing import NamedTuple

from torchtpu.buckets import Bucket
from workers.engine.logprobs import StepLogprobs
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
    PENALISED = 3
    """Some row has a penalty, a bias, or end tokens that may not come yet."""


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
    scores: bool = False
    """Whether the log-probabilities of its tokens are asked for."""

    @property
    def is_first(self) -> bool:
        """The first one of its sequence ever; a preempted sequence's next start has none."""
        return self.epoch == 0 and self.start == self.sequence.num_cached


class Sample(NamedTuple):
    """A token that a step draws."""

    place: int
    """Of its logits among the step's."""
    entry: DecodeRow | PrefillSegment
    position: int
    """Of the token itself."""

    @property
    def sequence(self) -> Sequence:
        return self.entry.sequence

    @property
    def is_start(self) -> bool:
        """Whether the host knows all tokens before it."""
        return isinstance(self.entry, PrefillSegment)

    @property
    def is_early(self) -> bool:
        """Whether the answer is too short for an end token."""
        sequence = self.entry.sequence
        num_before = self.position - len(sequence.request.prompt_token_ids)
        is_early = num_before < sequence.request.sampling.min_tokens
        return is_early and bool(sequence.output.end_token_ids)

    @property
    def is_endless(self) -> bool:
        """The same where no grammar says which tokens may come, and when that is the end alone."""
        return self.is_early and self.entry.sequence.binding is None

    @property
    def draw(self) -> Draw:
        """The cheapest way that does justice to it."""
        sampling = self.entry.sequence.request.sampling
        if _is_penalised(sampling) or self.is_endless:
            return Draw.PENALISED
        if sampling.temperature <= 0:
            return Draw.GREEDY
        truncates = sampling.top_k > 0 or sampling.top_p < 1 or sampling.min_p > 0
        return Draw.TRUNCATED if truncates else Draw.PLAIN


class ScoredToken(NamedTuple):
    """A prompt token whose log-probabilities a step reports."""

    place: int
    """Of the logits that foretell it among the step's."""
    segment: PrefillSegment
    source: int
    """The token before it, which has those logits: its index in the step's run of prompt tokens."""
    position: int

    @property
    def sequence(self) -> Sequence:
        return self.segment.sequence


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

    @cached_property
    def samples(self) -> list[Sample]:
        """The tokens that it draws: one for each decode row and each prompt that ends."""
        samples = [Sample(i, row, row.position + 1) for i, row in enumerate(self.rows)]
        first = self.bucket.rows
        samples += [
            Sample(first + i, segment, segment.start + segment.length)
            for i, segment in enumerate(self.segments)
            if segment.samples
        ]
        return samples

    @cached_property
    def scored(self) -> list[ScoredToken]:
        """Prompt tokens to score. Their logits take the places that nothing else takes."""
        rows, num_segments = self.bucket.rows, len(self.segments)
        free = [*range(len(self.rows), rows), *range(rows + num_segments, self.bucket.num_samples)]
        scored: list[ScoredToken] = []
        first = 0
        for index, segment in enumerate(self.segments):
            if segment.scores:
                for offset in range(segment.length - 1):
                    position = segment.start + offset + 1
                    scored.append(ScoredToken(free.pop(0), segment, first + offset, position))
                if not segment.samples:
                    last, end = first + segment.length - 1, segment.start + segment.length
                    scored.append(ScoredToken(rows + index, segment, last, end))
            first += segment.length
        return scored

    @cached_property
    def draw(self) -> Draw:
        """The cheapest way to choose this step's tokens that does justice to all of its rows."""
        return max((sample.draw for sample in self.samples), default=Draw.GREEDY)

    @cached_property
    def bound(self) -> list[Sample]:
        """The samples whose tokens a grammar chooses from."""
        return [sample for sample in self.samples if sample.entry.sequence.binding is not None]

    @property
    def reports(self) -> bool:
        """Whether somebody asked for log-probabilities of this step."""
        asked = (s.sequence.request.sampling.logprobs is not None for s in self.samples)
        return any(asked) or bool(self.scored)


@dataclass(frozen=True)
class StepResults:
    """What the device made of a plan."""

    tokens: list[int]
    """[num_samples]"""
    logprobs: StepLogprobs | None = None
    """If the plan reports."""


def is_current(entry: DecodeRow | PrefillSegment) -> bool:
    """Whether its sequence still waits for this result: it has not ended or started anew meanwhile."""
    sequence = entry.sequence
    return sequence.epoch == entry.epoch and sequence.status is Status.RUNNING


def score_prompts(plan: StepPlan, results: StepResults) -> None:
    """Hand the log-probabilities of prompt tokens to their choices."""
    for token in plan.scored:
        if results.logprobs is not None and is_current(token.segment):
            token.sequence.logprobs.score(results.logprobs, token.place, token.position)


def _is_penalised(sampling: SamplingParams) -> bool:
    return bool(
        sampling.repetition_penalty != 1
        or sampling.frequency_penalty
        or sampling.presence_penalty
        or sampling.logit_bias
    )
