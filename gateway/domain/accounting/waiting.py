"""What has come of a group over the stream and is not in SQL yet: by number, whatever order it came in."""

from dataclasses import dataclass, field

from gateway.domain.accounting.soundness import is_text
from workers.chip_time import AnyEntry, Batch, decode_batch, decode_entry

SLICE = 100
"""Entries of a transaction."""


@dataclass
class Waiting:
    """Of one group."""

    entries: dict[int, tuple[AnyEntry, bytes]] = field(default_factory=dict)
    messages: dict[bytes, int] = field(default_factory=dict)
    """Number of the last entry of each."""
    heads: dict[int, bytes] = field(default_factory=dict)
    """The chain's hashes after some of them, as the worker told them."""
    next_number: int = 0
    is_over: bool = False
    """The group's line has ended, or is broken: whatever comes is dropped."""

    def add(self, message_id: bytes, entries: list[tuple[AnyEntry, bytes]], head: bytes) -> None:
        """All of a batch; what is in SQL is passed over."""
        for pair in entries:
            if pair[0].number >= self.next_number:
                self.entries.setdefault(pair[0].number, pair)
        last = entries[-1][0].number
        self.messages[message_id] = last
        if last >= self.next_number:
            self.heads[last] = head

    def move_to(self, number: int) -> None:
        """Forget what is before it."""
        for at in range(self.next_number, number):
            self.entries.pop(at, None)
            self.heads.pop(at, None)
        self.next_number = number

    @property
    def has_news(self) -> bool:
        """Whether any of it is not in SQL: a repeat of what is brings none."""
        return any(last >= self.next_number for last in self.messages.values())

    def drop_all(self) -> None:
        self.entries.clear()
        self.heads.clear()
        self.next_number = 1 + max(self.messages.values())

    def next_slice(self) -> list[tuple[AnyEntry, bytes]]:
        """The next entries of the group's line that are there without a gap; none if the line is over."""
        news: list[tuple[AnyEntry, bytes]] = []
        number = self.next_number
        while not self.is_over and len(news) < SLICE and (pair := self.entries.get(number)):
            news.append(pair)
            number += 1
        return news


def decoded(payload: bytes) -> tuple[Batch, list[tuple[AnyEntry, bytes]]]:
    """Raises `MsgspecError` or `ValueError` if it is no batch."""
    batch = decode_batch(payload)
    entries = [(decode_entry(one), one) for one in batch.payloads]
    if not entries or any(entry.number != batch.first + i for i, (entry, _) in enumerate(entries)):
        raise ValueError("its entries do not follow each other")
    if not is_text(batch.group):
        raise ValueError("the group's name is too long, or no text")
    return batch, entries
