"""The ledger on the real device: what 500 mixed requests took (short and long, with prefixes in common, left early,
refused, with several choices, streamed, bound by grammars) adds up by all six invariants of the audit, is explained
request by request, and stands beside GPUs and TPUs with a source for each figure."""

import asyncio
import json
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import httpx
import pytest
from click.testing import CliRunner, Result

from cli.main import main
from tests.fakes.gateway import events
from tests.fakes.model_server import MODEL, ModelServer
from tests.fakes.wire import wait_until

NUM_REQUESTS = 500
AT_ONCE = 16
TAG = "mixed-run"
PRICE = "2.70"
SHARED = random.Random(0).choices(range(1000, 30000), k=96)
COLOUR = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "green"]}},
    "required": ["colour"],
    "additionalProperties": False,
}
Body = dict[str, Any]


def tokens(number: int, length: int) -> list[int]:
    return random.Random(number).choices(range(1000, 30000), k=length)


def chat(number: int, **fields: Any) -> Body:
    words = [{"role": "user", "content": f"Tell of day {number}."}]
    return {"model": MODEL, "messages": words, "max_tokens": 1 + number % 3, **fields}


def plain(prompt: list[int], **fields: Any) -> Body:
    return {"model": MODEL, "prompt": prompt, "max_tokens": 2, **fields}


