"""Protects the comparison with other chips: figures that can be redone by hand, and nothing claimed without a match."""

from decimal import Decimal

from hypothesis import given
from hypothesis import strategies as st

from gateway.domain.accounting.baselines import Baseline, Grade, interpolated
from gateway.domain.accounting.comparison import Load, compare, prices_beside
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


LOAD = Load("org/Big-8B-Instruct", "bfloat16", 100, 100_000, 100_000, Decimal(50), Decimal("0.40"))
"""Of 1000 tokens in and out, 2000 output tokens a second, US$ 4 per million output tokens."""


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


def test_whole_groups_are_paid_for_however_little_is_asked():
    idle = Load(LOAD.model, "bf16", 1, 1000, 1000, Decimal(1000), Decimal("0.01"))
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
        assert found.break_even_tokens_per_s == Decimal(250)


def test_no_percentage_for_grade_c_and_nothing_at_all_of_grade_d():
    (found,) = compare(LOAD, [row(grade=Grade.C)], [price()])
    assert found.is_matched
    assert found.percent is None
    (found,) = compare(LOAD, [row(grade=Grade.D)], [price()])
    assert not found.is_matched
    assert found.baselines == ()


def test_without_dollars_of_ours_theirs_are_still_told():
    load = Load(LOAD.model, "bf16", 100, 100_000, 100_000, Decimal(50), None)
    (found,) = compare(load, [row()], [price()])
    assert found.floor_usd_per_million == Decimal(1)
    assert found.percent is found.break_even_price is found.break_even_tokens_per_s is None


def test_an_empty_load_is_no_error():
    (found,) = compare(Load("m", "bf16", 0, 0, 0, Decimal(0), Decimal(0)), [row()], [price()])
    assert not found.is_matched


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
