"""Calls that a grammar forces are those that the parser reads, in every format, and nothing else is let through."""

import json
from typing import Any

import pytest

from gateway.domain.openai.parts import ToolArguments, ToolCall
from gateway.domain.openai.tool_schemas import FunctionDefinition
from gateway.domain.openai.tools.formats import framing
from gateway.domain.openai.tools.grammar import (
    MAX_CALLS,
    answer_grammar,
    call_grammar,
    schema_fault,
)
from gateway.domain.openai.tools.offer import ToolOffer
from gateway.domain.openai.tools.parser import CallParser
from models.chat_format import TOOL_FORMATS, ChatFormat, ToolFormat
from models.grammar_texts import schema_text
from models.grammars import byte_vocabulary, check, compiled
from workers.protocol import Grammar

THINK = ("<think>", "</think>")
TREE = {
    "type": "object",
    "description": 'a ::= b, <b>, // and # are no grammar; "see" https://example.org/#x \\',
    "properties": {"name": {"type": "string"}, "inner": {"$ref": "#/$defs/inner"}},
    "required": ["name"],
    "additionalProperties": False,
    "$defs": {
        "inner": {
            "type": "object",
            "properties": {"inner": {"$ref": "#/$defs/inner"}},
            "additionalProperties": False,
        }
    },
}
FUNCTIONS = (
    FunctionDefinition(name="plant", parameters=TREE, description="x ::= y"),
    FunctionDefinition(name="moon"),
    FunctionDefinition(name="moon_2", parameters={"properties": {"at": {"type": "integer"}}}),
)
GOOD: list[tuple[str, Any]] = [
    ("plant", {"name": 'oak "}</tool_call>', "inner": {"inner": {}}}),
    ("moon", {}),
    ("moon_2", {"at": 5}),
]
BAD: list[tuple[str, Any]] = [
    ("plant", {}),
    ("plant", {"name": 5}),
    ("moon", {"at": 5}),
    ("moon_2", {"at": "5"}),
    ("sun", {}),
]


def offer(*, parallel: bool = True, is_required: bool = True) -> ToolOffer:
    return ToolOffer(FUNCTIONS, FUNCTIONS, is_required, parallel)


def matches(grammar: Grammar, text: str) -> bool:
    matcher = compiled(grammar.kind, grammar.text, byte_vocabulary(grammar.text))
    data = list(text.encode())
    return matcher.try_consume_tokens(data) == len(data) and matcher.is_accepting()


def written(tools: ToolFormat, calls: list[tuple[str, Any]]) -> str:
    key = "parameters" if tools == "llama3" else "arguments"
    texts = [f'{{"name": "{name}", "{key}": {json.dumps(given)}}}' for name, given in calls]
    if tools == "hermes":
        return "\n".join(f"<tool_call>\n{text}\n</tool_call>" for text in texts)
    return "; ".join(texts) if tools == "llama3" else f"[{', '.join(texts)}]"


def read(tools: ToolFormat, text: str) -> list[tuple[str, Any]]:
    parser = CallParser(
        framing(tools, is_bound=True), frozenset(f.name for f in FUNCTIONS), is_required=True
    )
    calls: list[tuple[str, str]] = []
    for part in parser.feed(text) + parser.finish():
        if isinstance(part, ToolCall):
            calls.append((part.name, ""))
        else:
            assert isinstance(part, ToolArguments)
            calls[-1] = (calls[-1][0], calls[-1][1] + part.text)
    return [(name, json.loads(arguments)) for name, arguments in calls]


@pytest.mark.parametrize("tools", TOOL_FORMATS)
@pytest.mark.parametrize("reasoning", [None, THINK])
def test_what_is_forced_is_read(tools: ToolFormat, reasoning: Any):
    form = ChatFormat(tools, reasoning)
    grammar = answer_grammar(form, offer(), None, is_open=False)
    assert grammar is not None
    assert check(grammar.kind, grammar.text) is None
    for calls in (*([call] for call in GOOD), GOOD, GOOD[1:2] * MAX_CALLS):
        text = written(tools, calls)
        assert matches(grammar, text)
        assert read(tools, text) == calls
        assert matches(grammar, f"<think>so ☺</think>\n\n{text}") == (reasoning is not None)
    for calls in (*([call] for call in BAD), GOOD[1:2] * (MAX_CALLS + 1)):
        assert not matches(grammar, written(tools, calls))
    for text in ("", "Hello", written(tools, GOOD[:1]) + " more"):
        assert not matches(grammar, text)


@pytest.mark.parametrize("tools", TOOL_FORMATS)
def test_one_call_alone(tools: ToolFormat):
    grammar = call_grammar(ChatFormat(tools), offer(parallel=False))
    assert matches(grammar, written(tools, GOOD[:1]))
    assert not matches(grammar, written(tools, GOOD[:2]))


