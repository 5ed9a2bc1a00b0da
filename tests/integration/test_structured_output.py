"""Structured output over HTTP with a real model: whatever asks for it, an answer that ends by itself matches;
and a hostile grammar is a 400 that names its field, soon, while the answers beside it go on."""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from typing import Any

import httpx
import jsonschema
import openai
import pytest

from tests.fakes.model_server import MODEL, ModelServer

FIELDS: Any = {"model": MODEL, "temperature": 0, "max_tokens": 80}
ASK: Any = {**FIELDS, "messages": [{"role": "user", "content": "Tell me of a town."}]}
TOWN: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 10},
        "size": {"enum": ["small", "large"]},
        "near": {"anyOf": [{"$ref": "#/$defs/place"}, {"type": "null"}]},
    },
    "required": ["name", "size", "near"],
    "additionalProperties": False,
    "$defs": {
        "place": {
            "type": "object",
            "properties": {
                "km": {"type": "integer", "minimum": 1, "maximum": 99},
                "then": {"anyOf": [{"$ref": "#/$defs/place"}, {"type": "null"}]},
            },
            "required": ["km", "then"],
            "additionalProperties": False,
        }
    },
}
AS_SCHEMA: Any = {
    "type": "json_schema",
    "json_schema": {"name": "town", "schema": TOWN, "strict": True},
}
MOST_S = 20.0
"""For the refusal of one grammar, whatever else the machine does; a check ends after two seconds of work."""


@pytest.fixture(autouse=True)
def compiles_nothing(model_server: ModelServer):
    yield
    assert model_server.metric("tpugate_compiles_after_warmup") == 0


@pytest.fixture
async def client(model_server: ModelServer) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(
        base_url=f"{model_server.url}/v1",
        api_key=model_server.key,
        max_retries=0,
        _strict_response_validation=True,
    ) as client:
        yield client


async def chat(client: openai.AsyncOpenAI, **fields: Any) -> Any:
    return await client.chat.completions.create(**ASK | fields)


async def text_of(client: openai.AsyncOpenAI, **extra: Any) -> str:
    answer = await chat(client, extra_body=extra)
    assert answer.choices[0].finish_reason == "stop"
    return answer.choices[0].message.content


def check_town(text: str, finish_reason: str) -> None:
    if finish_reason == "stop":
        jsonschema.validate(json.loads(text), TOWN)
    else:
        assert finish_reason == "length"
        assert text.startswith("{")


async def test_schemas_bind_every_choice_beside_free_answers(client: openai.AsyncOpenAI):
    free: Any = {"messages": [{"role": "user", "content": "What is the capital of France?"}]}
    alone = await chat(client, **free)
    bound, drawn, whole, beside = await asyncio.gather(
        chat(client, response_format=AS_SCHEMA),
        chat(client, response_format=AS_SCHEMA, n=3, temperature=1.0, seed=3, top_p=0.9),
        chat(client, response_format={"type": "json_object"}, frequency_penalty=0.5),
        chat(client, **free),
    )
    assert beside.choices[0].message.content == alone.choices[0].message.content
    for choice in (*bound.choices, *drawn.choices):
        check_town(choice.message.content, choice.finish_reason)
    assert len({choice.message.content for choice in drawn.choices}) > 1
    if whole.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(whole.choices[0].message.content), dict)


async def test_streams_are_bound_and_report_each_token(client: openai.AsyncOpenAI):
    whole = await chat(client, response_format=AS_SCHEMA)
    text, tokens = "", []
    stream = await chat(
        client, response_format=AS_SCHEMA, stream=True, logprobs=True, top_logprobs=2
    )
    async for chunk in stream:
        choice = chunk.choices[0]
        text += choice.delta.content or ""
        tokens += choice.logprobs.content if choice.logprobs else []
    assert text == whole.choices[0].message.content
    assert len(tokens) == whole.usage.completion_tokens
    assert "".join(token.token for token in tokens) == text
    check_town(text, choice.finish_reason)


async def test_vllms_fields(client: openai.AsyncOpenAI):
    regex, chosen, written, nested = await asyncio.gather(
        text_of(client, guided_regex="[A-Z][a-z]{2,8}, [0-9]{3} km"),
        text_of(client, guided_choice=["a port", "a fort", "中"]),
        text_of(client, guided_grammar='start: "<" WORD ">" WORD\nWORD: /[a-z]{1,6}/'),
        text_of(client, structured_outputs={"json": {"type": "array", "items": {"enum": [1, 2, 3]},
                                                     "maxItems": 3}}),
    )  # fmt: skip
    assert re.fullmatch("[A-Z][a-z]{2,8}, [0-9]{3} km", regex)
    assert chosen in ("a port", "a fort", "中")
    assert re.fullmatch("<[a-z]{1,6}>[a-z]{1,6}", written)
    assert len(json.loads(nested)) <= 3
    plain = await client.completions.create(
        **FIELDS, prompt="Yes or no?", extra_body={"guided_choice": ["yes", "no"]}
    )
    assert plain.choices[0].text in ("yes", "no")


