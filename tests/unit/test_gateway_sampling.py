"""Every sampling parameter of a body reaches the engine as it was given, or a 400 names its field."""

import json
from typing import Any

import pytest

from gateway.directory import ServedModel
from gateway.domain.openai.sampling import sampling_params
from gateway.domain.openai.schemas import (
    ChatCompletionRequest,
    CompletionRequest,
    GenerationBody,
)
from gateway.domain.openai.validation import parse
from gateway.errors import BadRequestError, ContextLengthError
from models.tokenizer import TextTokenizer
from workers.engine.scripted import scripted_card
from workers.protocol import SamplingParams

CARD = scripted_card("m", context_len=100)
SERVED = ServedModel(CARD, TextTokenizer(CARD.tokenizer_json), None)
CHAT, PLAIN = ChatCompletionRequest, CompletionRequest
LAST_ID = CARD.vocab_size - 1


def params(kind: type[GenerationBody], *, prompt_len: int = 10, **fields: Any) -> SamplingParams:
    """The way of a request, from its bytes on; a string `raw` is JSON as it is."""
    raw = fields.pop("raw", "")
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}], "prompt": "x", **fields}
    text = json.dumps(body)[:-1] + (f", {raw}}}" if raw else "}")
    where = "messages" if kind is CHAT else "prompt"
    return sampling_params(SERVED, parse(kind, text.encode()), prompt_len, where)


@pytest.mark.parametrize("kind", [CHAT, PLAIN])
def test_defaults_change_nothing(kind: type[GenerationBody]):
    assert params(kind, max_tokens=5) == SamplingParams(max_tokens=5)


@pytest.mark.parametrize("kind", [CHAT, PLAIN])
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", 0.5),
        ("temperature", 2),
        ("top_p", 0),
        ("top_p", 0.9),
        ("top_k", 5),
        ("min_p", 0.1),
        ("frequency_penalty", -2),
        ("frequency_penalty", 2.0),
        ("presence_penalty", 1.5),
        ("repetition_penalty", 1.3),
        ("repetition_penalty", 0.01),
        ("seed", -(2**63)),
        ("seed", 2**63 - 1),
        ("min_tokens", 4),
        ("ignore_eos", True),
        ("skip_special_tokens", False),
        ("prompt_logprobs", 0),
        ("prompt_logprobs", 20),
    ],
)
def test_a_parameter_is_handed_on(kind: type[GenerationBody], name: str, value: Any):
    assert params(kind, max_tokens=5, **{name: value}) == SamplingParams(
        max_tokens=5, **{name: value}
    )


@pytest.mark.parametrize(
    ("kind", "fields", "expected"),
    [
        (CHAT, {"top_k": -1}, {"top_k": 0}),
        (
            CHAT,
            {"seed": 7.0, "top_k": 5.0, "min_tokens": 2.0},
            {"seed": 7, "top_k": 5, "min_tokens": 2},
        ),
        (PLAIN, {"logprobs": 2.0, "best_of": 1.0, "n": 1.0}, {"logprobs": 2}),
        (CHAT, {"top_k": 2**62}, {"top_k": CARD.vocab_size}),
        (CHAT, {"temperature": 1e-40}, {"temperature": 0.0}),
        (
            CHAT,
            {"logit_bias": {"7": -100, "0": 0, str(LAST_ID): 0.5}},
            {"logit_bias": ((7, -100.0), (LAST_ID, 0.5))},
        ),
        (PLAIN, {"stop_token_ids": [3, 1, 3]}, {"stop_token_ids": (3, 1)}),
        (CHAT, {"logprobs": True}, {"logprobs": 0}),
        (CHAT, {"logprobs": True, "top_logprobs": 20}, {"logprobs": 20}),
        (CHAT, {"logprobs": False, "top_logprobs": 0}, {"logprobs": None}),
        (PLAIN, {"logprobs": 0}, {"logprobs": 0}),
        (PLAIN, {"logprobs": 20}, {"logprobs": 20}),
        (PLAIN, {"echo": True}, {}),
        (PLAIN, {"echo": True, "logprobs": 2}, {"logprobs": 2, "prompt_logprobs": 2}),
        (
            PLAIN,
            {"echo": True, "logprobs": 2, "prompt_logprobs": 5},
            {"logprobs": 2, "prompt_logprobs": 5},
        ),
        (PLAIN, {"best_of": 3}, {"logprobs": 0}),
        (PLAIN, {"best_of": 3, "n": 3}, {"logprobs": None}),
    ],
)
def test_what_a_parameter_becomes(
    kind: type[GenerationBody], fields: dict[str, Any], expected: dict[str, Any]
):
    assert params(kind, max_tokens=5, **fields) == SamplingParams(max_tokens=5, **expected)


