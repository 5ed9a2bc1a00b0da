"""Protects the comparison with other chips: figures that can be redone by hand, and nothing claimed without a match."""

from dataclasses import replace
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.domain.accounting.baselines import Baseline, Grade, interpolated
from gateway.domain.accounting.comparison import Load, Missing, compare, prices_beside
from gateway.domain.accounting.loads import covered
from gateway.domain.accounting.prices import Price, Term


def price(sku: str = "h100", usd: str = "3.60", term: Term = Term.ON_DEMAND) -> Price:
    return Price(
        sku=sku, region="gcp/x", term=term, usd_per_chip_hour=Decimal(usd), effective_from_ns=0,
        effective_to_ns=None, source="a page, https://example.com", retrieved_at="2026-12-01",
    )  # fmt: skip


def row(rate: str = "1000", **fields: object) -> Baseline:
    given = {
        "accelerator": "h100", "num_chips": 2, "model": "org/Big-8B", "engine": "e 1", "dtype": "bf16",
        "isl": 1000, "osl": 1000, "concurrency": None, "output_tokens_per_s_chip": Decimal(rate),
        "grade": Grade.A, "source": "a page, https://example.com", "date": "2026",
    }  # fmt: skip
    return Baseline(**{**given, **fields})  # type: ignore[arg-type]


HOUR_NS = 3600 * 10**9
LOAD = Load(
    "org/Big-8B-Instruct", "bfloat16", 100, 100_000, 100_000, Decimal(50), HOUR_NS // 10, Decimal("0.40")
)  # fmt: skip
"""Of 1000 tokens in and out, 2000 output tokens a second, US$ 4 per million output tokens, a tenth of a chip-hour."""


def test_the_figures_of_a_match_can_be_redone_by_hand():
    (found,) = compare(LOAD, [row()], [price()])
    assert found.is_matched
    # 3.60 an hour is 0.001 a second; a token takes 0.001 s of a chip.
    assert found.floor_usd_per_million == Decimal(1)
    # 2000 tokens/s are just one group of two chips: 0.002 a second for 2000 tokens.
    assert found.matched_usd_per_million == Decimal(1)
    assert found.break_even_tokens_per_s == Decimal(250)
    assert found.break_even_price == (Decimal("14.4"), Decimal("14.4"))
    assert found.break_even_utilisation == (Decimal("0.25"), Decimal("0.25"))
    assert found.percent == Decimal(300)
    # A million tokens took a chip-hour of ours.
    assert found.own_break_even_price == (Decimal(1), Decimal(1))
    assert found.same_time_usd == Decimal("0.36")
    assert found.missing == ()
    assert not found.is_latency_bound


def test_a_configuration_counts_at_its_fullest_and_the_cheapest_one_is_the_floor():
    served = [
        row("10", concurrency=1, num_chips=3),
        row("500", concurrency=64, num_chips=3),
        row("400", concurrency=64, engine="another", num_chips=8),
    ]
    (found,) = compare(LOAD, served, [price()])
    assert found.floor_usd_per_million == Decimal(2)
    # 2000 tokens/s are four chips of the first, so two groups of three, 0.006 a second; or one group of eight.
    assert found.matched_usd_per_million == Decimal(3)
    assert found.break_even_price == (Decimal("5.76"), Decimal("7.2"))
    assert {one.output_tokens_per_s_chip for one in found.baselines} == {500, 400}
    assert found.is_latency_bound


def test_rows_for_orientation_count_only_where_there_are_no_better_ones():
    (found,) = compare(LOAD, [row("9000", grade=Grade.C), row("1000", engine="other")], [price()])
    assert found.floor_usd_per_million == Decimal(1)
    assert found.percent == Decimal(300)


def test_whole_groups_are_paid_for_however_little_is_asked():
    idle = replace(LOAD, requests=1, input_tokens=1000, output_tokens=1000, seconds=Decimal(1000))
    (found,) = compare(idle, [row()], [price()])
    # One token a second on two chips: 0.002 a token.
    assert found.matched_usd_per_million == Decimal(2000)


def test_without_a_match_nothing_is_claimed():
    others = [
        row(model="org/Other-8B"), row(dtype="fp8"), row(isl=500), row(osl=1300), row(accelerator="h200"),
        row(dtype="some new kind"),
    ]  # fmt: skip
    for other in others:
        (found,) = compare(LOAD, [other], [price()])
        assert not found.is_matched
        assert found.percent is found.floor_usd_per_million is found.matched_usd_per_million is None
        assert found.break_even_price is found.break_even_utilisation is None
        assert found.own_break_even_price is None
        assert found.missing == (Missing.NOT_MATCHED,)
        assert found.break_even_tokens_per_s == Decimal(250)
        assert found.same_time_usd == Decimal("0.36")


