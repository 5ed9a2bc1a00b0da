"""Protects how a step's chip-time is shared: nothing is lost or made up whatever the batch, nobody pays more than
a nanosecond beside the exact share, who does more pays no less, and equal input gives equal output everywhere."""

from fractions import Fraction
from itertools import permutations
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.attribution import apportion, shares
from workers.chip_time import Coefficients, Member

TOTALS = st.one_of(st.integers(0, 30), st.integers(0, 10**15))
"""Up to a step of 100 chips for three hours; small ones, where remainders are often equal."""
WEIGHTS = st.one_of(
    st.lists(st.integers(0, 9), min_size=1, max_size=8),
    st.lists(st.integers(0, 10**18), min_size=1, max_size=80),
)
COEFFICIENT = st.one_of(st.just(0), st.integers(0, 10**12))
FITS = st.builds(Coefficients, COEFFICIENT, COEFFICIENT, COEFFICIENT, COEFFICIENT, COEFFICIENT)


def member(n: int, c: int, *, is_prefill: bool) -> Member:
    return Member("r", 0, is_prefill, n, c)


PREFILLS = st.builds(
    lambda n, c: member(n, c, is_prefill=True), st.integers(1, 8192), st.integers(0, 131072)
)
DECODES = st.builds(
    lambda n, c: member(n, c, is_prefill=False), st.integers(1, 8), st.integers(1, 131072)
)
BATCHES = st.lists(st.one_of(PREFILLS, DECODES), min_size=1, max_size=64)


def cost(members: tuple[Member, ...], fit: Coefficients) -> Fraction:
    """The fitted cost of a step with just these members, as docs/cost.md has it."""
    if not members:
        return Fraction(0)
    whole = Fraction(fit.fixed)
    for one in members:
        n, c = one.num_tokens, one.context_len
        if one.is_prefill:
            whole += fit.prefill * n + fit.attention * n * (c + Fraction(n, 2))
        else:
            whole += fit.decode * n + fit.context * c
    return whole


def shapley_values(members: tuple[Member, ...], fit: Coefficients) -> list[Fraction]:
    """What each adds to the cost when it joins, in the mean of all orders of joining."""
    added = [Fraction(0)] * len(members)
    orders = list(permutations(range(len(members))))
    for order in orders:
        joined: tuple[Member, ...] = ()
        for i in order:
            added[i] += cost((*joined, members[i]), fit) - cost(joined, fit)
            joined = (*joined, members[i])
    return [one / len(orders) for one in added]


@given(TOTALS, WEIGHTS)
def test_parts_are_whole_sum_up_and_miss_the_exact_share_by_less_than_one(
    total: int, weights: list[int]
) -> None:
    parts = apportion(total, weights)
    assert sum(parts) == total
    whole = sum(weights)
    for part, weight in zip(parts, weights, strict=True):
        assert type(part) is int
        assert part >= 0
        exact = Fraction(total * weight, whole) if whole else Fraction(total, len(weights))
        assert abs(part - exact) < 1


@given(TOTALS, WEIGHTS)
def test_no_other_rounding_is_closer(total: int, weights: list[int]) -> None:
    """Who was rounded up had at least the remainder of everyone who was not: the sum of errors is the least."""
    parts, whole = apportion(total, weights), sum(weights)
    if not whole:
        return
    rests = [
        Fraction(total * weight, whole) - part for part, weight in zip(parts, weights, strict=True)
    ]
    up = [rest + 1 for rest in rests if rest < 0]
    down = [rest for rest in rests if rest >= 0]
    assert not up or not down or min(up) >= max(down)


@given(TOTALS, WEIGHTS)
def test_who_weighs_more_pays_no_less_and_ties_go_to_the_earlier(
    total: int, weights: list[int]
) -> None:
    paid = sorted(zip(weights, range(0, -len(weights), -1), apportion(total, weights), strict=True))
    assert [part for _, _, part in paid] == sorted(part for _, _, part in paid)


@given(TOTALS, WEIGHTS, st.randoms(use_true_random=False))
def test_another_order_moves_remainders_between_equals_only(
    total: int, weights: list[int], random: Random
) -> None:
    order = list(range(len(weights)))
    random.shuffle(order)
    parts = apportion(total, weights)
    shuffled = apportion(total, [weights[i] for i in order])
    assert sorted(shuffled) == sorted(parts)
    for place, i in enumerate(order):
        alone = weights.count(weights[i]) == 1
        assert abs(shuffled[place] - parts[i]) <= (0 if alone and sum(weights) else 1)


