"""OpenAI's client in strict mode takes every answer of /v1/responses, streamed, stored and in the background."""

import json
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI, OpenAI

from tests.fakes.gateway import ADMIN_KEY, GatewayUnderTest, assert_error
from tests.fakes.wire import wait_until
from tests.integration.conftest import StartGateway
from workers.engine.scripted import FAIL, HANG

PARIS = {"x-model-script": json.dumps(["Par", "is", " 🗼"])}
ASK: Any = {"model": "m-small", "input": "What is it?"}
UNENDING = {"x-model-script": json.dumps(["so far ", HANG.decode()])}


@pytest.fixture
async def client(shared_gateway: GatewayUnderTest) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(
        base_url=shared_gateway.url + "/v1",
        api_key=ADMIN_KEY,
        max_retries=0,
        _strict_response_validation=True,
    ) as client:
        yield client


async def test_a_response(client: AsyncOpenAI):
    answer = await client.responses.create(
        **ASK, instructions="Be brief.", metadata={"a": "b"}, extra_headers=PARIS
    )
    assert answer.output_text == "Paris 🗼"
    assert (answer.status, answer.error, answer.incomplete_details) == ("completed", None, None)
    assert answer.usage is not None
    assert answer.usage.output_tokens == 3
    assert (answer.instructions, answer.metadata) == ("Be brief.", {"a": "b"})
    assert answer.id.startswith("resp_")


def test_a_response_without_asyncio(shared_gateway: GatewayUnderTest):
    with OpenAI(base_url=shared_gateway.url + "/v1", api_key=ADMIN_KEY) as client:
        assert client.responses.create(**ASK, extra_headers=PARIS).output_text == "Paris 🗼"


async def test_a_response_streamed(client: AsyncOpenAI):
    told: list[Any] = []
    async for event in await client.responses.create(**ASK, stream=True, extra_headers=PARIS):
        told.append(event)
    assert [event.sequence_number for event in told] == list(range(len(told)))
    kinds = [event.type for event in told]
    assert [kind for kind in kinds if kind != "response.output_text.delta"] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    deltas = [event.delta for event in told if event.type == "response.output_text.delta"]
    assert "".join(deltas) == "Paris 🗼"
    assert told[-1].response.output_text == "Paris 🗼"
    assert told[-1].response.usage.output_tokens == 3
    fetched = await client.responses.retrieve(told[0].response.id)
    assert fetched.output == told[-1].response.output


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_that_is_cut(client: AsyncOpenAI, stream: bool):
    ask: Any = {**ASK, "max_output_tokens": 2, "extra_headers": PARIS}
    if stream:
        last: Any = None
        async for event in await client.responses.create(**ask, stream=True):
            last = event
        assert last.type == "response.incomplete"
        answer = last.response
    else:
        answer = await client.responses.create(**ask)
    assert answer.status == "incomplete"
    assert answer.incomplete_details.reason == "max_output_tokens"
    assert answer.output[0].status == "incomplete"


