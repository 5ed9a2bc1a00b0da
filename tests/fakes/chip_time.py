"""Lives of groups for tests of the ledger: entries as a worker's meter tells them, on a calendar of the test's own."""

import random
from dataclasses import dataclass, field

from workers.chip_time import (
    AnyEntry,
    Batch,
    Ended,
    Joined,
    Member,
    Opened,
    Released,
    Span,
    Spent,
    Step,
    chain,
    encode,
    first_hash,
)
from workers.protocol import FinishReason

SECOND = 1_000_000_000
HOUR_UNIX_NS = 1_800_000_000 // 3600 * 3600 * SECOND
"""The beginning of an hour."""


@dataclass
class Life:
    """One group; each call appends an entry to its line."""

    group: str = "g"
    model: str = "m"
    num_chips: int = 2
    sku: str = "v6e"
    region: str = ""
    granted_unix_ns: int = HOUR_UNIX_NS
    fit: str = ""
    entries: list[AnyEntry] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.entries.append(
            Opened(
                number=0, begin_ns=0, end_ns=0, model=self.model, worker_id=self.group,
                engine="model", sku=self.sku, num_chips=self.num_chips, region=self.region,
                granted_unix_ns=self.granted_unix_ns,
            )
        )  # fmt: skip
        self._joined: list[Joined] = []
        self._ended: list[Ended] = []
        self._num_steps = 0

    @property
    def end_ns(self) -> int:
        return self.entries[-1].end_ns

    def join(self, request_id: str, key_id: str = "k", tag: str = "") -> None:
        """Told with the next entry, as the end is."""
        self._joined.append(Joined(request_id, key_id, tag, 4, 1))

    def end(
        self, request_id: str, num_tokens: int = 1, reason: FinishReason = FinishReason.STOP
    ) -> None:
        self._ended.append(Ended(request_id, reason, num_tokens, 0))

    def span(self, length_ns: int, spent: Spent = Spent.IDLE) -> None:
        self._add(Span, self.end_ns + length_ns, spent=spent)

    def step(self, members: list[Member], length_ns: int, **fields: object) -> None:
        gaps = sum(int(str(fields.get(name, 0))) for name in ("idle_ns", "bubble_ns", "compile_ns"))
        number, self._num_steps = self._num_steps, self._num_steps + 1
        self._add(
            Step, self.end_ns + gaps + length_ns, step=number, bucket="b", members=tuple(members),
            fit=self.fit, **fields,
        )  # fmt: skip

    def release(self) -> None:
        self._add(Released, self.end_ns)

    def batches(self, size: int = 3) -> list[Batch]:
        """All entries, `size` to a batch."""
        payloads = [encode(entry) for entry in self.entries]
        hashes = chain(first_hash(self.group), payloads)
        return [
            Batch(self.group, at, payloads[at : at + size], hashes[min(at + size, len(hashes)) - 1])
            for at in range(0, len(payloads), size)
        ]

    def _add(self, kind: type[Span | Step | Released], end_ns: int, **fields: object) -> None:
        joined, self._joined = tuple(self._joined), []
        ended, self._ended = tuple(self._ended), []
        self.entries.append(
            kind(
                number=len(self.entries), begin_ns=self.end_ns, end_ns=end_ns,
                joined=joined, ended=ended, **fields,
            )  # type: ignore[arg-type]
        )  # fmt: skip


def random_life(seed: int, group: str, num_steps: int = 30, **fields: object) -> Life:
    """Requests that come, run and end in all ways, with steps of up to minutes: some hours pass."""
    chance = random.Random(seed)
    life = Life(group, **fields)  # type: ignore[arg-type]
    life.span(chance.randrange(10 * SECOND), Spent.WEIGHTS)
    resident: list[str] = []
    for number in range(num_steps):
        for _ in range(chance.randrange(3)):
            resident.append(f"{group}-r{number}-{len(resident)}")
            life.join(resident[-1], f"key-{chance.randrange(3)}", chance.choice(["", "tag"]))
        if not resident or chance.random() < 0.2:
            life.span(chance.randrange(5 * SECOND), chance.choice([Spent.IDLE, Spent.DRAIN]))
            continue
        members = [
            Member(
                request_id, 0, chance.random() < 0.3, 1 + chance.randrange(9), chance.randrange(99),
                chance.randrange(3), chance.random() < 0.9, chance.random() < 0.1,
            )
            for request_id in resident
        ]  # fmt: skip
        for request_id in [r for r in resident if chance.random() < 0.2]:
            resident.remove(request_id)
            life.end(request_id, chance.randrange(9), chance.choice(list(FinishReason)))
        life.step(
            members, chance.randrange(400 * SECOND), idle_ns=chance.randrange(SECOND),
            bubble_ns=chance.randrange(SECOND), compile_ns=chance.choice([0, 0, 0, SECOND]),
            is_failed=chance.random() < 0.1, is_draining=chance.random() < 0.1,
            num_padded=chance.randrange(8), num_rejected=chance.randrange(2),
        )  # fmt: skip
    return life
