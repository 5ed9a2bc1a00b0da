"""Which waiting sequence starts next. Plain Python.

Priority comes first. Among equals, sequences that were preempted come back in the order of their first
start; then the keys take turns: whose key was served the fewest tokens goes first, and within a key
whoever came first. So a key with a thousand requests delays another one's by about one of its own:

    key A   ▯▯▯▯▯▯▯▯   1200 tokens served
    key B   ▯           900 tokens served      <- next

A key that comes back from idle is lifted to the least served one of those that wait: nobody saves up
turns by being away. This is the virtual token counter of Sheng et al., "Fairness in Serving Large
Language Models" (OSDI 2024), with prompt and output tokens of equal weight.
"""

import bisect
from collections import deque
from collections.abc import Iterator

from workers.engine.request import Sequence

MAX_KEYS = 1024
"""Counters kept; beyond that those are dropped that a returning key would be lifted over anyway."""

Line = tuple[int, str]
"""A priority and a key: sequences that are served first come, first served."""


class FairQueue:
    """The sequences that do not run, and how many tokens each key was served."""

    def __init__(self) -> None:
        self._lines: dict[Line, deque[Sequence]] = {}
        """No line is empty."""
        self._preempted: list[Sequence] = []
        self._served: dict[str, int] = {}
        self._last_key = ""
        """Whose sequence left last: what a key is lifted to while nobody waits."""

    def __len__(self) -> int:
        return len(self._preempted) + sum(len(line) for line in self._lines.values())

    def __iter__(self) -> Iterator[Sequence]:
        """In no particular order."""
        yield from self._preempted
        for line in self._lines.values():
            yield from line

    def add(self, sequence: Sequence) -> None:
        """Take in a new sequence, or a preempted one with its old right."""
        if sequence.has_started:
            bisect.insort(self._preempted, sequence, key=lambda s: s.order)
            return
        key = sequence.request.fair_key
        if not any(key == waiting for _, waiting in self._lines):
            self._lift(key)
        self._lines.setdefault((sequence.request.priority, key), deque()).append(sequence)

    def first(self) -> Sequence | None:
        """Who starts next; None if nobody waits."""
        heads = self._preempted[:1]
        if self._lines:
            heads.append(self._lines[min(self._lines, key=self._rank)][0])
        # Of equal priorities the preempted one.
        return min(heads, key=lambda s: s.request.priority, default=None)

    def remove(self, sequence: Sequence) -> None:
        """It starts, or has ended; raises ValueError if it does not wait."""
        if sequence.has_started:
            self._preempted.remove(sequence)
            return
        name = (sequence.request.priority, sequence.request.fair_key)
        line = self._lines.get(name, deque())
        line.remove(sequence)
        if not line:
            del self._lines[name]
            self._last_key = sequence.request.fair_key

    def charge(self, key: str, num_tokens: int) -> None:
        """The key was served so many tokens more."""
        self._served[key] = self._served.get(key, 0) + num_tokens

    def _rank(self, line: Line) -> tuple[int, int, int]:
        priority, key = line
        return priority, self._served.get(key, 0), self._lines[line][0].arrival

    def _lift(self, key: str) -> None:
        served = [self._served.get(waiting, 0) for _, waiting in self._lines]
        least = min(served, default=self._served.get(self._last_key, 0))
        if len(self._served) >= MAX_KEYS:
            self._served = {k: n for k, n in self._served.items() if n > least}
        self._served[key] = max(self._served.get(key, 0), least)