async def test_items_of_all_kinds(client: AsyncOpenAI):
    answer = await client.responses.create(
        model="m-small",
        input=[
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": [{"type": "input_text", "text": "first"}]},
            {
                "type": "reasoning",
                "id": "rs_1",
                "summary": [{"type": "summary_text", "text": "hm"}],
            },
            {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c1", "output": "seen"},
            {"role": "assistant", "content": "I see."},
            {"type": "reasoning", "id": "rs_2", "summary": []},
            {"role": "user", "content": "go on"},
        ],
    )
    assert answer.output_text == "go on"
    items = await client.responses.input_items.list(answer.id, order="asc", limit=3)
    assert [item.type for item in items.data] == ["message", "message", "reasoning"]
    assert items.has_more
    rest = await client.responses.input_items.list(answer.id, order="asc", after=items.last_id)
    assert [item.type for item in rest.data][:2] == ["function_call", "function_call_output"]
    assert not rest.has_more


async def test_a_conversation_by_reference(client: AsyncOpenAI):
    first = await client.responses.create(**ASK, extra_headers=PARIS)
    second = await client.responses.create(
        model="m-small", input="And then?", previous_response_id=first.id
    )
    assert second.output_text == "And then?"
    items = await client.responses.input_items.list(second.id, order="asc")
    assert [item.role for item in items.data if item.type == "message"] == [
        "user",
        "assistant",
        "user",
    ]
    await client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(first.id)
    with pytest.raises(openai.BadRequestError, match="previous"):
        await client.responses.create(**ASK, previous_response_id=first.id)
    assert (await client.responses.retrieve(second.id)).output_text == "And then?"


async def test_what_is_not_stored_cannot_be_fetched(client: AsyncOpenAI):
    answer = await client.responses.create(**ASK, store=False)
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(answer.id)


async def test_another_key_sees_nothing(client: AsyncOpenAI, shared_gateway: GatewayUnderTest):
    answer = await client.responses.create(**ASK)
    made = shared_gateway.client.post("/admin/api/keys", json={"name": "other", "role": "member"})
    other = client.with_options(api_key=made.json()["key"])
    with pytest.raises(openai.NotFoundError):
        await other.responses.retrieve(answer.id)
    with pytest.raises(openai.NotFoundError):
        await other.responses.delete(answer.id)
    with pytest.raises(openai.NotFoundError):
        await other.responses.input_items.list(answer.id)
    with pytest.raises(openai.BadRequestError):
        await other.responses.create(**ASK, previous_response_id=answer.id)


def status_of(gateway: GatewayUnderTest, response_id: str) -> str:
    return str(gateway.client.get(f"/v1/responses/{response_id}").json()["status"])


async def test_in_the_background(client: AsyncOpenAI, shared_gateway: GatewayUnderTest):
    answer = await client.responses.create(**ASK, background=True, extra_headers=PARIS)
    assert answer.status == "in_progress"
    wait_until(lambda: status_of(shared_gateway, answer.id) == "completed", "the response is done")
    assert (await client.responses.retrieve(answer.id)).output_text == "Paris 🗼"
    # What has ended stays as it is.
    assert (await client.responses.cancel(answer.id)).status == "completed"
    failing = {"x-model-script": json.dumps([FAIL.decode()])}
    answer = await client.responses.create(**ASK, background=True, extra_headers=failing)
    wait_until(lambda: status_of(shared_gateway, answer.id) == "failed", "the response fails")


async def test_cancelled_in_the_background(client: AsyncOpenAI, shared_gateway: GatewayUnderTest):
    answer = await client.responses.create(**ASK, background=True, extra_headers=UNENDING)
    active = "tpugate_gateway_requests_active"
    wait_until(lambda: shared_gateway.metric(active) == 1, "it runs")
    assert (await client.responses.cancel(answer.id)).status == "cancelled"
    wait_until(lambda: shared_gateway.metric(active) == 0, "the work has stopped")
    assert (await client.responses.retrieve(answer.id)).status == "cancelled"
    with pytest.raises(openai.BadRequestError):
        await client.responses.cancel((await client.responses.create(**ASK)).id)


def test_a_background_response_of_a_dead_gateway(
    shared_gateway: GatewayUnderTest, start_gateway: StartGateway
):
    gateway = start_gateway(shared_gateway.redis_url, shared_gateway.data_dir)
    gateway.wait_for_ready()
    made = gateway.client.post(
        "/v1/responses", json={**ASK, "background": True}, headers=UNENDING
    ).json()
    assert status_of(shared_gateway, made["id"]) == "in_progress"
    gateway.kill()
    wait_until(lambda: status_of(shared_gateway, made["id"]) == "failed", "its end is noticed")
    assert shared_gateway.client.get(f"/v1/responses/{made['id']}").json()["error"]


def test_a_failure_in_a_stream(shared_gateway: GatewayUnderTest):
    script = {"x-model-script": json.dumps(["so far ", FAIL.decode()])}
    whole = shared_gateway.client.post("/v1/responses", json=ASK, headers=script)
    assert_error(whole, 500, code="engine_error")
    told = shared_gateway.client.post("/v1/responses", json={**ASK, "stream": True}, headers=script)
    data = [json.loads(line[6:]) for line in told.text.splitlines() if line.startswith("data: ")]
    assert [event["type"] for event in data][-2:] == ["error", "response.failed"]
    assert data[-1]["response"]["status"] == "failed"
    assert data[-1]["response"]["error"]["code"] == "server_error"
    assert [event["sequence_number"] for event in data] == list(range(len(data)))


def said(*items: object) -> dict[str, Any]:
    return {"input": list(items)}


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"input": None}, "input"),
    ({"input": []}, "input"),
    ({"input": 5}, "input"),
    (said({"type": "item_reference", "id": "msg_1"}), "input[0]"),
    (said({"id": "msg_1"}), "input[0]"),
    (said({"type": "web_search_call", "id": "w"}), "input[0]"),
    (said({"role": "user"}), "input[0].content"),
    (said({"role": "tool", "content": "x"}), "input[0].role"),
    (said({"role": "user", "content": [{"type": "input_image"}]}), "input[0].content[0].type"),
    (said({"role": "user", "content": [{"type": "input_text"}]}), "input[0].content[0].text"),
    (said({"type": "function_call_output", "output": "x"}), "input[0].call_id"),
    (said({"role": "user", "content": "x" * 200_000}), "input"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ({"tools": [{"type": "function"}]}, "tools[0].name"),
    ({"truncation": "auto"}, "truncation"),
    ({"temperature": 3}, "temperature"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"max_output_tokens": 100_000}, "max_output_tokens"),
    ({"conversation": "conv_1"}, "conversation"),
    ({"prompt": {"id": "p"}}, "prompt"),
    ({"include": ["message.output_text.logprobs"]}, "include"),
    ({"include": ["all"]}, "include[0]"),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"service_tier": "flex"}, "service_tier"),
    ({"background": True, "stream": True}, "background"),
    ({"background": True, "store": False}, "store"),
    ({"stream_options": {}}, "stream_options"),
    ({"previous_response_id": "resp_unknown"}, "previous_response_id"),
    ({"metadata": {"a": 1}}, "metadata.a"),
    ({"reasoning": {"effort": "most"}}, "reasoning.effort"),
    ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
]


