"""Protects what the engine computes: the tokens of plain transformers, whatever else is in the batch, in
the cache or gone wrong on the device; and that nothing compiles once it is ready."""

import random
import subprocess
import sys
from dataclasses import replace

import pytest
from tokenizers import Tokenizer

from tests.device.driving import (
    CONTEXT_LEN,
    LADDER,
    Answer,
    Driver,
    ask,
    ask_one,
    fresh_engine,
    new_request,
)
from tests.device.forced import ask_forced
from tests.device.reference import Generated, Reference
from workers.engine.engine import MAX_FAILED_STEPS, EngineParts, ModelEngine
from workers.protocol import FinishReason

TEXT = """The first bridge over the river was built of oak and lasted for almost ninety winters. Then
the ice took it, one night in March, and the ferryman had work again. He had never trusted the bridge.
His daughter, who kept the accounts, noted that grain was now two coins dearer on the other side, that
the miller had bought a second boat, and that nobody had yet asked who would pay for the stone. When
the council met, the mason brought a model made of bread, which held until the dog was let in."""
SHARED = "You are a careful assistant who answers every question about geography in one sentence. "
QUESTIONS = ("Where is Paris?", "Where does the Nile end?", "Name a lake.", "What is a delta?")
LONG_SEGMENT = max(shape.segment_len for shape in LADDER.prefill)

SECOND_START = """
import logging, sys
from torchtpu import environment
environment.apply(environment.plain_variables())
logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(message)s")
from tests.device.driving import ask_one, engine_config
from workers.engine.build import build_engine
engine = build_engine(engine_config(), lambda what, share: None).engine
print("tokens", ask_one(engine, [504, 3575, 282, 4649, 314], max_tokens=6).tokens)
print("later compilations", engine.stats().num_compiles_after_warmup)
"""


@pytest.fixture(scope="module")
def prompts(tokenizer: Tokenizer) -> list[list[int]]:
    """32 prompts of 1 to 150 tokens; some are longer than any prefill segment, some begin alike."""
    text = tokenizer.encode(TEXT).ids
    shared = tokenizer.encode(SHARED * 2).ids
    lengths = [1, 2, 5, 15, 16, 17, 31, 32, 33, 48, 64, 79, 96, LONG_SEGMENT]
    pieces = [text[i * 3 : i * 3 + length] for i, length in enumerate(lengths)]
    pieces += [text[i : i + 20 * i] for i in range(1, 5)]
    pieces += [(text + text)[i : i + 130 + 10 * i] for i in range(3)]
    pieces += [shared + tokenizer.encode(question).ids for question in QUESTIONS]
    pieces += [tokenizer.encode(question).ids for question in QUESTIONS]
    pieces += [shared, shared[:33], shared[:32]]
    assert len(pieces) == 32
    return pieces


@pytest.fixture(scope="module")
def lengths() -> list[int]:
    """Tokens asked of each prompt: 4 to 12."""
    return [4 + i * 7 % 9 for i in range(32)]


@pytest.fixture(scope="module")
def together(parts: EngineParts, prompts: list[list[int]], lengths: list[int]) -> list[list[int]]:
    """The tokens of all prompts, sent at once."""
    return tokens_of(fresh_engine(parts), prompts, lengths)


def tokens_of(engine: ModelEngine, prompts: list[list[int]], lengths: list[int]) -> list[list[int]]:
    requests = [
        new_request(prompt, max_tokens=length)
        for prompt, length in zip(prompts, lengths, strict=True)
    ]
    return [answer.tokens for answer in ask(engine, requests)]


@pytest.fixture(scope="module")
def expected(reference: Reference, prompts: list[list[int]], lengths: list[int]) -> list[Generated]:
    return reference.generate(prompts, lengths)


def test_a_full_batch_gives_the_tokens_of_transformers(
    together: list[list[int]], expected: list[Generated], reference: Reference
):
    for index, (tokens, generated) in enumerate(zip(together, expected, strict=True)):
        reference.check(f"prompt {index} in a full batch", tokens, generated)


def test_a_prompt_alone_gives_the_tokens_of_the_full_batch(
    parts: EngineParts,
    prompts: list[list[int]],
    together: list[list[int]],
    expected: list[Generated],
    reference: Reference,
):
    for index in range(0, len(prompts), 4):
        prompt, tokens = prompts[index], together[index]
        (alone,) = tokens_of(fresh_engine(parts), [prompt], [len(tokens)])
        if alone != tokens:
            reference.check(f"prompt {index} alone", alone, expected[index])


