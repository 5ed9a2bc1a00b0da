"""Answers of all tool formats become text and calls: the same however they are cut, and nothing is lost."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.domain.openai.parts import Part, PartParser, Reasoning, Text, ToolArguments, ToolCall
from gateway.domain.openai.reasoning import PlainText, ReasoningParser
from gateway.domain.openai.tools.formats import FRAMINGS
from gateway.domain.openai.tools.json_text import JsonText
from gateway.domain.openai.tools.parser import CallParser

NAMES = frozenset({"tide", "moon"})
TIDE = '{"name": "tide", "arguments": {"harbour": "Port <Ness>", "at": [1, -2.5e3, null]}}'
MOON = '{"arguments": {}, "name": "moon"}'
TIDE_CALL = ("tide", '{"harbour": "Port <Ness>", "at": [1, -2.5e3, null]}')
MOON_CALL = ("moon", "{}")


def parser_of(tools: str, *, parallel: bool = True) -> CallParser:
    return CallParser(FRAMINGS[tools], NAMES, parallel=parallel)


def run(parser: PartParser, pieces: list[str]) -> list[Part]:
    parts = [part for piece in pieces for part in parser.feed(piece, 1)]
    return merged(parts + parser.finish())


def merged(parts: list[Part]) -> list[Any]:
    """Neighbours of a kind as one, ids left out."""
    found: list[Any] = []
    for part in parts:
        last = found[-1] if found else None
        if isinstance(part, ToolCall):
            found.append(("call", part.index, part.name))
        elif isinstance(part, ToolArguments):
            if last and last[:2] == ("arguments", part.index):
                part, _ = ToolArguments(part.index, last[2] + part.text), found.pop()
            found.append(("arguments", part.index, part.text))
        else:
            kind = type(part).__name__
            if last and last[0] == kind:
                found[-1] = (kind, last[1] + part.text)
            else:
                found.append((kind, part.text))
    return found


def calls(*pairs: tuple[str, str]) -> list[Any]:
    return [
        item
        for index, (name, arguments) in enumerate(pairs)
        for item in (("call", index, name), ("arguments", index, arguments))
    ]


def text(value: str) -> list[Any]:
    return [("Text", value)]


CASES: list[tuple[str, str, list[Any]]] = [
    ("hermes", f"<tool_call>\n{TIDE}\n</tool_call>", calls(TIDE_CALL)),
    (
        "hermes",
        f"\n<tool_call>{TIDE}</tool_call>\n<tool_call>\n{MOON}\n</tool_call>\n",
        calls(TIDE_CALL, MOON_CALL),
    ),
    ("hermes", f"Hm. <tool_call>{TIDE}", text("Hm. ") + calls(TIDE_CALL)),
    ("hermes", f"<tool_call>{TIDE}{MOON}</tool_call>", calls(TIDE_CALL, MOON_CALL)),
    ("hermes", f"<tool_call>{MOON}</tool_call> So.", calls(MOON_CALL) + text(" So.")),
    ("hermes", " just text, a < b <tool_", text(" just text, a < b <tool_")),
    ("hermes", " \n", text(" \n")),
    ("hermes", "<tool_call>nothing</tool_call>", text("<tool_call>nothing</tool_call>")),
    ("hermes", '<tool_call>{"name": "tide"', text('<tool_call>{"name": "tide"')),
    (
        "hermes",
        f'<tool_call>{{"name": "rm", "arguments": {{}}}}</tool_call>{MOON}',
        text(f'<tool_call>{{"name": "rm", "arguments": {{}}}}</tool_call>{MOON}'),
    ),
    (
        "hermes",
        '<tool_call>{"name": "tide", "arguments": {harbour}}</tool_call>',
        text('<tool_call>{"name": "tide", "arguments": {harbour}}</tool_call>'),
    ),
    (
        "hermes",
        '<tool_call>{"name": "tide", "arguments": {"a": 1',
        [("call", 0, "tide"), ("arguments", 0, '{"a": 1')],
    ),
    (
        "hermes",
        '<tool_call>{"name": "tide", "arguments": {"a" 1}} <tool_call>' + MOON,
        [("call", 0, "tide"), ("arguments", 0, '{"a" '), ("Text", "1}} ")]
        + [("call", 1, "moon"), ("arguments", 1, "{}")],
    ),
    (
        "hermes",
        '<tool_call>{"name": "tide", "arguments": "{\\"a\\": \\"\\u00e9\\"}", "x": 5}</tool_call>',
        calls(("tide", '{"a": "é"}')),
    ),
    ("hermes", '<tool_call>{"id": 1, "name": "moon"}</tool_call>', calls(MOON_CALL)),
    ("mistral", f"[TOOL_CALLS][{TIDE}, {MOON}]", calls(TIDE_CALL, MOON_CALL)),
    ("mistral", f"[TOOL_CALLS] {MOON}", calls(MOON_CALL)),
    (
        "mistral",
        'Let me. [TOOL_CALLS]tide[ARGS]{"a": 1}',
        text("Let me. ") + calls(("tide", '{"a": 1}')),
    ),
    (
        "mistral",
        '[TOOL_CALLS]tide{"a": 1}[TOOL_CALLS]moon[ARGS]{}',
        calls(("tide", '{"a": 1}'), MOON_CALL),
    ),
    ("mistral", "[TOOL_CALLS]rm[ARGS]{}", text("[TOOL_CALLS]rm[ARGS]{}")),
    ("mistral", "[TOOL", text("[TOOL")),
    ("mistral", "[TOOL_CALLS][]", text("[TOOL_CALLS][]")),
    ("llama3", TIDE.replace("arguments", "parameters"), calls(TIDE_CALL)),
    ("llama3", f"<|python_tag|>{TIDE}; {MOON}", calls(TIDE_CALL, MOON_CALL)),
    ("llama3", f"{TIDE}\n{MOON}", calls(TIDE_CALL, MOON_CALL)),
    ("llama3", '{"answer": 5}', text('{"answer": 5}')),
    ("llama3", '{"name": "Ann", "age": 5}', text('{"name": "Ann", "age": 5}')),
    ("llama3", "<|python_tag|>print(5)", text("<|python_tag|>print(5)")),
    ("llama3", f"Look: {TIDE}", text(f"Look: {TIDE}")),
    ("json", f" [{TIDE}, {MOON}]", calls(TIDE_CALL, MOON_CALL)),
    ("json", f"{MOON} is it", calls(MOON_CALL) + text(" is it")),
    ("json", '[1, 2] and {"a": 1}', text('[1, 2] and {"a": 1}')),
]


@pytest.mark.parametrize(("tools", "answer", "expected"), CASES)
def test_whole_and_token_by_token(tools: str, answer: str, expected: list[Any]):
    assert run(parser_of(tools), [answer]) == expected
    assert run(parser_of(tools), list(answer)) == expected
    for at in range(len(answer)):
        assert run(parser_of(tools), [answer[:at], answer[at:]]) == expected


PIECES = st.sampled_from(
    [
        *(
            "<tool_call>",
            "</tool_call>",
            "<tool_",
            "[TOOL_CALLS]",
            "[ARGS]",
            "<|python_tag|>",
            "<think>",
        ),
        *(
            "</think>",
            "</th",
            TIDE,
            MOON,
            '{"name": "',
            "tide",
            '", "arguments": ',
            '{"a": ',
            '"b\\n"',
            "}",
        ),
        *(
            "]",
            "[",
            ", ",
            ";",
            " ",
            "\n",
            "1",
            "-",
            "tru",
            "e",
            "\\u00",
            "e9",
            '"',
            "text ",
            '"{}"',
            "é",
        ),
    ]
)


@settings(deadline=None, max_examples=300)
@given(st.sampled_from(sorted(FRAMINGS)), st.lists(PIECES, max_size=12), st.data())
def test_no_cut_makes_a_difference(tools: str, pieces: list[str], data: st.DataObject):
    answer = "".join(pieces)
    is_open, parallel = data.draw(st.booleans()), data.draw(st.booleans())

    def parser() -> PartParser:
        inner = parser_of(tools, parallel=parallel)
        return ReasoningParser(("<think>", "</think>"), inner, is_open=is_open)

    whole = run(parser(), [answer])
    assert run(parser(), list(answer)) == whole
    assert run(parser(), pieces) == whole
    cuts = sorted(data.draw(st.lists(st.integers(0, len(answer)), max_size=5)))
    bounds = [0, *cuts, len(answer)]
    assert run(parser(), [answer[a:b] for a, b in zip(bounds, bounds[1:], strict=False)]) == whole


@settings(deadline=None)
@given(st.lists(PIECES, max_size=12))
def test_text_without_calls_is_not_lost(pieces: list[str]):
    answer = "".join(pieces)
    for tools in FRAMINGS:
        parts = run(parser_of(tools), pieces)
        if all(part[0] == "Text" for part in parts):
            assert "".join(part[1] for part in parts) == answer


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(JSON, st.booleans(), st.sampled_from([None, 1]))
def test_json_is_json(value: Any, ascii_only: bool, indent: int | None):
    written = json.dumps([value], ensure_ascii=ascii_only, indent=indent)
    scanner = JsonText()
    assert scanner.feed(written + "]", 0) == len(written)
    assert scanner.is_complete


@given(st.text(alphabet='{}[]",:\\u0019aefnrstlE+-. \n\x01'))
def test_what_the_scanner_takes_python_takes(written: str):
    scanner = JsonText()
    end = scanner.feed("[" + written, 0)
    if scanner.is_complete:
        json.loads(("[" + written)[:end])


def test_complete_calls_alone_count():
    for answer, expected in [(f"<tool_call>{TIDE}", True), (f"<tool_call>{TIDE[:-1]}", False)]:
        parser = parser_of("hermes")
        run(parser, list(answer))
        assert parser.has_calls == expected


def test_ids_differ_and_only_one_call_without_parallel_calls():
    parts = parser_of("json").feed(f"[{MOON}, {MOON}]")
    ids = {part.id for part in parts if isinstance(part, ToolCall)}
    assert len(ids) == 2
    assert all(item.startswith("call_") for item in ids)
    alone = run(parser_of("json", parallel=False), [f"[{MOON}, {MOON}] more"])
    assert alone == calls(MOON_CALL)


def reasoning(answer: PartParser | None = None, **options: Any) -> ReasoningParser:
    options.setdefault("is_open", False)
    return ReasoningParser(("<think>", "</think>"), answer or PlainText(), **options)


@pytest.mark.parametrize(
    ("pieces", "is_open", "expected", "num_tokens"),
    [
        (["<think>", "add", "</think>", "2"], False, [("Reasoning", "add"), ("Text", "2")], 1),
        (
            ["<th", "ink>\n", "a ", "b\n", "</think>\n\n", "2"],
            False,
            [("Reasoning", "a b"), ("Text", "2")],
            2,
        ),
        (["a", " b", "</think>", "c"], True, [("Reasoning", "a b"), ("Text", "c")], 2),
        (["<think>", "a", " </thi"], False, [("Reasoning", "a </thi")], 2),
        (["<think>", "</think>", "c"], False, [("Text", "c")], 0),
        (["2 <think>a</think>"], False, [("Text", "2 <think>a</think>")], 0),
        (["<thin"], False, [("Text", "<thin")], 0),
        (["<think>a</think>"], False, [("Reasoning", "a")], 1),
    ],
)
def test_reasoning(pieces: list[str], is_open: bool, expected: list[Any], num_tokens: int):
    parser = reasoning(is_open=is_open)
    assert run(parser, pieces) == expected
    assert parser.num_reasoning_tokens == num_tokens


def test_reasoning_that_is_not_shown_is_counted():
    parser = reasoning(is_shown=False)
    assert run(parser, ["<think>", "a", "b", "</think>", "c"]) == text("c")
    assert parser.num_reasoning_tokens == 2


def test_reasoning_before_calls():
    parser = reasoning(parser_of("hermes"))
    answer = f"<think>which? <tool_call></think>\n\n<tool_call>{TIDE}</tool_call>"
    assert run(parser, list(answer)) == [("Reasoning", "which? <tool_call>"), *calls(TIDE_CALL)]
    assert parser.has_calls is True


def test_plain_text_needs_no_parser_any_more():
    parser = reasoning()
    assert not parser.is_plain
    assert parser.feed("Hello") == [Text("Hello")]
    assert parser.is_plain
    assert PlainText().feed("") == []
    assert isinstance(reasoning(is_open=True).feed("x")[0], Reasoning)
