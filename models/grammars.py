"""Grammars that answers must match, compiled: llguidance behind one door, for the check and for engines.

A grammar is a JSON schema, a regular expression, or llguidance's dialect of Lark. Nearly everything that a
hostile one could blow up has a limit here; time and the stack have not: see `models.grammar_check`.
"""

import json
import re
from collections.abc import Iterable

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from models.errors import GrammarError
from models.grammar_texts import MAX_TEXT_BYTES
from models.schema_bases import has_base

_LIMITS = LLParserLimits(
    max_items_in_row=2_000,
    initial_lexer_fuel=200_000,
    step_lexer_fuel=50_000,
    step_max_items=10_000,
    max_lexer_states=20_000,
    max_grammar_size=100_000,
    precompute_large_lexemes=False,
    verbose_errors=False,
)
_SPECIAL = re.compile(r"<[^<>\s\"\[\]]{1,64}>")
_JSON_RULE = re.compile(r"%json\s*(?=\{)")
_DECODER = json.JSONDecoder()
_EXPLANATIONS = (
    # An expression is compiled within a grammar that the client has not written.
    (re.compile(r"invalid regex .*\(in regex\): (?:.*error: )?(.*?)(?: in regex .*| 1 \| start: .*)$"), r"\1."),
    (re.compile(r"Resource '([^']*)' is not present in a registry"), r"'\1' is elsewhere, and never fetched."),
    (re.compile(r"Too many items"), "it has too many parts, such as properties."),
)  # fmt: skip
"""What llguidance says, and what a client is told instead."""
_NUM_BYTES = 256


def model_vocabulary(tokenizer_json: str, vocab_size: int, end_ids: Iterable[int]) -> LLTokenizer:
    """Of a model whose logits are `vocab_size` wide. Takes a second or so. Raises `GrammarError`."""
    try:
        return LLTokenizer(tokenizer_json, n_vocab=vocab_size, eos_token=sorted(end_ids))
    except ValueError as error:
        raise GrammarError(f"this model's vocabulary cannot be constrained: {error}") from error


def byte_vocabulary(text: str) -> LLTokenizer:
    """A token for each byte, and one for each special token that a Lark text may name."""
    special = sorted(set(_SPECIAL.findall(text)))
    return LLTokenizer(TokenizerWrapper(_Bytes(special)), slices=[])


def compiled(kind: str, text: str, vocabulary: LLTokenizer) -> LLMatcher:
    """A matcher at its start whose first mask is known. Raises `GrammarError`, a sentence for the client."""
    if len(text.encode()) > MAX_TEXT_BYTES:
        raise GrammarError(f"it has more than {MAX_TEXT_BYTES} bytes.")
    matcher = LLMatcher(vocabulary, _source(kind, text), limits=_LIMITS, log_level=0)
    if not matcher.is_error():
        matcher.compute_bitmask()
    if matcher.is_error():
        raise GrammarError(explained(matcher))
    if matcher.is_stopped() and not matcher.is_accepting():
        raise GrammarError("nothing matches it.")
    return matcher


def check(kind: str, text: str) -> str | None:
    """What is wrong with a grammar, whatever the model; None if it can be matched."""
    try:
        compiled(kind, text, byte_vocabulary(text if kind == "lark" else ""))
    except GrammarError as error:
        return str(error)
    return None


def explained(matcher: LLMatcher) -> str:
    """Why a matcher failed, as a sentence."""
    error = matcher.get_error()
    if error.startswith("panic"):
        return "it cannot be followed."
    if error.startswith("NoExtension"):
        return "nothing matches it."
    first = " ".join(error.split("\n<non-verbose/>")[0].split())
    for pattern, sentence in _EXPLANATIONS:
        if found := pattern.search(first):
            return found.expand(sentence)[:300]
    return first[:300] or "it is no grammar."


def _source(kind: str, text: str) -> str:
    """What llguidance takes."""
    try:
        if kind == "json_schema":
            if not has_base(json.loads(text)):
                raise GrammarError("nothing that ends matches it.")
            return LLMatcher.grammar_from_json_schema(text)
        if kind == "regex":
            return LLMatcher.grammar_from_regex(text)
        lark = _lark(text)
        _check_bases(lark)
        return LLMatcher.grammar_from_lark(lark)
    except (ValueError, RecursionError) as error:
        raise GrammarError(f"it cannot be read: {error}"[:300]) from error


def _check_bases(lark: str) -> None:
    """Raises `GrammarError`, with the place as llguidance tells it, for a schema within that has no base."""
    for mark in _JSON_RULE.finditer(lark):
        try:
            schema, _ = _DECODER.raw_decode(lark, mark.end())
        except ValueError:
            continue  # the compiler's to judge
        if not has_base(schema):
            line = lark.count("\n", 0, mark.start()) + 1
            column = mark.start() - lark.rfind("\n", 0, mark.start())
            place = f"at {line}({column})"
            raise GrammarError(
                f"{place}: failed to compile JSON schema: nothing that ends matches it"
            )


def _lark(text: str) -> str:
    """Other servers take GBNF, which has `::=`."""
    if "::=" not in text:
        return text
    # Seldom needed, and rather long.
    from llguidance.gbnf_to_lark import GbnfToLarkError, any_to_lark

    try:
        return any_to_lark(text)
    except GbnfToLarkError as error:
        raise GrammarError(f"it cannot be read: {error}"[:300]) from error


class _Bytes:
    """What `TokenizerWrapper` asks for."""

    bos_token_id = None
    eos_token_id = _NUM_BYTES

    def __init__(self, special: list[str]) -> None:
        names = ["<|end|>", *(name for name in special if name != "<|end|>")]
        self.tokens = [bytes([i]) for i in range(_NUM_BYTES)] + [name.encode() for name in names]
        self.special_token_ids = list(range(_NUM_BYTES, len(self.tokens)))

    def __call__(self, text: bytes) -> list[int]:
        return list(text)
