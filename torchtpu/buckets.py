"""The shapes that get compiled, and the choice of one for a step's work. Plain Python.

XLA compiles one program for one shape, so a step is padded to the smallest compiled **bucket** that
holds it. A bucket has decode rows and, beside them, a run of prompt tokens, all over one length of context:

    rows = 8            8 decode tokens, one a request                  ┐ one flat row of
    tokens = 128        128 prompt tokens, one chunk behind the other   ┘ 8 + 128 tokens
    segments = 4 × 64   of at most 4 requests, at most 64 tokens each
    context = 128       keys that each of them may look at

Fewer than eight rows cost as much as eight (the sublane tile of a TPU; one row is far slower on
XLA:CPU), so eight is the least.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

MIN_ROWS = 8
SEGMENT_SAMPLES = 8
"""Logits rows beside decode rows in every bucket with prefill: few sizes mean few sampling programs."""
ATTENTION_SHARE = 0.2
"""What a place of the attention grid costs, as a share of a token's whole cost (measured at 128 keys)."""


@dataclass(frozen=True, order=True)
class PrefillShape:
    """A run of `tokens` prompt tokens, cut into at most `segments` chunks of at most `segment_len`.

    Everything but attention works on the run, where chunks lie without gaps; attention works on a grid
    of `segments` × `segment_len` places.
    """

    tokens: int
    segments: int
    segment_len: int

    def cut(self, waiting: Sequence[int]) -> list[int]:
        """How many of the `waiting` tokens of each request fit, in order; none for the last ones."""
        lengths: list[int] = []
        room = self.tokens
        for num_tokens in waiting[: self.segments]:
            length = min(num_tokens, self.segment_len, room)
            if length == 0:
                break
            lengths.append(length)
            room -= length
        return lengths


NO_PREFILL = PrefillShape(0, 0, 0)


@dataclass(frozen=True, order=True)
class Bucket:
    """One compiled shape of the step program."""

    rows: int
    """Decode rows, a multiple of 8."""
    context: int
    """Keys each query may look at, tokens; a multiple of the block length."""
    prefill: PrefillShape = NO_PREFILL

    @property
    def num_tokens(self) -> int:
        """Length of the flat row of tokens."""
        return self.rows + self.prefill.tokens

    @property
    def num_samples(self) -> int:
        """Rows that get logits: each decode row, and room for the last token of each segment."""
        return self.rows + (SEGMENT_SAMPLES if self.prefill.segments else 0)

    @property
    def name(self) -> str:
        decode = f"r{self.rows}-c{self.context}"
        prefill = self.prefill
        return (
            decode
            if prefill == NO_PREFILL
            else f"{decode}-t{prefill.tokens}-{prefill.segments}x{prefill.segment_len}"
        )


