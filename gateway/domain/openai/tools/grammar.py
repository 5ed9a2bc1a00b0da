"""Grammars of answers that must be calls, that may be calls or what a `response_format` asks for, or text with calls.

A call is written as the model itself writes it, and its arguments match the tool's schema: so they always
parse. Marks that are special tokens are left out: an answer that must be a call needs none.
"""

import json
import re
from dataclasses import dataclass, replace

from gateway.domain.openai.tool_schemas import FunctionDefinition
from gateway.domain.openai.tools.offer import ToolOffer
from models.chat_format import ChatFormat, ToolFormat
from models.grammar_texts import schema_text
from workers.protocol import Grammar

MAX_CALLS = 16
"""Of one answer; a small model may find no end by itself."""
_FAULT = re.compile(r"at (\d+)\(\d+\): failed to compile JSON schema: (.*?)(?: \d+ \| |$)")
_FIRST_SCHEMA_LINE = 5
"""Of a grammar of calls; those of other tools are on every second line that follows."""
_NO_MEMBERS = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True)
class _Style:
    """How calls are written."""

    before: str = ""
    """All of them."""
    after: str = ""
    between: str = ""
    before_each: str = ""
    after_each: str = ""
    arguments: str = "arguments"


_ARRAY = _Style(before="[", after="]", between=", ")
_STYLES: dict[ToolFormat, _Style] = {
    "hermes": _Style(before_each="<tool_call>\n", after_each="\n</tool_call>", between="\n"),
    "llama3": _Style(between="; ", arguments="parameters"),
    "mistral": _ARRAY,
    "json": _ARRAY,
}


def call_grammar(form: ChatFormat, offer: ToolOffer) -> Grammar:
    """Of an answer that is a call; not checked yet."""
    text = "start: calls\n" + _call_rules(_style(form), offer)
    return Grammar("lark", text, "tools")


def call_text(form: ChatFormat, name: str, arguments: str) -> str:
    """An answer that is one call, as `call_grammar` wants it."""
    style = _style(form)
    head, tail = _around(style, name)
    return f"{style.before}{head}{arguments}{tail}{style.after}"


def schema_fault(message: str) -> tuple[int, str] | None:
    """What is wrong with the arguments of which callable tool, if a check of `call_grammar` tells of that."""
    found = _FAULT.search(message)
    if found is None:
        return None
    return (int(found[1]) - _FIRST_SCHEMA_LINE) // 2, found[2].strip() + "."


def _style(form: ChatFormat, *, beside_json: bool = False) -> _Style:
    """`beside_json`: an answer that is no call is JSON, and must be another one from its first character on."""
    style = _STYLES[form.tools]
    needs_special = style.before_each != "" and bool(form.special_marks)
    is_bare = not style.before and not style.before_each
    return _ARRAY if needs_special or (beside_json and is_bare) else style


def _call_rules(style: _Style, offer: ToolOffer) -> str:
    """Lark rules of which `calls` matches an answer that is one call or, in parallel, several."""
    more = f" ({_literal(style.between)} call){{0,{MAX_CALLS - 1}}}" if offer.parallel else ""
    numbers = range(len(offer.callable))
    rules = [
        f"calls: {_literal(style.before)} call{more} {_literal(style.after)}",
        "call: " + " | ".join(f"call_{number}" for number in numbers),
    ]
    for number, function in enumerate(offer.callable):
        head, tail = _around(style, function.name)
        rules.append(f"call_{number}: {_literal(head)} arguments_{number} {_literal(tail)}")
        rules.append(f"arguments_{number}: %json {_schema(function)}")
    return "\n".join(rules) + "\n"


def answer_grammar(
    form: ChatFormat, offer: ToolOffer | None, wanted: Grammar | None, *, is_open: bool
) -> Grammar | None:
    """What the answer must match, given what was asked of it: calls, `wanted`, or one of both, after reasoning.

    `is_open`: the prompt ends within the reasoning.
    """
    must_call = offer is not None and offer.is_required
    if wanted is None and not must_call:
        return None if offer is None else _text_with_calls(form, offer, is_open=is_open)
    rules, choices = "", []
    if offer is not None:
        beside_json = wanted is not None and not must_call
        rules, choices = _call_rules(_style(form, beside_json=beside_json), offer), ["calls"]
    if wanted is not None and not must_call:
        if offer is None and form.reasoning is None:
            return wanted
        rule = _answer_rule(wanted)
        if rule is None:
            return wanted
        rules += rule
        choices.append("answer")
    start, thoughts = _reasoning(form, is_open=is_open)
    text = f"start: {start}({' | '.join(choices)})\n{thoughts}{rules}"
    param = "tools" if wanted is None else wanted.param
    return Grammar("lark", text, param)


def _text_with_calls(form: ChatFormat, offer: ToolOffer, *, is_open: bool) -> Grammar | None:
    """Any text, but what follows the mark of a call is one; None unless that is wanted and can be told."""
    style = _style(form)
    mark = style.before_each.strip()
    if not offer.is_strict or not mark:
        return None
    style = replace(style, before_each=style.before_each.removeprefix(mark))
    start, thoughts = _reasoning(form, is_open=is_open)
    calls = "(lead call)*" if offer.parallel else "(lead call)?"
    text = f"lead[lazy]: /(.|\\n)*{re.escape(mark)}/\nREST: /(.|\\n)*/\n"
    rules = thoughts + text + _call_rules(style, offer)
    return Grammar("lark", f"start: {start}{calls} REST\n{rules}", "tools")


def _around(style: _Style, name: str) -> tuple[str, str]:
    """What stands before and after the arguments of a call."""
    return f'{style.before_each}{{"name": "{name}", "{style.arguments}": ', "}" + style.after_each


def _reasoning(form: ChatFormat, *, is_open: bool) -> tuple[str, str]:
    """What stands before the answer in the first rule, and the rules for it."""
    if form.reasoning is None:
        return "", ""
    opening, closing = form.reasoning
    if form.special_marks.intersection(form.reasoning):
        if not (opening.startswith("<") and closing.startswith("<")):
            return "", ""
        thoughts = f"thoughts: {'' if is_open else opening} /(.|\\n)*/ {closing}\n"
    else:
        body = ("" if is_open else re.escape(opening)) + r"(.|\n)*" + re.escape(closing)
        thoughts = f"thoughts[lazy]: /{body.replace('/', chr(92) + '/')}/\n"
    gap = "GAP: /[ \\n]{0,4}/\n"
    return ("thoughts GAP " if is_open else "(thoughts GAP)? "), thoughts + gap


def _answer_rule(wanted: Grammar) -> str | None:
    """The rule `answer`; None for a client's own grammar, which has rules of its own."""
    if wanted.kind == "json_schema":
        return f"answer: %json {_quoted(wanted.text)}\n"
    if wanted.kind == "regex":
        pattern = re.sub(r"(?<!\\)/", r"\/", wanted.text).replace("\n", r"\n")
        return f"answer: /{pattern}/\n"
    return None


def _schema(function: FunctionDefinition) -> str:
    schema = {"type": "object", **function.parameters} if function.parameters else _NO_MEMBERS
    return _quoted(schema_text(schema, strict=bool(function.strict)))


def _quoted(schema: str) -> str:
    """Of a schema's texts: what would make the grammar one of another dialect."""
    return schema.replace("::=", "\\u003a:=")


def _literal(text: str) -> str:
    return json.dumps(text) if text else ""
