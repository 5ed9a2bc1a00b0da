"""Protects the price book: what a row must say, what is refused or put aside, and that hostile YAML is an error and
nothing else."""

from datetime import UTC, datetime
from decimal import Decimal
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.domain.accounting.baseline_store import published_baselines
from gateway.domain.accounting.baselines import Grade, dtype_class
from gateway.domain.accounting.price_file import check_rows, read_builtin, read_price_file
from gateway.domain.accounting.prices import (
    NoPrice,
    NoPriceReason,
    Price,
    PriceBook,
    Term,
    overlap,
)
from gateway.domain.accounting.strict_yaml import YamlError, parse_yaml

NOW = datetime(2026, 12, 3, tzinfo=UTC)
DAY_NS = 86400 * 10**9
GOOD: dict[str, Any] = {
    "sku": "v6e",
    "region": "gcp/us-east5",
    "term": "on_demand",
    "usd_per_chip_hour": Decimal("2.70"),
    "effective_from": "2026-12-01",
    "source": "a page, https://example.com",
    "retrieved_at": "2026-12-01",
}


def checked_one(**changes: object) -> tuple[list[Price], list[str]]:
    row = {name: value for name, value in {**GOOD, **changes}.items() if value is not None}
    found = check_rows([row], NOW)
    return found.good, found.refused


def test_a_good_row_is_a_price():
    (price,), refused = checked_one(note="host included")
    assert refused == []
    assert price.usd_per_chip_hour == Decimal("2.70")
    assert price.term is Term.ON_DEMAND
    assert price.detail == {"note": "host included"}
    assert price.dollars(3600 * 10**9) == Decimal("2.70")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"source": None}, "source is missing"),
        ({"retrieved_at": None}, "retrieved_at is missing"),
        ({"usd_per_chip_hour": 700}, "no price"),
        ({"usd_per_chip_hour": Decimal("700.0")}, "no price"),
        ({"usd_per_chip_hour": 0}, "above 0"),
        ({"usd_per_chip_hour": Decimal(-1)}, "above 0"),
        ({"usd_per_chip_hour": 10**20}, "at most 1000"),
        ({"usd_per_chip_hour": Decimal("1e-30")}, "more than 12 places"),
        ({"usd_per_chip_hour": "2.70"}, "is no number"),
        ({"usd_per_chip_hour": True}, "is no number"),
        ({"usd_per_chip_hour": [2]}, "is no number"),
        ({"term": "weekly"}, "term is one of"),
        ({"term": {"a": 1}}, "term is one of"),
        ({"effective_from": "9999-01-01"}, "is not between"),
        ({"effective_from": "0001-01-01"}, "is not between"),
        ({"region": "us-east5"}, "region"),
        ({"source": "\udcff"}, "source"),
        ({"sku": "V6E"}, "sku"),
        ({"sku": "v6e; drop"}, "sku"),
        ({"sku": 6}, "sku"),
        ({"source": "two\nlines"}, "source"),
        ({"source": "x" * 2000}, "source"),
        ({"source": "https://deploybase.ai/tpu"}, "contradict the bills"),
        ({"effective_from": "2026-12-01T07:00:00"}, "without a zone"),
        ({"effective_from": "soon"}, "is no date"),
        ({"effective_to": "2026-11-30"}, "not after"),
        ({"retrieved_at": "2027-05-01"}, "in the future"),
        ({"retrieved_at": "2026-02-30"}, "is no date"),
        ({"currency": "EUR"}, "exchange_rate"),
        ({"exchange_rate": 1}, "another currency"),
        ({"upfront_usd": 100}, "1y and 3y"),
        ({"confirmed_by": GOOD["source"]}, "another one is wanted"),
        ({"confirmed_by": "digiteria"}, "contradict the bills"),
        ({"currency": "€"}, "three capital letters"),
        ({"discount": 0.5}, "discount is unknown"),
    ],
)
def test_a_bad_row_is_refused_in_a_sentence(changes: dict[str, object], said: str):
    good, refused = checked_one(**changes)
    assert good == []
    assert len(refused) == 1
    assert said in refused[0]


@pytest.mark.parametrize("row", [None, 3, "v6e", [], [GOOD]])
def test_a_row_that_is_no_mapping_is_refused(row: object):
    assert len(check_rows([row], NOW).refused) == 1


def test_an_on_demand_price_below_spot_is_refused():
    spot = {**GOOD, "term": "spot", "usd_per_chip_hour": Decimal("2.80")}
    found = check_rows([GOOD, spot], NOW)
    assert [price.term for price in found.good] == [Term.SPOT]
    assert "below the spot price" in found.refused[0]