@pytest.mark.parametrize(
    ("wrong", "param"), WRONG, ids=[f"{param}-{i}" for i, (_, param) in enumerate(WRONG)]
)
def test_a_refusal_names_the_field(
    shared_gateway: GatewayUnderTest, wrong: dict[str, Any], param: str
):
    answer = shared_gateway.client.post("/v1/responses", json={**ASK, **wrong})
    assert_error(answer, 400, param=param)


@pytest.mark.parametrize("query", ["limit=0", "limit=101", "limit=x", "order=up", "after=none"])
def test_a_wrong_page_of_items(shared_gateway: GatewayUnderTest, query: str):
    made = shared_gateway.client.post("/v1/responses", json=ASK).json()
    answer = shared_gateway.client.get(f"/v1/responses/{made['id']}/input_items?{query}")
    assert_error(answer, 400, param=query.split("=")[0])


def test_unknown_responses(shared_gateway: GatewayUnderTest):
    client = shared_gateway.client
    for path in ("resp_unknown", "resp_unknown/input_items"):
        assert_error(client.get(f"/v1/responses/{path}"), 404)
    assert_error(client.delete("/v1/responses/resp_unknown"), 404)
    assert_error(client.post("/v1/responses/resp_unknown/cancel"), 404)
    assert_error(client.get("/v1/responses/x?stream=true"), 400, param="stream")
