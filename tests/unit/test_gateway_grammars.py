"""An answer is bound to a checked grammar, or the field that asks for it is refused; it is never ignored."""

import asyncio
import json
from typing import Any

import msgspec
import pytest

from gateway.directory import ServedModel
from gateway.domain.openai.grammars import asked_grammar
from gateway.domain.openai.schemas import ChatCompletionRequest
from gateway.domain.openai.validation import parse
from gateway.errors import BadRequestError
from models.tokenizer import TextTokenizer
from workers.engine.scripted import scripted_card
from workers.protocol import Grammar

CARD = scripted_card("m-small")
TOKENIZER = TextTokenizer(CARD.tokenizer_json)
NUMBER = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}


def asked(takes_grammars: bool, fields: dict[str, Any]) -> Grammar | None:
    card = msgspec.structs.replace(CARD, takes_grammars=takes_grammars)
    body = {"model": "m-small", "messages": [{"role": "user", "content": "x"}], **fields}
    request = parse(ChatCompletionRequest, json.dumps(body).encode())
    return asyncio.run(asked_grammar(ServedModel(card, TOKENIZER, None), request))


FIELDS = [
    ({"response_format": {"type": "json_object"}}, "response_format"),
    (
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "a", "schema": NUMBER},
            }
        },
        "response_format.json_schema.schema",
    ),
    ({"guided_json": NUMBER}, "guided_json"),
    ({"guided_regex": "[a-z]+"}, "guided_regex"),
    ({"guided_choice": ["yes", "no"]}, "guided_choice"),
    ({"guided_grammar": 'start: "a"'}, "guided_grammar"),
    ({"structured_outputs": {"regex": "a*"}}, "structured_outputs.regex"),
]


@pytest.mark.parametrize(("fields", "param"), FIELDS)
def test_a_model_that_cannot_be_bound_refuses_the_field(fields: dict[str, Any], param: str):
    with pytest.raises(BadRequestError) as caught:
        asked(False, fields)
    assert (caught.value.param, caught.value.code) == (param, "unsupported_parameter")


@pytest.mark.parametrize(("fields", "param"), FIELDS)
def test_a_model_that_can_gets_the_grammar(fields: dict[str, Any], param: str):
    grammar = asked(True, fields)
    assert grammar is not None
    assert grammar.param == param
    assert grammar.text


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"guided_regex": "("}, "guided_regex"),
        ({"guided_grammar": "nothing"}, "guided_grammar"),
        ({"guided_json": {"type": "no type"}}, "guided_json"),
        ({"guided_json": {"$ref": "https://example.com/schema"}}, "guided_json"),
        ({"guided_json": {"$ref": "#/$defs/missing"}}, "guided_json"),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice"),
    ],
)
def test_what_is_no_grammar_is_refused_by_name(fields: dict[str, Any], param: str):
    with pytest.raises(BadRequestError) as caught:
        asked(True, fields)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"guided_regex": "(a"}, "unclosed group."),
        ({"guided_regex": r"\bfoo"}, "lookarounds not supported yet"),
        ({"guided_regex": "(?<=a)b"}, "look-around, including"),
        (
            {"guided_json": {"$ref": "https://example.com/a"}},
            "'https://example.com/a' is elsewhere",
        ),
    ],
)
def test_the_reason_is_told_without_what_the_client_has_not_written(
    fields: dict[str, Any], reason: str
):
    with pytest.raises(BadRequestError) as caught:
        asked(True, fields)
    assert caught.value.message.startswith(f"Invalid '{caught.value.param}': {reason}")
    assert "start:" not in caught.value.message


def test_no_grammar_is_asked_for_by_default():
    assert asked(False, {}) is None
    assert asked(False, {"response_format": {"type": "text"}}) is None
