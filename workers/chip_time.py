"""The wire of chip-time: what a lockstep group of chips did, interval by interval, for the ledger.

A lockstep group is all chips that wait for each other: one replica. Its life is a line of integer
nanoseconds from 0 (granted: the process started) to its release, and entries tile that line: each begins
where the one before ended. So nothing is counted twice and nothing is lost, whatever else goes wrong:

    granted                                                                        released
    0 ├─ provision ─┼─ weights ─┼─ compile ─┼─ idle ─┼ gap │ step 0 ┼ gap │ step 1 ┼─ … ┤

Times are of the group's monotonic clock; `granted_unix_ns` pins it to the calendar once, so a clock that is
set back changes nothing. Chip-time is an interval's length times the group's chips.

    worker ── Batch ──> CHIP_TIME_STREAM ──(consumer group)──> accountant, which writes it to SQL
    worker <── number of the next entry ── `committed_key` <── accountant, after its transaction
    worker <── Fits ── `fits_key` of the model <── accountant

A worker keeps what it has sent until the accountant has committed it and sends it again when Redis forgot it;
entries are told apart by group and number, so a repeat does no harm. Each entry is hashed together with the
hash of the one before it.
"""

import hashlib
from collections.abc import Iterable
from enum import StrEnum
from typing import Literal

import msgspec

from workers.protocol import FinishReason

CHIP_TIME_STREAM = "tpugate:chip-time"
ACCOUNTANTS = "accountants"
"""The stream's consumer group; one accountant at a time is at work."""
MAX_SPAN_S = 5.0
"""A longer idle or overhead interval is told in pieces, so that the ledger is never further behind."""
HASH_SIZE = 16


def committed_key(group: str) -> str:
    """Holds the number of the first entry that is not in SQL yet, as decimal text."""
    return f"tpugate:chip-time:committed:{group}"


def fits_key(model: str) -> str:
    """Holds the newest `Fits` of a model."""
    return f"tpugate:chip-time:fits:{model}"


class Spent(StrEnum):
    """What an interval went to."""

    STEP = "step"
    BUBBLE = "bubble"
    """Between two steps, with requests resident: the host was not ready."""
    IDLE = "idle"
    """No request was resident."""
    PROVISION = "provision"
    """Process start and device bring-up."""
    WEIGHTS = "weights"
    """Weights fetched, read and placed."""
    COMPILE = "compile"
    """Programs compiled or read back: at the start, or on the hot path."""
    DRAIN = "drain"
    """After the request to stop, between steps."""
    FAULT = "fault"
    """The group was lost, or a step's results were."""
    PROBE = "probe"
    """Work for nobody that tests the device."""


class Member(msgspec.Struct, frozen=True, array_like=True):
    """A choice's part in a step."""

    request_id: str
    choice: int
    is_prefill: bool
    num_tokens: int
    """Tokens computed for it."""
    context_len: int
    """Tokens in the cache before them."""
    num_cached: int = 0
    """Prompt tokens found in the prefix cache; on the choice's first segment only."""
    is_kept: bool = True
    """Whether the token that was drawn joined the answer, if one was drawn."""
    is_recomputed: bool = False
    """Prefill of what a preemption lost."""


class Joined(msgspec.Struct, frozen=True, array_like=True):
    """A request's first appearance: whose it is."""

    request_id: str
    key_id: str
    tag: str
    num_prompt_tokens: int
    num_choices: int


class Ended(msgspec.Struct, frozen=True, array_like=True):
    """A request has left: all its choices have ended."""

    request_id: str
    reason: FinishReason
    """Of the choice that ended last."""
    num_output_tokens: int
    """Delivered, all choices together."""
    num_cached_tokens: int


class Entry(msgspec.Struct, frozen=True, array_like=True, tag=True, kw_only=True):
    """One piece of a group's line. Number 0 is `Opened`, the last one `Released`."""

    number: int
    begin_ns: int
    """Where the entry before ended."""
    end_ns: int
    joined: tuple[Joined, ...] = ()
    """Requests first heard of since the entry before."""
    ended: tuple[Ended, ...] = ()


