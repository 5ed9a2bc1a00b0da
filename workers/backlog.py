"""Whose turn it is among the requests that no worker has yet.

While workers have room, entries are read as they come. Once none has, a backlog builds up in the stream,
and whoever gets room looks at its oldest entries and takes those whose turn it is: urgent ones first,
then one of the key that has the fewest choices running here, then the oldest. So the rows are shared
evenly between the keys that want some, whoever came first and with however many requests.
"""

import time
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass

import msgspec

from workers.consumer import RequestQueue
from workers.protocol import GenerateRequest, decode

WINDOW = 1000
"""Entries looked at: a request behind so many others waits until some of them are gone."""


@dataclass(frozen=True, slots=True)
class Head:
    """What decides an entry's turn."""

    entry_id: bytes
    request_id: str = ""
    """Empty for what is no request: it is taken at once, to be dropped."""
    priority: int = 0
    fair_key: str = ""
    num_choices: int = 1
    deadline_s: float = 0.0

    @classmethod
    def of(cls, entry_id: bytes, payload: bytes | None) -> "Head":
        try:
            request = decode(GenerateRequest, payload or b"")
        except (msgspec.MsgspecError, ValueError):
            return cls(entry_id)
        return cls(
            entry_id,
            request.request_id,
            request.priority,
            request.fair_key,
            max(1, request.n),
            request.deadline_s,
        )

    def is_over(self, aborted: Collection[str], now_s: float) -> bool:
        """Whether it ends without taking room."""
        is_late = 0 < self.deadline_s < now_s
        return not self.request_id or is_late or self.request_id in aborted


class Backlog:
    """The waiting entries as last seen; each payload is decoded once."""

    def __init__(self, queue: RequestQueue) -> None:
        self._queue = queue
        self._heads: dict[bytes, Head] = {}

    async def look(self) -> list[Head]:
        """The oldest waiting entries. Raises `link.OUTAGE`."""
        ids = await self._queue.backlog(WINDOW)
        new = [entry_id for entry_id in ids if entry_id not in self._heads]
        payloads = await self._queue.peek(new) if new else []
        fresh = {i: Head.of(i, payload) for i, payload in zip(new, payloads, strict=True)}
        self._heads = {i: fresh.get(i) or self._heads[i] for i in ids}
        return list(self._heads.values())


def choose(
    heads: Iterable[Head],
    running: Iterable[GenerateRequest],
    room: int,
    aborted: Collection[str] = (),
) -> list[Head]:
    """The entries to take with room for so many choices; the last one may need more than is left.

    `heads` come oldest first. What is over already is among them in any case.
    """
    now_s = time.time()
    chosen: list[Head] = []
    lines: dict[tuple[int, str], list[Head]] = {}
    for head in heads:
        if head.is_over(aborted, now_s):
            chosen.append(head)
        else:
            lines.setdefault((head.priority, head.fair_key), []).append(head)
    rows = Counter[str]()
    for request in running:
        rows[request.fair_key] += max(1, request.n)
    for line in lines.values():
        line.reverse()
    while room > 0 and lines:
        name = min(lines, key=lambda n: (n[0], rows[n[1]], lines[n][-1].entry_id))
        head = lines[name].pop()
        if not lines[name]:
            del lines[name]
        chosen.append(head)
        rows[head.fair_key] += head.num_choices
        room -= head.num_choices
    return chosen