def test_prices_far_below_the_others_of_their_cloud_are_put_aside():
    rows = [
        {**GOOD, "sku": "h100", "region": region, "usd_per_chip_hour": Decimal(usd)}
        for region, usd in (
            ("gcp/us-central1", "4.20076"), ("gcp/us-east4", "9.79655"), ("nebius/eu-north1", "2.95"),
        )
    ]  # fmt: skip
    found = check_rows(rows, NOW)
    assert [price.region for price, _ in found.quarantined] == ["gcp/us-central1"]
    assert len(found.good) == 2


def test_a_second_source_takes_the_doubt_away():
    low = {**GOOD, "usd_per_chip_hour": Decimal(1)}
    high = {**GOOD, "region": "gcp/us-east1"}
    assert len(check_rows([low, high], NOW).quarantined) == 1
    found = check_rows([{**low, "confirmed_by": "another page"}, high], NOW)
    assert (len(found.good), found.quarantined) == (2, [])


def test_prices_are_compared_only_while_both_are_valid():
    old = {**GOOD, "effective_from": "2024-01-01", "effective_to": "2025-01-01"}
    rows = [
        {**old, "usd_per_chip_hour": Decimal(9)},
        {**old, "term": "spot", "usd_per_chip_hour": Decimal(5)},
        GOOD,
        {**GOOD, "term": "spot", "usd_per_chip_hour": Decimal(1)},
    ]
    found = check_rows(rows, NOW)
    assert (len(found.good), found.refused, found.quarantined) == (4, [], [])
    # Of two on-demand prices of one line each is held against the spot price of its own time.
    found = check_rows([{**rows[0], "usd_per_chip_hour": Decimal(3)}, *rows[1:]], NOW)
    assert "US$ 3" in found.refused[0]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (("2026-01-01", None), ("2026-01-01", None)),
        (("2026-01-01", "2026-03-01"), ("2026-02-01", None)),
        (("2026-02-01", None), ("2026-01-01", "2026-03-01")),
    ],
)
def test_two_prices_that_would_be_valid_at_once_are_refused_by_name(
    one: tuple[str, str | None], other: tuple[str, str | None]
):
    rows = [
        {**GOOD, "usd_per_chip_hour": Decimal(usd), "effective_from": begin, "effective_to": end}
        for usd, (begin, end) in (("2.5", one), ("2.6", other))
    ]
    found = check_rows(rows, NOW)
    assert len(found.good) == 1
    assert "2.5" in found.refused[0]
    assert "2.6" in found.refused[0]


def test_another_currency_comes_with_its_rate_and_source():
    changes: dict[str, object] = {
        "currency": "EUR", "original_price": Decimal("2.50"), "exchange_rate": Decimal("1.08"),
        "exchange_source": "ECB 2026-12-01",
    }  # fmt: skip
    (price,), _ = checked_one(usd_per_chip_hour=None, **changes)
    assert (price.currency, price.usd_per_chip_hour) == ("EUR", Decimal("2.70"))
    assert price.detail["exchange_rate"] == "1.08"
    assert checked_one(**changes) == ([price], [])
    assert "is not original_price" in checked_one(**{**changes, "exchange_rate": 2})[1][0]


def test_what_is_paid_in_advance_is_spread_over_the_hours_of_the_term():
    (price,), _ = checked_one(term="1y", usd_per_chip_hour=Decimal(1), upfront_usd=4380)
    assert price.usd_per_chip_hour == Decimal("1.5")  # 4380 / 8760 an hour
    assert price.detail == {"hourly_usd": "1", "upfront_usd": "4380"}


@pytest.mark.parametrize(
    "text",
    [
        "a: &x [1]\nb: *x",
        "a: 1\na: 2",
        "a: .nan",
        "a: .inf",
        "a: 010",
        "a: 1:30",
        "!!python/object/apply:os.system ['true']",
        "--- 1\n--- 2",
        "[" * 100,
        "a: " + "9" * 100,
        "\x00",
        "? [1]\n: 2",
        "!!float .",
        "!!int [1]",
        "!!bool x",
        "!!map 3",
        "<<: {a: 1}",
        "\udcff",
    ],
)
def test_hostile_yaml_is_an_error(text: str):
    with pytest.raises(YamlError):
        parse_yaml(text)


@pytest.mark.parametrize("content", [b"", b"[]", b"prices: []", b"prices: 3", b"\xff\xfe", b"a: ["])
def test_a_file_that_is_none_of_prices_is_an_error(tmp_path: Path, content: bytes):
    path = tmp_path / "prices.yaml"
    path.write_bytes(content)
    with pytest.raises(YamlError):
        read_price_file(path, NOW)


