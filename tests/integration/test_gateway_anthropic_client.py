"""Anthropic's client takes every answer of /v1/messages, and turns every refusal into its own exception."""

import json
from collections.abc import AsyncIterator
from typing import Any

import anthropic
import pytest
from anthropic import AsyncAnthropic

from tests.fakes.gateway import ADMIN_KEY, GatewayUnderTest
from workers.engine.scripted import FAIL

ASK: Any = {
    "model": "m-small",
    "max_tokens": 50,
    "messages": [{"role": "user", "content": "What is it?"}],
}
PARIS = {"x-model-script": json.dumps(["Par", "is", " 🗼"])}


@pytest.fixture
async def client(shared_gateway: GatewayUnderTest) -> AsyncIterator[AsyncAnthropic]:
    async with AsyncAnthropic(
        base_url=shared_gateway.url,
        api_key=ADMIN_KEY,
        max_retries=0,
        _strict_response_validation=True,
    ) as client:
        yield client


async def test_a_message(client: AsyncAnthropic):
    answer = await client.messages.create(**ASK, extra_headers=PARIS)
    assert [block.model_dump(exclude_none=True) for block in answer.content] == [
        {"type": "text", "text": "Paris 🗼"}
    ]
    assert (answer.role, answer.stop_reason, answer.stop_sequence) == (
        "assistant",
        "end_turn",
        None,
    )
    assert answer.usage.output_tokens == 3
    assert answer.usage.input_tokens > 3
    assert answer.usage.cache_read_input_tokens == 0


async def test_a_message_streamed(client: AsyncAnthropic):
    kinds: list[str] = []
    async with client.messages.stream(**ASK, extra_headers=PARIS) as stream:
        async for event in stream:
            kinds.append(event.type)
        answer = await stream.get_final_message()
    assert [kind for kind in kinds if kind not in ("content_block_delta", "text")] == [
        "message_start",
        "content_block_start",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    assert answer.content[0].type == "text"
    assert answer.content[0].text == "Paris 🗼"
    assert answer.stop_reason == "end_turn"
    assert answer.usage.output_tokens == 3


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(
    ("extra", "reason", "sequence"),
    [
        ({"max_tokens": 2}, "max_tokens", None),
        ({"stop_sequences": ["is"]}, "stop_sequence", "is"),
        ({"max_tokens": 100_000}, "end_turn", None),
        ({"max_tokens": 8190}, "end_turn", None),
    ],
)
async def test_why_it_stopped(
    client: AsyncAnthropic, extra: Any, reason: str, sequence: str | None, streamed: bool
):
    ask = {**ASK, **extra}
    if streamed:
        async with client.messages.stream(**ask, extra_headers=PARIS) as stream:
            answer = await stream.get_final_message()
    else:
        answer = await client.messages.create(**ask, timeout=60, extra_headers=PARIS)
    assert (answer.stop_reason, answer.stop_sequence) == (reason, sequence)


async def test_what_a_turn_is_made_of(client: AsyncAnthropic):
    """Everything a coding agent sends reaches the model's template; the scripted engine repeats the user's text."""
    answer = await client.messages.create(
        model="m-small",
        max_tokens=20,
        system=[{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
        metadata={"user_id": "someone"},
        messages=[
            {"role": "user", "content": [{"type": "text", "text": "first"}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": ""},
                    {"type": "text", "text": "I look."},
                    {"type": "tool_use", "id": "t1", "name": "look", "input": {"at": "it"}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "t1", "content": "seen"},
                    {"type": "text", "text": "go on"},
                ],
            },
        ],
    )
    assert answer.content[0].type == "text"
    assert answer.content[0].text == "go on"


async def test_counted_tokens(client: AsyncAnthropic):
    ask = {name: value for name, value in ASK.items() if name != "max_tokens"}
    counted = await client.messages.count_tokens(**ask, system="Be brief.")
    answer = await client.messages.create(**ASK, system="Be brief.")
    assert counted.input_tokens == answer.usage.input_tokens


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": None}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": "5"}, "max_tokens"),
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
        "messages[0].content[0]",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
        "messages[0].content[0].text",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "tool_result", "content": "x"}]}]},
        "messages[0].content[0].tool_use_id",
    ),
    ({"temperature": 1.5}, "temperature"),
    ({"top_k": -2}, "top_k"),
    ({"stop_sequences": [""]}, "stop_sequences[0]"),
    ({"stop_sequences": ["a", "b", "c", "d", "e"]}, "stop_sequences"),
    ({"system": [{"type": "image"}]}, "system[0]"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0]"),
    ({"tools": [{"name": "look"}]}, "tools[0].input_schema"),
    ({"tool_choice": {"type": "tool"}}, "tool_choice.name"),
    ({"mcp_servers": [{"url": "https://example.org"}]}, "mcp_servers"),
    ({"messages": [{"role": "user", "content": "x" * 200_000}]}, "messages[0].content"),
]


@pytest.mark.parametrize(
    ("wrong", "place"), WRONG, ids=[f"{p}-{i}" for i, (_, p) in enumerate(WRONG)]
)
async def test_a_refusal_names_the_field(client: AsyncAnthropic, wrong: dict[str, Any], place: str):
    with pytest.raises(anthropic.BadRequestError) as refused:
        await client.post("/v1/messages", body={**ASK, **wrong}, cast_to=object)
    body: Any = refused.value.body
    assert set(body) == {"type", "error", "request_id"}
    assert body["type"] == "error"
    assert body["error"]["type"] == "invalid_request_error"
    assert place in body["error"]["message"] or place == "messages[0].content"
    assert body["request_id"] == refused.value.response.headers["x-request-id"]


async def test_other_refusals(client: AsyncAnthropic, shared_gateway: GatewayUnderTest):
    with pytest.raises(anthropic.NotFoundError):
        await client.messages.create(**{**ASK, "model": "unknown"})
    with pytest.raises(anthropic.AuthenticationError):
        await client.with_options(api_key="tpg-wrong").messages.create(**ASK)
    bearer = AsyncAnthropic(base_url=shared_gateway.url, auth_token=ADMIN_KEY, api_key=None)
    async with bearer:
        assert (await bearer.messages.create(**ASK)).stop_reason == "end_turn"
    unknown = shared_gateway.client.post("/v1/messages/batches", json={})
    assert (unknown.status_code, unknown.json()["type"]) == (404, "error")


async def test_a_failure_in_the_middle(client: AsyncAnthropic):
    script = {"x-model-script": json.dumps(["so far ", FAIL.decode()])}
    with pytest.raises(anthropic.APIStatusError):
        await client.messages.create(**ASK, extra_headers=script)
    with pytest.raises(anthropic.APIStatusError):
        async with client.messages.stream(**ASK, extra_headers=script) as stream:
            await stream.get_final_message()
