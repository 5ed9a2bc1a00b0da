"""Protects what the product is for: 500 requests of all kinds on the real device are billed to the nanosecond, one of
them can be worked out again step by step, and the run stands beside other chips with the source of each figure."""

import asyncio
import csv
import io
import json
from typing import Any

import httpx
import pytest

from tests.fakes.model_server import ModelServer
from tests.fakes.wire import wait_until

NUM_REQUESTS = 500
CLIENTS = 16
SHARED = "You answer in one word. " * 12
CHIPS = "v5e,v6e,h100,h200"


def body(number: int) -> tuple[dict[str, Any], int]:
    """A request of one of ten kinds, and the status that it should get."""
    kind = number % 10
    asks: dict[str, Any] = {
        "model": "smollm2-135m-instruct",
        "messages": [{"role": "user", "content": f"Number {number}: name a colour."}],
        "max_tokens": 1 + number % 4,
        "temperature": 0 if number % 3 else 0.9,
    }
    if kind == 1:
        asks["messages"].insert(0, {"role": "system", "content": SHARED})
    elif kind == 2:
        asks |= {"n": 2, "temperature": 1}
    elif kind in (3, 4):
        asks |= {"stream": True, "stream_options": {"include_usage": True}}
    elif kind == 5:
        asks |= {"max_tokens": -1}
    elif kind == 6:
        asks |= {"response_format": {"type": "json_object"}, "max_tokens": 6}
    elif kind == 7:
        asks["messages"][0]["content"] = "word " * (20 + number % 150)
    elif kind == 8:
        asks |= {"stream": True, "max_tokens": 40}
    return asks, 400 if kind == 5 else 200


class Run:
    """What 500 answers said."""

    def __init__(self) -> None:
        self.ids: list[str] = []
        """Of whole answers, with their x-request-id beside them."""
        self.request_ids: list[str] = []
        self.usd = 0.0
        self.num_admitted = 0

    async def go(self, server: ModelServer) -> None:
        numbers = iter(range(NUM_REQUESTS))
        headers = {"authorization": f"Bearer {server.key}"}
        async with httpx.AsyncClient(base_url=server.url, headers=headers, timeout=120) as client:
            await asyncio.gather(*(self._client(client, numbers) for _ in range(CLIENTS)))

    async def _client(self, client: httpx.AsyncClient, numbers: Any) -> None:
        for number in numbers:
            asks, status = body(number)
            headers = {"x-tpugate-tag": f"team-{number % 2}"}
            if asks.get("stream"):
                await self._stream(client, asks, headers, is_left=number % 10 == 8)
                continue
            answer = await client.post("/v1/chat/completions", json=asks, headers=headers)
            assert answer.status_code == status, answer.text
            if status == 200:
                self.num_admitted += 1
                self.usd += float(answer.headers["x-cost-usd"])
                self.ids.append(answer.json()["id"])
                self.request_ids.append(answer.headers["x-request-id"])

    async def _stream(
        self,
        client: httpx.AsyncClient,
        asks: dict[str, Any],
        headers: dict[str, str],
        *,
        is_left: bool,
    ) -> None:
        path = "/v1/chat/completions"
        async with client.stream("POST", path, json=asks, headers=headers) as answer:
            self.num_admitted += 1
            async for line in answer.aiter_lines():
                if is_left and line.startswith("data: {"):
                    return
                if '"usage":{' in line:
                    cost = json.loads(line[6:])["usage"]["cost"]
                    self.usd += cost


@pytest.fixture(scope="module")
def run(model_server: ModelServer) -> Run:
    client = model_server.client()

    def is_priced() -> bool:
        answer = client.chat.completions.with_raw_response.create(
            model="smollm2-135m-instruct",
            max_tokens=1,
            messages=[{"role": "user", "content": "Hi"}],
        )
        return "x-cost-usd" in answer.headers

    wait_until(is_priced, "the share of idle time is known")
    done = Run()
    asyncio.run(done.go(model_server))
    return done


def report(server: ModelServer, *more: str) -> dict[str, Any]:
    told = server.command("cost", "report", "--json", *more)
    assert told.returncode == 0, told.stderr
    document: dict[str, Any] = json.loads(told.stdout)
    return document


