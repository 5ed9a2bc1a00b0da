"""The cost that an answer tells: exact from its chip-time, null with a reason where something is not known."""

import asyncio
import json
from decimal import Decimal
from typing import Any

import msgspec
import pytest

from gateway.domain.accounting.live import LiveCosts, Rates, live_cost
from gateway.domain.accounting.prices import Price, PriceBook, Pricing, Term
from gateway.domain.accounting.tags import tag_of
from gateway.errors import BadRequestError, UnavailableError
from gateway.request_ids import own_id, quoted_id, request_id, wire_id
from workers.protocol import Usage


def price(sku: str, dollars: str, region: str = "any", begin: int = 0, end: Any = None) -> Price:
    """Valid from `begin` until `end`."""
    amount = Decimal(dollars)
    return Price(sku, region, Term.ON_DEMAND, amount, begin, end, "a list", "2026-01-01")


V6E, V5E = price("v6e", "2.70"), price("v5e", "0.36")
BOOK = PriceBook([V6E, V5E, price("v4", "3", "gcp/us"), price("h200", "5", end=50)])
RATES = Rates(Pricing(BOOK), {"m": Decimal("1.5")})
NOW = 100


def usage(prefill_ns: int = 0, decode_ns: int = 0, sku: str = "v6e", region: str = "") -> Usage:
    return Usage(
        prompt_tokens=1,
        completion_tokens=1,
        prefill_chip_ns=prefill_ns,
        decode_chip_ns=decode_ns,
        sku=sku,
        region=region,
    )


def test_a_cost():
    cost = live_cost(RATES, "m", [usage(400_000_000, 800_000_000)], NOW)
    # 1.2 chip-seconds at 2.70 dollars an hour.
    assert cost.active == Decimal("0.0009")
    assert cost.loaded == Decimal("0.00135")
    assert cost.fields() == {
        "cost": 0.00135,
        "cost_details": {
            "provisional": True,
            "active": 0.0009,
            "loaded": 0.00135,
            "kappa": 1.5,
            "prefill_chip_seconds": 0.4,
            "decode_chip_seconds": 0.8,
            "price_id": V6E.id,
            "sku": "v6e",
            "term": "on_demand",
            "reason": None,
        },
    }
    assert cost.headers() == [(b"x-cost-usd", b"0.001350000000")]


def test_a_nanosecond_is_not_nothing():
    cost = live_cost(RATES, "m", [usage(decode_ns=1)], NOW)
    assert cost.headers() == [(b"x-cost-usd", b"0.000000000001")]
    assert cost.fields()["cost"] == 1e-12


def test_prompts_are_added_up_each_at_its_own_price():
    both = [usage(3_600_000_000), usage(0, 7_200_000_000), usage(0, 10**10, sku="v5e")]
    cost = live_cost(RATES, "m", both, NOW)
    assert cost.active == Decimal("0.0081") + Decimal("0.001")
    details = cost.fields()["cost_details"]
    assert isinstance(details, dict)
    assert details["prefill_chip_seconds"] == 3.6
    assert details["decode_chip_seconds"] == 17.2
    assert (details["price_id"], details["sku"]) == (f"{V6E.id},{V5E.id}", "v6e,v5e")
    assert details["term"] == "on_demand,on_demand"


def test_a_region_has_its_own_price_and_a_price_its_time():
    book = PriceBook([price("v6e", "1"), price("v6e", "2", "gcp/us"), price("v6e", "4", begin=200)])
    rates = Rates(Pricing(book), {"m": Decimal(1)})
    hour = 3600 * 10**9
    for region, now_ns, dollars in (("", 100, 1), ("us", 100, 2), ("gcp/eu", 200, 4)):
        assert live_cost(rates, "m", [usage(hour, 0, "v6e", region)], now_ns).loaded == dollars


