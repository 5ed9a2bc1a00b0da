"""Grammars that bind answers, off the step loop until they are ready:

    start ──> a thread compiles, or it is kept from before ──> ready ──> a binding for each choice

and from then on a mask for each bound sample of each step. What a gateway has checked compiles within bounds
(`models.grammar_check`); should it not, only the request that brought it ends.
"""

import logging
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Collection
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait

import numpy as np
from llguidance import LLMatcher, LLTokenizer
from numpy.typing import NDArray

from models.errors import GrammarError
from models.grammars import compiled
from workers.engine.binding import bar
from workers.engine.outputs import Sample, StepPlan, is_current
from workers.protocol import Grammar

MAX_KEPT = 64
"""Compiled grammars that are kept for the next request with the same."""
MOST_S = 15.0
"""A grammar that compiles for longer is given up; the library's own limits end it some time."""
NUM_THREADS = 2
TOO_SLOW = "it takes too long to compile."
BROKEN = "it cannot be compiled."

log = logging.getLogger(__name__)


class Grammars:
    """Of one model. All but the compiling is for the engine's thread alone."""

    def __init__(self, vocabulary: Callable[[], LLTokenizer], vocab_size: int) -> None:
        """`vocabulary` may raise `GrammarError`; it runs in the background. `vocab_size` is the logits' width."""
        self._num_words = -(-vocab_size // 32)
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="grammar")
        self._vocabulary = self._threads.submit(vocabulary)
        self._kept: OrderedDict[tuple[str, str], _Compiling] = OrderedDict()
        self._waiting: dict[str, _Compiling] = {}
        """By request."""

    @property
    def why_not(self) -> str | None:
        """Why answers of this model cannot be bound; None if they can. Waits for the vocabulary."""
        error = self._vocabulary.exception()
        if error is not None and not isinstance(error, GrammarError):
            raise error
        return None if error is None else str(error)

    @property
    def waiting(self) -> Collection[str]:
        """Requests whose grammars are not ready."""
        return self._waiting.keys()

    def start(self, request_id: str, grammar: Grammar) -> None:
        """Have it ready soon: see `take_ready`."""
        key = grammar.kind, grammar.text
        compiling = self._kept.get(key)
        if compiling is None or compiling.is_given_up:
            compiling = self._kept[key] = _Compiling(grammar, self._vocabulary.result())
            compiling.future = self._threads.submit(compiling.run)
        self._kept.move_to_end(key)
        if len(self._kept) > MAX_KEPT:
            self._kept.popitem(last=False)
        self._waiting[request_id] = compiling

    def forget(self, request_id: str) -> None:
        """Nobody waits for it any more."""
        self._waiting.pop(request_id, None)

    def wait(self, timeout_s: float) -> None:
        """Until one more is ready, or the time is up."""
        wait([c.future for c in self._waiting.values()], timeout_s, FIRST_COMPLETED)

    def take_ready(self) -> list[tuple[str, LLMatcher | str]]:
        """Requests whose wait is over: a matcher to copy, or why there is none, a sentence for the client."""
        if not self._waiting:
            return []
        ready = [(i, c) for i, c in self._waiting.items() if c.future.done() or c.is_given_up]
        for request_id, _ in ready:
            del self._waiting[request_id]
        return [(request_id, compiling.outcome()) for request_id, compiling in ready]

    def allowed(self, plan: StepPlan) -> NDArray[np.int32]:
        """[num_samples, words] int32: a bit for each token that a sample may draw, the lowest first.

        Unbound samples may draw any, and so may those whose token nobody waits for.
        """
        masks = np.full((plan.bucket.num_samples, self._num_words), -1, np.int32)
        for sample in plan.bound:
            binding = sample.sequence.binding
            if binding is not None and is_current(sample.entry):
                binding.fill(masks, sample.place)
                if barred := _barred(sample):
                    bar(masks[sample.place], barred)
        return masks


class _Compiling:
    """A grammar on its way, or there."""

    future: Future[LLMatcher]

    def __init__(self, grammar: Grammar, vocabulary: LLTokenizer) -> None:
        self._grammar, self._vocabulary = grammar, vocabulary
        self._began_s = math.inf
        """Until a thread is free for it."""

    def run(self) -> LLMatcher:
        self._began_s = time.monotonic()
        return compiled(self._grammar.kind, self._grammar.text, self._vocabulary)

    @property
    def is_given_up(self) -> bool:
        return not self.future.done() and time.monotonic() - self._began_s > MOST_S

    def outcome(self) -> LLMatcher | str:
        if not self.future.done():
            return TOO_SLOW
        error = self.future.exception()
        if error is None:
            return self.future.result()
        if isinstance(error, GrammarError):
            return str(error)
        log.error("A grammar could not be compiled.", exc_info=error)
        return BROKEN


def _barred(sample: Sample) -> frozenset[int]:
    """Tokens that may not end the answer yet."""
    sequence = sample.sequence
    barred = sequence.output.end_token_ids if sample.is_early else frozenset()
    if sequence.request.sampling.ignore_eos:
        barred |= sequence.output.eos_token_ids
    return barred
