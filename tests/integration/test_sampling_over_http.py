"""Sampling parameters over HTTP with a real model: each does what it says, log-probabilities agree with
each other, bad ones are refused and harm nobody in the same batch, and none of them compiles anything."""

import asyncio
import math
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest

from tests.fakes.model_server import CONTEXT_LEN, MODEL, ModelServer

PARIS: Any = [{"role": "user", "content": "What is the capital of France?"}]
FRANCE = "The capital of France is Paris."
GREEDY: Any = {"model": MODEL, "messages": PARIS, "temperature": 0}
FULL_STOP = 30
PARIS_TOKEN = 7042
"""`" Paris"` in this model's vocabulary."""


@pytest.fixture(autouse=True)
def compiles_nothing(model_server: ModelServer):
    yield
    assert model_server.metric("tpugate_compiles_after_warmup") == 0


@pytest.fixture
async def client(model_server: ModelServer) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(
        base_url=f"{model_server.url}/v1", api_key=model_server.key, max_retries=0
    ) as client:
        yield client


async def chat(client: openai.AsyncOpenAI, **fields: Any) -> Any:
    extensions = {"extra_body": fields.pop("extra", {})}
    return await client.chat.completions.create(**GREEDY | fields, **extensions)


async def streamed(client: openai.AsyncOpenAI, begun: asyncio.Event, **fields: Any) -> str:
    """The text of a stream; `begun` is set when its first token is there."""
    text = ""
    async for chunk in await chat(client, stream=True, **fields):
        text += chunk.choices[0].delta.content or ""
        if text:
            begun.set()
    assert chunk.choices[0].finish_reason == "length"
    return text


def counting(word: str, **fields: Any) -> dict[str, Any]:
    extra = {"ignore_eos": True, **fields.pop("extra", {})}
    content = f"Count from one to fifty in {word}."
    messages = [{"role": "user", "content": content}]
    return {"messages": messages, "max_tokens": 80, "extra": extra, **fields}


BEGINNING = 24
"""Characters of an answer that no near-tie is known to change."""
VICTIMS = [
    counting("words"),
    counting("digits", extra={"repetition_penalty": 1.05}),
    counting("figures", logit_bias={str(FULL_STOP): -5}),
    counting("English", logprobs=True, top_logprobs=2),
]
BAD: list[tuple[dict[str, Any], str]] = [
    ({"seed": 2**63}, "seed"),
    ({"seed": "7"}, "seed"),
    ({"logit_bias": {"7": 1000}}, "logit_bias"),
    ({"logit_bias": {"49152": 1}}, "logit_bias"),
    ({"logit_bias": {"one": 1}}, "logit_bias"),
    ({"n": 0}, "n"),
    ({"n": 9}, "n"),
    ({"n": 129}, "n"),
    ({"frequency_penalty": 2.5}, "frequency_penalty"),
    ({"presence_penalty": -2.5}, "presence_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"temperature": 3}, "temperature"),
    ({"top_p": -1}, "top_p"),
    ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
    ({"stop_token_ids": [49152]}, "stop_token_ids"),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"max_tokens": CONTEXT_LEN}, "max_tokens"),
    ({"messages": [{"role": "user", "content": "tide " * 400}]}, "messages"),
]


async def refusal(client: openai.AsyncOpenAI, fields: dict[str, Any]) -> str | None:
    """The field that is named."""
    with pytest.raises(openai.BadRequestError) as caught:
        await client.chat.completions.create(**GREEDY, extra_body=fields)
    return caught.value.param


async def test_bad_requests_leave_the_others_of_the_batch_alone(client: openai.AsyncOpenAI):
    alone = [await streamed(client, asyncio.Event(), **fields) for fields in VICTIMS]
    begun = [asyncio.Event() for _ in VICTIMS]
    async with asyncio.TaskGroup() as group:
        together = [
            group.create_task(streamed(client, event, **fields))
            for event, fields in zip(begun, VICTIMS, strict=True)
        ]
        for event in begun:
            await event.wait()
        refusals = await asyncio.gather(*(refusal(client, fields) for fields, _ in BAD))
        assert not any(task.done() for task in together), "the answers were too short for this test"
    assert refusals == [param for _, param in BAD]
    # All of their tokens came, as `streamed` saw. The server computes in bfloat16, where a near-tie may fall otherwise
    # in another batch; that the same tokens come is tested in float32 (tests/device).
    beginnings = [text[:BEGINNING] for text in alone]
    assert [task.result()[:BEGINNING] for task in together] == beginnings


async def test_the_same_seed_gives_the_same_text_in_any_company(client: openai.AsyncOpenAI):
    poem: Any = [{"role": "user", "content": "Write a poem about the sea."}]
    fields: Any = {"messages": poem, "temperature": 1.0, "max_tokens": 12, "n": 2}

    async def ask(seed: int) -> list[str]:
        answer = await chat(client, seed=seed, **fields)
        return [choice.message.content for choice in answer.choices]

    first, second = await ask(5)
    crowd = await asyncio.gather(ask(5), ask(6), ask(7))
    assert crowd[0] == [first, second]
    assert len({first, second, *crowd[1], *crowd[2]}) == 6


@pytest.mark.parametrize("name", ["frequency_penalty", "presence_penalty"])
async def test_penalties(client: openai.AsyncOpenAI, name: str):
    messages = [{"role": "user", "content": "Say: one one one one one one one one one one"}]
    fields: Any = {"messages": messages, "max_tokens": 40, "extra": {"ignore_eos": True}}
    plain, penalised = await asyncio.gather(
        chat(client, **fields), chat(client, **{name: 2.0}, **fields)
    )
    texts = [answer.choices[0].message.content.split() for answer in (plain, penalised)]
    assert len(set(texts[1])) / len(texts[1]) > len(set(texts[0])) / len(texts[0])


