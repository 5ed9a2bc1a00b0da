"""A device small enough to compute by hand, in the place of a model: its cache holds the tokens
themselves, and the next token is a checksum of all tokens that a row can reach through its blocks.

It sees nothing but the packed arrays of a step, so a wrong block, position, row or stale content gives
another token than `continuation`, which knows the text alone.
"""

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from torchtpu.buckets import BucketLadder
from workers.engine.input_batch import BatchLayout
from workers.engine.logprobs import StepLogprobs
from workers.engine.outputs import StepPlan, StepResults
from workers.engine.sampling_batch import pack_targets
from workers.protocol import TokenLogprobs

EOS = 0
NUM_TOKENS = 7
"""Few tokens make equal texts likely."""
NUM_TOP = 3


def next_token(text: Sequence[int]) -> int:
    return zlib.crc32(bytes(text)) % NUM_TOKENS


def continuation(prompt: Sequence[int], max_tokens: int, *, ignore_eos: bool) -> list[int]:
    """The tokens that must come out, the end-of-sequence token included."""
    text = list(prompt)
    while len(text) - len(prompt) < max_tokens:
        text.append(next_token(text))
        if text[-1] == EOS and not ignore_eos:
            break
    return text[len(prompt) :]


def toy_logprobs(text: Sequence[int], token: int, num_top: int) -> TokenLogprobs:
    """What must be reported of `token` after `text`: numbers that no other place has."""
    row = _logprobs_row(list(text), token)
    return StepLogprobs(np.array([row], np.int32)).of(0, token, num_top)


def _logprobs_row(text: list[int], token: int) -> NDArray[np.int32]:
    values = [-zlib.crc32(bytes([*text, token, i])) / 2**32 for i in range(1 + NUM_TOP)]
    ids = np.arange(NUM_TOP, dtype=np.int32) + next_token(text)
    return np.concatenate([np.array(values, np.float32).view(np.int32), ids])


@dataclass(frozen=True)
class ToyHandle:
    plan: StepPlan
    results: StepResults
    is_lost: bool = False

    def collect(self) -> StepResults:
        if self.is_lost:
            raise RuntimeError("buffer has been deleted or donated")
        return self.results


class ToyRunner:
    """Takes the place of `workers.engine.model_runner.ModelRunner`."""

    num_programs = 0

    def __init__(self, ladder: BucketLadder, num_blocks: int, block_len: int) -> None:
        self._ladder, self._num_blocks, self._block_len = ladder, num_blocks, block_len
        self.lose_next: str | None = None
        """`dispatch` or `collect`: where the next step fails."""
        self.plans: list[StepPlan] = []
        self.watch: Callable[[StepPlan], None] = lambda plan: None
        """Sees each plan before it runs."""
        self.reset_cache()

    @property
    def max_rows(self) -> int:
        return self._ladder.max_rows

    def num_compilations(self) -> int:
        return 0

    def reset_cache(self) -> None:
        self._cache = np.full(self._num_blocks * self._block_len, -1)
        self._newest = np.full(self.max_rows + 1, -1)

    def dispatch(self, plan: StepPlan) -> ToyHandle:
        self.plans.append(plan)
        self.watch(plan)
        lost, self.lose_next = self.lose_next, None
        if lost:
            self._cache[:] = self._newest[:] = -1
        if lost == "dispatch":
            raise RuntimeError("buffer has been deleted or donated")
        return ToyHandle(plan, self._compute(plan), is_lost=lost == "collect")

    def _compute(self, plan: StepPlan) -> StepResults:
        layout = BatchLayout(plan.bucket, self._block_len, self.max_rows)
        fields = layout.fields(layout.pack(plan))
        tokens = [*self._newest[fields["newest_rows"]], *fields["prompt_tokens"]]
        # All tokens of a step are written before any is read.
        self._cache[fields["slots"]] = tokens
        tables = fields["tables"][fields["token_tables"]]
        texts = [
            self._read(tables[token], fields["positions"][token] + 1)
            for token in fields["sample_tokens"]
        ]
        sampled = [next_token(text) if text else -1 for text in texts]
        self._newest[fields["sample_rows"]] = sampled
        if not plan.reports:
            return StepResults(sampled)
        wanted = np.where(pack_targets(plan) < 0, sampled, pack_targets(plan)).clip(min=0)
        rows = [_logprobs_row(*pair) for pair in zip(texts, wanted.tolist(), strict=True)]
        return StepResults(sampled, StepLogprobs(np.array(rows, np.int32)))

    def _slot(self, blocks: NDArray[np.int32], position: int) -> int:
        return int(blocks[position // self._block_len]) * self._block_len + (
            position % self._block_len
        )

    def _read(self, blocks: NDArray[np.int32], end: int) -> list[int]:
        """The tokens that the blocks hold; none if one of them was never written."""
        text = [int(self._cache[self._slot(blocks, position)]) for position in range(end)]
        return text if min(text, default=-1) >= 0 else []