def test_a_file_that_is_not_there_or_too_large_is_an_error(tmp_path: Path):
    with pytest.raises(YamlError, match="cannot be read"):
        read_price_file(tmp_path / "none.yaml", NOW)
    large = tmp_path / "large.yaml"
    large.write_bytes(b"#" * (5 * 1024 * 1024))
    with pytest.raises(YamlError, match="larger than"):
        read_price_file(large, NOW)


def test_what_comes_with_the_package_is_good_and_has_no_price_of_a_v7x():
    found = read_builtin(NOW)
    assert found.refused == []
    assert found.quarantined == []
    assert {"v5e", "v6e", "h100", "h200"} <= {price.sku for price in found.good}
    assert "v7x" not in {price.sku for price in found.good}
    assert all("https://" in price.source for price in found.good)
    assert overlap(found.good) is None
    # A source's own date, where it has one: an old price must look old.
    assert {p.retrieved_at for p in found.good if "Cyclenerd" in p.source} == {"2025-03-06"}


def test_published_baselines_can_be_read_and_none_is_of_grade_d():
    rows = published_baselines()
    assert len(rows) > 150
    assert all(row.grade is not Grade.D and row.output_tokens_per_s_chip > 0 for row in rows)
    assert all("http" in row.source for row in rows)
    assert all(dtype_class(row.dtype) for row in rows)


_MOMENTS = st.integers(0, 60)
_LINES = st.lists(
    st.tuples(_MOMENTS, st.none() | _MOMENTS, st.sampled_from(["a/x", "a/all", "any"]))
)


@given(_LINES, _MOMENTS, _MOMENTS)
def test_segments_cover_a_time_without_gaps_and_agree_with_every_moment(
    lines: list[tuple[int, int | None, str]], one: int, other: int
):
    prices: list[Price] = []
    for begin, end, region in lines:
        price = Price("v", region, Term.SPOT, Decimal(begin + 1), begin, end, "s", "2026-12-01")
        if (end is None or end > begin) and overlap([*prices, price]) is None:
            prices.append(price)
    book = PriceBook(prices)
    begin, end = min(one, other), max(one, other) + 1
    segments = book.segments("v", "a/x", Term.SPOT, begin, end)
    assert [segments[0].from_ns, segments[-1].to_ns] == [begin, end]
    assert all(a.to_ns == b.from_ns for a, b in pairwise(segments))
    for segment in segments:
        for moment in range(segment.from_ns, segment.to_ns):
            assert book.price_at("v", "a/x", Term.SPOT, moment) == segment.price


def test_a_region_is_found_by_its_name_the_nearest_first():
    def at(region: str, usd: str, sku: str = "v6e") -> Price:
        (price,), _ = checked_one(region=region, usd_per_chip_hour=Decimal(usd), sku=sku)
        return price

    book = PriceBook(
        [at("gcp/us-east5", "3"), at("gcp/all", "4"), at("any", "5")]
        + [at("gcp/us-central1", "7", "h200"), at("nebius/us-central1", "3", "h200")]
    )  # fmt: skip

    def found(sku: str, region: str) -> object:
        when_ns = book.valid_at(2**62)[0].effective_from_ns
        price = book.price_at(sku, region, Term.ON_DEMAND, when_ns)
        return price.reason if isinstance(price, NoPrice) else price.usd_per_chip_hour

    asked = ("us-east5", "gcp/us-east5", "gcp/us-west9", "us-west9", "aws/us-east-1", "")
    assert [found("v6e", region) for region in asked] == [3, 3, 4, 5, 5, 5]
    assert found("h200", "us-central1") == NoPriceReason.AMBIGUOUS_REGION
    assert found("h200", "nebius/us-central1") == 3
    assert found("h200", "") == found("h200", "moon") == NoPriceReason.UNKNOWN_REGION
    assert found("v7x", "us-central1") == NoPriceReason.UNKNOWN_SKU


def test_a_price_is_valid_until_the_next_begins():
    first, _ = checked_one(effective_from="2026-01-01")
    second, _ = checked_one(effective_from="2026-06-01", usd_per_chip_hour=Decimal(2))
    book = PriceBook([*second, *first])
    begin = second[0].effective_from_ns

    def at(when_ns: int) -> object:
        found = book.price_at("v6e", "gcp/us-east5", Term.ON_DEMAND, when_ns)
        return None if isinstance(found, NoPrice) else found.usd_per_chip_hour

    assert [at(begin - 1), at(begin), at(0)] == [Decimal("2.70"), Decimal(2), None]
    segments = book.segments("v6e", "us-east5", Term.ON_DEMAND, begin - DAY_NS, begin + DAY_NS)
    assert [segment.from_ns for segment in segments] == [begin - DAY_NS, begin]