@pytest.mark.parametrize(
    ("model", "skus", "reason"),
    [
        ("m", [""], "not_metered"),
        ("m", ["v6e", ""], "not_metered"),
        ("m", [], "not_metered"),
        ("m", ["v7x"], "unknown_sku"),
        ("m", ["v6e", "v7x"], "unknown_sku"),
        ("m", ["v4"], "unknown_region"),
        ("m", ["h200"], "not_effective"),
        ("new", ["v6e"], "no_kappa"),
    ],
)
def test_what_is_not_known_is_null_with_a_reason(model: str, skus: list[str], reason: str):
    cost = live_cost(RATES, model, [usage(10, 10, sku) for sku in skus], NOW)
    fields = json.loads(msgspec.json.encode(cost.fields()))
    assert fields["cost"] is None
    assert fields["cost_details"]["reason"] == reason
    assert fields["cost_details"]["loaded"] is None
    assert (fields["cost_details"]["active"] is None) == (reason != "no_kappa")
    assert (fields["cost_details"]["decode_chip_seconds"] is None) == (reason == "not_metered")
    assert cost.headers() == []


def test_details_have_the_same_types_in_every_answer():
    """Clients that add up the usages of several answers take numbers for floats and refuse nested objects."""
    skus = ("v6e", "v7x", "")
    found = [live_cost(RATES, "m", [usage(10, 10, sku)], NOW).fields() for sku in skus]
    names = {frozenset(fields["cost_details"]) for fields in found}  # type: ignore[arg-type]
    assert len(names) == 1
    for fields in found:
        for value in fields["cost_details"].values():  # type: ignore[attr-defined]
            assert value is None or isinstance(value, bool | float | str)


async def test_rates_that_cannot_be_read_anew_go_on():
    answers: list[Rates | Exception] = [RATES, UnavailableError("away"), ValueError("broken")]
    is_over = asyncio.Event()

    async def read() -> Rates:
        if not answers:
            is_over.set()
            await asyncio.sleep(60)
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    costs = LiveCosts(read, interval_s=0.001)
    assert costs.of("m", [usage(10)]).loaded is None
    costs.start()
    await is_over.wait()
    assert costs.of("m", [usage(10)]).loaded is not None
    await costs.stop()


@pytest.mark.parametrize("tag", ["a", "Nightly-eval_2", "team/search:batch.7", "9" * 64, "a@b+c"])
def test_a_tag(tag: str):
    assert tag_of({"x-tpugate-tag": tag}) == tag


def test_no_tag():
    assert tag_of({}) == ""


@pytest.mark.parametrize(
    "tag", ["", " a", "a b", "=1+1", "@a", "-a", "__idle__", "a" * 65, "é", "a,b", "a\n", "a;b"]
)
def test_a_tag_that_is_none(tag: str):
    with pytest.raises(BadRequestError) as caught:
        tag_of({"x-tpugate-tag": tag})
    assert caught.value.param == "x-tpugate-tag"


def test_ids_lead_to_each_other():
    scope = {"state": {}, "headers": []}
    own = own_id(scope)  # type: ignore[arg-type]
    assert request_id(scope) == b"req_" + own.encode()  # type: ignore[arg-type]
    ids = [wire_id(own, number) for number in range(3)]
    assert len(set(ids)) == 3
    for prefix in ("", "req_", "chatcmpl-", "cmpl-", "resp_", "msg_"):
        assert quoted_id(prefix + own) == own
    assert {quoted_id(one) for one in ids} == {own}


def test_a_clients_id_is_not_ours():
    given = b"req_" + b"0" * 32
    scope = {"state": {}, "headers": [(b"x-request-id", given)]}
    assert request_id(scope) == given  # type: ignore[arg-type]
    assert own_id(scope) != "0" * 32  # type: ignore[arg-type]


@pytest.mark.parametrize("quoted", ["", "mine", "req_", "chatcmpl-" + "g" * 32, "a" * 31, "%" * 32])
def test_an_id_that_is_none(quoted: str):
    assert quoted_id(quoted) is None
