"""Protects the worked example of docs/cost.md: its numbers are what workers and ledger compute."""

import re
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path

import pytest

from gateway.domain.accounting.prices import Price, Term
from gateway.domain.accounting.recompute import classes, share_step
from workers.attribution import apportion
from workers.chip_time import AnyEntry, Coefficients, Member, Span, Spent, Step

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "cost.md").read_text(encoding="utf-8")
EXAMPLE = TEXT.partition("## A worked example")[2].partition("\n## ")[0]
CHIPS = 2
FIT = Coefficients(fixed=12, prefill=2, attention=1, decode=3, context=1)
PRICE = Price("v6e", "any", Term.ON_DEMAND, Decimal("3.60"), 0, None, "the example", "2026-12-01")


def table(heading: str) -> list[dict[str, str]]:
    """Rows of the example's table whose first column has this heading."""
    lines = iter(EXAMPLE.splitlines())
    header = next(cells for cells in map(_cells, lines) if cells[:1] == [heading])
    rows = []
    for cells in map(_cells, lines):
        if not cells:
            break
        rows.append(dict(zip(header, cells, strict=True)))
    return rows[1:]


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.split("|")[1:-1]]


PIECES, PARTS, COSTS = table("piece"), table("step"), table("request")


def entries() -> Iterator[AnyEntry]:
    """What a worker would have sent of it."""
    begin = 0
    for number, row in enumerate(PIECES, start=1):
        what, end = row["piece"], int(row["to"])
        assert int(row["from"]) == begin
        if what.startswith("step"):
            step = int(what.removeprefix("step "))
            members = tuple(_member(part) for part in PARTS if part["step"] == str(step))
            yield Step(
                number=number, begin_ns=begin, end_ns=end, step=step, bucket="b", fit="f",
                members=members,
            )  # fmt: skip
        else:
            yield Span(number=number, begin_ns=begin, end_ns=end, spent=Spent(what))
        begin = end


def _member(part: dict[str, str]) -> Member:
    return Member(part["request"], 0, part["phase"] == "prompt", int(part["n"]), int(part["c"]))


def spent() -> dict[str, dict[str, int]]:
    """Nano-chip-seconds by request and phase."""
    found = {name: {"prefill": 0, "decode": 0} for name in ("A", "B")}
    for entry in entries():
        if isinstance(entry, Step):
            for part in share_step(entry, CHIPS, {"f": {"b": FIT}}).parts:
                phase = "prefill" if part.member.is_prefill else "decode"
                found[part.member.request_id][phase] += part.share_ns
    return found


def test_the_text_names_the_fit_and_the_price_that_the_tables_are_made_with() -> None:
    flat = " ".join(EXAMPLE.split())
    assert "α = 12, b_p = 2, b_a = 1, b_d = 3, b_kv = 1" in flat
    assert f"{CHIPS} chips at US$ {PRICE.usd_per_chip_hour} a chip-hour" in flat
    assert PRICE.dollars(1) == Decimal("1e-12")


def test_pieces_add_up_to_all_chip_time() -> None:
    lengths = [sum(classes(entry, CHIPS).values()) for entry in entries()]
    assert [int(row["chips × length"]) for row in PIECES] == lengths
    assert sum(lengths) == CHIPS * int(PIECES[-1]["to"])
    assert f"M = 2 × 451 = {sum(lengths)}" in EXAMPLE


def test_shares_are_those_that_are_charged() -> None:
    rows = iter(PARTS)
    for entry in entries():
        if not isinstance(entry, Step):
            continue
        parts = share_step(entry, CHIPS, {"f": {"b": FIT}})
        assert sum(part.share_ns for part in parts.parts) == parts.cost_ns
        for part in parts.parts:
            row = next(rows)
            u = row["u"].rpartition("= ")[2]
            assert Decimal(u) * 2 * len(parts.parts) == part.weight
            exact = Decimal(parts.cost_ns) * part.weight / part.weight_of_all
            assert Decimal(row["D · u / Σ u"].rpartition("= ")[2]) == exact
            assert int(row["rounded down"]) == int(exact)
            assert int(row["share"]) == part.share_ns
    assert next(rows, None) is None


@pytest.mark.parametrize("name", ["A", "B"])
def test_what_requests_cost(name: str) -> None:
    everything = spent()
    active = {request: sum(phases.values()) for request, phases in everything.items()}
    measured = CHIPS * int(PIECES[-1]["to"])
    added = dict(
        zip(active, apportion(measured - sum(active.values()), list(active.values())), strict=True)
    )
    row = next(row for row in COSTS if row["request"] == name)
    loaded = active[name] + added[name]
    told = [int(row[column]) for column in ("prefill", "decode", "active", "added", "loaded")]
    assert told == [*everything[name].values(), active[name], added[name], loaded]
    assert Decimal(row["active US$"]) == PRICE.dollars(active[name])
    assert Decimal(row["loaded US$"]) == PRICE.dollars(loaded)


def test_the_bill_is_the_sum_of_what_requests_cost() -> None:
    *each, both = COSTS
    for column in list(both)[1:]:
        assert Decimal(both[column]) == sum(Decimal(row[column]) for row in each)
    measured = CHIPS * int(PIECES[-1]["to"])
    assert int(both["loaded"]) == measured
    assert Decimal(both["loaded US$"]) == PRICE.dollars(measured)
    kappa = re.search(r"κ = M / Σ D = (\d+)/(\d+) = (\d+\.\d+)", EXAMPLE)
    assert kappa is not None
    assert kappa.group(1, 2) == (both["loaded"], both["active"])
    assert round(Decimal(both["loaded"]) / Decimal(both["active"]), 3) == Decimal(kappa[3])
