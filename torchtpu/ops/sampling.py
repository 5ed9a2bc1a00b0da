"""Choosing tokens on the device: penalties, bias, temperature, top-k, top-p, min-p, a seed for each row.

No sort and no cumulative sum (`cumsum` aborts the process on XLA:CPU): thresholds are found by
bisection over the ordered integers that float32 bits are. The draw is the Gumbel-max trick with noise
hashed from (seed, position, token), so a row's token does not depend on the rest of the batch.

Every operation takes the same packed parameters [N, NUM_PARAMS] int32, one row for each row of logits.
What a row's text says about each token of the vocabulary is kept on the device, one int32 a token:

    facts   count · 4 + is_end · 2 + is_in_prompt        count: how often the answer has the token
"""

from dataclasses import dataclass

import torch
from torch import Tensor

FLOATS = ("temperature", "top_p", "min_p", "repetition", "frequency", "presence")
"""The first columns of the parameters, as float32 bits."""
INTEGERS = ("top_k", "seed", "position", "row", "switches")
"""The other columns: `top_k` 0 is off, `row` is the row of the facts, for `switches` see below."""
NUM_PARAMS = len(FLOATS) + len(INTEGERS)
BIASED, ENDLESS = 1, 2
"""Switches: the row has a bias; its end tokens cannot be drawn."""
IN_PROMPT, IS_END, ONE_MORE = 1, 2, 4
"""Bits of a token's facts, and what another occurrence in the answer adds."""
NUM_TOP = 20
"""The most alternatives reported beside a token."""
_COUNT_SHIFT = 2
_BITS = 32


@dataclass(frozen=True)
class Params:
    """The packed parameters column by column, each [N]."""

    temperature: Tensor
    top_p: Tensor
    min_p: Tensor
    repetition: Tensor
    frequency: Tensor
    presence: Tensor
    top_k: Tensor
    seed: Tensor
    position: Tensor
    row: Tensor
    switches: Tensor

    @classmethod
    def unpack(cls, packed: Tensor) -> "Params":
        floats = packed[:, : len(FLOATS)].contiguous().view(torch.float32)
        return cls(*floats.unbind(1), *packed[:, len(FLOATS) :].unbind(1))


def restrict(logits: Tensor, allowed: Tensor) -> Tensor:
    """Logits [N, V], those of tokens that are not allowed at minus infinity.

    `allowed` [N, ⌈V / 32⌉] int32 has a bit for each token, the lowest first.
    """
    places = torch.arange(_BITS, dtype=torch.int32, device=allowed.device)
    bits = torch.ones_like(places) << places
    is_allowed = ((allowed[:, :, None] & bits) != 0).reshape(logits.shape[0], -1)[
        :, : logits.shape[1]
    ]
    return logits.masked_fill(~is_allowed, float("-inf"))


def sample(logits: Tensor, greedy: Tensor, packed: Tensor, *, truncates: bool = True) -> Tensor:
    """Tokens [N] int32 from logits [N, V]; rows of temperature 0 keep `greedy` [N] int32.

    Without `truncates` only temperature, seed and position count: a seventh of the time.
    """
    params = Params.unpack(packed)
    is_greedy = params.temperature <= 0
    scaled = logits.float() / torch.where(is_greedy, 1.0, params.temperature)[:, None]
    noisy = scaled + gumbel(params.seed, params.position, logits.shape[-1])
    if truncates:
        allowed = _allowed(scaled, params.top_k, params.top_p, params.min_p)
        noisy = noisy.masked_fill(~allowed, float("-inf"))
    drawn = argmax(noisy)
    return torch.where(is_greedy, greedy, drawn)


def penalise(logits: Tensor, facts: Tensor, bias: Tensor, packed: Tensor) -> Tensor:
    """Logits [N, V] float32 after bias, then repetition, frequency and presence penalty, as in vLLM.

    `facts` [N, V] int32 and `bias` [N, V] float32 belong to the rows. A row without any of them passes
    unchanged, whatever its facts are.
    """
    params = Params.unpack(packed)
    count = facts >> _COUNT_SHIFT
    is_generated = count > 0
    is_known = is_generated | ((facts & IN_PROMPT) != 0)
    has_bias = (params.switches & BIASED) != 0
    values = logits.float() + torch.where(has_bias[:, None], bias, 0.0)
    repetition = torch.where(is_known, params.repetition[:, None], 1.0)
    values = torch.where(values > 0, values / repetition, values * repetition)
    values = values - params.frequency[:, None] * count
    values = values - params.presence[:, None] * is_generated
    is_endless = (params.switches & ENDLESS) != 0
    return values.masked_fill(is_endless[:, None] & ((facts & IS_END) != 0), float("-inf"))


def logprobs(logits: Tensor, tokens: Tensor) -> Tensor:
    """[N, 1 + 2 k] int32: of logits [N, V] the logarithm of each token's probability and of the k likeliest ones (float32
    bits), then the ids of those, the likeliest first; k is `NUM_TOP`, or V if that is less.
    """
    values = logits.float()
    most = values.amax(-1, keepdim=True)
    total = (values - most).exp().sum(-1, keepdim=True).log() + most
    chosen = values.gather(1, tokens.long()[:, None]) - total
    top, ids = values.topk(min(NUM_TOP, values.shape[-1]))
    bits = torch.cat([chosen, top - total], 1).view(torch.int32)
    return torch.cat([bits, ids.to(torch.int32)], 1)


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
