"""Log-probabilities on the host: from the packed array of a step to what a choice reports."""

from collections.abc import Sequence as Tokens
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from workers.protocol import SamplingParams, TokenLogprobs


class StepLogprobs:
    """Those of one step, by place among its rows of logits."""

    def __init__(self, packed: NDArray[np.int32]) -> None:
        """`packed` [num_samples, 1 + 2 k] as `torchtpu.ops.sampling.logprobs` gives it."""
        self._num_top = (packed.shape[1] - 1) // 2
        self._ids = packed[:, 1 + self._num_top :]
        self._values = packed[:, : 1 + self._num_top].view(np.float32)

    def of(self, place: int, token: int, num_top: int) -> TokenLogprobs:
        """`token` is the one whose probability the device was asked for at this place."""
        num_top = min(num_top, self._num_top)
        ids, values = self._ids[place, :num_top], self._values[place, 1 : 1 + num_top]
        top = tuple(zip(ids.tolist(), values.tolist(), strict=True))
        return TokenLogprobs(token, float(self._values[place, 0]), top)


@dataclass
class ChoiceLogprobs:
    """What one choice reports, and has not sent yet.

    Prompt tokens are scored in order while the prompt is computed. A preempted sequence that computes its
    prompt again is scored again, and what is known already stays.
    """

    sampling: SamplingParams
    prompt: Tokens[int]
    prompt_is_asked: bool
    """Choice 0 answers for all choices."""
    _unsent: list[TokenLogprobs] = field(default_factory=list)
    _scored: list[TokenLogprobs | None] = field(default_factory=lambda: [None])
    """Of the first prompt tokens; nothing comes before the first one, so it has no probability."""
    _is_prompt_sent: bool = False

    def __post_init__(self) -> None:
        self.prompt_is_asked &= self.sampling.prompt_logprobs is not None

    @property
    def is_scoring(self) -> bool:
        """Whether the prompt must be computed token by token, with logits for each."""
        return self.prompt_is_asked and len(self._scored) < len(self.prompt)

    def add(self, logprobs: StepLogprobs, place: int, token: int) -> None:
        """A generated token, reported if that was asked for."""
        if self.sampling.logprobs is not None:
            self._unsent.append(logprobs.of(place, token, self.sampling.logprobs))

    def score(self, logprobs: StepLogprobs, place: int, position: int) -> None:
        """The prompt token at `position`."""
        if position == len(self._scored) and self.sampling.prompt_logprobs is not None:
            token = self.prompt[position]
            self._scored.append(logprobs.of(place, token, self.sampling.prompt_logprobs))

    def take(self) -> tuple[TokenLogprobs, ...] | None:
        """Those of the tokens that the next delta counts."""
        if self.sampling.logprobs is None:
            return None
        taken, self._unsent = tuple(self._unsent), []
        return taken

    def take_prompt(self) -> tuple[TokenLogprobs | None, ...] | None:
        """Those of the whole prompt, once; None if they were not asked for or an end came before."""
        if not self.prompt_is_asked or self._is_prompt_sent or self.is_scoring:
            return None
        self._is_prompt_sent = True
        return tuple(self._scored)
