"""Protects how grammars join a running engine: they compile beside it, one that fails ends its own request only,
and a request that waits for one can be aborted, expire and be counted like any other."""

import threading
from collections.abc import Iterator
from dataclasses import replace

import msgspec
import numpy as np
import pytest

from models.errors import GrammarError
from tests.contract.test_worker_engine import Collected, run
from tests.fakes.toy_device import EOS, NUM_TOKENS, toy_vocabulary
from tests.fakes.toy_engine import CONTEXT_LEN, expected_answer, new_request, toy_engine
from workers.engine import binding
from workers.engine import grammars as module
from workers.engine.binding import bar
from workers.engine.engine import ModelEngine
from workers.engine.grammars import MAX_KEPT, NUM_THREADS, TOO_SLOW, Grammars
from workers.engine.interface import EXPIRED
from workers.errors import RequestError
from workers.protocol import FinishReason, GenerateRequest, Grammar

LETTERS = Grammar("regex", "[a-f]*", "guided_regex")
NONE = Grammar("regex", "(", "guided_regex")


@pytest.fixture
def grammars() -> Grammars:
    return Grammars(toy_vocabulary, NUM_TOKENS)


@pytest.fixture
def engine(grammars: Grammars) -> ModelEngine:
    return ModelEngine(replace(toy_engine()._parts, grammars=grammars))


@pytest.fixture
def busy(grammars: Grammars) -> Iterator[threading.Event]:
    """No grammar gets compiled until it is set."""
    done = threading.Event()
    for _ in range(NUM_THREADS):
        grammars._threads.submit(done.wait)
    yield done
    done.set()


def bound(grammar: Grammar | None, **fields: object) -> GenerateRequest:
    request = new_request([1, 2, 3], **fields)
    sampling = msgspec.structs.replace(request.sampling, grammar=grammar)
    return msgspec.structs.replace(request, sampling=sampling)


def tokens_of(engine: ModelEngine, request: GenerateRequest) -> list[int]:
    engine.add(request)
    (sequence,) = engine._residents[request.request_id].sequences
    run(engine)
    return sequence.token_ids[len(request.prompt_token_ids) :]


def test_others_run_while_a_grammar_is_compiled(engine: ModelEngine, busy: threading.Event):
    waiting, free = bound(LETTERS), bound(None)
    engine.add(waiting)
    engine.add(free)
    collected = Collected()
    while not collected.is_over(free.request_id):
        collected.take(engine.step())
    assert engine.has_work()
    assert engine.stats().num_waiting == 1
    assert waiting.request_id not in collected.deltas
    busy.set()
    assert run(engine, collected).is_over(waiting.request_id)


def test_a_request_that_waits_for_its_grammar_can_be_ended(
    engine: ModelEngine, busy: threading.Event
):
    aborted, late, lost = bound(LETTERS), bound(LETTERS, deadline_s=1.0), bound(LETTERS, n=2)
    for request in (aborted, late, lost):
        engine.add(request)
    collected = Collected()
    collected.take(engine.abort(aborted.request_id))
    collected.take(engine.step())
    assert collected.deltas[late.request_id][0].error == EXPIRED
    collected.take(engine.fail_all("It broke."))
    assert collected.ends(lost.request_id) == dict.fromkeys(range(2), FinishReason.ERROR)
    assert not engine.has_work()
    busy.set()
    request = bound(LETTERS)
    assert tokens_of(engine, request) == expected_answer(request)[0]


def test_a_grammar_that_is_none_ends_its_own_request(engine: ModelEngine):
    bad, good = bound(NONE, n=2), bound(LETTERS)
    for request in (bad, good):
        engine.add(request)
    collected = run(engine)
    assert {delta.param for delta in collected.deltas[bad.request_id]} == {"guided_regex"}
    assert collected.ends(bad.request_id) == dict.fromkeys(range(2), FinishReason.ERROR)
    assert collected.ends(good.request_id)[0] is not FinishReason.ERROR


