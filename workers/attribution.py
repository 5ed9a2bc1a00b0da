"""A step's chip-time shared among its members, in integers that add up exactly.

A step costs what it costs; who is it spent on? Its cost is affine in its members' tokens, so with α shared
equally the shares are Shapley values of the fitted cost:

    prefill   u = α/|B| + b_p·n + b_a·n·(c + n/2)      n tokens computed, c in the cache before them
    decode    u = α/|B| + b_d·n + b_kv·c
    A_i = D · u_i / Σ u                                D is measured, so Σ A_i = D whatever the fit's error

Division leaves less than one nanosecond for each member; the largest remainders get one more (Hamilton's
method), of equal ones the larger share's, then the earlier member's. So who did more never pays less, and the
order of members matters among equals only. All of it is integer arithmetic: workers and accountants get equal
numbers.
"""

from collections.abc import Sequence

from workers.chip_time import Coefficients, Member


def shares(length: int, members: Sequence[Member], fit: Coefficients | None) -> list[int]:
    """Each member's part of `length` (nano-chip-seconds, >= 0); they sum to it.

    `fit` None shares by tokens computed. Raises ValueError if there are no members.
    """
    if not members:
        raise ValueError("a step without members has nobody to share its time")
    if len(members) == 1:
        return [length]
    return apportion(length, weights(members, fit))


def apportion(total: int, weights: Sequence[int]) -> list[int]:
    """`total` (>= 0) divided in proportion to `weights` (>= 0), equally if all are 0; the parts sum to it."""
    if min(weights) == max(weights):
        part, left = divmod(total, len(weights))
        return [part + 1] * left + [part] * (len(weights) - left)
    whole = sum(weights)
    parts, remainders = [], []
    for weight in weights:
        part, remainder = divmod(total * weight, whole)
        parts.append(part)
        remainders.append(remainder)
    left = total - sum(parts)
    if left:
        order = list(zip(remainders, weights, strict=True))
        for i in sorted(range(len(parts)), key=order.__getitem__, reverse=True)[:left]:
            parts[i] += 1
    return parts


def weights(members: Sequence[Member], fit: Coefficients | None) -> list[int]:
    """u_i of each member, times 2·|B| so that no fraction is left."""
    if fit is None:
        return [member.num_tokens for member in members]
    fixed, each = 2 * fit.fixed, 2 * len(members)
    prefill, decode, context = each * fit.prefill, each * fit.decode, each * fit.context
    attention = len(members) * fit.attention
    weights = []
    for member in members:
        n, c = member.num_tokens, member.context_len
        if member.is_prefill:
            weights.append(fixed + n * (prefill + attention * (2 * c + n)))
        else:
            weights.append(fixed + decode * n + context * c)
    return weights