async def test_what_else_ends_a_bound_answer(client: openai.AsyncOpenAI):
    cut, stopped, longer, forced = await asyncio.gather(
        chat(client, response_format=AS_SCHEMA, max_tokens=4),
        chat(client, response_format=AS_SCHEMA, stop=['"size"']),
        chat(client, extra_body={"guided_regex": "abc?", "min_tokens": 20, "ignore_eos": True}),
        # What the grammar needs is drawn, however small a bias makes it.
        chat(client, extra_body={"guided_regex": "[0-9]"}, logit_bias={str(32 + i): -100 for i in range(10)}),
    )  # fmt: skip
    assert (cut.choices[0].finish_reason, cut.usage.completion_tokens) == ("length", 4)
    assert stopped.choices[0].finish_reason == "stop"
    assert '"size"' not in stopped.choices[0].message.content
    assert longer.choices[0].message.content == "abc"
    assert longer.choices[0].finish_reason == "stop"
    assert forced.choices[0].message.content.isdigit()


def as_schema(schema: object) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": schema, "strict": True}}}  # fmt: skip


SCHEMA = "response_format.json_schema.schema"
HOSTILE: list[tuple[str, dict[str, Any], str]] = [
    ("recursion without a base", as_schema({"$ref": "#/$defs/a", "$defs": {"a": {
        "type": "object", "properties": {"a": {"$ref": "#/$defs/a"}}, "required": ["a"]}}}), SCHEMA),
    ("a reference to itself", as_schema({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}), SCHEMA),
    ("a schema of a megabyte", as_schema({"enum": [f"value {i}" for i in range(80_000)]}), SCHEMA),
    ("a type that is none", as_schema({"type": "banana"}), SCHEMA),
    ("an unknown reference", as_schema({"$ref": "#/$defs/nothing"}), SCHEMA),
    ("a remote reference", as_schema({"$ref": "https://example.com/schema.json"}), SCHEMA),
    ("nothing fits", as_schema({"type": "object", "properties": {"a": False}, "required": ["a"]}), SCHEMA),
    ("an empty range", as_schema({"type": "integer", "minimum": 5, "maximum": 3}), SCHEMA),
    ("what strict cannot keep", as_schema({"type": "array", "uniqueItems": True}), SCHEMA),
    ("deep", {"guided_json": "[" * 5000 + "]" * 5000}, "guided_json"),
    ("deep arrays", {"guided_json": '{"items":' * 3000 + "{}" + "}" * 3000}, "guided_json"),
    ("references in a long chain", {"guided_json": {"$ref": "#/$defs/d0", "$defs": {
        f"d{i}": {"type": "array", "items": {"$ref": f"#/$defs/d{i + 1}"}} for i in range(2000)
    } | {"d2000": {"type": "string"}}}}, "guided_json"),
    ("many optional parts", {"guided_json": {"allOf": [
        {"anyOf": [{"type": "object", "properties": {f"p{j}{i}": {"const": i}}} for i in range(20)]}
        for j in range(8)]}}, "guided_json"),
    ("too much in the middle of the answer", {
        "guided_regex": "((a{1,1000}){1,1000}){1,1000}", "max_tokens": 80}, "guided_regex"),
    ("many parentheses", {"guided_regex": "(" * 20_000 + "a" + ")" * 20_000}, "guided_regex"),
    ("looking ahead", {"guided_regex": "(?=a)b"}, "guided_regex"),
    ("no expression", {"guided_regex": "["}, "guided_regex"),
    ("too many choices", {"guided_choice": ["a"] * 3000}, "guided_choice"),
    ("no grammar", {"guided_grammar": "start: (\n"}, "guided_grammar"),
    ("a missing rule", {"guided_grammar": "start: nothing"}, "guided_grammar"),
    ("rules without end", {"guided_grammar": "start: start"}, "guided_grammar"),
    ("two at once", {"guided_regex": "a", "guided_json": {}}, "guided_regex"),
]  # fmt: skip
HARMLESS: list[dict[str, Any]] = [
    {"guided_regex": r"(a+)+(b|b)*c{1,3}"},
    {"guided_regex": r"[\p{Greek}\p{Han}]{2,4}"},
    {"guided_regex": r"(?i)straße"},
    {"guided_json": {"enum": [f"value {i}" for i in range(1000)]}},
]
"""They look bad, and are not."""


async def test_hostile_grammars_are_refused_and_harm_nobody(
    client: openai.AsyncOpenAI, model_server: ModelServer
):
    victim = asyncio.create_task(
        chat(client, max_tokens=150, response_format=AS_SCHEMA, extra_body={"ignore_eos": True})
    )
    free = asyncio.create_task(chat(client, max_tokens=150, extra_body={"ignore_eos": True}))
    refused = {}
    for name, fields, _ in HOSTILE:
        async with httpx.AsyncClient(timeout=MOST_S) as raw:
            response = await raw.post(
                f"{model_server.url}/v1/chat/completions",
                json={**ASK, "max_tokens": 4, **fields},
                headers={"authorization": f"Bearer {model_server.key}"},
            )
        refused[name] = (response.status_code, response.json().get("error", {}).get("param"))
    assert refused == {name: (400, param) for name, _, param in HOSTILE}
    answers = await asyncio.gather(*(chat(client, extra_body=extra) for extra in HARMLESS))
    assert all(answer.choices[0].finish_reason in ("stop", "length") for answer in answers)
    check_town((await victim).choices[0].message.content, (await victim).choices[0].finish_reason)
    assert (await free).choices[0].finish_reason == "length"


async def test_a_body_of_ten_megabytes_is_refused_for_its_size(
    client: openai.AsyncOpenAI, model_server: ModelServer
):
    with pytest.raises(openai.APIStatusError) as caught:
        await chat(client, extra_body={"guided_json": {"enum": ["x" * 10_000_000]}})
    assert caught.value.status_code in (400, 413)
    assert (await text_of(client, guided_choice=["still here"])) == "still here"
