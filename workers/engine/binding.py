"""One choice's place in the grammar that its answer must match."""

import time

import numpy as np
from llguidance import LLMatcher
from llguidance.numpy import fill_next_token_bitmask
from numpy.typing import NDArray

from models.grammars import explained

GRACE_S = 1.0
MOST_OF_A_TOKEN_S = 0.005
"""Processor time that following an answer may take: some for a beginning, and so much for each token. A hostile
grammar may take a hundred times that, and every answer of the step would wait for it."""
TOO_SLOW = "it takes too long to follow."
_WORD_BITS = 32


class Binding:
    """Follows the answer token by token. It never raises: what goes wrong is told by `error`."""

    __slots__ = ("_left_s", "_matcher", "error")

    def __init__(self, matcher: LLMatcher) -> None:
        """`matcher` is its own, at its start."""
        self._matcher = matcher
        self._left_s = GRACE_S
        self.error: str | None = None
        """Why the answer cannot go on, a sentence for the client."""

    @property
    def is_over(self) -> bool:
        """Whether the answer is whole and nothing can follow."""
        return self._matcher.is_stopped()

    def advance(self, token: int) -> None:
        """The answer has got a token."""
        if self.error is None:
            began_s = time.thread_time()
            self._matcher.consume_token(token)
            self._account(time.thread_time() - began_s - MOST_OF_A_TOKEN_S)

    def fill(self, masks: NDArray[np.int32], place: int) -> None:
        """Say what may come next, in a row of `masks` [n, words]; anything if it is not known."""
        if self.error is None:
            began_s = time.thread_time()
            fill_next_token_bitmask(self._matcher, masks, place)
            self._account(time.thread_time() - began_s)
        if self.error is not None:
            masks[place] = -1

    def _account(self, spent_s: float) -> None:
        self._left_s = min(GRACE_S, self._left_s - spent_s)
        if self._matcher.is_error():
            self.error = explained(self._matcher)
        elif self._left_s < 0:
            self.error = TOO_SLOW


def bar(mask: NDArray[np.int32], tokens: frozenset[int]) -> None:
    """Take tokens out of a mask [words], unless no others are left: an end may not come early, but must then."""
    left = mask.view(np.uint32).copy()
    for token in tokens:
        word, bit = divmod(token, _WORD_BITS)
        left[word] &= np.uint32(0xFFFFFFFF ^ (1 << bit))
    if left.any():
        mask[:] = left.view(np.int32)
