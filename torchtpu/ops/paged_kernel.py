"""A Pallas kernel for a TPU: attention of a flat run of tokens over a packed, paged KV cache.

    cache    [blocks, block_len, W]: a token's keys of all heads, then its values of all heads, then
             zeros up to whole lanes (128). A block is one contiguous piece, and nothing is padded
             where heads are narrower than a lane row.
    query    [N, heads, W]: each head's query in the lanes of its own key head, zeros elsewhere, so that
             one product with a piece of the cache scores every head, without cutting lanes apart.

The grid runs over blocks of tokens. Each takes the context of its tokens chunk by chunk: while one
chunk is computed with a running softmax (as flash attention does), the next is on its way from HBM.
Keys and values are read once and never copied. With one token in a block (decode rows) the first chunk
of the next token is fetched during the last chunk of this one.

Nothing here asks JAX for a device: that would open the chip a second time, beside TorchTPU. For the
same reason integers are divided with `lax.div`.
"""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from torchtpu.ops.lanes import LANES

Ref = Any
"""Of Pallas: memory that is read and written by index."""
Scalar = Any
"""A traced integer."""
CHUNK_TOKENS = 256
"""Keys that are fetched and scored together: two chunks lie in VMEM."""
UNSEEN = -1e30


@dataclass(frozen=True)
class Shape:
    """What the kernel is compiled for."""

    key_width: int
    """kv_heads · key head_dim: the lanes [0, key_width) of the cache hold keys."""
    block_tokens: int
    scale: float
    window: int | None
    softcap: float | None
    chunk_blocks: int
    block_len: int

    @property
    def key_lanes(self) -> int:
        """Whole lane rows that hold all keys; what else is in them meets zeros of the query."""
        return -(-self.key_width // LANES) * LANES

    @property
    def first_value_lane(self) -> int:
        """Start of the lane row in which values begin."""
        return self.key_width // LANES * LANES

    @property
    def chunk(self) -> int:
        return self.chunk_blocks * self.block_len


def attend(  # noqa: PLR0913 -- an operation's inputs
    query: jax.Array,
    sinks: jax.Array,
    cache: jax.Array,
    tables: jax.Array,
    token_tables: jax.Array,
    positions: jax.Array,
    *,
    key_width: int,
    block_tokens: int,
    scale: float,
    window: int | None,
    softcap: float | None,
    interpret: bool = False,
) -> jax.Array:
    """[N, heads, W - first value lane]: lanes of each head's own value head hold its answer.

    tables [B, n] int32 are blocks of the cache, token_tables [N] int32 says which of them a token has,
    and it sees its keys 0 … positions[N] int32. sinks [heads, 1] float32 are logits that take their
    share of the softmax, UNSEEN for none. N is a multiple of `block_tokens`, heads one of 8.
    """
    num_tokens, heads, width = query.shape
    block_len, num_blocks = cache.shape[1], tables.shape[1]
    chunk_blocks = _divisor(num_blocks, max(CHUNK_TOKENS // block_len, 1))
    shape = Shape(key_width, block_tokens, scale, window, softcap, chunk_blocks, block_len)
    out_lanes = width - shape.first_value_lane
    rows = block_tokens * heads
    owners = jnp.stack([positions, token_tables], -1)  # per row of the product, to mask it with
    owners = jnp.broadcast_to(owners[:, None], (num_tokens, heads, 2))
    result: Any = jax.ShapeDtypeStruct((num_tokens, heads, out_lanes), query.dtype)  # type: ignore[no-untyped-call]
    # Of a full bucket, each block of tokens with one request's context, or what a window leaves of it.
    context = num_blocks * block_len
    if window is not None:
        context = min(context, window + block_tokens + shape.chunk)
    reads = num_tokens // block_tokens * context
    call: Any = pl.pallas_call(
        functools.partial(_kernel, shape=shape),
        out_shape=result,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(num_tokens // block_tokens,),
            in_specs=[
                pl.BlockSpec((block_tokens, heads, width), lambda i, *_: (i, 0, 0)),
                pl.BlockSpec((block_tokens, heads, 2), lambda i, *_: (i, 0, 0)),
                pl.BlockSpec((heads, 1), lambda i, *_: (0, 0)),
                pl.BlockSpec(memory_space=pltpu.HBM),
            ],
            out_specs=pl.BlockSpec((block_tokens, heads, out_lanes), lambda i, *_: (i, 0, 0)),
            scratch_shapes=[
                pltpu.VMEM((2, chunk_blocks, block_len, width), cache.dtype),
                pltpu.VMEM((rows, 1), jnp.float32),
                pltpu.VMEM((rows, 1), jnp.float32),
                pltpu.VMEM((rows, out_lanes), jnp.float32),
                pltpu.SMEM((1,), jnp.int32),
                pltpu.SemaphoreType.DMA((2,)),
            ],
        ),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",)),
        # XLA cannot look inside.
        cost_estimate=pl.CostEstimate(
            flops=2 * num_tokens * heads * context * (shape.key_lanes + out_lanes),
            bytes_accessed=reads * width * cache.dtype.itemsize,
            transcendentals=num_tokens * heads * context,
        ),
        interpret=interpret,
        name="tpugate_paged_attention",
    )
    answers: jax.Array = call(tables, token_tables, positions, query, owners, sinks, cache)
    return answers


def _divisor(number: int, most: int) -> int:
    """The largest divisor of `number` that is at most `most`."""
    return next(n for n in range(min(most, number), 0, -1) if number % n == 0)


def _kernel(*refs: Ref, shape: Shape) -> None:
    """One block of tokens. Pallas gives the references in the order of the call above."""
    # Asked here, because within loops and branches the interpreter does not know.
    _Block(shape, pl.program_id(0), pl.num_programs(0), *refs).run()


@dataclass(frozen=True)
class _Block:
    shape: Shape
    index: Scalar
    num_blocks: Scalar
    tables: Ref
    token_tables: Ref
    positions: Ref
    query: Ref
    owners: Ref
    sinks: Ref
    cache: Ref
    out: Ref
    buffers: Ref
    """Two chunks: one that is computed, one that is on its way."""
    peak: Ref
    """Of the softmax so far, for each token and head: largest score, sum, weighted values."""
    total: Ref
    answer: Ref
    turn: Ref
    """Which buffer the next chunk is in; it outlives the block."""
    semaphores: Ref

    @property
    def is_single(self) -> bool:
        return self.shape.block_tokens == 1

    @property
    def first_token(self) -> Scalar:
        return self.index * self.shape.block_tokens

    def run(self) -> None:
        @pl.when(self.index == 0)
        def _() -> None:
            self.turn[0] = 0

        sinks = jnp.broadcast_to(
            self.sinks[...][None], (self.shape.block_tokens, *self.sinks.shape)
        )
        self.peak[...] = sinks.reshape(-1, 1)
        # The sink's own share. If there is none, the first score makes nothing of it.
        self.total[...] = jnp.ones_like(self.total)
        self.answer[...] = jnp.zeros_like(self.answer)
        own = [self.token_tables[self.first_token + i] for i in range(self.shape.block_tokens)]
        if self.is_single:
            self.visit(own[0])
        else:
            low, high = functools.reduce(jnp.minimum, own), functools.reduce(jnp.maximum, own)
            _loop(low, high + 1, self.visit)
        answers = self.answer[...] / self.total[...]
        self.out[...] = answers.reshape(self.out.shape).astype(self.out.dtype)

    def visit(self, table: Scalar) -> None:
        """Take in what the tokens of this block see through one table."""
        start, end = self.span(table, self.first_token)
        # The block before has fetched a single token's first chunk already.
        is_first = (self.index == 0) | (not self.is_single)

        @pl.when((start < end) & is_first)
        def _() -> None:
            self.fetch(table, start, self.turn[0])

        def step(chunk: Scalar) -> None:
            slot = self.turn[0]
            self.turn[0] = 1 - slot
            self.fetch_next(table, chunk, end, 1 - slot)
            for copy in self.copies(table, chunk, slot):
                copy.wait()
            self.absorb(chunk, table, self.buffers[slot])

        _loop(start, end, step)

    def span(self, table: Scalar, token: Scalar) -> tuple[Scalar, Scalar]:
        """First and one-past-last chunk of a table that the block beginning at `token` needs."""
        shape = self.shape
        low, high = jnp.int32(self.tables.shape[1] * shape.block_len), jnp.int32(-1)
        if self.is_single:
            low = high = self.positions[token]
        else:
            for offset in range(shape.block_tokens):
                position = self.positions[token + offset]
                is_own = self.token_tables[token + offset] == table
                low = jnp.where(is_own, jnp.minimum(low, position), low)
                high = jnp.where(is_own, jnp.maximum(high, position), high)
        end = lax.div(high + shape.chunk, shape.chunk)
        if shape.window is None:
            return jnp.int32(0), end
        start = lax.div(jnp.maximum(low - shape.window + 1, 0), shape.chunk)
        return jnp.minimum(start, end), end

    def copies(self, table: Scalar, chunk: Scalar, slot: Scalar) -> list[Any]:
        first = chunk * self.shape.chunk_blocks
        return [
            pltpu.make_async_copy(
                self.cache.at[self.tables[table, first + i]],
                self.buffers.at[slot, i],
                self.semaphores.at[slot],
            )
            for i in range(self.shape.chunk_blocks)
        ]

    def fetch(self, table: Scalar, chunk: Scalar, slot: Scalar) -> None:
        for copy in self.copies(table, chunk, slot):
            copy.start()

    def fetch_next(self, table: Scalar, chunk: Scalar, end: Scalar, slot: Scalar) -> None:
        """The chunk after this one; after a single token's last one, the next token's first."""
        is_last = chunk + 1 == end

        @pl.when(~is_last)
        def _() -> None:
            self.fetch(table, chunk + 1, slot)

        if self.is_single:

            @pl.when(is_last & (self.index + 1 < self.num_blocks))
            def _() -> None:
                token = jnp.minimum(self.index + 1, self.num_blocks - 1)
                following = self.token_tables[token]
                self.fetch(following, self.span(following, token)[0], slot)

    def absorb(self, chunk: Scalar, table: Scalar, piece: jax.Array) -> None:
        """Take one chunk of keys and values into the running softmax."""
        shape = self.shape
        rows = self.query.shape[0] * self.query.shape[1]
        cached = piece.reshape(shape.chunk, piece.shape[-1])
        query = self.query[...].reshape(rows, -1)
        scores = _product(query[:, : shape.key_lanes], cached[:, : shape.key_lanes], 1)
        scores = scores * shape.scale
        if shape.softcap is not None:
            scores = shape.softcap * jnp.tanh(scores / shape.softcap)
        seen = self.seen(chunk, table, scores.shape)
        scores = jnp.where(seen, scores, UNSEEN)
        peak = jnp.maximum(self.peak[...], scores.max(-1, keepdims=True))
        weights = jnp.where(seen, jnp.exp(scores - peak), 0.0)
        decay = jnp.exp(self.peak[...] - peak)
        self.peak[...] = peak
        self.total[...] = self.total[...] * decay + weights.sum(-1, keepdims=True)
        values = cached[:, shape.first_value_lane :]
        self.answer[...] = self.answer[...] * decay + _product(
            weights.astype(values.dtype), values, 0
        )

    def seen(self, chunk: Scalar, table: Scalar, shape: tuple[int, ...]) -> jax.Array:
        owners = self.owners[...].reshape(shape[0], 2)
        position = owners[:, :1]
        key = chunk * self.shape.chunk + lax.broadcasted_iota(jnp.int32, shape, 1)
        seen: jax.Array = (key <= position) & (owners[:, 1:] == table)
        if self.shape.window is not None:
            seen = seen & (key > position - self.shape.window)
        return seen


def _loop(start: Scalar, end: Scalar, body: Any) -> None:  # noqa: ANN401 -- of one traced integer
    def step(index: Scalar, _: Scalar) -> Scalar:
        body(index)
        return 0

    lax.fori_loop(start, end, step, 0)


def _product(left: jax.Array, right: jax.Array, over: int) -> jax.Array:
    """Float32 sums over the last dimension of `left` and dimension `over` of `right`."""
    dimensions = (((1,), (over,)), ((), ()))
    return lax.dot_general(left, right, dimensions, preferred_element_type=jnp.float32)