def test_the_ledger_of_500_requests_adds_up(model_server: ModelServer, run: Run):
    wait_until(
        lambda: report(model_server)["total"]["num_requests"] >= run.num_admitted,
        "all of them are in the ledger",
    )
    told = model_server.command("cost", "audit", "--json")
    found = json.loads(told.stdout)
    assert told.returncode == 0, found
    assert [(c["name"], c["residual"]) for c in found["checks"]] == [
        (f"I{i}", "0") for i in range(1, 7)
    ]
    assert all(check["checked"] > 0 for check in found["checks"])
    assert run.usd > 0


def test_a_request_is_worked_out_again_by_either_of_its_ids(model_server: ModelServer, run: Run):
    found = []
    for name in (run.ids[-1], run.request_ids[-1]):
        told = model_server.command("cost", "explain", name, "--json")
        assert told.returncode == 0, told.stderr
        found.append(json.loads(told.stdout))
    one, other = found
    assert one["steps"] == other["steps"]
    assert one["is_equal"] is True
    assert one["recomputed"]["prefill_ns"] > 0
    assert sum(step["share_ns"] for step in one["steps"]) == (
        one["ledger"]["prefill_ns"] + one["ledger"]["decode_ns"]
    )


def test_the_run_stands_beside_two_gpus_and_two_tpus_with_sources(
    model_server: ModelServer, run: Run
):
    found = report(model_server, "--beside", CHIPS, "--by", "tag")
    assert {line["tag"] for line in found["lines"]} >= {"team-0", "team-1"}
    (ours,) = [one for one in found["beside"] if one["model"].startswith("smollm2")]
    assert [chip["sku"] for chip in ours["chips"]] == CHIPS.split(",")
    for chip in ours["chips"]:
        assert "http" in chip["price_source"]
        assert float(chip["break_even_tokens_per_s_chip"]) > 0
        assert all("http" in row["source"] for row in chip["baselines"])
        assert chip["percent"] is None, "no published row is of this model"
    shown = model_server.command("cost", "report", "--beside", CHIPS).stdout
    assert shown.count("not matched: nothing is claimed") == 4


def test_what_if_prices_the_same_chip_time_elsewhere(model_server: ModelServer, run: Run):
    half = report(model_server, "--what-if", "usd=0.048")["what_if"]
    assert abs(float(half["ratio"]) - 0.5) < 0.1
    assert half["assumptions"]


def test_admins_get_the_same_over_http_and_nobody_else(model_server: ModelServer, run: Run):
    admin = {"authorization": f"Bearer {model_server.key}"}
    with httpx.Client(base_url=f"{model_server.url}/admin/api", headers=admin) as client:
        told = client.get("/costs", params={"by": "model,tag", "what_if": "usd=0.048"}).json()
        assert told["total"]["num_requests"] >= run.num_admitted
        assert {line["tag"] for line in told["lines"]} >= {"team-0", "team-1"}
        assert float(told["what_if"]["loaded_usd"]) > 0
        rows = list(csv.DictReader(io.StringIO(client.get("/costs?format=csv&by=tag").text)))
        assert sum(int(row["loaded_ns"]) for row in rows) > 0
        focus = list(csv.DictReader(io.StringIO(client.get("/costs?format=focus").text)))
        assert {row["ChargeCategory"] for row in focus} == {"Usage"}
        assert sum(float(row["EffectiveCost"]) for row in focus) > 0
        for wrong in ("from=yesterday", "to=2026-13-01", "by=moon", "format=xml", "what_if=usd=-1"):
            answer = client.get(f"/costs?{wrong}")
            assert answer.status_code == 400
            assert answer.json()["error"]["param"] == wrong.partition("=")[0]
        made = client.post("/keys", json={"name": "app", "role": "member"}).json()
    for key, status in ((made["key"], 403), ("sk-none", 401)):
        headers = {"authorization": f"Bearer {key}"}
        answer = httpx.get(f"{model_server.url}/admin/api/costs", headers=headers)
        assert answer.status_code == status


def test_metrics_tell_chip_time_by_class_and_the_price_of_the_chips(
    model_server: ModelServer, run: Run
):
    assert wait_until(lambda: model_server.metric("tpugate_cost_usd_total") > 0, "it is told")
    assert model_server.metric("node_gpu_hourly_cost") == 0.096
    assert model_server.metric("node_gpu_count") == 1
    assert model_server.metric("tpugate_chip_seconds_total") > 0
