"""How a model writes calls and reasoning is found out from its template and vocabulary, and answers are read so."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tokenizers import AddedToken

from gateway.directory import ServedModel
from gateway.domain.openai.parts import Reasoning, Text, ToolCall
from gateway.domain.openai.prompts import Prompt, render_chat
from gateway.domain.openai.reading import Reading, reading_of
from gateway.domain.openai.schemas import ChatCompletionRequest
from gateway.domain.openai.tools.offer import tool_offer
from gateway.domain.openai.validation import parse
from gateway.errors import BadRequestError
from models.chat_format import ChatFormat, chat_format
from models.chat_templates import ChatTemplate
from models.tokenizer import TextTokenizer
from workers.engine.scripted import scripted_card, scripted_tokenizer
from workers.protocol import SamplingParams

TEMPLATES = Path(__file__).resolve().parents[1] / "data" / "chat_templates"
THINK = ("<think>", "</think>")
OPENING = "{% for m in messages %}{{ m.content }}{% endfor %}<think>\n{# ends with </think> #}"
TOOL = {"type": "function", "function": {"name": "tide"}}


def tokenizer(*special: str, added: tuple[str, ...] = ()) -> TextTokenizer:
    plain = scripted_tokenizer()
    plain.add_special_tokens([AddedToken(mark, special=True) for mark in special])
    plain.add_tokens([AddedToken(mark, special=False) for mark in added])
    return TextTokenizer(plain.to_str().encode())


def served(source: str, *special: str) -> ServedModel:
    tokens = tokenizer(*special)
    template = ChatTemplate(source)
    card = scripted_card("m")
    return ServedModel(card, tokens, template, chat_format(template, tokens))


def family(name: str) -> ServedModel:
    return served((TEMPLATES / f"{name}.jinja").read_text())


def chat(**fields: Any) -> ChatCompletionRequest:
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}], **fields}
    return parse(ChatCompletionRequest, json.dumps(body).encode())


def read(model: ServedModel, **fields: Any) -> tuple[Reading | None, Prompt]:
    body = chat(**fields)
    token_ids = model.tokenizer.encode(render_chat(model, body))
    prompt = Prompt(token_ids=token_ids, sampling=SamplingParams(max_tokens=9))
    return reading_of(model, body, tool_offer(body), None, prompt), prompt


@pytest.mark.parametrize(
    ("name", "tools", "reasoning"),
    [
        ("chatml", "hermes", None),
        ("hermes", "hermes", None),
        ("qwen2_5", "hermes", None),
        ("qwen3", "hermes", THINK),
        ("llama3", "llama3", None),
        ("mistral", "mistral", None),
    ],
)
def test_families(name: str, tools: str, reasoning: Any):
    found = family(name).format
    assert (found.tools, found.reasoning) == (tools, reasoning)


def test_the_vocabulary_tells_of_reasoning_too():
    plain = ChatTemplate("{{ messages }}")
    assert chat_format(plain, tokenizer(added=THINK)) == ChatFormat(reasoning=THINK)
    found = chat_format(plain, tokenizer("[THINK]", "[/THINK]"))
    assert found.reasoning == ("[THINK]", "[/THINK]")
    assert found.special_marks == {"[THINK]", "[/THINK]"}
    assert chat_format(plain, tokenizer(), "json", "think") == ChatFormat("json", THINK)
    assert chat_format(plain, tokenizer(*THINK), "auto", "none").reasoning is None


def test_a_plain_chat_is_not_read_at_all():
    reading, _ = read(family("chatml"))
    assert reading is None


def test_reasoning_that_the_template_opens():
    reading, _ = read(served(OPENING))
    assert reading is not None
    parser = reading.parser()
    parts = parser.feed("hm") + parser.feed("</think>2")
    assert parts == [Reasoning("hm"), Text("2")]
    closed, _ = read(family("qwen3"), reasoning_effort="none")
    assert closed is not None
    assert closed.parser().feed("hm") == [Text("hm")]


def test_marks_that_are_special_tokens_are_in_the_text():
    template = (TEMPLATES / "mistral.jinja").read_text()
    for special, skips in (((), True), (("[TOOL_CALLS]",), False)):
        reading, prompt = read(served(template, *special), tools=[TOOL])
        assert reading is not None
        assert reading.shaped(prompt).sampling.skip_special_tokens is skips


def test_calls_in_the_models_own_format():
    call = '{"name": "tide", "arguments": {}}'
    for name, text in [
        ("qwen2_5", f"<tool_call>{call}</tool_call>"),
        ("mistral", f"[TOOL_CALLS][{call}]"),
        ("llama3", call),
    ]:
        reading, _ = read(family(name), tools=[TOOL])
        assert reading is not None
        found = [part for part in reading.parser().feed(text) if isinstance(part, ToolCall)]
        assert [part.name for part in found] == ["tide"]


@pytest.mark.parametrize(
    ("source", "effort", "expected"),
    [
        ("{{ reasoning_effort }}", "low", "low"),
        ("{{ enable_thinking }}", "low", "True"),
        ("{{ enable_thinking }}", "none", "False"),
        ("{{ thinking }}", "high", "True"),
        ("plain", "none", "plain"),
    ],
)
def test_effort_is_what_the_template_knows_it_by(source: str, effort: str, expected: str):
    assert render_chat(served(source), chat(reasoning_effort=effort)) == expected
    own = {"reasoning_effort": "own", "enable_thinking": "own", "thinking": "own"}
    ask = chat(reasoning_effort=effort, chat_template_kwargs=own)
    assert render_chat(served(source), ask) in ("own", "plain")


@pytest.mark.parametrize(
    ("source", "effort"), [("plain", "low"), (OPENING, "none"), (OPENING, "high")]
)
def test_effort_that_cannot_be_set_is_refused(source: str, effort: str):
    with pytest.raises(BadRequestError) as caught:
        render_chat(served(source), chat(reasoning_effort=effort))
    assert caught.value.param == "reasoning_effort"
    assert caught.value.code == "unsupported_parameter"


def test_tools_that_a_template_cannot_render_are_named():
    source = (
        "{% for message in messages %}{{ message.content }}{% endfor %}"
        "{% for tool in tools or [] %}{% for name, of in tool.function.parameters.properties.items() %}"
        "{{ name }}{{ raise_exception(tone) if tone else of.type }}{% endfor %}{% endfor %}"
    )
    good = [tool.model_dump() for tool in chat(tools=[TOOL]).tools or ()]
    good[0]["function"]["parameters"] = {"properties": {"a": {"type": "string"}}}
    bad = [{"type": "function", "function": {"name": "f", "parameters": {"properties": 5}}}]
    model = served(source)
    assert render_chat(model, chat(), good) == "xastring"
    for tools, variables, param in [
        (bad, {}, "tools"),
        (good, {"tone": "no"}, "chat_template_kwargs"),
        (bad, {"tone": "no"}, "tools"),
    ]:
        with pytest.raises(BadRequestError) as caught:
            render_chat(model, chat(chat_template_kwargs=variables), tools)
        assert caught.value.param == param


def test_a_model_that_takes_no_grammars_still_reads_calls():
    model = family("qwen2_5")
    card = msgspec.structs.replace(model.card, takes_grammars=False)
    reading, _ = read(
        ServedModel(card, model.tokenizer, model.template, model.format), tools=[TOOL]
    )
    assert reading is not None
    assert reading.grammar is None
