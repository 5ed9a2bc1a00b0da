"""A body is taken as OpenAI's document says, and what the engine cannot do is named, never ignored."""

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gateway.domain.openai.schemas import ChatCompletionRequest, CompletionRequest
from gateway.domain.openai.validation import parse
from gateway.errors import BadRequestError

TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}


def chat(**fields: Any) -> ChatCompletionRequest:
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}], **fields}
    return parse(ChatCompletionRequest, json.dumps(body).encode())


def plain(**fields: Any) -> CompletionRequest:
    return parse(CompletionRequest, json.dumps({"model": "m", "prompt": "x", **fields}).encode())


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("functions", [{"name": "f"}]),
        ("audio", {"voice": "alloy", "format": "wav"}),
        ("modalities", ["text", "audio"]),
        ("web_search_options", {}),
        ("service_tier", "flex"),
        ("store", True),
        ("chat_template", "{{ messages }}"),
        ("prediction", {"type": "content", "content": "x"}),
        ("length_penalty", 1.5),
        ("include_stop_str_in_output", True),
        ("echo", True),
        ("best_of", 2),
        ("use_beam_search", True),
        ("bad_words", ["x"]),
        ("allowed_token_ids", [1]),
        ("logits_processors", ["x"]),
        ("truncate_prompt_tokens", 5),
    ],
)
def test_what_the_engine_cannot_do_is_named(name: str, value: Any):
    with pytest.raises(BadRequestError) as caught:
        chat(**{name: value})
    assert (caught.value.param, caught.value.code) == (name, "unsupported_parameter")


@pytest.mark.parametrize(("name", "value"), [("suffix", "x"), ("bad_words", ["x"])])
def test_what_plain_completions_cannot_do_is_named(name: str, value: Any):
    with pytest.raises(BadRequestError) as caught:
        plain(**{name: value})
    assert (caught.value.param, caught.value.code) == (name, "unsupported_parameter")


def test_null_is_not_given():
    fields = set(ChatCompletionRequest.model_fields) - {"model", "messages"}
    assert chat(**dict.fromkeys(fields)) == chat()


def test_values_that_ask_for_nothing_are_taken():
    chat(
        logprobs=False,
        top_logprobs=0,
        tools=[],
        tool_choice="auto",
        response_format={"type": "text"},
        frequency_penalty=0,
        presence_penalty=0.0,
        repetition_penalty=1,
        logit_bias={"5": 0, "6": 0.0},
        length_penalty=1,
        include_stop_str_in_output=False,
        echo=False,
        use_beam_search=False,
        bad_words=[],
        user="u",
        metadata={"a": "b"},
        modalities=["text"],
        service_tier="auto",
        store=False,
        parallel_tool_calls=False,
        a_field_of_next_year={"x": 1},
    )
    chat(tools=[TOOL], tool_choice="none")
    plain(echo=False, best_of=1)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", 2.1),
        ("temperature", "1"),
        ("top_p", 1.1),
        ("n", True),
        ("n", 1.5),
        ("top_logprobs", 21),
        ("presence_penalty", 2.01),
        ("logit_bias", [1]),
        ("stop", []),
        ("stop", ["a"] * 5),
        ("stop", ""),
        ("stop", 5),
        ("stream", "yes"),
        ("stream_options", []),
        ("min_p", 2),
        ("top_k", -2),
        ("seed", 2**63),
        ("max_completion_tokens", 0),
        ("chat_template_kwargs", []),
        ("tools", 0),
        ("tools", {}),
        ("store", {}),
        ("response_format", "json"),
        ("guided_json", []),
        ("guided_regex", ""),
        ("guided_choice", []),
        ("structured_outputs", []),
        ("user", 5),
        ("metadata", 1.5),
        ("functions", 0),
        ("documents", ""),
        ("audio", 0),
        ("bad_words", 0),
        ("echo", 0),
        ("use_beam_search", 0),
        ("parallel_tool_calls", "no"),
    ],
)
def test_out_of_range_or_of_another_type(name: str, value: Any):
    with pytest.raises(BadRequestError) as caught:
        chat(**{name: value})
    assert (caught.value.param or "").split("[")[0].split(".")[0] == name
    assert len(caught.value.message) < 600


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"content": "x"}, "messages[0].role"),
        ({"role": "wizard", "content": "x"}, "messages[0].role"),
        ({"role": "user"}, "messages[0].content"),
        ({"role": "assistant", "content": None}, "messages[0].content"),
        ({"role": "tool", "content": "x"}, "messages[0].tool_call_id"),
        (
            {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f"}}]},
            "messages[0].tool_calls[0].function.arguments",
        ),
        ("x", "messages[0]"),
    ],
)
def test_messages_that_are_none(message: Any, param: str):
    with pytest.raises(BadRequestError) as caught:
        chat(messages=[message])
    assert caught.value.param == param


def test_an_assistant_turn_with_tool_calls_needs_no_content():
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    chat(messages=[{"role": "assistant", "tool_calls": [call]}])


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("a", ["a"]),
        ("", [""]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [[1, 2]]),
        ([[1, 2], [3]], [[1, 2], [3]]),
    ],
)
def test_shapes_of_a_prompt(prompt: Any, expected: Any):
    assert plain(prompt=prompt).prompts() == expected


@pytest.mark.parametrize("prompt", [[], 5, [1, "a"], [[]], [-1], [1.5], {"a": 1}, ["a"] * 129])
def test_what_is_no_prompt(prompt: Any):
    with pytest.raises(BadRequestError) as caught:
        plain(prompt=prompt)
    assert caught.value.param == "prompt"


FIELDS = sorted(ChatCompletionRequest.model_fields)
JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=9,
)


# How fast values are drawn says nothing on a busy machine.
@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.dictionaries(st.sampled_from(FIELDS), JSON_VALUES, max_size=4))
def test_no_body_is_answered_with_anything_but_a_400(fields: dict[str, Any]):
    for kind in (ChatCompletionRequest, CompletionRequest):
        body = {"model": "m", "messages": [{"role": "user", "content": "x"}], "prompt": "x"}
        try:
            parse(kind, json.dumps({**body, **fields}).encode())
        except BadRequestError as error:
            assert len(error.message) < 600
