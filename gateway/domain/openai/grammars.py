"""What answers must match: from `response_format`, `guided_*` and `structured_outputs` to a checked `Grammar`.

A grammar is checked in a process of its own (`models.grammar_check`), one at a time; what was found is kept.
"""

import asyncio
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec

from gateway.directory import ServedModel
from gateway.domain.openai.formats import ResponseFormat
from gateway.domain.openai.schemas import GenerationBody
from gateway.errors import BadRequestError, QueueFullError
from models.errors import GrammarError
from models.grammar_check import GrammarChecker
from models.grammar_texts import choice_text, schema_text
from workers.protocol import Grammar

MAX_WAITING = 32
"""Grammars that may wait to be checked; each takes two seconds at most."""
_GUIDED = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
}
_checker = GrammarChecker()
_thread = ThreadPoolExecutor(1, thread_name_prefix="grammar")
_num_waiting = 0


async def asked_grammar(served: ServedModel, body: GenerationBody) -> Grammar | None:
    """What the answer of a request must match, checked. Raises `BadRequestError` or `QueueFullError`.

    A model whose workers cannot bind an answer is no reason to answer without: the field is refused.
    """
    chosen = format_grammar(body.response_format, "response_format")
    given = [grammar for grammar in (*_guided(body), chosen) if grammar is not None]
    if not given:
        return None
    if not served.card.takes_grammars:
        raise BadRequestError(
            f"'{given[0].param}' is not supported by this model.",
            param=given[0].param,
            code="unsupported_parameter",
        )
    if len(given) > 1:
        raise _wrong(given[-1].param, "an answer can be bound to one grammar only.")
    return await checked(given[0], given[0].param)


async def checked(grammar: Grammar, param: str) -> Grammar:
    """The grammar, once it is known to compile within bounds.

    Raises `BadRequestError` naming `param`, or `QueueFullError` if too many others wait for that.
    """
    global _num_waiting
    try:
        if not _checker.knows(grammar.kind, grammar.text):
            if _num_waiting >= MAX_WAITING:
                raise QueueFullError("Too many grammars wait to be compiled.", retry_after_s=1)
            _num_waiting += 1
            try:
                check = _thread.submit(_checker.check, grammar.kind, grammar.text)
                await asyncio.wrap_future(check)
            finally:
                _num_waiting -= 1
    except GrammarError as error:
        raise _wrong(param, str(error)) from error
    return msgspec.structs.replace(grammar, param=param)


def json_grammar(schema: dict[str, Any], param: str, *, strict: bool) -> Grammar:
    """Of a JSON schema; `strict` refuses, when it is checked, keywords that cannot be enforced."""
    try:
        return Grammar("json_schema", schema_text(schema, strict=strict), param)
    except RecursionError as error:
        raise _wrong(param, "it is nested too deeply.") from error


def format_grammar(chosen: ResponseFormat | None, param: str) -> Grammar | None:
    """Of a `response_format`, or of what other surfaces call the same; not checked yet."""
    if chosen is None or chosen.type == "text":
        return None
    of = chosen.json_schema
    if chosen.type == "json_object" or of is None:
        return json_grammar({"type": "object"}, param, strict=True)
    schema = {"type": "object"} if of.schema_ is None else of.schema_
    return json_grammar(schema, f"{param}.json_schema.schema", strict=bool(of.strict))


def _guided(body: GenerationBody) -> list[Grammar]:
    given = [(name, kind, getattr(body, name)) for name, kind in _GUIDED.items()]
    outputs = body.structured_outputs
    if outputs is not None:
        if outputs.structural_tag is not None:
            raise _wrong("structured_outputs.structural_tag", "it is not supported.")
        fields = {
            "json": outputs.json_,
            "regex": outputs.regex,
            "choice": outputs.choice,
            "grammar": outputs.grammar,
            "json_object": outputs.json_object,
        }
        given += [(f"structured_outputs.{kind}", kind, value) for kind, value in fields.items()]
    grammars = [_of_kind(kind, value, name) for name, kind, value in given if value is not None]
    return [grammar for grammar in grammars if grammar is not None]


def _of_kind(kind: str, value: Any, param: str) -> Grammar | None:  # noqa: ANN401
    if kind == "json":
        return json_grammar(_schema(value, param), param, strict=True)
    if kind == "json_object":
        return json_grammar({"type": "object"}, param, strict=True) if value else None
    if kind == "choice":
        return Grammar("lark", choice_text(value), param)
    return Grammar("regex" if kind == "regex" else "lark", value, param)


def _schema(value: str | Mapping[str, Any], param: str) -> dict[str, Any]:
    """Other servers take a schema as JSON text too."""
    if not isinstance(value, str):
        return dict(value)
    try:
        schema = msgspec.json.decode(value)
    except (msgspec.DecodeError, RecursionError) as error:
        raise _wrong(param, "it is no JSON.") from error
    if not isinstance(schema, dict):
        raise _wrong(param, "a JSON schema is an object.")
    return schema


def _wrong(param: str, sentence: str) -> BadRequestError:
    return BadRequestError(
        f"Invalid '{param}': {sentence}"[:500], param=param, code="invalid_value"
    )
