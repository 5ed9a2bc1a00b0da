"""Every surface tells what an answer has cost, takes a tag for it, and its ids lead to the ledger's."""

import asyncio
import itertools
import json
import time
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
import redis

from gateway.db.engine import Database
from gateway.domain.accounting.prices import Price, Term
from gateway.domain.accounting.tables import HOUR_S, Period, PriceRow
from gateway.request_ids import quoted_id, wire_id
from gateway.settings import GatewaySettings
from tests.fakes.gateway import ADMIN_KEY, GatewayUnderTest, assert_error
from tests.fakes.processes import WorkerUnderTest
from tests.fakes.valkey import OwnValkey
from tests.fakes.wire import wait_until
from tests.fakes.worker_peer import WorkerPeer
from workers.engine.scripted import HANG
from workers.protocol import PAYLOAD_FIELD, GenerateRequest, Usage, decode, requests_stream

TURNS = [{"role": "user", "content": "one two three"}]
SURFACES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": TURNS},
    "/v1/completions": {"prompt": ["x y", "z"]},
    "/v1/responses": {"input": "one two three"},
    "/v1/messages": {"messages": TURNS, "max_tokens": 20},
}
each_surface = pytest.mark.parametrize("path", SURFACES)
PRICE = Price(
    sku="v6e",
    region="any",
    term=Term.ON_DEMAND,
    usd_per_chip_hour=Decimal("2.70"),
    effective_from_ns=0,
    effective_to_ns=None,
    source="a list",
    retrieved_at="2026-01-01",
)
USAGE = Usage(
    prompt_tokens=3,
    completion_tokens=1,
    prefill_chip_ns=400_000_000,
    decode_chip_ns=800_000_000,
    sku="v6e",
)
COST = 0.00135
"""1.2 chip-seconds at 2.70 dollars an hour, half as much again for idle time."""
Priced = tuple[GatewayUnderTest, WorkerPeer]


@pytest.fixture(scope="module")
def priced(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Priced]:
    """A gateway whose ledger knows a price of v6e and κ = 1.5 of the model `m-small`, and its worker;
    and a real worker of `m-real`, with the same price and κ = 1.5."""
    folder: Path = tmp_path_factory.mktemp("priced")
    with (
        OwnValkey() as valkey,
        WorkerPeer(valkey.url, "m-small", USAGE) as worker,
        WorkerUnderTest(valkey.url, "w", folder / "worker.log", model="m-real", sku="v6e"),
        GatewayUnderTest(valkey.url, folder, cost_refresh_s="0.1", accountant="off") as gateway,
    ):
        gateway.wait_for_ready()
        asyncio.run(write_ledger(folder))
        wait_until(lambda: cost_of(ask(gateway, "/v1/chat/completions")), "prices are read")
        yield gateway, worker


async def write_ledger(folder: Path) -> None:
    database = Database(GatewaySettings(data_dir=folder))
    hour = int(time.time()) // HOUR_S * HOUR_S
    async with database.session() as session:
        session.add(
            PriceRow(
                price_id=PRICE.id,
                sku=PRICE.sku,
                region=PRICE.region,
                term=PRICE.term.value,
                usd_per_chip_hour=PRICE.usd_per_chip_hour,
                currency=PRICE.currency,
                effective_from_ns=PRICE.effective_from_ns,
                source=PRICE.source,
                retrieved_at=PRICE.retrieved_at,
                added_unix_ns=0,
            )
        )
        # Of yesterday, and of a month ago, which does not count.
        periods = ((hour - 20 * HOUR_S, 200), (hour - 720 * HOUR_S, 1))
        for model, (start, step_ns) in itertools.product(("m-small", "m-real"), periods):
            session.add(
                Period(
                    model=model,
                    hour=start,
                    price_id=PRICE.id,
                    group_id="g",
                    measured_ns=300,
                    step_ns=step_ns,
                )
            )
    await database.close()


def cost_of(answer: Any) -> Any:
    return answer.json()["usage"]["cost"]


def ask(gateway: GatewayUnderTest, path: str, headers: Any = None, **fields: Any) -> Any:
    body = {"model": "m-small", **SURFACES[path], **fields}
    return gateway.client.post(path, json=body, headers=headers)


def on_the_wire(gateway: GatewayUnderTest, tag: str) -> list[GenerateRequest]:
    """The requests with a tag that are queued or running."""
    with redis.Redis.from_url(gateway.redis_url) as client:
        entries = client.xrange(requests_stream("m-small"))
    found = [decode(GenerateRequest, fields[PAYLOAD_FIELD]) for _, fields in entries]
    return [request for request in found if request.tag == tag]


@each_surface
def test_tag_and_ids_reach_the_wire(shared_gateway: GatewayUnderTest, path: str):
    tag = "wire" + path
    headers = {
        "x-tpugate-tag": tag,
        "x-model-script-hex": json.dumps([b"a ".hex(), HANG.hex()]),
        "authorization": f"Bearer {ADMIN_KEY}",
    }
    body = {"model": "m-small", **SURFACES[path], "stream": True}
    with shared_gateway.client.stream("POST", path, json=body, headers=headers) as answer:
        requests = wait_until(lambda: on_the_wire(shared_gateway, tag), "it is queued")
        own = quoted_id(answer.headers["x-request-id"])
        assert own is not None
        prompts = SURFACES[path].get("prompt", [""])
        wanted = {wire_id(own, number) for number in range(len(prompts))}
        assert {request.request_id for request in requests} == wanted


