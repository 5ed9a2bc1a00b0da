"""Protects how a real engine's answers end: limits, end-of-sequence tokens, stop strings, refusals; and
that it keeps the contract which the service relies on."""

import msgspec
import pytest
from tokenizers import Tokenizer

from tests.contract.test_worker_engine import EngineContract
from tests.device.driving import (
    CONTEXT_LEN,
    Driver,
    ask,
    ask_one,
    engine_config,
    fresh_engine,
    new_request,
)
from workers.engine.build import build_engine
from workers.engine.engine import EngineParts, ModelEngine
from workers.engine.interface import Engine
from workers.errors import HopelessLoadError, LoadError, RequestError
from workers.protocol import FinishReason, GenerateRequest

QUESTION = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
PROSE = "The first bridge over the river was built of oak"


class TestModelEngine(EngineContract):
    @pytest.fixture
    def engine(self, parts: EngineParts) -> Engine:
        return fresh_engine(parts)

    def request(self, *, max_tokens: int = 5, n: int = 1, num_prompt: int = 3) -> GenerateRequest:
        return new_request([504] * num_prompt, n=n, max_tokens=max_tokens, ignore_eos=True)


@pytest.fixture
def question(tokenizer: Tokenizer) -> list[int]:
    return tokenizer.encode(QUESTION).ids


@pytest.fixture
def prose(tokenizer: Tokenizer) -> list[int]:
    return tokenizer.encode(PROSE).ids


def test_paris(engine: ModelEngine, question: list[int], parts: EngineParts):
    answer = ask_one(engine, question, max_tokens=20)
    assert answer.text == "The capital of France is Paris."
    assert (answer.finish_reason, answer.stop_reason) == (FinishReason.STOP, None)
    # The end-of-sequence token is counted and not shown.
    assert answer.tokens[-1] in parts.eos_token_ids
    assert answer.usage.completion_tokens == len(answer.tokens)
    assert answer.usage.prompt_tokens == len(question)


def test_an_ignored_end_of_sequence_goes_on_to_the_limit(
    engine: ModelEngine, question: list[int], parts: EngineParts
):
    answer = ask_one(engine, question, max_tokens=14, ignore_eos=True)
    assert answer.finish_reason is FinishReason.LENGTH
    assert answer.usage.completion_tokens == 14
    assert parts.eos_token_ids & set(answer.tokens)


def test_min_tokens_delays_the_end(engine: ModelEngine, question: list[int]):
    answer = ask_one(engine, question, max_tokens=14, min_tokens=12)
    assert answer.usage.completion_tokens >= 12
    assert answer.text.startswith("The capital of France is Paris.")


def test_a_stop_string_ends_the_answer_and_is_not_sent(engine: ModelEngine, question: list[int]):
    answer = ask_one(engine, question, max_tokens=20, stop=("nce is", "never said"))
    assert answer.text == "The capital of Fra"
    assert (answer.finish_reason, answer.stop_reason) == (FinishReason.STOP, "nce is")


def test_a_stop_token_ends_the_answer_and_is_named(engine: ModelEngine, question: list[int]):
    whole = ask_one(engine, question, max_tokens=20)
    stop = whole.tokens[3]
    answer = ask_one(engine, question, max_tokens=20, stop_token_ids=(stop,))
    assert answer.tokens == whole.tokens[:4]
    assert (answer.finish_reason, answer.stop_reason) == (FinishReason.STOP, stop)


def test_the_text_is_the_tokens_decoded(
    engine: ModelEngine, tokenizer: Tokenizer, prose: list[int]
):
    answer = ask_one(engine, prose, max_tokens=40, ignore_eos=True, temperature=1.0, seed=5)
    whole = tokenizer.decode(prose + answer.tokens)
    assert PROSE + answer.text == whole.replace("\N{REPLACEMENT CHARACTER}", "")


@pytest.mark.parametrize("max_tokens", [1, 2, 7])
def test_the_limit_is_exact(engine: ModelEngine, prose: list[int], max_tokens: int):
    answer = ask_one(engine, prose, max_tokens=max_tokens, ignore_eos=True)
    assert len(answer.tokens) == answer.usage.completion_tokens == max_tokens


@pytest.mark.parametrize("prompt_len", [0, CONTEXT_LEN, CONTEXT_LEN + 1])
def test_a_prompt_that_leaves_no_room_is_refused(engine: ModelEngine, prompt_len: int):
    with pytest.raises(RequestError):
        engine.add(new_request([504] * prompt_len))
    assert not engine.has_work()