def test_remainders_by_hand() -> None:
    # 10/3 each: 3, 3, 3 and one left, of equals to the first.
    assert apportion(10, [1, 1, 1]) == [4, 3, 3]
    # 1.25, 2.5, 6.25: the half gets what is left.
    assert apportion(10, [1, 2, 5]) == [1, 3, 6]
    # 0.5 and 1.5: of equal remainders the heavier one's is rounded up, wherever it stands.
    assert apportion(2, [1, 3]) == [0, 2]
    assert apportion(2, [3, 1]) == [2, 0]
    # More are left than one: 0.75, 0.75, 0.75, 0.75 and 3 to give.
    assert apportion(3, [5, 5, 5, 5]) == [1, 1, 1, 0]


@pytest.mark.parametrize("total", [0, 1, 7])
def test_weights_of_nothing_share_equally(total: int) -> None:
    assert apportion(total, [0, 0, 0]) == apportion(total, [1, 1, 1])
    assert apportion(total, [0, 5, 0]) == [0, total, 0]


@given(TOTALS, BATCHES, st.none() | FITS)
def test_a_step_is_paid_exactly_whatever_the_batch_and_the_fit(
    length: int, members: list[Member], fit: Coefficients | None
) -> None:
    paid = shares(length, members, fit)
    assert len(paid) == len(members)
    assert sum(paid) == length
    assert min(paid) >= 0
    assert shares(length, members, fit) == paid


@given(TOTALS, BATCHES, FITS)
def test_a_share_misses_the_formula_by_less_than_a_nanosecond(
    length: int, members: list[Member], fit: Coefficients
) -> None:
    whole = cost(tuple(members), fit)
    if not whole:
        return
    for one, paid in zip(members, shares(length, members, fit), strict=True):
        own = cost((one,), fit) - fit.fixed + Fraction(fit.fixed, len(members))
        assert abs(paid - length * own / whole) < 1


@given(st.lists(st.one_of(PREFILLS, DECODES), min_size=1, max_size=5), FITS)
def test_shares_are_the_shapley_values_of_the_fitted_cost(
    members: list[Member], fit: Coefficients
) -> None:
    """If a step took what the fit says (here so scaled that nothing is rounded), each pays its Shapley value."""
    values = shapley_values(tuple(members), fit)
    scale = 2 * len(members)
    length = scale * cost(tuple(members), fit)
    assert length.denominator == 1
    if length:
        assert shares(int(length), members, fit) == [scale * value for value in values]


@given(TOTALS, BATCHES, FITS, st.integers(1, 4096), st.integers(0, 4096), st.data())
def test_more_work_in_the_same_step_costs_no_less(
    length: int,
    members: list[Member],
    fit: Coefficients,
    more_tokens: int,
    more_context: int,
    data: st.DataObject,
) -> None:
    """Between the members of one step exactly; between two steps, which round apart, to a nanosecond."""
    i = data.draw(st.integers(0, len(members) - 1))
    less = members[i]
    more = member(
        less.num_tokens + more_tokens,
        less.context_len + more_context,
        is_prefill=less.is_prefill,
    )
    beside = shares(length, [more, *members], fit)
    assert beside[0] >= beside[1 + i]
    instead = shares(length, [*members[:i], more, *members[i + 1 :]], fit)
    assert instead[i] >= shares(length, members, fit)[i] - 1


@given(TOTALS, BATCHES)
def test_without_a_fit_tokens_computed_are_what_counts(length: int, members: list[Member]) -> None:
    assert shares(length, members, None) == apportion(length, [m.num_tokens for m in members])


@given(TOTALS, st.one_of(PREFILLS, DECODES), st.none() | FITS)
def test_who_is_alone_pays_all(length: int, alone: Member, fit: Coefficients | None) -> None:
    assert shares(length, [alone], fit) == [length]


def test_a_step_of_nobody_has_nobody_to_pay_it() -> None:
    with pytest.raises(ValueError, match="nobody"):
        shares(1, [], None)
