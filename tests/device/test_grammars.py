"""Protects answers that a grammar binds, on the device: every token is the best one that the grammar allows,
whatever the row asks of the sampler, is in the batch beside it, is preempted or lost, and the rows beside it
notice nothing."""

import json
import re
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch
from llguidance import LLTokenizer
from tokenizers import Tokenizer
from transformers import PreTrainedModel

from models.grammar_texts import choice_text, schema_text
from models.grammars import compiled, model_vocabulary
from tests.device.driving import (
    CONTEXT_LEN,
    Answer,
    Driver,
    ask,
    ask_one,
    fresh_engine,
    new_request,
)
from tests.device.reference import TIE
from tests.device.test_engine import lose_a_step
from tests.device.test_engine_sampling import Plain
from workers.engine.engine import EngineParts, ModelEngine
from workers.protocol import FinishReason, GenerateRequest, Grammar

PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "friend": {"anyOf": [{"$ref": "#"}, {"type": "null"}]},
    },
    "required": ["name", "age", "friend"],
    "additionalProperties": False,
}
POINT: dict[str, Any] = {
    "type": "object",
    "properties": {"x": {"type": "integer"}, "kind": {"enum": ["one", "two"]}},
    "required": ["x", "kind"],
    "additionalProperties": False,
}
CHOICES = ["a river", "a mountain", "an island"]
SENTENCE = r"[A-Z][a-z]{1,8}( [a-z]{1,8}){2}\."
LIST = 'start: ("- " WORD "\\n"){3}\nWORD: /[a-z]{2,9}/'
CALL = (
    'start: "<tool_call>" %json {"type": "object", "properties": {"city": {"type": "string", '
    + ('"maxLength": 9}}, "required": ["city"], "additionalProperties": false} "</tool_call>"')
)
"""As a tool that must be called is forced: JSON between the marks of a format."""


def schema(document: dict[str, Any]) -> Grammar:
    return Grammar("json_schema", schema_text(document, strict=True), "guided_json")


GRAMMARS = [
    schema(POINT),
    Grammar("lark", choice_text(CHOICES), "guided_choice"),
    Grammar("regex", SENTENCE, "guided_regex"),
    Grammar("lark", LIST, "guided_grammar"),
    Grammar("lark", CALL, "tool_choice"),
    schema(PERSON),
]
SAMPLINGS: list[dict[str, Any]] = [
    {},
    {"frequency_penalty": 1.5, "repetition_penalty": 1.2},
    {"logit_bias": ((18, -100.0), (30, 60.0), (198, 100.0))},
    {"min_tokens": 30},
    {"ignore_eos": True},
]
"""Greedy ones."""


@pytest.fixture(scope="module")
def plain(reference_model: PreTrainedModel) -> Plain:
    return Plain(reference_model)


@pytest.fixture(scope="module")
def vocabulary(parts: EngineParts) -> LLTokenizer:
    return model_vocabulary(parts.tokenizer.to_str(), parts.vocab_size, parts.eos_token_ids)


@pytest.fixture(scope="module")
def prompt(tokenizer: Tokenizer) -> list[int]:
    return tokenizer.encode("Write down what you see. It is").ids


@pytest.fixture(scope="module")
def bound(prompt: list[int]) -> list[GenerateRequest]:
    """Each grammar with one way of sampling, and the first with each."""
    pairs = [(grammar, SAMPLINGS[i % 5]) for i, grammar in enumerate(GRAMMARS)]
    pairs += [(GRAMMARS[0], sampling) for sampling in SAMPLINGS]
    return [
        new_request([*prompt, 500 + i], max_tokens=40, grammar=grammar, **sampling)
        for i, (grammar, sampling) in enumerate(pairs)
    ]


class Judge:
    """Says of greedy answers whether each token was the best that was allowed."""

    def __init__(self, plain: Plain, vocabulary: LLTokenizer, ends: frozenset[int]) -> None:
        self._plain, self._vocabulary, self._ends = plain, vocabulary, ends

    def check(self, request: GenerateRequest, answer: Answer) -> None:
        prompt, sampling, tokens = request.prompt_token_ids, request.sampling, answer.tokens
        assert sampling.grammar is not None
        matcher = compiled(sampling.grammar.kind, sampling.grammar.text, self._vocabulary)
        logits = self._plain.logits([*prompt, *tokens])[len(prompt) - 1 :]
        for at, token in enumerate(tokens):
            values = self._plain.penalised(logits[at].clone(), prompt, tokens[:at], sampling)
            bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
            allowed = torch.from_numpy(np.unpackbits(bits, bitorder="little")).bool()[: len(values)]
            assert allowed[token], f"token {at} of {answer.text!r}"
            if at < sampling.min_tokens or sampling.ignore_eos:
                without_end = allowed.clone()
                without_end[list(self._ends)] = False
                allowed = without_end if without_end.any() else allowed
            best = values[allowed].max()
            assert values[token] >= best - TIE, f"token {at} of {answer.text!r}"
            assert matcher.consume_token(token)
        reason = FinishReason.STOP if matcher.is_stopped() else FinishReason.LENGTH
        assert answer.finish_reason is reason