def test_a_prompt_one_token_short_of_the_context_gets_one_token(engine: ModelEngine):
    answer = ask_one(engine, [504] * (CONTEXT_LEN - 1), max_tokens=50, ignore_eos=True)
    assert answer.finish_reason is FinishReason.LENGTH
    assert answer.usage.completion_tokens == 1


def test_the_context_ends_an_answer_that_asks_for_more(engine: ModelEngine, prose: list[int]):
    prompt = (prose * 40)[: CONTEXT_LEN - 20]
    answer = ask_one(engine, prompt, max_tokens=5000, ignore_eos=True)
    assert answer.finish_reason is FinishReason.LENGTH
    assert answer.usage.completion_tokens == 20


def test_a_context_filled_among_the_fewest_blocks_ends_too(parts: EngineParts, prose: list[int]):
    engine = fresh_engine(parts, num_blocks=CONTEXT_LEN // parts.block_len)
    prompt = (prose * 40)[: CONTEXT_LEN - 12]
    requests = [new_request(prompt, max_tokens=50, ignore_eos=True) for _ in range(3)]
    answers = ask(engine, requests)
    assert [len(answer.tokens) for answer in answers] == [12] * 3
    assert len({tuple(answer.tokens) for answer in answers}) == 1


def test_preemption_does_not_pass_for_a_prompt_read_from_the_cache(
    parts: EngineParts, prose: list[int]
):
    engine = fresh_engine(parts, num_blocks=CONTEXT_LEN // parts.block_len)
    prompts = [[token] + prose * 9 for token in range(600, 603)]
    driver = Driver(engine)
    ids = [driver.add(new_request(p, max_tokens=40, ignore_eos=True)) for p in prompts]
    driver.run()
    assert engine._scheduler.num_preemptions > 0
    assert [driver.answer(request_id).usage.cached_tokens for request_id in ids] == [0] * 3


def test_a_greedy_row_is_greedy_beside_sampled_ones(engine: ModelEngine, question: list[int]):
    hot = [new_request(question, max_tokens=12, temperature=2.0, seed=i) for i in range(3)]
    answers = ask(engine, [*hot, new_request(question, max_tokens=20)])
    assert answers[3].text == "The capital of France is Paris."


@pytest.mark.parametrize(
    "sampling", [{"top_k": 1}, {"top_p": 0.0}, {"min_p": 1.0}, {"top_p": 1e-9, "seed": 1}]
)
def test_a_choice_of_one_token_is_the_greedy_one(
    engine: ModelEngine, question: list[int], sampling: dict[str, object]
):
    answer = ask_one(engine, question, max_tokens=20, temperature=1.7, **sampling)
    assert answer.text == "The capital of France is Paris."


def test_urgent_requests_go_first(parts: EngineParts, prose: list[int]):
    engine = fresh_engine(parts, num_blocks=CONTEXT_LEN // parts.block_len)
    driver = Driver(engine)
    ids = []
    for priority in (2, 1, 0):
        request = new_request([priority, *prose * 15][:160], max_tokens=4, ignore_eos=True)
        ids.append(driver.add(msgspec.structs.replace(request, priority=priority)))
    ended: list[str] = []
    while engine.has_work():
        driver.step()
        ended += [i for i in reversed(ids) if driver.collected.is_over(i) and i not in ended]
    assert ended == list(reversed(ids))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"num_blocks": 3}, "--num-blocks"),
        ({"block_len": 48}, "--block-len"),
        ({"max_step_tokens": 32}, "no room for 32 rows"),
        ({"model": "never-heard-of"}, "never-heard-of"),
    ],
)
def test_settings_that_cannot_work_are_refused_with_one_sentence(
    parts: EngineParts, fields: dict[str, object], words: str
):
    with pytest.raises(HopelessLoadError, match=words) as caught:
        build_engine(engine_config(**fields), lambda what, share: None)
    assert "\n" not in str(caught.value)


def test_a_cache_that_memory_cannot_hold_is_refused_with_the_figures(parts: EngineParts):
    with pytest.raises(
        LoadError, match=r"does not fit: of .* GiB .* weights take 0\.5 GiB"
    ) as caught:
        build_engine(engine_config(memory_share=0.01), lambda what, share: None)
    assert not isinstance(caught.value, HopelessLoadError)
    assert "--memory-share" in str(caught.value)