def test_how_long_an_answer_may_be():
    assert params(CHAT).max_tokens == 90
    assert params(PLAIN).max_tokens == 16
    assert params(PLAIN, prompt_len=95).max_tokens == 5
    assert params(PLAIN, max_tokens=0, echo=True).max_tokens == 1


NUMBERS = [
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "seed",
    "n",
    "best_of",
    "min_tokens",
    "max_tokens",
    "prompt_logprobs",
    "priority",
]
HUGE = "9" * 400
NO_NUMBERS = ["NaN", "Infinity", "-Infinity", "1e999", '"1"', "true", "[]", "{}", HUGE, "-" + HUGE]


@pytest.mark.parametrize("value", NO_NUMBERS)
@pytest.mark.parametrize(
    ("kind", "name"),
    [
        *((kind, name) for kind in (CHAT, PLAIN) for name in NUMBERS),
        (CHAT, "top_logprobs"),
        (CHAT, "max_completion_tokens"),
    ],
)
def test_what_is_no_number_of_the_range(kind: type[GenerationBody], name: str, value: str):
    with pytest.raises(BadRequestError) as caught:
        params(kind, raw=f'"logprobs": {"true" if kind is CHAT else 1}, "{name}": {value}')
    assert caught.value.param == name


BAD: list[tuple[type[GenerationBody], dict[str, Any], str]] = [
    (CHAT, {"frequency_penalty": 2.01}, "frequency_penalty"),
    (CHAT, {"presence_penalty": -2.01}, "presence_penalty"),
    (CHAT, {"repetition_penalty": 0}, "repetition_penalty"),
    (CHAT, {"repetition_penalty": -1}, "repetition_penalty"),
    (CHAT, {"repetition_penalty": 1e30}, "repetition_penalty"),
    (CHAT, {"logit_bias": {"7": 100.5}}, "logit_bias"),
    (CHAT, {"logit_bias": {"7": -101}}, "logit_bias"),
    (CHAT, {"logit_bias": {"7": True}}, "logit_bias"),
    (CHAT, {"logit_bias": {"7": "1"}}, "logit_bias"),
    (CHAT, {"logit_bias": {"7": None}}, "logit_bias"),
    (CHAT, {"logit_bias": {"7": float("nan")}}, "logit_bias"),
    (CHAT, {"logit_bias": {str(LAST_ID + 1): 1}}, "logit_bias"),
    (CHAT, {"logit_bias": {"9" * 5000: 1}}, "logit_bias"),
    *((CHAT, {"logit_bias": {key: 1}}, "logit_bias") for key in ("", "a", "-1", "+1", " 1", "01")),
    *((CHAT, {"logit_bias": {key: 0}}, "logit_bias") for key in ("1.0", "1_0", "٣", "²", "1e1")),
    (CHAT, {"logit_bias": [[7, 1]]}, "logit_bias"),
    (CHAT, {"logit_bias": "7"}, "logit_bias"),
    (CHAT, {"logit_bias": {str(i): 1 for i in range(301)}}, "logit_bias"),
    (CHAT, {"min_tokens": -1}, "min_tokens"),
    (CHAT, {"min_tokens": 6, "max_tokens": 5}, "min_tokens"),
    (PLAIN, {"min_tokens": 17}, "min_tokens"),
    (CHAT, {"stop_token_ids": [LAST_ID + 1]}, "stop_token_ids"),
    (CHAT, {"stop_token_ids": [1] * 129}, "stop_token_ids"),
    (CHAT, {"stop_token_ids": 5}, "stop_token_ids"),
    (CHAT, {"stop_token_ids": [1, -1]}, "stop_token_ids[1]"),
    (CHAT, {"stop_token_ids": [True]}, "stop_token_ids[0]"),
    (CHAT, {"min_p": -0.1}, "min_p"),
    (CHAT, {"top_k": -2}, "top_k"),
    (CHAT, {"seed": 2**63}, "seed"),
    (CHAT, {"seed": -(2**63) - 1}, "seed"),
    (CHAT, {"seed": 1.5}, "seed"),
    (CHAT, {"seed": 1e300}, "seed"),
    (CHAT, {"n": 0}, "n"),
    (CHAT, {"n": 129}, "n"),
    (CHAT, {"best_of": 2}, "best_of"),
    (CHAT, {"echo": True}, "echo"),
    (CHAT, {"max_tokens": 0}, "max_tokens"),
    (CHAT, {"ignore_eos": 1}, "ignore_eos"),
    (CHAT, {"skip_special_tokens": "no"}, "skip_special_tokens"),
    (CHAT, {"logprobs": 5}, "logprobs"),
    (CHAT, {"logprobs": "true"}, "logprobs"),
    (CHAT, {"top_logprobs": 5}, "top_logprobs"),
    (CHAT, {"top_logprobs": 1, "logprobs": False}, "top_logprobs"),
    (CHAT, {"top_logprobs": 21, "logprobs": True}, "top_logprobs"),
    (CHAT, {"top_logprobs": -1, "logprobs": True}, "top_logprobs"),
    (CHAT, {"prompt_logprobs": 21}, "prompt_logprobs"),
    (CHAT, {"prompt_logprobs": -1}, "prompt_logprobs"),
    (CHAT, {"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    (PLAIN, {"logprobs": True}, "logprobs"),
    (PLAIN, {"logprobs": 21}, "logprobs"),
    (PLAIN, {"logprobs": -1}, "logprobs"),
    (PLAIN, {"echo": 1}, "echo"),
    (PLAIN, {"max_tokens": 0}, "max_tokens"),
    (PLAIN, {"max_tokens": -1, "echo": True}, "max_tokens"),
    (PLAIN, {"n": 3, "best_of": 2}, "best_of"),
    (PLAIN, {"best_of": 21}, "best_of"),
    (PLAIN, {"best_of": 2, "stream": True}, "best_of"),
]


@pytest.mark.parametrize(("kind", "fields", "param"), BAD)
def test_a_bad_value_is_named(kind: type[GenerationBody], fields: dict[str, Any], param: str):
    with pytest.raises(BadRequestError) as caught:
        params(kind, **fields)
    assert caught.value.param == param
    assert 10 < len(caught.value.message) < 600


def test_a_bias_that_is_wrong_is_told_by_its_key():
    with pytest.raises(BadRequestError, match="'logit_bias.7'"):
        params(CHAT, logit_bias={"6": 1, "7": 101})
    with pytest.raises(BadRequestError, match=f'"0" to "{LAST_ID}"'):
        params(CHAT, logit_bias={str(LAST_ID + 1): 1})


@pytest.mark.parametrize(
    ("kind", "fields", "param"),
    [
        (CHAT, {"max_tokens": 91}, "max_tokens"),
        (CHAT, {"max_completion_tokens": 2**63 - 1}, "max_completion_tokens"),
        (PLAIN, {"max_tokens": 91}, "max_tokens"),
        (PLAIN, {"prompt_len": 100}, "prompt"),
        (PLAIN, {"prompt_len": 100, "echo": True, "max_tokens": 0}, "prompt"),
        (CHAT, {"prompt_len": 100}, "messages"),
    ],
)
def test_more_than_the_context(kind: type[GenerationBody], fields: dict[str, Any], param: str):
    with pytest.raises(ContextLengthError) as caught:
        params(kind, **fields)
    assert caught.value.param == param
    assert caught.value.code == "context_length_exceeded"