class Opened(Entry, frozen=True, kw_only=True, tag="opened"):
    """The chips were granted; of no length."""

    model: str
    worker_id: str
    engine: Literal["model", "scripted"]
    sku: str
    """What a price is asked for: `v6e`, `v5e`, `v7x`, `h200` … or `cpu`."""
    num_chips: int
    """From the topology: one v7x chip is two devices."""
    region: str = ""
    granted_unix_ns: int


class Span(Entry, frozen=True, kw_only=True, tag="span"):
    """An interval in which no step ran."""

    spent: Spent


class Step(Entry, frozen=True, kw_only=True, tag="step"):
    """A gap, then a step: begin ≤ begin + bubble + idle + compile + fault = began ≤ end."""

    step: int
    """0, 1, 2 … in this group."""
    bucket: str
    idle_ns: int = 0
    bubble_ns: int = 0
    """DRAIN instead, if the group is draining."""
    compile_ns: int = 0
    is_draining: bool = False
    is_failed: bool = False
    """Its results were not used: the step's time is a fault's, and its members keep nothing."""
    num_padded: int = 0
    """Tokens computed for nobody."""
    num_rejected: int = 0
    """Tokens that speculation drafted and the model refused."""
    fit: str = ""
    """Id of the `Fits` that the step's time was shared by; "" is token-proportional."""
    members: tuple[Member, ...] = ()

    @property
    def began_ns(self) -> int:
        return self.begin_ns + self.idle_ns + self.bubble_ns + self.compile_ns

    @property
    def length_ns(self) -> int:
        """D / N of the step: what its members share, times the group's chips."""
        return self.end_ns - self.began_ns


class Released(Entry, frozen=True, kw_only=True, tag="released"):
    """The chips are free again; of no length. A group that is lost gets its end from the accountant."""


AnyEntry = Opened | Span | Step | Released


class Batch(msgspec.Struct, frozen=True, array_like=True):
    """Neighbouring entries of one group: one append to the stream."""

    group: str
    """Unique for each process that ever lived: the worker's id."""
    first: int
    """Number of the first of them."""
    payloads: list[bytes]
    """Each an encoded entry."""
    head: bytes
    """Hash of the chain after the last of them."""


class Coefficients(msgspec.Struct, frozen=True, array_like=True):
    """Of a step's affine cost, in picoseconds; see `workers.attribution`. None is negative."""

    fixed: int
    """α: weights, launch, collectives."""
    prefill: int
    """b_p: per prompt token."""
    attention: int
    """b_a: per prompt token and token of its context."""
    decode: int
    """b_d: per decoded token."""
    context: int
    """b_kv: per token in the cache of a decoding choice."""


class Fits(msgspec.Struct, frozen=True, array_like=True):
    """The affine model of one model's steps; a bucket that is missing is shared token-proportionally."""

    id: str
    buckets: dict[str, Coefficients]


_encoder = msgspec.msgpack.Encoder()
_entries = msgspec.msgpack.Decoder(AnyEntry)
_batches = msgspec.msgpack.Decoder(Batch)
_fits = msgspec.msgpack.Decoder(Fits)


def encode(record: Entry | Batch | Fits) -> bytes:
    """One record as msgpack bytes."""
    return _encoder.encode(record)


def decode_entry(payload: bytes) -> AnyEntry:
    """Raises `msgspec.DecodeError` or `ValidationError` if it is none; so do the two below."""
    return _entries.decode(payload)


def decode_batch(payload: bytes) -> Batch:
    return _batches.decode(payload)


def decode_fits(payload: bytes) -> Fits:
    return _fits.decode(payload)


def first_hash(group: str) -> bytes:
    """What the chain of a group begins with."""
    return hashlib.blake2b(group.encode(), digest_size=HASH_SIZE).digest()


def next_hash(previous: bytes, payload: bytes) -> bytes:
    """The chain's hash after `payload`."""
    return hashlib.blake2b(previous + payload, digest_size=HASH_SIZE).digest()


def chain(previous: bytes, payloads: Iterable[bytes]) -> list[bytes]:
    """The hash after each of `payloads`."""
    hashes = []
    for payload in payloads:
        previous = next_hash(previous, payload)
        hashes.append(previous)
    return hashes