def test_hits_chunks_and_too_few_blocks_change_no_token(
    parts: EngineParts,
    prompts: list[list[int]],
    lengths: list[int],
    together: list[list[int]],
    expected: list[Generated],
    reference: Reference,
):
    answers = ask_forced(parts, prompts, lengths, CONTEXT_LEN // parts.block_len + 8)
    for index, (answer, before) in enumerate(zip(answers, together, strict=True)):
        if answer.tokens != before:
            reference.check(f"prompt {index} among few blocks", answer.tokens, expected[index])


def test_nothing_compiles_while_a_hundred_mixed_requests_run(
    engine: ModelEngine, tokenizer: Tokenizer
):
    random_ = random.Random(0)
    text = tokenizer.encode(TEXT).ids
    samplings = [
        {},
        {"temperature": 0.7},
        {"temperature": 1.0, "top_k": 5},
        {"temperature": 1.3, "top_p": 0.8},
        {"temperature": 1.0, "min_p": 0.1, "seed": 7},
        {"temperature": 0.2, "top_k": 50, "top_p": 0.95, "min_p": 0.01},
        {"stop": (" the", "\n")},
        {"ignore_eos": True, "min_tokens": 3},
        {"stop_token_ids": (text[7],)},
    ]
    waiting = []
    for i in range(100):
        start, length = random_.randrange(40), random_.choice((1, 6, 12, 16, 20))
        length = 130 if i % 20 == 0 else length
        fields = {"max_tokens": random_.randint(1, 8), **samplings[i % len(samplings)]}
        waiting.append(new_request(text[start : start + length], n=1 + (i % 17 == 0), **fields))
    driver, aborted = Driver(engine), set()
    sent = [driver.add(request) for request in waiting[:40]]
    for step, request in enumerate(waiting[40:]):
        sent.append(driver.add(request))
        if step % 2:
            driver.step()
        if step % 20 == 0:
            aborted.add(sent[-3])
            driver.abort(sent[-3])
    driver.run()
    for request_id in sent:
        assert driver.collected.is_over(request_id)
        ends = set(driver.collected.ends(request_id).values())
        assert ends <= {FinishReason.STOP, FinishReason.LENGTH} or request_id in aborted
    assert engine.stats().num_compiles_after_warmup == 0
    assert engine.stats().kv_usage == 0


def test_a_second_start_compiles_nothing_and_computes_the_same(engine: ModelEngine):
    tokens = ask_one(engine, [504, 3575, 282, 4649, 314], max_tokens=6).tokens
    command = [sys.executable, "-c", SECOND_START]
    second = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert second.returncode == 0, second.stderr
    assert "\n0 programs compiled, " in f"\n{second.stdout}"
    assert f"tokens {tokens}\n" in second.stdout
    assert "later compilations 0\n" in second.stdout


def test_a_repeated_prompt_is_read_from_the_cache(
    engine: ModelEngine, parts: EngineParts, prompts: list[list[int]]
):
    prompt = max(prompts, key=len)
    first, second = (ask_one(engine, prompt) for _ in range(2))
    assert first.usage.cached_tokens == 0
    full_blocks = (len(prompt) - 1) // parts.block_len * parts.block_len
    assert second.usage.cached_tokens == full_blocks
    assert second.tokens == first.tokens


def test_prompts_that_begin_alike_share_their_beginning(
    engine: ModelEngine, parts: EngineParts, prompts: list[list[int]]
):
    block_len = parts.block_len
    first, other = prompts[21], prompts[22]
    ask_one(engine, first)
    alike = next(i for i, pair in enumerate(zip(first, other, strict=False)) if len({*pair}) > 1)
    shared = ask_one(engine, other)
    assert 0 < shared.usage.cached_tokens == alike // block_len * block_len
    assert shared.tokens == ask_one(fresh_engine(parts), other).tokens


def test_generated_tokens_serve_the_next_turn_of_a_dialogue(
    engine: ModelEngine, parts: EngineParts, prompts: list[list[int]]
):
    first = ask_one(engine, prompts[10], max_tokens=24, ignore_eos=True)
    dialogue = prompts[10] + first.tokens + [28, 198]
    second = ask_one(engine, dialogue)
    assert second.usage.cached_tokens > len(prompts[10])
    assert second.tokens == ask_one(fresh_engine(parts), dialogue).tokens


@pytest.mark.parametrize("when", ["dispatch", "collect"])
def test_a_failed_step_costs_no_request_its_answer(
    engine: ModelEngine, prompts: list[list[int]], when: str
):
    requests = [new_request(prompt, max_tokens=12, ignore_eos=True) for prompt in prompts[:6]]
    undisturbed = [a.tokens for a in ask(engine, [*requests, sampled(prompts[7])])]
    again = [new_request(prompt, max_tokens=12, ignore_eos=True) for prompt in prompts[:6]]
    driver = Driver(engine)
    ids = [driver.add(request) for request in [*again, sampled(prompts[7])]]
    lose_a_step(driver, when)
    driver.run()
    assert engine._scheduler.num_preemptions == len(ids)
    answers = [driver.answer(request_id) for request_id in ids]
    assert [answer.tokens for answer in answers] == undisturbed
    assert all(answer.text.count("�") == 0 for answer in answers)
    assert engine.stats().kv_usage == 0


def sampled(prompt: list[int]):
    return new_request(prompt, max_tokens=12, temperature=0.9, seed=3, ignore_eos=True)


def lose_a_step(driver: Driver, when: str) -> None:
    """Three good steps, then one that meets tensors which an earlier step has consumed."""
    runner = driver.engine._runner
    consumed = list(runner._cache)
    for _ in range(3):
        driver.step()
    if when == "dispatch":
        runner._cache = consumed
    else:
        handle = driver.engine._in_flight
        driver.engine._in_flight = replace(handle, tokens=consumed[0])
    before = len(driver.collected.deltas)
    driver.step()
    assert len(driver.collected.deltas) == before
    assert driver.engine.has_work()


def test_a_device_that_keeps_failing_ends_the_engine_but_not_its_books(
    engine: ModelEngine, prompts: list[list[int]]
):
    driver = Driver(engine)
    request_id = driver.add(new_request(prompts[3], max_tokens=20, ignore_eos=True))
    consumed = list(engine._runner._cache)
    driver.step()
    with pytest.raises(RuntimeError, match="deleted or donated"):
        # A failure shows one step late, so each takes two steps.
        for _ in range(2 * MAX_FAILED_STEPS):
            engine._runner._cache = consumed
            driver.step()
    driver.collected.take(engine.fail_all("It broke."))
    assert driver.collected.ends(request_id) == {0: FinishReason.ERROR}
    assert ask_one(engine, prompts[3], max_tokens=2).finish_reason is FinishReason.LENGTH


def test_an_abort_frees_row_and_blocks_within_two_steps(
    engine: ModelEngine, prompts: list[list[int]]
):
    driver = Driver(engine)
    ids = [driver.add(new_request(prompts[9], max_tokens=100, ignore_eos=True)) for _ in "ab"]
    for _ in range(4):
        driver.step()
    used = engine.stats().kv_usage
    assert engine.stats().num_running == 2
    driver.abort(ids[0])
    for _ in range(2):
        driver.step()
    assert engine.stats().num_running == 1
    assert 0 < engine.stats().kv_usage < used
    driver.abort(ids[1])
    driver.run()
    assert (engine.stats().num_running, engine.stats().kv_usage) == (0, 0)
    engine._scheduler.check_integrity()


def test_choices_differ_and_each_is_repeatable(engine: ModelEngine, prompts: list[list[int]]):
    def choices() -> list[Answer]:
        driver = Driver(engine)
        request = new_request(prompts[12], n=4, max_tokens=12, temperature=1.2, seed=99)
        request_id = driver.add(request)
        driver.run()
        return [driver.answer(request_id, choice) for choice in range(4)]

    first, second = choices(), choices()
    assert [a.tokens for a in first] == [a.tokens for a in second]
    assert len({tuple(a.tokens) for a in first}) == 4


def test_two_requests_without_a_seed_differ(engine: ModelEngine, prompts: list[list[int]]):
    requests = [new_request(prompts[12], max_tokens=16, temperature=1.5) for _ in range(2)]
    first, second = ask(engine, requests)
    assert first.tokens != second.tokens