@dataclass(frozen=True)
class BucketLadder:
    """All buckets of one engine. Raises ValueError if one of the parts is empty or unordered."""

    rows: tuple[int, ...]
    """Sizes for steps without prefill, rising; the last one is the most requests that run at once."""
    mixed_rows: tuple[int, ...]
    """Sizes beside prefill: fewer, because each one multiplies the programs."""
    prefill: tuple[PrefillShape, ...]
    contexts: tuple[int, ...]
    """For decode, tokens, rising; the last one is the model's context length."""
    mixed_contexts: tuple[int, ...]
    place_cost: float = ATTENTION_SHARE
    """What a place of the attention grid costs, in tokens; a kernel has no grid: 0."""

    def __post_init__(self) -> None:
        for name in ("rows", "mixed_rows", "contexts", "mixed_contexts"):
            sizes: tuple[int, ...] = getattr(self, name)
            if not sizes or list(sizes) != sorted(set(sizes)):
                raise ValueError(f"{name} must be rising and not empty, not {sizes}")
        if self.rows[-1] != self.mixed_rows[-1] or self.contexts[-1] != self.mixed_contexts[-1]:
            raise ValueError(
                "the largest rows and contexts must be the same with and without prefill"
            )
        if not self.prefill or max(s.segments for s in self.prefill) > SEGMENT_SAMPLES:
            raise ValueError(
                f"prefill shapes have 1 to {SEGMENT_SAMPLES} segments, and there is one"
            )

    @cached_property
    def buckets(self) -> tuple[Bucket, ...]:
        """Every bucket, the cheapest first."""
        decode = [Bucket(rows, context) for rows in self.rows for context in self.contexts]
        mixed = [
            Bucket(rows, context, shape)
            for rows in self.mixed_rows
            for context in self.mixed_contexts
            for shape in self.prefill
            if shape.segment_len <= context
        ]
        return tuple(sorted(decode + mixed, key=lambda bucket: (bucket.num_tokens, bucket.context)))

    @property
    def max_rows(self) -> int:
        return self.rows[-1]

    @property
    def max_context(self) -> int:
        return self.contexts[-1]

    def choose(self, num_rows: int, context: int, prefill: PrefillShape = NO_PREFILL) -> Bucket:
        """The smallest bucket for that work; raises ValueError if none holds it."""
        mixed = prefill != NO_PREFILL
        rows = _at_least(self.mixed_rows if mixed else self.rows, max(num_rows, 1), "rows")
        need = max(context, prefill.segment_len, 1)
        reach = _at_least(self.mixed_contexts if mixed else self.contexts, need, "context")
        return Bucket(rows, reach, prefill)

    def choose_prefill(self, waiting: Sequence[int], overhead_tokens: int) -> PrefillShape:
        """The shape that computes the most useful tokens for its cost.

        `waiting` are the token counts still to prefill, in the order in which they will be served;
        `overhead_tokens` is what the rest of the step costs, in tokens.
        """
        fitting = [shape for shape in self.prefill if shape.segment_len <= self.max_context]

        def worth(shape: PrefillShape) -> tuple[float, float]:
            cost = shape.tokens + self.place_cost * shape.segments * shape.segment_len
            return sum(shape.cut(waiting)) / (cost + overhead_tokens), -cost

        return max(fitting, key=worth)


def _at_least(sizes: Iterable[int], need: int, what: str) -> int:
    for size in sizes:
        if size >= need:
            return size
    raise ValueError(f"no bucket holds {need} {what}")


def default_ladder(max_rows: int, context_len: int, *, has_kernel: bool = False) -> BucketLadder:
    """The sizes that serve most loads well. `max_rows` is rounded up to a multiple of 8, `context_len` to 128.

    A kernel (`has_kernel`) reads each token's own context and no more, so that one context serves all.
    Without it the shortest one is 96, because most chats are short.
    """
    top_rows = -(-max(max_rows, MIN_ROWS) // MIN_ROWS) * MIN_ROWS
    top_context = -(-context_len // 128) * 128
    rows = tuple(n for n in (8, 16, 32, 64, 128) if n < top_rows) + (top_rows,)
    if has_kernel:
        return BucketLadder(
            rows=rows,
            mixed_rows=rows,
            prefill=tuple(
                PrefillShape(tokens, SEGMENT_SAMPLES, tokens)
                for tokens in (32, 64, 128, 256)
                if tokens <= top_context
            ),
            contexts=(top_context,),
            mixed_contexts=(top_context,),
            place_cost=0.0,
        )
    shapes = [
        PrefillShape(tokens=48, segments=2, segment_len=48),
        PrefillShape(tokens=128, segments=4, segment_len=64),
        PrefillShape(tokens=256, segments=8, segment_len=64),
        PrefillShape(tokens=256, segments=1, segment_len=256),
    ]
    return BucketLadder(
        rows=rows,
        mixed_rows=tuple(dict.fromkeys((MIN_ROWS, top_rows))),
        prefill=tuple(shape for shape in shapes if shape.segment_len <= top_context),
        contexts=tuple(n for n in (96, 128, 256, 512, 1024) if n < top_context) + (top_context,),
        mixed_contexts=tuple(n for n in (128, 512) if n < top_context) + (top_context,),
    )
