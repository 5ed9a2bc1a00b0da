"""One choice's place in the grammar that its answer must match."""

import numpy as np
from llguidance import LLMatcher
from numpy.typing import NDArray

from models.grammars import explained

_WORD_BITS = 32


class Binding:
    """Follows the answer token by token. It never raises: what goes wrong is told by `error`."""

    __slots__ = ("error", "matcher")

    def __init__(self, matcher: LLMatcher) -> None:
        """`matcher` is its own, at its start."""
        self.matcher = matcher
        self.error: str | None = None
        """Why the answer cannot go on, a sentence for the client."""

    @property
    def is_over(self) -> bool:
        """Whether the answer is whole and nothing can follow."""
        return self.matcher.is_stopped()

    def advance(self, token: int) -> None:
        """The answer has got a token."""
        if self.error is None and not self.matcher.consume_token(token):
            self.note_error()

    def note_error(self) -> None:
        """Look whether the matcher has failed."""
        if self.error is None and self.matcher.is_error():
            self.error = explained(self.matcher)


def bar(mask: NDArray[np.int32], tokens: frozenset[int]) -> None:
    """Take tokens out of a mask [words], unless no others are left: an end may not come early, but must then."""
    left = mask.view(np.uint32).copy()
    for token in tokens:
        word, bit = divmod(token, _WORD_BITS)
        left[word] &= np.uint32(0xFFFFFFFF ^ (1 << bit))
    if left.any():
        mask[:] = left.view(np.int32)