class Load:
    """Counts what became of requests, by kind and status."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        self._client = client
        self.seen: Counter[tuple[str, int]] = Counter()
        self.answers: list[Body] = []

    async def _post(self, path: str, body: Body, **headers: str) -> int:
        answer = await self._client.post(path, json=body, headers=headers)
        if answer.status_code == 200:
            self.answers.append(answer.json())
        return answer.status_code

    async def short(self, i: int) -> int:
        return await self._post("/v1/chat/completions", chat(i))

    async def long(self, i: int) -> int:
        return await self._post("/v1/completions", plain(tokens(i, 150 + i % 80)))

    async def shared(self, i: int) -> int:
        return await self._post("/v1/completions", plain([*SHARED, *tokens(i, 8)]))

    async def choices(self, i: int) -> int:
        return await self._post("/v1/chat/completions", chat(i, n=3, temperature=1.0, seed=i))

    async def bound(self, i: int) -> int:
        form = {"type": "json_schema", "json_schema": {"name": "c", "schema": COLOUR}}
        body = chat(i, response_format=form, max_tokens=12)
        return await self._post("/v1/chat/completions", body)

    async def messages(self, i: int) -> int:
        return await self._post("/v1/messages", chat(i))

    async def refused(self, i: int) -> int:
        wrong = ({"max_tokens": 0}, {"model": "nobody"}, {"n": 0}, {"messages": []})
        return await self._post("/v1/chat/completions", {**chat(i), **wrong[i // 10 % 4]})

    async def streamed(self, i: int) -> int:
        body = chat(i, stream=True, stream_options={"include_usage": True})
        async with self._client.stream("POST", "/v1/chat/completions", json=body) as answer:
            text = (await answer.aread()).decode()
            assert events(text)[-1] == "[DONE]"
            return answer.status_code

    async def left(self, i: int) -> int:
        """Its client goes away after the first piece, or at once."""
        body = chat(i, stream=True, max_tokens=100, ignore_eos=True)
        async with self._client.stream("POST", "/v1/chat/completions", json=body) as answer:
            async for _ in _pieces(answer, 2 if i % 20 else 0):
                pass
            return answer.status_code

    async def run(self) -> None:
        kinds: list[Callable[[int], Coroutine[Any, Any, int]]] = [
            self.short, self.long, self.shared, self.streamed, self.left,
            self.refused, self.choices, self.bound, self.shared, self.messages,
        ]  # fmt: skip
        room = asyncio.Semaphore(AT_ONCE)

        async def one(i: int) -> None:
            kind = kinds[i % len(kinds)]
            async with room:
                self.seen[kind.__name__, await kind(i)] += 1

        await asyncio.gather(*(one(i) for i in range(NUM_REQUESTS)))


async def _pieces(answer: httpx.Response, most: int) -> AsyncIterator[str]:
    async for piece in answer.aiter_text():
        if most <= 0:
            return
        most -= 1
        yield piece


def command(server: ModelServer, *words: str) -> Result:
    return CliRunner().invoke(main, [*words, "--data-dir", str(server.data_dir)])


def report(server: ModelServer, *options: str) -> Body:
    result = command(server, "cost", "report", "--json", *options)
    assert result.exit_code == 0, result.output
    found: Body = json.loads(result.stdout)
    return found


def line_of_the_run(server: ModelServer) -> Body:
    lines = [line for line in report(server, "--by", "tag")["lines"] if line["tag"] == TAG]
    return lines[0] if lines else {"num_requests": 0}


@pytest.fixture(scope="module")
def run(model_server: ModelServer) -> Load:
    """The load, when the ledger has all of it."""
    for words in (
        ("prices", "import", "--builtin"),
        ("prices", "add", "cpu", PRICE, "--source", "the tests", "--from", "2020-01-01"),
    ):
        result = command(model_server, *words)
        assert result.exit_code == 0, result.output

    async def go() -> Load:
        headers = {"authorization": f"Bearer {model_server.key}", "x-tpugate-tag": TAG}
        limits = httpx.Limits(max_connections=AT_ONCE)
        async with httpx.AsyncClient(
            base_url=model_server.url, headers=headers, timeout=120, limits=limits
        ) as client:
            load = Load(client)
            await load.run()
            return load

    load = asyncio.run(go())
    wanted = sum(count for (kind, _), count in load.seen.items() if kind != "refused")
    wait_until(
        lambda: line_of_the_run(model_server)["num_requests"] >= wanted,
        "the ledger has every request",
        seconds=60,
    )
    assert line_of_the_run(model_server)["num_requests"] == wanted
    return load


def test_requests_end_as_they_should(run: Load) -> None:
    statuses: dict[str, set[int]] = {}
    for kind, status in run.seen:
        statuses.setdefault(kind, set()).add(status)
    assert statuses.pop("refused") == {400, 404}
    assert set(map(tuple, statuses.values())) == {(200,)}
    assert sum(run.seen.values()) == NUM_REQUESTS


def test_the_ledger_adds_up(run: Load, model_server: ModelServer) -> None:
    result = command(model_server, "cost", "audit", "--json")
    assert result.exit_code == 0, result.output
    checks = json.loads(result.stdout)["checks"]
    assert {check["name"]: check["residual"] for check in checks} == dict.fromkeys(
        ("I1", "I2", "I3", "I4", "I5", "I6"), "0"
    )
    assert all(check["checked"] > 0 for check in checks)


def test_the_ledger_has_what_was_delivered(run: Load, model_server: ModelServer) -> None:
    line = line_of_the_run(model_server)
    told = sum(
        usage.get("completion_tokens", usage.get("output_tokens", 0))
        for usage in (answer["usage"] for answer in run.answers)
    )
    assert line["delivered_tokens"] > told > 0
    assert line["cached_tokens"] > 0
    assert line["aborted_ns"] > 0
    assert line["active_usd"] is not None


def test_an_answer_is_explained(run: Load, model_server: ModelServer) -> None:
    result = command(model_server, "cost", "explain", "--json", run.answers[-1]["id"])
    assert result.exit_code == 0, result.output


def test_what_it_would_cost_elsewhere_comes_with_sources(
    run: Load, model_server: ModelServer
) -> None:
    chips = report(model_server, "--beside", "h100,h200,v5e,v6e")["beside"][0]["chips"]
    assert {chip["sku"] for chip in chips} == {"h100", "h200", "v5e", "v6e"}
    for chip in chips:
        sources = [chip["price_source"], *(row["source"] for row in chip["baselines"])]
        assert all("://" in source for source in sources), sources