def test_no_percentage_for_grade_c_and_nothing_at_all_of_grade_d():
    (found,) = compare(LOAD, [row(grade=Grade.C)], [price()])
    assert found.is_matched
    assert found.percent is None
    assert found.missing == (Missing.WEAK_EVIDENCE,)
    (found,) = compare(LOAD, [row(grade=Grade.D)], [price()])
    assert not found.is_matched
    assert found.baselines == ()


def test_without_dollars_of_ours_theirs_are_still_told():
    load = replace(LOAD, loaded_usd=None)
    (found,) = compare(load, [row()], [price()])
    assert found.missing == (Missing.NO_PRICE,)
    assert found.own_break_even_price == (Decimal(1), Decimal(1))
    assert found.floor_usd_per_million == Decimal(1)
    assert found.percent is found.break_even_price is found.break_even_tokens_per_s is None


@pytest.mark.parametrize("tokens", [0, 5])
def test_an_empty_load_is_no_error(tokens: int):
    empty = Load("m", "bf16", 0, tokens, 0, Decimal(0), 0, Decimal(0))
    (found,) = compare(empty, [row(model="m")], [price()])
    assert found.missing == (Missing.NOT_MATCHED, Missing.NO_PRICE)
    assert found.break_even_tokens_per_s is None


_RATES = st.lists(st.integers(1, 10**5), min_size=1, max_size=4)


@given(_RATES, st.integers(1, 10**6), st.integers(1, 10**4), st.integers(1, 10**4))
def test_the_figures_of_a_match_agree_with_each_other(
    rates: list[int], cents: int, seconds: int, usd: int
):
    load = replace(LOAD, loaded_usd=Decimal(cents) / 100, seconds=Decimal(seconds))
    rows = [row(str(rate), engine=f"e{i}", num_chips=i + 1) for i, rate in enumerate(rates)]
    (found,) = compare(load, rows, [price(usd=str(Decimal(usd) / 100))])
    assert found.break_even_price is not None
    assert found.break_even_utilisation is not None
    assert found.floor_usd_per_million is not None
    assert found.matched_usd_per_million is not None
    slack = 1 - Decimal("1e-20")
    assert found.matched_usd_per_million >= found.floor_usd_per_million * slack
    for low, high in (found.break_even_price, found.break_even_utilisation):
        assert 0 < low <= high
    # At its break-even price, and only above it, the other chip is dearer than ours.
    ours = load.loaded_usd / load.output_tokens * 10**6
    is_dearer = found.price.usd_per_chip_hour > found.break_even_price[1]
    assert is_dearer == (found.floor_usd_per_million > ours / slack) or abs(
        found.floor_usd_per_million - ours
    ) <= ours * (1 - slack)
    assert found.break_even_utilisation[0] * found.break_even_price[1] == pytest.approx(
        found.price.usd_per_chip_hour
    )


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50))))
def test_time_that_groups_share_is_served_once(pairs: list[tuple[int, int]]):
    lives = [(min(pair), max(pair)) for pair in pairs]
    moments = {moment for begin, end in lives for moment in range(begin, end)}
    assert covered(lives) == len(moments)


@given(st.lists(st.integers(1, 10**6), min_size=1, max_size=5), st.integers(800, 1200))
def test_what_is_interpolated_lies_between_its_rows(rates: list[int], isl: int):
    rows = [row(str(rate), isl=800 + 100 * i) for i, rate in enumerate(rates)]
    found = interpolated(rows, Decimal(isl), Decimal(1000))
    seconds = [one.seconds_per_token for one in rows]
    slack = Decimal("1e-20")
    assert min(seconds) - slack <= found <= max(seconds) + slack


def test_the_cheapest_on_demand_price_of_a_chip_stands_beside_us():
    book = [price(usd="5"), price(usd="3"), price(usd="1", term=Term.SPOT), price("l4", "0.8")]
    assert [p.usd_per_chip_hour for p in prices_beside(book, ("l4", "h100", "b200"))] == [
        Decimal("0.8"), Decimal(3),
    ]  # fmt: skip