@each_surface
def test_an_answers_id_is_that_of_its_request(shared_gateway: GatewayUnderTest, path: str):
    answer = ask(shared_gateway, path)
    assert answer.status_code == 200, answer.text
    own = quoted_id(answer.headers["x-request-id"])
    assert own is not None
    assert quoted_id(answer.json()["id"]) == own
    named = ask(shared_gateway, path, {"x-request-id": "mine"})
    assert named.headers["x-request-id"] == "mine"
    assert quoted_id(named.json()["id"]) not in (None, own)


@each_surface
@pytest.mark.parametrize("tag", ["", "a b", "=1", "x" * 65])
def test_a_bad_tag_is_named(shared_gateway: GatewayUnderTest, path: str, tag: str):
    refused = ask(shared_gateway, path, {"x-tpugate-tag": tag})
    if path == "/v1/messages":
        assert refused.status_code == 400
        assert "x-tpugate-tag" in refused.json()["error"]["message"]
    else:
        assert_error(refused, 400, param="x-tpugate-tag", code="invalid_value")


def details(usage: dict[str, Any], num_prompts: int) -> None:
    """It is the cost of so many prompts."""
    assert usage["cost"] == COST * num_prompts
    assert usage["cost_details"] == {
        "provisional": True,
        "active": 0.0009 * num_prompts,
        "loaded": COST * num_prompts,
        "kappa": 1.5,
        "prefill_chip_seconds": 0.4 * num_prompts,
        "decode_chip_seconds": 0.8 * num_prompts,
        "price_id": PRICE.id,
        "sku": "v6e",
        "term": "on_demand",
        "reason": None,
    }


@each_surface
def test_a_whole_answer_tells_its_cost(priced: Priced, path: str):
    answer = ask(priced[0], path)
    assert answer.status_code == 200, answer.text
    num_prompts = len(SURFACES[path].get("prompt", [""]))
    details(answer.json()["usage"], num_prompts)
    assert Decimal(answer.headers["x-cost-usd"]) == Decimal("0.00135") * num_prompts


@each_surface
def test_a_stream_tells_it_in_its_last_chunk(priced: Priced, path: str):
    asks = {"stream": True}
    if path.endswith("completions"):
        asks["stream_options"] = {"include_usage": True}  # type: ignore[assignment]
    answer = ask(priced[0], path, **asks)
    told = [line[6:] for line in answer.text.splitlines() if line.startswith("data: {")]
    usages = [
        found.get("usage") or found.get("response", {}).get("usage")
        for found in map(json.loads, told)
    ]
    costs = [usage for usage in usages if usage and "cost" in usage]
    assert len(costs) == 1
    details(costs[0], len(SURFACES[path].get("prompt", [""])))
    assert "x-cost-usd" not in answer.headers


def test_a_real_worker_meters_what_is_told(priced: Priced):
    gateway = priced[0]
    known = gateway.client.get("/v1/models").json
    wait_until(lambda: "m-real" in {model["id"] for model in known()["data"]}, "it is known")
    answer = wait_until(
        lambda: (
            (found := ask(gateway, "/v1/chat/completions", model="m-real")).is_success and found
        ),
        "it is ready",
    )
    told = answer.json()["usage"]["cost_details"]
    assert told["prefill_chip_seconds"] > 0
    assert told["decode_chip_seconds"] > 0
    seconds = Decimal(str(told["prefill_chip_seconds"])) + Decimal(str(told["decode_chip_seconds"]))
    cost = PRICE.usd_per_chip_hour * seconds / 3600 * Decimal("1.5")
    assert abs(Decimal(answer.headers["x-cost-usd"]) - cost) <= Decimal("1e-12")


def test_all_choices_are_one_cost(priced: Priced):
    details(ask(priced[0], "/v1/chat/completions", n=3).json()["usage"], 1)


def test_a_stored_response_keeps_its_cost(priced: Priced):
    made = ask(priced[0], "/v1/responses")
    stored = priced[0].client.get(f"/v1/responses/{made.json()['id']}")
    details(stored.json()["usage"], 1)
    assert "x-cost-usd" not in stored.headers


def test_a_response_in_the_background_has_its_cost_when_it_is_fetched(priced: Priced):
    made = ask(priced[0], "/v1/responses", background=True)
    assert "x-cost-usd" not in made.headers
    url = f"/v1/responses/{made.json()['id']}"
    fetch = priced[0].client.get
    wait_until(lambda: fetch(url).json()["status"] == "completed", "it is made")
    details(fetch(url).json()["usage"], 1)


@each_surface
@pytest.mark.parametrize("stream", [False, True])
def test_a_repeat_is_billed_once(priced: Priced, path: str, stream: bool):
    gateway, worker = priced
    headers = {"idempotency-key": f"{path}-{stream}"}
    before = len(worker.heard)
    first = ask(gateway, path, headers, stream=stream)
    heard = len(worker.heard)
    assert heard > before
    again = ask(gateway, path, {**headers, "x-tpugate-tag": "other"}, stream=stream)
    assert again.content == first.content
    assert again.headers["idempotent-replayed"] == "true"
    assert again.headers.get("x-cost-usd") == first.headers.get("x-cost-usd")
    assert ("x-cost-usd" in again.headers) != stream
    # The ledger knows what workers do, and they have heard of nothing.
    assert len(worker.heard) == heard


def test_what_is_not_known_is_null(priced: Priced):
    gateway, worker = priced
    for sku, reason in (("v7x", "unknown_sku"), ("", "not_metered")):
        worker.usage = Usage(prompt_tokens=3, completion_tokens=1, sku=sku)
        try:
            answer = ask(gateway, "/v1/chat/completions")
        finally:
            worker.usage = USAGE
        usage = answer.json()["usage"]
        assert (usage["cost"], usage["cost_details"]["reason"]) == (None, reason)
        assert "x-cost-usd" not in answer.headers
