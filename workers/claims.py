"""The requests that this worker has claimed and not finished."""

import asyncio
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple

import msgspec

from workers.protocol import FinishReason, GenerateRequest, OutputDelta


class Entry(NamedTuple):
    """One entry of the requests stream, as claimed."""

    entry_id: bytes
    payload: bytes
    num_deliveries: int = 1
    """How often the entry was handed to a worker, this time included."""


@dataclass(slots=True)
class Claim:
    request: GenerateRequest
    entry_ids: list[bytes]
    """Usually one; more if the gateway enqueued the request again after an outage of Redis."""
    num_deltas: int = 0
    """Deltas handed to the publisher; 0 means that no gateway has heard of the request from here."""
    held: dict[int, list[OutputDelta]] = field(default_factory=dict)
    """By choice, of a request whose answer is read at its end."""

    def to_publish(self, delta: OutputDelta) -> OutputDelta | None:
        """What the gateway is to hear now; None if that can wait.

        Where nobody reads before the end, a choice's deltas become one. The very first goes out at once: it
        says who answers, and when the answer began.
        """
        if self.request.whole:
            if self.num_deltas and delta.finish_reason is None:
                self.held.setdefault(delta.choice, []).append(delta)
                return None
            deltas = [*self.held.pop(delta.choice, ()), delta]
            delta = _joined(deltas, self.num_deltas, self.request.boundary)
        self.num_deltas += 1
        return delta


def _joined(deltas: list[OutputDelta], seq: int, boundary: str) -> OutputDelta:
    """One for all of them, which are a choice's and follow each other."""
    text = "".join(delta.text for delta in deltas)
    pieces: tuple[tuple[int, int], ...] = ()
    if boundary and (boundary in text or deltas[-1].finish_reason is FinishReason.LENGTH):
        pieces = tuple((len(delta.text), delta.num_tokens) for delta in deltas)
    scored = [delta.logprobs for delta in deltas if delta.logprobs is not None]
    return msgspec.structs.replace(
        deltas[-1],
        seq=seq,
        text=text,
        num_tokens=sum(delta.num_tokens for delta in deltas),
        logprobs=tuple(chain.from_iterable(scored)) if scored else None,
        prompt_logprobs=deltas[0].prompt_logprobs,
        pieces=pieces,
    )


class Claims:
    """Claims by request id, in the order they came, and the room that is left."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._claims: dict[str, Claim] = {}
        self._num_choices = 0
        self._is_closed = False
        self._room = asyncio.Event()
        self._room.set()
        self._empty = asyncio.Event()
        self._empty.set()

    def __len__(self) -> int:
        return len(self._claims)

    @property
    def num_free(self) -> int:
        """Choices that could still be taken in; 0 if full."""
        return max(0, self._capacity - self._num_choices)

    def get(self, request_id: str) -> Claim | None:
        return self._claims.get(request_id)

    def add(self, claim: Claim) -> None:
        """Remember a claim whose request id is not there yet."""
        self._claims[claim.request.request_id] = claim
        self._num_choices += max(1, claim.request.n)
        self._update()

    def release(self, request_id: str) -> Claim | None:
        """Forget a claim: it is finished or given back."""
        claim = self._claims.pop(request_id, None)
        if claim is not None:
            self._num_choices -= max(1, claim.request.n)
            self._update()
        return claim

    def all(self) -> list[Claim]:
        return list(self._claims.values())

    def without_output(self) -> list[Claim]:
        """Claims of which no gateway has heard, oldest first."""
        return [claim for claim in self._claims.values() if not claim.num_deltas]

    async def wait_for_room(self) -> bool:
        """True once there is room, False once the table is closed."""
        await self._room.wait()
        return not self._is_closed

    def close(self) -> None:
        """No more claims: whoever waits for room is let go."""
        self._is_closed = True
        self._room.set()

    async def wait_until_empty(self) -> None:
        await self._empty.wait()

    def _update(self) -> None:
        (self._room.set if self.num_free or self._is_closed else self._room.clear)()
        (self._empty.clear if self._claims else self._empty.set)()
