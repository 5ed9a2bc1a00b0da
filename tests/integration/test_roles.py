"""Any order of roles is answered or refused by name: two models, of which one has a template that takes little."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import redis
from anthropic import Anthropic
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from openai import AsyncOpenAI, BadRequestError, OpenAI

from tests.fakes.gateway import ADMIN_KEY, GatewayUnderTest, assert_error, events, joined
from tests.fakes.processes import WorkerUnderTest
from tests.fakes.valkey import OwnValkey
from tests.fakes.wire import wait_until
from workers.protocol import ModelCard, card_key, decode, encode

STRICT_TEMPLATE = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('No system role.') }}{% endif %}"
    "{% for message in messages %}"
    "{% if (message.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Roles must alternate.') }}{% endif %}"
    "{{ '[' + message.role + ']' + message.content }}"
    "{% if 'REFUSE' in message.content %}{{ raise_exception('I will not say that.') }}{% endif %}"
    "{% if 'ENDLESS' in message.content %}"
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}{% endif %}"
    "{% if 'HUGE' in message.content %}{{ 'x' * 10 ** 10 }}{% endif %}"
    "{% if 'SURROGATE' in message.content %}{{ '\\ud800' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '[assistant]' + (tone or '') }}{% endif %}"
)
USER = {"role": "user", "content": "U1"}
CALL = {"id": "c1", "type": "function", "function": {"name": "tide", "arguments": '{"at": "N"}'}}
AGENT: list[dict[str, Any]] = [
    {"role": "developer", "content": "S1"},
    {"role": "user", "content": [{"type": "text", "text": "U1"}, {"type": "text", "text": "U2"}]},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "R1"}]},
    {"role": "assistant", "content": [{"type": "refusal", "refusal": "A1"}], "refusal": None},
    {"role": "assistant", "refusal": "A2"},
    {"role": "system", "content": "S2"},
    {"role": "user", "content": "U3", "name": "ann"},
]


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayUnderTest]:
    """Of the scripted models `m-small` and `m-strict`."""
    folder: Path = tmp_path_factory.mktemp("roles")
    with (
        OwnValkey() as valkey,
        WorkerUnderTest(valkey.url, "small", folder / "small.log"),
        WorkerUnderTest(valkey.url, "strict", folder / "strict.log", model="m-strict"),
        redis.Redis.from_url(valkey.url) as store,
    ):
        key = card_key("m-strict")
        payload = wait_until(lambda: store.get(key), "the model has a card")
        card = decode(ModelCard, payload)
        store.set(key, encode(msgspec.structs.replace(card, chat_template=STRICT_TEMPLATE)))
        with GatewayUnderTest(valkey.url, folder / "data") as gateway:
            gateway.wait_for_ready()
            wait_until(lambda: gateway.chat(model="m-strict").status_code == 200, "both are ready")
            yield gateway


def prompt(gateway: GatewayUnderTest, messages: list[Any], **fields: Any) -> str:
    body = {"model": "m-small", "messages": messages, **fields}
    tokens = gateway.client.post("/tokenize", json=body)
    assert tokens.status_code == 200, tokens.text
    text = {"model": body["model"], "tokens": tokens.json()["tokens"]}
    return str(gateway.client.post("/detokenize", json=text).json()["prompt"])


def test_all_that_an_agent_sends(gateway: GatewayUnderTest):
    assert prompt(gateway, AGENT) == (
        "<|im_start|>system\nS1<|im_end|>\n<|im_start|>user\nU1\nU2<|im_end|>\n"
        '<|im_start|>assistant\n<tool_call>\n{"name": "tide", "arguments": {"at": "N"}}\n</tool_call>'
        "<|im_end|>\n<|im_start|>user\n<tool_response>\nR1\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\nA1<|im_end|>\n<|im_start|>assistant\nA2<|im_end|>\n"
        "<|im_start|>system\nS2<|im_end|>\n<|im_start|>user\nU3<|im_end|>\n<|im_start|>assistant\n"
    )
    assert prompt(gateway, AGENT, model="m-strict") == (
        "[user]S1\n\nS2\n\nU1\nU2"
        '[assistant]<tool_call>\n{"name": "tide", "arguments": {"at": "N"}}\n</tool_call>'
        "[user]<tool_response>\nR1\n</tool_response>[assistant]A1\n\nA2[user]U3[assistant]"
    )


@pytest.mark.parametrize("model", ["m-small", "m-strict"])
async def test_the_client_sends_them(gateway: GatewayUnderTest, model: str):
    async with AsyncOpenAI(
        base_url=gateway.url + "/v1", api_key=ADMIN_KEY, _strict_response_validation=True
    ) as client:
        answer = await client.chat.completions.create(model=model, messages=AGENT)  # type: ignore[arg-type]
        assert answer.choices[0].message.content == "U3"
        stream = await client.chat.completions.create(model=model, messages=AGENT, stream=True)  # type: ignore[arg-type]
        pieces = [chunk.choices[0].delta.content or "" async for chunk in stream]
        assert "".join(pieces) == "U3"


def test_the_older_form_of_calls(gateway: GatewayUnderTest):
    call = {"name": "tide", "arguments": "{}"}
    messages = [
        USER,
        {"role": "assistant", "content": None, "function_call": call},
        {"role": "function", "name": "tide", "content": "R1"},
    ]
    assert '{"name": "tide", "arguments": {}}' in prompt(gateway, messages)
    assert prompt(gateway, messages).count("R1") == 1


def test_arguments_that_the_model_wrote_wrong_stay_as_they_are(gateway: GatewayUnderTest):
    call = {**CALL, "function": {"name": "tide", "arguments": '{"at": '}}
    for text in ('{"at": ', "", "[1]", "NaN", "[" * 9999):
        call["function"] = {"name": "tide", "arguments": text}
        messages = [USER, {"role": "assistant", "tool_calls": [call]}]
        assert f'"arguments": {text or "{}"}' in prompt(gateway, messages)


@pytest.mark.parametrize("model", ["m-small", "m-strict"])
def test_the_answer_goes_on_with_the_last_turn(gateway: GatewayUnderTest, model: str):
    messages = [USER, {"role": "assistant", "content": "The answer is "}]
    fields = {"model": model, "continue_final_message": True}
    open_prompt = prompt(gateway, messages, **fields)
    assert open_prompt.endswith("The answer is ")
    assert open_prompt == prompt(gateway, messages, **fields, add_generation_prompt=False)
    whole = gateway.chat(messages=messages, script=["42"], **fields)
    assert whole.json()["choices"][0]["message"]["content"] == "42"
    streamed = gateway.chat(messages=messages, script=["42"], stream=True, **fields)
    assert joined(events(streamed.text)) == "42"


@pytest.mark.parametrize(
    ("messages", "fields"),
    [
        ([USER], {}),
        ([USER, {"role": "assistant", "content": "x"}], {"add_generation_prompt": True}),
        ([USER, {"role": "assistant", "content": "x", "tool_calls": [CALL]}], {}),
        ([{"role": "system", "content": "x"}], {"stream": True}),
    ],
)
def test_turns_that_nothing_can_go_on_with(gateway: GatewayUnderTest, messages: Any, fields: Any):
    refused = gateway.chat(messages=messages, continue_final_message=True, **fields)
    assert_error(refused, 400, param="continue_final_message", code="invalid_value")


def test_anthropics_prefill(gateway: GatewayUnderTest):
    turns: Any = [USER, {"role": "assistant", "content": "The answer is"}]
    with Anthropic(base_url=gateway.url, api_key=ADMIN_KEY) as client:
        answer = client.messages.create(model="m-strict", max_tokens=9, messages=turns, system="S1")
        counted = client.messages.count_tokens(model="m-strict", messages=turns, system="S1")
    assert answer.content[0].type == "text"
    assert counted.input_tokens == answer.usage.input_tokens == len(
        "[user]S1\n\nU1[assistant]The answer is"
    )  # fmt: skip


def test_items_of_a_response_take_the_same_way(gateway: GatewayUnderTest):
    items: Any = [
        {"role": "user", "content": "U1"},
        {"type": "function_call", "call_id": "c", "name": "tide", "arguments": "{"},
        {"type": "function_call_output", "call_id": "c", "output": "R1"},
        {"role": "developer", "content": [{"type": "input_text", "text": "S2"}]},
        {"role": "user", "content": "U2"},
    ]
    with OpenAI(
        base_url=gateway.url + "/v1", api_key=ADMIN_KEY, _strict_response_validation=True
    ) as client:
        answer = client.responses.create(model="m-strict", input=items, instructions="S1")
        with pytest.raises(BadRequestError) as refused:
            client.responses.create(model="m-strict", input="REFUSE")
    assert refused.value.param == "input"
    assert answer.output_text == "U2"
    assert answer.usage is not None
    assert answer.usage.input_tokens == len(
        "[user]S1\n\nS2\n\nU1"
        '[assistant]<tool_call>\n{"name": "tide", "arguments": {}\n</tool_call>'
        "[user]<tool_response>\nR1\n</tool_response>\n\nU2[assistant]"
    )


def test_variables_of_the_template(gateway: GatewayUnderTest):
    fields: dict[str, Any] = {"model": "m-strict", "chat_template_kwargs": {"tone": "(kind)"}}
    assert prompt(gateway, [USER], **fields) == "[user]U1[assistant](kind)"
    for variables in (
        {"messages": []},
        {"raise_exception": "x"},
        {"continue_final_message": True},
        {f"v{i}": i for i in range(65)},
        {"tone": {"a": 1}},
    ):
        refused = gateway.chat(model="m-strict", chat_template_kwargs=variables)
        assert_error(refused, 400, param="chat_template_kwargs", code="invalid_value")
    refused = gateway.chat(chat_template="{{ messages }}")
    assert_error(refused, 400, param="chat_template", code="unsupported_parameter")


PARTS = [
    ({"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/x.png"}}, "type", "images"),
    ({"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}, "type", "audio"),
    ({"type": "file", "file": {"file_id": "f"}}, "type", "files"),
    ({"type": "video_url", "video_url": {"url": "x"}}, "type", "video"),
    ({"type": "thought", "text": "x"}, "type", "content part"),
    ({"type": "refusal"}, "refusal", "no text"),
    ({"text": "x"}, "type", "required"),
    ({"type": "text", "text": 5}, "text", "string"),
]


@pytest.mark.parametrize(("part", "field", "words"), PARTS)
def test_parts_that_are_not_text(
    gateway: GatewayUnderTest, part: dict[str, Any], field: str, words: str
):
    content = [{"type": "text", "text": "x"}, part]
    for stream in (False, True):
        messages = [USER, {"role": "user", "content": content}]
        refused = gateway.chat(messages=messages, stream=stream)
        error = assert_error(refused, 400, param=f"messages[1].content[1].{field}")
        assert words in error["message"]


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "wizard", "content": "x"}, "role"),
        ({"role": None, "content": "x"}, "role"),
        ({"role": "user", "content": None}, "content"),
        ({"role": "user", "content": {}}, "content"),
        ({"role": "assistant", "tool_calls": []}, "content"),
        ({"role": "assistant", "audio": {"id": "a"}, "content": "x"}, "audio"),
        ({"role": "assistant", "tool_calls": [CALL] * 513}, "tool_calls"),
        ({"role": "assistant", "tool_calls": [{**CALL, "type": "custom"}]}, "tool_calls[0].type"),
        ({"role": "assistant", "tool_calls": [{**CALL, "id": 1}]}, "tool_calls[0].id"),
        ({"role": "tool", "content": "x"}, "tool_call_id"),
        ({"role": "function", "content": "x"}, "name"),
        ({"role": "user", "content": [{"type": "text", "text": "x"}] * 4097}, "content"),
    ],
)
def test_messages_that_are_none(gateway: GatewayUnderTest, message: Any, param: str):
    refused = gateway.chat(messages=[USER, message])
    assert_error(refused, 400, param=f"messages[1].{param}")


def test_more_messages_than_there_may_be(gateway: GatewayUnderTest):
    assert_error(gateway.chat(messages=[USER] * 4097), 400, param="messages")
    short = {"role": "user", "content": ""}
    answered = gateway.client.post(
        "/tokenize", json={"model": "m-strict", "messages": [short] * 4096}
    )
    assert answered.status_code == 200


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("REFUSE", "I will not say that."),
        ("HUGE", "too much text"),
        ("SURROGATE", "surrogates"),
    ],
)
def test_what_a_template_refuses_is_a_400(
    gateway: GatewayUnderTest, text: str, words: str, stream: bool
):
    messages = [{"role": "user", "content": text}]
    refused = gateway.chat(model="m-strict", messages=messages, stream=stream)
    assert words in assert_error(refused, 400, param="messages")["message"]


def test_an_endless_template_holds_nobody_up(gateway: GatewayUnderTest):
    answers: list[httpx.Response] = []

    def ask() -> None:
        messages = [{"role": "user", "content": "ENDLESS"}]
        answers.append(gateway.chat(model="m-strict", messages=messages))

    asking = threading.Thread(target=ask)
    asking.start()
    while asking.is_alive():
        assert gateway.chat().status_code == 200
    assert "too long" in assert_error(answers[0], 400, param="messages")["message"]


TEXTS = st.none() | st.text(max_size=5) | st.lists(
    st.fixed_dictionaries({"type": st.sampled_from(["text", "refusal", "file"]), "text": st.text(max_size=3)}),
    max_size=2,
)  # fmt: skip
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {
            "role": st.sampled_from(["developer", "system", "user", "assistant", "tool", "x"]),
            "content": TEXTS,
        },
        optional={
            "tool_call_id": st.none() | st.text(max_size=3),
            "tool_calls": st.none() | st.lists(st.just(CALL), max_size=2),
            "refusal": st.none() | st.text(max_size=3),
            "name": st.none() | st.text(max_size=3),
            "reasoning_content": st.text(max_size=3),
        },
    ),
    max_size=5,
)


@settings(
    deadline=None,
    max_examples=60,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(MESSAGES, st.sampled_from(["m-small", "m-strict"]), st.booleans())
def test_no_messages_are_a_failure_of_the_server(
    gateway: GatewayUnderTest, messages: list[Any], model: str, continues: bool
):
    answer = gateway.chat(model=model, messages=messages, continue_final_message=continues)
    if answer.status_code != 200:
        error = assert_error(answer, 400)
        assert error["param"].startswith(("messages", "continue_final_message"))
