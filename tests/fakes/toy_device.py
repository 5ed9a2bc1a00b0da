"""A device small enough to compute by hand, in the place of a model: its cache holds the tokens
themselves, and the next token is a checksum of all tokens that a row can reach through its blocks.

It sees nothing but the packed arrays of a step, so a wrong block, position, row or stale content gives
another token than `continuation`, which knows the text alone.
"""

import functools
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper
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


def next_allowed(text: Sequence[int], mask: int) -> int:
    """The next token, or the first one that `mask` has a bit for."""
    token = next_token(text)
    if mask >> token & 1:
        return token
    return next(i for i in range(NUM_TOKENS) if mask >> i & 1)


def bound_continuation(
    prompt: Sequence[int], max_tokens: int, matcher: LLMatcher, *, ignore_eos: bool
) -> list[int]:
    """The same where `matcher`, at its start, says what may come."""
    text = list(prompt)
    while len(text) - len(prompt) < max_tokens and not matcher.is_stopped():
        mask = int.from_bytes(matcher.compute_bitmask(), "little")
        without_end = mask & ~(1 << EOS)
        text.append(next_allowed(text, without_end if ignore_eos and without_end else mask))
        assert matcher.consume_token(text[-1])
    return text[len(prompt) :]


class _Letters:
    """A vocabulary of the end and some letters, as llguidance asks for one."""

    bos_token_id = None
    eos_token_id = EOS
    special_token_ids = (EOS,)
    tokens = (b"<end>", *(bytes([ord("a") + i]) for i in range(NUM_TOKENS - 1)))

    def __call__(self, text: bytes) -> list[int]:
        letters = (bytes([byte]) for byte in text)
        return [self.tokens.index(letter) for letter in letters if letter in self.tokens]


@functools.cache
def toy_vocabulary() -> LLTokenizer:
    return LLTokenizer(TokenizerWrapper(_Letters()), slices=[])


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

    def __init__(
        self,
        ladder: BucketLadder,
        block_len: int,
        num_blocks: Sequence[int],
        windows: Sequence[int | None] = (None,),
    ) -> None:
        """`num_blocks` and `windows` of each group of layers; the first one sees every token."""
        self._ladder, self._block_len = ladder, block_len
        self._num_blocks, self._windows = num_blocks, windows
        self.lose_next: str | None = None
        """`dispatch`, `draw` or `collect`: where the next step fails."""
        self.plans: list[StepPlan] = []
        self.watch: Callable[[StepPlan], None] = lambda plan: None
        """Sees each plan before it runs."""
        self.num_resets = 0
        self.reset_cache()

    @property
    def max_rows(self) -> int:
        return self._ladder.max_rows

    def num_compilations(self) -> int:
        return 0

    def reset_cache(self) -> None:
        self.num_resets += 1
        self._caches = [np.full(n * self._block_len, -1) for n in self._num_blocks]
        self._newest = np.full(self.max_rows + 1, -1)

    def dispatch(
        self, plan: StepPlan, allowed: Callable[[], NDArray[np.int32]] | None = None
    ) -> ToyHandle:
        self.plans.append(plan)
        self.watch(plan)
        lost, self.lose_next = self.lose_next, None
        if lost:
            for cache in (*self._caches, self._newest):
                cache[:] = -1
        if lost == "dispatch":
            raise RuntimeError("buffer has been deleted or donated")
        results = self._compute(plan, allowed)
        if lost == "draw":
            raise RuntimeError("buffer has been deleted or donated")
        return ToyHandle(plan, results, is_lost=lost == "collect")

    def _compute(
        self, plan: StepPlan, allowed: Callable[[], NDArray[np.int32]] | None
    ) -> StepResults:
        layout = BatchLayout(plan.bucket, self._block_len, self.max_rows, len(self._caches))
        fields = layout.fields(layout.pack(plan))
        tokens = [*self._newest[fields["newest_rows"]], *fields["prompt_tokens"]]
        # All tokens of a step are written before any is read.
        for cache, slots in zip(self._caches, fields["slots"], strict=True):
            cache[slots] = tokens
        tables = fields["tables"][:, fields["token_tables"]]
        texts = [
            self._read(tables[:, token], int(fields["positions"][token]) + 1)
            for token in fields["sample_tokens"]
        ]
        masks = [-1] * len(texts) if allowed is None else allowed()[:, 0].tolist()
        sampled = [
            next_allowed(text, mask) if text else -1
            for text, mask in zip(texts, masks, strict=True)
        ]
        self._newest[fields["sample_rows"]] = sampled
        if not plan.reports:
            return StepResults(sampled)
        wanted = np.where(pack_targets(plan) < 0, sampled, pack_targets(plan)).clip(min=0)
        rows = [_logprobs_row(*pair) for pair in zip(texts, wanted.tolist(), strict=True)]
        return StepResults(sampled, StepLogprobs(np.array(rows, np.int32)))

    def _read(self, tables: NDArray[np.int32], end: int) -> list[int]:
        """The tokens so far; none if a group of layers does not have what it would look at."""
        texts = [
            [self._token(cache, blocks, p) for p in range(max(0, end - (window or end)), end)]
            for cache, blocks, window in zip(self._caches, tables, self._windows, strict=True)
        ]
        text = texts[0]
        agree = all(text[len(text) - len(other) :] == other for other in texts)
        return text if agree and min(text, default=-1) >= 0 else []

    def _token(self, cache: NDArray[np.int64], blocks: NDArray[np.int32], position: int) -> int:
        block, offset = divmod(position, self._block_len)
        return int(cache[blocks[block] * self._block_len + offset])
