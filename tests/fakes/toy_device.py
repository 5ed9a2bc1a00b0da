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
from workers.engine.outputs import StepPlan

EOS = 0
NUM_TOKENS = 7
"""Few tokens make equal texts likely."""


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


@dataclass(frozen=True)
class ToyHandle:
    plan: StepPlan
    tokens: list[int]
    is_lost: bool = False

    def collect(self) -> list[int]:
        if self.is_lost:
            raise RuntimeError("buffer has been deleted or donated")
        return self.tokens


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

    def _compute(self, plan: StepPlan) -> list[int]:
        layout = BatchLayout(plan.bucket, self._block_len, self.max_rows)
        fields = layout.fields(layout.pack(plan))
        tokens = [*self._newest[fields["newest_rows"]], *fields["prompt_tokens"]]
        # All tokens of a step are written before any is read.
        self._cache[fields["slots"]] = tokens
        tables = fields["tables"][fields["token_tables"]]
        sampled = [
            self._read(tables[token], fields["positions"][token] + 1)
            for token in fields["sample_tokens"]
        ]
        self._newest[fields["sample_rows"]] = sampled
        return sampled

    def _slot(self, blocks: NDArray[np.int32], position: int) -> int:
        return int(blocks[position // self._block_len]) * self._block_len + (
            position % self._block_len
        )

    def _read(self, blocks: NDArray[np.int32], end: int) -> int:
        text = [int(self._cache[self._slot(blocks, position)]) for position in range(end)]
        return next_token(text) if min(text, default=-1) >= 0 else -1
