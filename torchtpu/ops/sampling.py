"""Drawing tokens on the device: temperature, top-k, top-p, min-p, and a seed of its own for each row.

No sort and no cumulative sum (`cumsum` aborts the process on XLA:CPU): thresholds are found by
bisection over the ordered integers that float32 bits are. The draw is the Gumbel-max trick with noise
hashed from (seed, position, token), so a row's token does not depend on the rest of the batch.
"""

import torch
from torch import Tensor

NUM_PARAMS = 6
"""Columns of the packed parameters, see `workers.engine.input_batch.pack_sampling`."""
_BITS = 32


def sample(logits: Tensor, greedy: Tensor, params: Tensor, *, truncates: bool = True) -> Tensor:
    """Tokens [N] int32 from logits [N, V]; rows of temperature 0 keep `greedy` [N] int32.

    `params` [N, 6] int32: temperature, top_p, min_p as float bits, top_k (0 is off), seed, position.
    Without `truncates` only temperature, seed and position count: a seventh of the time.
    """
    temperature, top_p, min_p = params[:, :3].contiguous().view(torch.float32).unbind(1)
    top_k, seed, position = params[:, 3:].unbind(1)
    is_greedy = temperature <= 0
    scaled = logits.float() / torch.where(is_greedy, 1.0, temperature)[:, None]
    noisy = scaled + gumbel(seed, position, logits.shape[-1])
    if truncates:
        allowed = _allowed(scaled, top_k, top_p, min_p)
        noisy = noisy.masked_fill(~allowed, float("-inf"))
    drawn = argmax(noisy)
    return torch.where(is_greedy, greedy, drawn)


def argmax(values: Tensor) -> Tensor:
    """The first index [N] int32 of the largest of [N, V].

    Two plain reductions: XLA:CPU runs the one that carries value and index 19 times slower.
    """
    index = torch.arange(values.shape[-1], dtype=torch.int32, device=values.device)
    is_largest = values == values.amax(-1, keepdim=True)
    return torch.where(is_largest, index, values.shape[-1] - 1).amin(-1).to(torch.int32)


def gumbel(seed: Tensor, position: Tensor, vocab_size: int) -> Tensor:
    """Standard Gumbel noise [N, V] float32 from seeds and positions [N] int32; the same on any device."""
    token = torch.arange(vocab_size, dtype=torch.int32, device=seed.device)
    row = _mix(seed ^ _mix(position))
    bits = _mix(row[:, None] ^ _mix(token)[None])
    uniform = (_shift(bits, 9).float() + 0.5) / (1 << 23)
    return -torch.log(-torch.log(uniform))


def _allowed(scaled: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """[N, V] bool: what top-k, then top-p of what is left, then min-p let through."""
    vocab_size = scaled.shape[-1]
    keys = _ordered(scaled)
    k = torch.where(top_k > 0, top_k, vocab_size).clamp(max=vocab_size)
    in_top_k = keys >= _threshold(keys, torch.ones_like(scaled), k.float())[:, None]
    probabilities = torch.where(in_top_k, scaled, float("-inf")).softmax(-1)
    # A hair below 1 so that rounding of the sum never cuts a row that wants all of it, and above 0
    # so that a row that wants nothing keeps its likeliest token.
    wanted = (top_p - 1e-6).clamp(min=1e-9)
    in_top_p = keys >= _threshold(keys, probabilities, wanted)[:, None]
    in_top_p = in_top_p | (top_p >= 1.0)[:, None]
    in_min_p = probabilities >= min_p[:, None] * probabilities.amax(-1, keepdim=True)
    return in_top_k & in_top_p & in_min_p


def _threshold(keys: Tensor, weights: Tensor, wanted: Tensor) -> Tensor:
    """The largest key [N] such that the weights at or above it sum to at least `wanted` [N]."""
    # The sign bit first: zero or the least integer. The other bits only ever add to it.
    zero = torch.zeros_like(wanted, dtype=torch.int32)
    low = torch.where(_mass(keys, weights, zero) >= wanted, zero, torch.iinfo(torch.int32).min)
    for bit in reversed(range(_BITS - 1)):
        candidate = low + (1 << bit)
        low = torch.where(_mass(keys, weights, candidate) >= wanted, candidate, low)
    return low


def _mass(keys: Tensor, weights: Tensor, least: Tensor) -> Tensor:
    """Sum [N] of the weights whose keys are at least `least` [N]."""
    return torch.where(keys >= least[:, None], weights, 0.0).sum(-1)


def _ordered(values: Tensor) -> Tensor:
    """float32 as int32 in the same order."""
    bits = values.view(torch.int32)
    return torch.where(bits >= 0, bits, bits ^ 0x7FFFFFFF)


def _shift(bits: Tensor, by: int) -> Tensor:
    """Logical right shift of int32."""
    return (bits >> by) & ((1 << (32 - by)) - 1)


def _mix(bits: Tensor) -> Tensor:
    """MurmurHash3's finaliser on int32; products wrap around."""
    bits = (bits ^ _shift(bits, 16)) * -2048144789
    bits = (bits ^ _shift(bits, 13)) * -1028477387
    return bits ^ _shift(bits, 16)