def test_marks_that_are_special_tokens_are_left_out():
    form = ChatFormat("hermes", None, frozenset({"<tool_call>"}))
    grammar = call_grammar(form, offer())
    text = written("json", GOOD)
    assert matches(grammar, text)
    assert read("hermes", text) == GOOD


def test_an_answer_within_open_reasoning():
    grammar = answer_grammar(ChatFormat("hermes", THINK), offer(), None, is_open=True)
    assert grammar is not None
    text = written("hermes", GOOD)
    assert matches(grammar, f"hm </b> </think>\n{text}")
    assert not matches(grammar, text)


STRICT = tuple(function.model_copy(update={"strict": True}) for function in FUNCTIONS)


@pytest.mark.parametrize("parallel", [True, False])
@pytest.mark.parametrize("is_open", [None, False, True])
def test_calls_that_need_not_come_match_where_a_tool_is_strict(
    is_open: bool | None, parallel: bool
):
    form = ChatFormat("hermes", None if is_open is None else THINK)
    grammar = answer_grammar(
        form, ToolOffer(STRICT, STRICT, False, parallel), None, is_open=bool(is_open)
    )
    assert grammar is not None
    assert check(grammar.kind, grammar.text) is None
    before = "so </think>\n" if is_open else ""
    for text in (
        "",
        "Just text: <tool {x}.\n",
        "<tool_call",
        "a\n" + written("hermes", GOOD[:1]) + "b",
    ):
        assert matches(grammar, before + text), text
    assert matches(grammar, before + written("hermes", GOOD)) or not parallel
    for call in BAD:
        assert not matches(grammar, before + "Hm. " + written("hermes", [call]))
    assert not matches(grammar, before + "<tool_call>text")
    for other in ("llama3", "mistral", "json"):
        assert (
            answer_grammar(ChatFormat(other), offer(is_required=False), None, is_open=False) is None
        )


ASKED = Grammar(
    "json_schema",
    schema_text(
        {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]},
        strict=True,
    ),
    "response_format",
)


@pytest.mark.parametrize("tools", TOOL_FORMATS)
@pytest.mark.parametrize("reasoning", [None, THINK])
def test_calls_beside_what_an_answer_is_to_be(tools: ToolFormat, reasoning: Any):
    grammar = answer_grammar(
        ChatFormat(tools, reasoning), offer(is_required=False), ASKED, is_open=False
    )
    assert grammar is not None
    assert grammar.param == "response_format"
    assert check(grammar.kind, grammar.text) is None
    assert matches(grammar, '{"name": "Ann"}')
    assert not matches(grammar, "Ann")
    style = "json" if tools == "llama3" else tools
    text = written(style, GOOD[:2])
    assert matches(grammar, text)
    assert read(tools, text) == GOOD[:2]


@pytest.mark.parametrize(
    ("asked", "good", "bad"),
    [
        (ASKED, '{"name": "Ann"}', '{"name": 5}'),
        (Grammar("regex", "a/[b\n]+\\/"), "a/b\nb/", "a"),
    ],
)
def test_reasoning_before_what_an_answer_is_to_be(asked: Grammar, good: str, bad: str):
    form = ChatFormat("hermes", THINK)
    for is_open, before in ((True, "so</think>\n"), (False, "<think>so</think>"), (False, "")):
        grammar = answer_grammar(form, None, asked, is_open=is_open)
        assert grammar is not None
        assert matches(grammar, before + good)
        assert not matches(grammar, before + bad)


def test_special_marks_around_reasoning():
    form = ChatFormat("hermes", THINK, frozenset(THINK))
    grammar = answer_grammar(form, None, ASKED, is_open=False)
    assert grammar is not None
    assert check(grammar.kind, grammar.text) is None


def test_what_binds_nothing():
    assert answer_grammar(ChatFormat(), None, None, is_open=False) is None
    assert answer_grammar(ChatFormat(), offer(is_required=False), None, is_open=False) is None
    assert answer_grammar(ChatFormat(), None, ASKED, is_open=False) is ASKED
    own = Grammar("lark", 'start: "x"')
    assert answer_grammar(ChatFormat("hermes", THINK), None, own, is_open=False) is own


def test_a_tool_whose_arguments_never_end_is_named():
    endless = {
        "type": "object",
        "properties": {"inner": {"$ref": "#"}},
        "required": ["inner"],
    }
    functions = (*FUNCTIONS, FunctionDefinition(name="well", parameters=endless))
    grammar = call_grammar(ChatFormat(), ToolOffer(functions, functions, True, True))
    error = check(grammar.kind, grammar.text)
    assert error is not None
    assert schema_fault(error) == (len(FUNCTIONS), "nothing that ends matches it.")
