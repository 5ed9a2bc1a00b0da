"""The official client in strict mode takes every answer, and turns every refusal into its own exception."""

import json
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI

from tests.fakes.gateway import ADMIN_KEY, GatewayUnderTest, assert_error, events
from workers.engine.scripted import FAIL

ASK: Any = {"model": "m-small", "messages": [{"role": "user", "content": "What is it?"}]}
PARIS = {"x-model-script": json.dumps(["Par", "is", " 🗼"])}


@pytest.fixture
async def client(shared_gateway: GatewayUnderTest) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(
        base_url=shared_gateway.url + "/v1",
        api_key=ADMIN_KEY,
        max_retries=0,
        _strict_response_validation=True,
    ) as client:
        yield client


async def test_chat(client: AsyncOpenAI):
    answer = await client.chat.completions.create(**ASK, extra_headers=PARIS)
    assert answer.choices[0].message.content == "Paris 🗼"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 3
    assert answer.usage.completion_tokens_details is not None
    assert answer.system_fingerprint
    assert answer._request_id


async def test_chat_streamed(client: AsyncOpenAI):
    stream = await client.chat.completions.create(
        **ASK, n=2, stream=True, stream_options={"include_usage": True}, extra_headers=PARIS
    )
    texts = {0: "", 1: ""}
    usage = None
    async for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == {0: "Paris 🗼", 1: "Paris 🗼"}
    assert usage is not None
    assert usage.completion_tokens == 6


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("a b", ["a b"]),
        (["a b", "c d"], ["a b", "c d"]),
        ([65, 66], None),
        ([[65], [66]], None),
    ],
)
async def test_completions(client: AsyncOpenAI, prompt: Any, expected: list[str] | None):
    answer = await client.completions.create(model="m-small", prompt=prompt, n=2)
    num_prompts = len(prompt) if isinstance(prompt, list) and prompt != [65, 66] else 1
    assert [choice.index for choice in answer.choices] == list(range(2 * num_prompts))
    if expected is not None:
        assert [choice.text for choice in answer.choices[::2]] == expected
    # The client's type of a streamed completion knows no null finish_reason, which OpenAI sends itself.
    texts = {choice.index: "" for choice in answer.choices}
    async with AsyncOpenAI(base_url=client.base_url, api_key=ADMIN_KEY) as loose:
        ask: Any = {"model": "m-small", "prompt": prompt, "n": 2, "stream": True}
        async for chunk in await loose.completions.create(**ask):
            for piece in chunk.choices:
                texts[piece.index] += piece.text
    assert texts == {choice.index: choice.text for choice in answer.choices}


SPELLED = {"x-model-script": json.dumps([*"tide"])}
"""The scripted model's tokens are bytes: what it tells of these is their own text."""


async def test_log_probabilities_of_a_chat(client: AsyncOpenAI):
    ask: Any = {**ASK, "n": 2, "logprobs": True, "top_logprobs": 3, "extra_headers": SPELLED}
    answer = await client.chat.completions.create(**ask)
    told: dict[int, list[Any]] = {0: [], 1: []}
    async for chunk in await client.chat.completions.create(**ask, stream=True):
        for piece in chunk.choices:
            told[piece.index] += (piece.logprobs and piece.logprobs.content) or []
    for choice in answer.choices:
        assert choice.logprobs is not None
        assert choice.logprobs.content is not None
        assert choice.logprobs.refusal is None
        assert [token.token for token in choice.logprobs.content] == [*"tide"]
        assert (
            bytes(byte for token in choice.logprobs.content for byte in token.bytes or [])
            == b"tide"
        )
        for token in choice.logprobs.content:
            assert len(token.top_logprobs) == 3
            assert token.top_logprobs[0].logprob == token.logprob < 0
        assert told[choice.index] == choice.logprobs.content


async def test_log_probabilities_of_a_chat_alone(client: AsyncOpenAI):
    answer = await client.chat.completions.create(**ASK, logprobs=True, extra_headers=SPELLED)
    assert answer.choices[0].logprobs is not None
    assert [t.top_logprobs for t in answer.choices[0].logprobs.content or []] == [[]] * 4
    silent = await client.chat.completions.create(**ASK, logprobs=False, extra_headers=SPELLED)
    assert silent.choices[0].logprobs is None


async def test_log_probabilities_of_completions(client: AsyncOpenAI):
    ask: Any = {"model": "m-small", "prompt": ["a", "b"], "n": 2, "extra_headers": SPELLED}
    answer = await client.completions.create(**ask, logprobs=2)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    for choice in answer.choices:
        assert choice.logprobs is not None
        assert choice.logprobs.tokens == [*"tide"]
        assert choice.logprobs.text_offset == [0, 1, 2, 3]
        assert all(value < 0 for value in choice.logprobs.token_logprobs or [])
        assert [len(top) for top in choice.logprobs.top_logprobs or []] == [2] * 4