def test_an_answer_that_its_grammar_cannot_follow_ends_alone(engine: ModelEngine):
    """Such as one that gets too complex; here the matcher is told of a token that it does not allow."""
    broken, good = bound(Grammar("regex", "a[b-f]{20}", "guided_regex")), bound(LETTERS)
    for request in (broken, good):
        engine.add(request)
    collected = Collected()
    (sequence,) = engine._residents[broken.request_id].sequences
    while len(sequence.token_ids) < 6:
        collected.take(engine.step())
    assert sequence.binding is not None
    sequence.binding._matcher.consume_token(1)
    run(engine, collected)
    last = collected.deltas[broken.request_id][-1]
    assert (last.finish_reason, last.param) == (FinishReason.ERROR, "guided_regex")
    assert collected.ends(good.request_id)[0] is not FinishReason.ERROR


def test_an_answer_whose_grammar_is_too_slow_to_follow_ends(
    engine: ModelEngine, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(binding, "MOST_OF_A_TOKEN_S", 0.0)
    monkeypatch.setattr(binding, "GRACE_S", 0.0)
    slow, free = bound(LETTERS), bound(None)
    for request in (slow, free):
        engine.add(request)
    collected = run(engine)
    last = collected.deltas[slow.request_id][-1]
    assert (last.error, last.param) == (binding.TOO_SLOW, "guided_regex")
    assert collected.ends(free.request_id)[0] is not FinishReason.ERROR


def test_a_grammar_that_takes_too_long_is_given_up(
    engine: ModelEngine, grammars: Grammars, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(module, "MOST_S", -1.0)
    release = threading.Event()
    request = bound(LETTERS)
    engine.add(request)
    compiling = grammars._waiting[request.request_id]
    compiling.future.result()
    # As if a thread had begun, and were still at it.
    compiling.future = grammars._threads.submit(release.wait)
    collected = run(engine)
    release.set()
    assert collected.deltas[request.request_id][-1].error == TOO_SLOW


def test_equal_grammars_are_compiled_once_and_not_kept_for_ever(
    engine: ModelEngine, grammars: Grammars
):
    first, second = bound(LETTERS), bound(LETTERS)
    assert tokens_of(engine, first) == tokens_of(engine, second) == expected_answer(first)[0]
    assert len(grammars._kept) == 1
    for i in range(MAX_KEPT + 5):
        tokens_of(engine, bound(Grammar("regex", f"a{{{i}}}b"), max_tokens=1))
    assert len(grammars._kept) == MAX_KEPT


def test_an_end_may_not_come_early_unless_it_must(engine: ModelEngine):
    request = bound(Grammar("regex", "abc?"), max_tokens=9, ignore_eos=False)
    longer = msgspec.structs.replace(request.sampling, min_tokens=6)
    assert tokens_of(engine, msgspec.structs.replace(request, sampling=longer)) == [1, 2, 3]
    mask = np.array([0b101], np.int32)
    bar(mask, frozenset({EOS}))
    assert mask.tolist() == [0b100]
    bar(mask, frozenset({2}))
    assert mask.tolist() == [0b100]


def test_a_whole_answer_ends_at_once_also_at_its_last_token(engine: ModelEngine):
    for max_tokens in (3, CONTEXT_LEN):
        request = bound(Grammar("regex", "abc"), max_tokens=max_tokens)
        engine.add(request)
        collected = run(engine)
        assert collected.ends(request.request_id) == {0: FinishReason.STOP}
        assert collected.deltas[request.request_id][-1].usage.completion_tokens == 3


def test_a_model_whose_vocabulary_cannot_be_bound_refuses_grammars():
    def fail() -> None:
        raise GrammarError("no vocabulary")

    assert Grammars(fail, NUM_TOKENS).why_not == "no vocabulary"
    assert Grammars(toy_vocabulary, NUM_TOKENS).why_not is None
    engine = ModelEngine(replace(toy_engine()._parts, grammars=None))
    with pytest.raises(RequestError) as caught:
        engine.add(bound(LETTERS))
    assert caught.value.param == "guided_regex"
    assert not engine.has_work()
