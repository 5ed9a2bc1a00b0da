"""OpenAI's client in strict response validation, sync and async: every answer has the published shape.

Runs under the client's current major and under the one before.
"""

import json

import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel
from server import BASE_URL, KEY, MODEL, call_script, script

ASK = {"model": MODEL, "messages": [{"role": "user", "content": "What is it?"}]}
PARIS = script("Par", "is", " \N{TOKYO TOWER}")
TEXT = "Paris \N{TOKYO TOWER}"
TIDE = {
    "type": "function",
    "function": {
        "name": "lookup_tide",
        "parameters": {
            "type": "object",
            "properties": {"harbour": {"type": "string"}},
            "required": ["harbour"],
            "additionalProperties": False,
        },
    },
}


@pytest.fixture
def client():
    with OpenAI(
        base_url=BASE_URL, api_key=KEY, max_retries=0, _strict_response_validation=True
    ) as client:
        yield client


@pytest.fixture
async def async_client():
    async with AsyncOpenAI(
        base_url=BASE_URL, api_key=KEY, max_retries=0, _strict_response_validation=True
    ) as client:
        yield client


def test_chat(client):
    answer = client.chat.completions.create(**ASK, extra_headers=PARIS)
    assert answer.choices[0].message.content == TEXT
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.completion_tokens == 3
    assert answer._request_id


def test_chat_streamed(client):
    options = {"include_usage": True}
    chunks = list(
        client.chat.completions.create(
            **ASK, n=2, stream=True, stream_options=options, extra_headers=PARIS
        )
    )
    for index in (0, 1):
        pieces = [c for chunk in chunks for c in chunk.choices if c.index == index]
        assert "".join(piece.delta.content or "" for piece in pieces) == TEXT
        assert pieces[0].delta.role == "assistant"
        assert pieces[-1].finish_reason == "stop"
    assert chunks[-1].usage.completion_tokens == 6


def test_the_accumulating_stream(client):
    with client.chat.completions.stream(**ASK, extra_headers=PARIS) as stream:
        types = [event.type for event in stream]
        assert "content.delta" in types
        assert stream.get_final_completion().choices[0].message.content == TEXT


async def test_chat_async(async_client):
    create = async_client.chat.completions.create
    answer = await create(**ASK, logprobs=True, top_logprobs=2, extra_headers=script(*"tide"))
    assert [token.token for token in answer.choices[0].logprobs.content] == [*"tide"]
    stream = await create(**ASK, stream=True, extra_headers=PARIS)
    assert "".join([c.choices[0].delta.content or "" async for c in stream]) == TEXT


async def test_a_stream_that_is_left_early(async_client):
    stream = await async_client.chat.completions.create(
        **ASK, stream=True, extra_headers=script(*["a "] * 50)
    )
    async for _ in stream:
        break
    await stream.close()
    answer = await async_client.chat.completions.create(**ASK, extra_headers=PARIS)
    assert answer.choices[0].message.content == TEXT


@pytest.mark.parametrize("prompt", ["a b", ["a", "b"], [65, 66], [[65], [66, 67]]])
def test_completions(client, prompt):
    answer = client.completions.create(model=MODEL, prompt=prompt, extra_headers=PARIS)
    expected = len(prompt) if isinstance(prompt, list) and prompt != [65, 66] else 1
    assert [choice.text for choice in answer.choices] == [TEXT] * expected


def test_models(client):
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).object == "model"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("nope")


@pytest.mark.parametrize(
    "choice", ["auto", "required", {"type": "function", "function": {"name": "lookup_tide"}}]
)
def test_tools(client, choice):
    ask = {
        **ASK,
        "tools": [TIDE],
        "tool_choice": choice,
        "extra_headers": call_script("lookup_tide", {"harbour": "Port Ness"}),
    }
    whole = client.chat.completions.create(**ask).choices[0]
    call = whole.message.tool_calls[0]
    assert call.id
    assert call.function.name == "lookup_tide"
    assert json.loads(call.function.arguments) == {"harbour": "Port Ness"}
    assert whole.finish_reason in ("tool_calls", "stop")
    if choice in ("auto", "required"):
        assert whole.finish_reason == "tool_calls"
    with client.chat.completions.stream(**ask) as stream:
        for _ in stream:
            pass
        streamed = stream.get_final_completion().choices[0]
    assert streamed.message.tool_calls[0].function.arguments == call.function.arguments
    assert streamed.finish_reason == whole.finish_reason


def test_a_conversation_with_a_tool(client):
    call = {"name": "lookup_tide", "arguments": '{"harbour": "Port Ness"}'}
    messages = [
        {"role": "developer", "content": "Answer in one word."},
        *ASK["messages"],
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "call_1", "type": "function", "function": call}],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": "3.1 m"},
    ]
    answer = client.chat.completions.create(
        model=MODEL, messages=messages, tools=[TIDE], extra_headers=PARIS
    )
    assert answer.choices[0].message.content == TEXT
    assert not answer.choices[0].message.tool_calls


class Tide(BaseModel):
    harbour: str
    metres: float


def test_structured_output(client):
    answer = client.chat.completions.parse(
        **ASK,
        response_format=Tide,
        extra_headers=script('{"harbour": "Port ', 'Ness", "metres": 3.1}'),
    )
    assert answer.choices[0].message.parsed == Tide(harbour="Port Ness", metres=3.1)


def test_json_mode(client):
    answer = client.chat.completions.create(
        **ASK, response_format={"type": "json_object"}, extra_headers=script('{"a"', ": 1}")
    )
    assert json.loads(answer.choices[0].message.content) == {"a": 1}


def test_responses(client):
    answer = client.responses.create(model=MODEL, input="What is it?", extra_headers=PARIS)
    assert answer.output_text == TEXT
    assert answer.usage.output_tokens == 3
    events = client.responses.create(
        model=MODEL, input="What is it?", stream=True, extra_headers=PARIS
    )
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == TEXT


@pytest.mark.parametrize(
    ("change", "error", "param"),
    [
        ({"n": 0}, openai.BadRequestError, "n"),
        ({"messages": []}, openai.BadRequestError, "messages"),
        ({"model": "nope"}, openai.NotFoundError, "model"),
        ({"max_tokens": 10**6}, openai.BadRequestError, "max_tokens"),
    ],
)
def test_refusals(client, change, error, param):
    with pytest.raises(error) as refused:
        client.chat.completions.create(**{**ASK, **change})
    assert refused.value.param == param
    assert refused.value.request_id


def test_a_wrong_key(client):
    with pytest.raises(openai.AuthenticationError) as stranger:
        client.with_options(api_key="tpg-wrong-wrong-wrong").models.list()
    assert stranger.value.code == "invalid_api_key"


def test_an_error_in_mid_stream(client):
    stream = client.chat.completions.create(
        **ASK, stream=True, extra_headers=script("go ", "\x00FAIL")
    )
    with pytest.raises(openai.APIError, match="failure"):
        list(stream)
