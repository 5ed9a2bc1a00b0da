"""Protects the fit of a step's cost: it finds what the cost is made of, never below 0, and is used only if it foretells
better than the number of tokens."""

import random

from hypothesis import given
from hypothesis import strategies as st

from gateway.domain.accounting.fits import MIN_STEPS, fit_buckets, non_negative
from workers.chip_time import Member, Step, encode

FINITE = st.floats(0, 1e6, allow_nan=False)


def test_it_finds_what_the_targets_are_made_of():
    chance = random.Random(3)
    true = [5e6, 40.0, 0.0, 700.0]
    rows = [[1.0, *(chance.uniform(0, 100) for _ in range(3))] for _ in range(200)]
    targets = [sum(a * b for a, b in zip(true, row, strict=True)) for row in rows]
    found = non_negative(rows, targets)
    assert all(abs(a - b) < 1e-3 * (1 + b) for a, b in zip(found, true, strict=True))


@given(
    st.lists(st.tuples(st.lists(FINITE, min_size=4, max_size=4), FINITE), min_size=1, max_size=30)
)
def test_nothing_is_negative_whatever_the_rows_are(data: list[tuple[list[float], float]]):
    found = non_negative([row for row, _ in data], [target for _, target in data])
    assert len(found) == 4
    assert all(value >= 0 for value in found)


def test_columns_that_tell_the_same_are_counted_once():
    rows = [[1.0, float(i), 2.0 * i] for i in range(20)]
    found = non_negative(rows, [3.0 + 4.0 * i for i in range(20)])
    assert all(
        abs(sum(a * b for a, b in zip(found, row, strict=True)) - 3 - 4 * row[1]) < 1e-6
        for row in rows
    )


def steps(number: int, length_of: object) -> list[bytes]:
    chance = random.Random(9)
    found = []
    for i in range(number):
        members = tuple(Member("r", 0, False, 1, 10) for _ in range(1 + chance.randrange(8)))
        length = length_of(len(members))  # type: ignore[operator]
        found.append(
            encode(Step(number=i, begin_ns=0, end_ns=length, step=i, bucket="b", members=members))
        )
    return found


def test_a_fit_is_used_only_if_it_beats_the_share_by_tokens():
    fixed = fit_buckets(steps(MIN_STEPS, lambda n: 1_000_000 + 10 * n))
    assert fixed["b"].coefficients.fixed > 900_000_000
    assert fixed["b"].residual_ppm < fixed["b"].proportional_ppm
    assert fit_buckets(steps(MIN_STEPS, lambda n: 1_000 * n)) == {}
    assert fit_buckets(steps(MIN_STEPS - 1, lambda n: 1_000_000 + 10 * n)) == {}