async def test_an_echo_with_log_probabilities(client: AsyncOpenAI):
    # The client's type of a list of log-probabilities knows no null, which OpenAI sends for a first token.
    ask: Any = {"model": "m-small", "prompt": "ab", "n": 2, "echo": True, "logprobs": 0}
    async with AsyncOpenAI(base_url=client.base_url, api_key=ADMIN_KEY) as loose:
        answer = await loose.completions.create(**ask, extra_headers=SPELLED)
        texts, tokens = {0: "", 1: ""}, {0: [], 1: []}
        async for chunk in await loose.completions.create(
            **ask, stream=True, extra_headers=SPELLED
        ):
            for piece in chunk.choices:
                texts[piece.index] += piece.text
                tokens[piece.index] += (piece.logprobs and piece.logprobs.tokens) or []
    for choice in answer.choices:
        assert choice.text == "abtide" == texts[choice.index]
        assert choice.logprobs is not None
        assert choice.logprobs.tokens == [*"abtide"] == tokens[choice.index]
        assert (choice.logprobs.token_logprobs or [0])[0] is None
        assert choice.logprobs.text_offset == [*range(6)]


async def test_an_echo_of_token_ids(client: AsyncOpenAI):
    answer = await client.completions.create(
        model="m-small", prompt=[65, 66], echo=True, extra_headers=SPELLED
    )
    assert answer.choices[0].text.endswith("tide")
    assert len(answer.choices[0].text) == 6


async def test_log_probabilities_of_a_prompt(client: AsyncOpenAI):
    asked = {"prompt_logprobs": 2}
    chat = await client.chat.completions.create(**ASK, extra_body=asked)
    prompt: Any = chat.model_extra and chat.model_extra["prompt_logprobs"]
    assert chat.usage is not None
    assert len(prompt) == chat.usage.prompt_tokens
    plain = await client.completions.create(model="m-small", prompt="ab", extra_body=asked)
    entries: Any = plain.choices[0].model_extra and plain.choices[0].model_extra["prompt_logprobs"]
    assert entries[0] is None
    assert [entry["decoded_token"] for entry in entries[1].values()][0] == "b"
    assert all(entry["logprob"] < 0 for entry in entries[1].values())


async def test_the_best_of_several(client: AsyncOpenAI):
    answer = await client.completions.create(
        model="m-small", prompt="a", n=2, best_of=3, extra_headers=SPELLED
    )
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 12


async def test_models(client: AsyncOpenAI):
    assert [model.id async for model in client.models.list()] == ["m-small"]
    assert (await client.models.retrieve("m-small")).owned_by == "tpugate"


async def test_refusals(client: AsyncOpenAI):
    create = client.chat.completions.create
    with pytest.raises(openai.NotFoundError) as unknown:
        await create(**{**ASK, "model": "nope"})
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as wrong:
        await create(**ASK, n=0)
    assert wrong.value.param == "n"
    with pytest.raises(openai.AuthenticationError) as stranger:
        await client.with_options(api_key="tpg-wrong-wrong-wrong").models.list()
    assert stranger.value.code == "invalid_api_key"


async def test_an_error_in_mid_stream(client: AsyncOpenAI, shared_gateway: GatewayUnderTest):
    script = {"x-model-script": json.dumps(["go ", FAIL.decode()])}
    stream = await client.chat.completions.create(**ASK, stream=True, extra_headers=script)
    with pytest.raises(openai.APIError, match="failure"):
        async for _ in stream:
            pass


def test_completions_over_the_context_and_the_vocabulary(shared_gateway: GatewayUnderTest):
    post = shared_gateway.client.post
    too_long = post("/v1/completions", json={"model": "m-small", "prompt": "x" * 9000})
    assert_error(too_long, 400, code="context_length_exceeded", param="prompt")
    unknown = post("/v1/completions", json={"model": "m-small", "prompt": [258]})
    assert_error(unknown, 400, param="prompt")
    empty = post("/v1/completions", json={"model": "m-small", "prompt": ""})
    assert_error(empty, 400, param="prompt")


def test_completions_stop_at_sixteen_tokens_by_default(shared_gateway: GatewayUnderTest):
    body = {"model": "m-small", "prompt": "a " * 100}
    answer = shared_gateway.client.post("/v1/completions", json=body).json()
    assert answer["usage"]["completion_tokens"] == 16
    assert answer["choices"][0]["finish_reason"] == "length"


def test_streamed_completions_have_no_roles(shared_gateway: GatewayUnderTest):
    body = {"model": "m-small", "prompt": "a b", "stream": True}
    chunks = events(shared_gateway.client.post("/v1/completions", json=body).text)
    assert chunks[-1] == "[DONE]"
    assert {chunk["object"] for chunk in chunks[:-1]} == {"text_completion"}
    assert [chunk["choices"][0]["text"] for chunk in chunks[:-1]] == ["a ", "b", ""]


@pytest.mark.parametrize("header", ["x-model-script", "x-model-script-hex"])
def test_a_script_that_is_none(shared_gateway: GatewayUnderTest, header: str):
    response = shared_gateway.client.post("/v1/chat/completions", json=ASK, headers={header: "[1,"})
    assert_error(response, 400, param=header)


def test_the_api_describes_itself(shared_gateway: GatewayUnderTest):
    document = shared_gateway.client.get("/schema/openapi.json").json()
    assert {"/v1/chat/completions", "/v1/completions", "/v1/models"} <= set(document["paths"])
    body = document["paths"]["/v1/chat/completions"]["post"]["requestBody"]["content"]
    assert "messages" in body["application/json"]["schema"]["properties"]


def test_unknown_paths_and_methods(shared_gateway: GatewayUnderTest):
    assert_error(shared_gateway.client.get("/v1/nothing"), 404, type="invalid_request_error")
    wrong = shared_gateway.client.get("/v1/chat/completions")
    assert_error(wrong, 405, type="invalid_request_error")
    assert "POST" in wrong.headers["allow"]
