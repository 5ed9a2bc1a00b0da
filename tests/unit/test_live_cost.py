"""The cost that an answer tells: exact from its chip-time, null with a reason where something is not known."""

import asyncio
import json
from decimal import Decimal

import msgspec
import pytest

from gateway.domain.accounting.live import LiveCosts, Price, Rates, live_cost
from gateway.domain.accounting.tags import tag_of
from gateway.errors import BadRequestError, UnavailableError
from gateway.request_ids import own_id, quoted_id, request_id, wire_id
from workers.protocol import Usage

V6E = Price("7", "v6e", "on_demand", Decimal("2.70"))
V5E = Price("8", "v5e", "spot", Decimal("0.36"))
RATES = Rates({"v6e": V6E, "v5e": V5E}, {"m": Decimal("1.5")})


def usage(prefill_ns: int = 0, decode_ns: int = 0, sku: str = "v6e") -> Usage:
    return Usage(
        prompt_tokens=1,
        completion_tokens=1,
        prefill_chip_ns=prefill_ns,
        decode_chip_ns=decode_ns,
        sku=sku,
    )


def test_a_cost():
    cost = live_cost(RATES, "m", [usage(400_000_000, 800_000_000)])
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
            "price_id": "7",
            "sku": "v6e",
            "term": "on_demand",
            "reason": None,
        },
    }
    assert cost.headers() == [(b"x-cost-usd", b"0.001350000000")]


def test_a_nanosecond_is_not_nothing():
    cost = live_cost(RATES, "m", [usage(decode_ns=1)])
    assert cost.headers() == [(b"x-cost-usd", b"0.000000000001")]
    assert cost.fields()["cost"] == 1e-12


def test_prompts_are_added_up_each_at_its_own_price():
    both = [usage(3_600_000_000), usage(0, 7_200_000_000), usage(0, 10**10, sku="v5e")]
    cost = live_cost(RATES, "m", both)
    assert cost.active == Decimal("0.0081") + Decimal("0.001")
    details = cost.fields()["cost_details"]
    assert isinstance(details, dict)
    assert details["prefill_chip_seconds"] == 3.6
    assert details["decode_chip_seconds"] == 17.2
    assert (details["price_id"], details["sku"]) == ("7,8", "v6e,v5e")
    assert details["term"] == "on_demand,spot"


@pytest.mark.parametrize(
    ("model", "skus", "reason"),
    [
        ("m", [""], "not_metered"),
        ("m", ["v6e", ""], "not_metered"),
        ("m", [], "not_metered"),
        ("m", ["v7x"], "no_price"),
        ("m", ["v6e", "v7x"], "no_price"),
        ("new", ["v6e"], "no_kappa"),
    ],
)
def test_what_is_not_known_is_null_with_a_reason(model: str, skus: list[str], reason: str):
    cost = live_cost(RATES, model, [usage(10, 10, sku) for sku in skus])
    fields = json.loads(msgspec.json.encode(cost.fields()))
    assert fields["cost"] is None
    assert fields["cost_details"]["reason"] == reason
    assert fields["cost_details"]["loaded"] is None
    assert (fields["cost_details"]["active"] is None) == (reason != "no_kappa")
    assert (fields["cost_details"]["decode_chip_seconds"] is None) == (reason == "not_metered")
    assert cost.headers() == []


def test_details_have_the_same_types_in_every_answer():
    """Clients that add up the usages of several answers take numbers for floats and refuse nested objects."""
    found = [live_cost(RATES, "m", [usage(10, 10, sku)]).fields() for sku in ("v6e", "v7x", "")]
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