@pytest.fixture(scope="module")
def judge(plain: Plain, vocabulary: LLTokenizer, parts: EngineParts) -> Judge:
    return Judge(plain, vocabulary, parts.eos_token_ids)


def test_every_token_is_the_best_that_is_allowed_and_others_notice_nothing(
    engine: ModelEngine,
    bound: list[GenerateRequest],
    prompt: list[int],
    judge: Judge,
    plain: Plain,
):
    free = [new_request([*prompt, 600 + i], max_tokens=12) for i in range(6)]
    answers = ask(engine, [*bound, *free])
    for request, answer in zip(bound, answers, strict=False):
        judge.check(request, answer)
    for request, answer in zip(free, answers[len(bound) :], strict=True):
        plain.check(request, answer.tokens, engine._parts.eos_token_ids)
    assert engine.stats().num_compiles_after_warmup == 0
    texts = [answer.text for answer in answers]
    assert json.loads(texts[0])["kind"] in ("one", "two")
    assert texts[1] in CHOICES
    assert re.fullmatch(SENTENCE, texts[2])
    assert re.fullmatch(r"(- [a-z]{2,9}\n){3}", texts[3])
    called = re.fullmatch(r"<tool_call>(.*)</tool_call>", texts[4], re.DOTALL)
    assert called is not None
    assert set(json.loads(called[1])) == {"city"}


def test_preemption_keeps_the_place_in_a_grammar(
    parts: EngineParts, bound: list[GenerateRequest], judge: Judge
):
    engine = fresh_engine(parts, num_blocks=CONTEXT_LEN // parts.block_len)
    answers = ask(engine, bound)
    assert engine._scheduler.num_preemptions > 0
    for request, answer in zip(bound, answers, strict=True):
        judge.check(request, answer)


def test_a_lost_step_does_not_either(
    engine: ModelEngine, bound: list[GenerateRequest], judge: Judge
):
    driver = Driver(engine)
    ids = [driver.add(request) for request in bound[:5]]
    lose_a_step(driver, "collect")
    driver.run()
    for request, request_id in zip(bound, ids, strict=False):
        judge.check(request, driver.answer(request_id))


def test_random_answers_match_whatever_the_sampling(engine: ModelEngine, prompt: list[int]):
    """Every choice of its own: it is a place in the grammar as well as a draw."""
    samplings: list[dict[str, Any]] = [
        {"temperature": 1.5},
        {"temperature": 1.0, "top_p": 0.9, "top_k": 50},
        {"temperature": 1.2, "min_p": 0.02, "presence_penalty": 1.0},
    ]
    driver = Driver(engine)
    ids = [
        driver.add(
            new_request(
                prompt, n=4, seed=i, max_tokens=90, grammar=schema((POINT, PERSON)[i % 2]), **fields
            )
        )
        for i, fields in enumerate(samplings)
    ]
    driver.run()
    texts = set()
    for i, request_id in enumerate(ids):
        for choice in range(4):
            answer = driver.answer(request_id, choice)
            if answer.finish_reason is FinishReason.STOP:
                jsonschema.validate(json.loads(answer.text), (POINT, PERSON)[i % 2])
            texts.add(answer.text)
    assert len(texts) > 6
    assert engine.stats().num_compiles_after_warmup == 0


def test_stop_strings_cut_bound_answers_too(engine: ModelEngine, prompt: list[int]):
    cut = ask_one(engine, prompt, max_tokens=40, grammar=schema(POINT), stop=('"kind"',))
    assert (cut.finish_reason, cut.stop_reason) == (FinishReason.STOP, '"kind"')
    assert cut.text.lstrip().startswith("{")
    assert '"kind"' not in cut.text
    whole = ask_one(engine, prompt, max_tokens=40, grammar=schema(POINT), stop=("} never",))
    assert whole.text.endswith("}")
    assert json.loads(whole.text)


def test_logprobs_are_the_models_own_whatever_is_allowed(
    engine: ModelEngine, prompt: list[int], plain: Plain
):
    driver = Driver(engine)
    grammar = Grammar("lark", choice_text(CHOICES), "")
    request_id = driver.add(new_request(prompt, max_tokens=9, grammar=grammar, logprobs=3))
    driver.run()
    deltas = driver.collected.deltas[request_id]
    reported = [one for delta in deltas for one in delta.logprobs]
    assert [one.token_id for one in reported] == driver.answer(request_id).tokens
    plain.check_logprobs(reported, prompt, 3)