async def test_biases_rule_out_and_force(client: openai.AsyncOpenAI):
    forced = await chat(client, logit_bias={str(PARIS_TOKEN): 100}, max_tokens=3)
    assert forced.choices[0].message.content == " Paris Paris Paris"
    banned = await chat(client, logit_bias={str(PARIS_TOKEN): -100})
    assert " Paris" not in banned.choices[0].message.content


async def test_how_an_answer_ends(client: openai.AsyncOpenAI):
    ended = await chat(client, extra={"stop_token_ids": [PARIS_TOKEN]})
    assert ended.choices[0].message.content == "The capital of France is"
    assert ended.choices[0].finish_reason == "stop"
    longer = await chat(client, extra={"min_tokens": 30}, max_tokens=40)
    assert longer.usage.completion_tokens >= 30
    assert longer.choices[0].message.content.startswith(FRANCE)
    endless = await chat(client, extra={"ignore_eos": True}, max_tokens=40)
    assert endless.usage.completion_tokens == 40


async def test_log_probabilities_of_a_chat(client: openai.AsyncOpenAI):
    fields: Any = {"logprobs": True, "top_logprobs": 20}
    whole, plain = await asyncio.gather(chat(client, **fields), chat(client))
    choice = whole.choices[0]
    assert choice.message.content == plain.choices[0].message.content == FRANCE
    tokens = choice.logprobs.content
    assert len(tokens) == whole.usage.completion_tokens
    shown = b"".join(bytes(token.bytes) for token in tokens[:-1])
    assert (shown.decode(), tokens[-1].token) == (FRANCE, "<|im_end|>")
    for token in tokens:
        values = [top.logprob for top in token.top_logprobs]
        assert (token.token, token.logprob) == (token.top_logprobs[0].token, values[0])
        assert values == sorted(values, reverse=True)
        assert len(values) == 20
        assert 0 < sum(map(math.exp, values)) <= 1.001

    told: list[Any] = []
    async for chunk in await chat(client, stream=True, **fields):
        told += chunk.choices[0].logprobs.content if chunk.choices[0].logprobs else []
    assert [token.token for token in told] == [token.token for token in tokens]


async def test_they_are_those_of_the_model_whatever_is_done_to_its_logits(
    client: openai.AsyncOpenAI,
):
    fields: Any = {"logprobs": True, "top_logprobs": 1, "max_tokens": 1}
    plain, changed = await asyncio.gather(
        chat(client, **fields),
        chat(client, logit_bias={str(PARIS_TOKEN): 100}, presence_penalty=2, **fields),
    )
    usual = plain.choices[0].logprobs.content[0]
    forced = changed.choices[0].logprobs.content[0]
    assert forced.token == " Paris"
    assert forced.logprob < usual.logprob - 1
    assert forced.top_logprobs[0].token == usual.token
    assert forced.top_logprobs[0].logprob == pytest.approx(usual.logprob, abs=0.05)


async def test_a_text_is_scored_as_it_was_generated(client: openai.AsyncOpenAI):
    create = client.completions.create
    written = await create(
        model=MODEL, prompt="The capital of France is", temperature=0, max_tokens=12, logprobs=3
    )
    text, generated = written.choices[0].text, written.choices[0].logprobs
    prompt = "The capital of France is" + text
    scored = await create(
        model=MODEL, prompt=prompt, max_tokens=0, echo=True, logprobs=3,
        extra_body={"prompt_logprobs": 5},
    )  # fmt: skip
    choice = scored.choices[0]
    assert choice.text == prompt
    assert scored.usage.completion_tokens == 0
    logprobs = choice.logprobs
    assert "".join(logprobs.tokens) == prompt
    assert logprobs.token_logprobs[0] is None
    assert logprobs.tokens[5:] == generated.tokens
    assert logprobs.token_logprobs[5:] == pytest.approx(generated.token_logprobs, abs=0.1)
    for offset, token in zip(logprobs.text_offset, logprobs.tokens, strict=True):
        assert prompt[offset : offset + len(token)] == token
    by_id = choice.prompt_logprobs
    assert by_id[0] is None
    assert [next(iter(entry.values()))["decoded_token"] for entry in by_id[1:]] == logprobs.tokens[
        1:
    ]
    assert all(5 <= len(entry) <= 6 for entry in by_id[1:])

    told: list[str] = []
    stream = await create(
        model=MODEL, prompt=prompt, max_tokens=0, echo=True, logprobs=3, stream=True
    )
    async for chunk in stream:
        told += chunk.choices[0].logprobs.tokens if chunk.choices[0].logprobs else []
    assert told == logprobs.tokens


async def test_a_long_prompt_is_scored_whole(client: openai.AsyncOpenAI):
    """Also where another request has left a part of it in the cache."""
    prompt = "The tide comes and goes. " * 30
    ask: Any = {"model": MODEL, "prompt": prompt, "temperature": 0, "max_tokens": 2}
    await client.completions.create(**ask)
    first, second = [
        await client.completions.create(**ask, echo=True, logprobs=0) for _ in range(2)
    ]
    values = first.choices[0].logprobs.token_logprobs
    assert len(values) == first.usage.total_tokens
    assert all(-50 < value < 0 for value in values[1:])
    # What repeats is expected.
    assert sum(values[120:140]) > sum(values[1:21])
    assert second.choices[0].logprobs.token_logprobs[1:] == pytest.approx(values[1:], abs=0.1)
