"""Protects the sampling parameters in a running engine: every token and every log-probability is the one
that plain transformers logits give, whatever else is in the batch, in the cache or preempted."""

import math
from collections import Counter
from collections.abc import Sequence

import pytest
import torch
from tokenizers import Tokenizer
from transformers import PreTrainedModel

from tests.device.driving import (
    CONTEXT_LEN,
    LADDER,
    Driver,
    ask,
    ask_one,
    fresh_engine,
    new_request,
)
from tests.device.reference import TIE, one_thread
from tests.device.test_engine import TEXT, lose_a_step
from torchtpu.buckets import SEGMENT_SAMPLES
from workers.engine.engine import EngineParts, ModelEngine
from workers.errors import RequestError
from workers.protocol import GenerateRequest, OutputDelta, SamplingParams, TokenLogprobs

NUM_SCORED = LADDER.max_rows + SEGMENT_SAMPLES
"""The most prompt tokens that a step scores."""
PENALTIES = [
    {"repetition_penalty": 1.3},
    {"repetition_penalty": 0.8},
    {"frequency_penalty": 1.1},
    {"frequency_penalty": -0.6},
    {"presence_penalty": 1.5},
    {"presence_penalty": -1.0},
    {"logit_bias": ((28, -100.0), (30, 3.0), (198, 100.0)), "presence_penalty": 2.0},
    {"min_tokens": 6, "stop_token_ids": (28, 198, 253, 260, 284)},
    {"repetition_penalty": 1.1, "frequency_penalty": 0.2, "presence_penalty": 0.3, "min_tokens": 3},
]
MIXED = [
    {},
    {"logprobs": 2},
    {"temperature": 0.8},
    {"temperature": 1.1, "top_p": 0.8, "logprobs": 0},
    {"temperature": 0.7, "repetition_penalty": 1.2, "seed": 4},
    {"frequency_penalty": 0.8, "prompt_logprobs": 1},
    {"temperature": 1.0, "logit_bias": ((30, 2.0),), "top_k": 9, "logprobs": 20},
    {"min_tokens": 5, "stop_token_ids": (28, 30)},
]


@pytest.fixture(scope="module")
def text(tokenizer: Tokenizer) -> list[int]:
    return tokenizer.encode(TEXT).ids


@pytest.fixture(scope="module")
def prompts(text: list[int]) -> list[list[int]]:
    return [text[5 * i : 5 * i + 9 + 2 * i] for i in range(len(PENALTIES))]


class Plain:
    """Logits of transformers on the CPU, and what the parameters make of them, written down plainly."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model

    def logits(self, tokens: Sequence[int]) -> torch.Tensor:
        """[len, vocab]"""
        with torch.no_grad(), one_thread():
            return self._model(torch.tensor([list(tokens)])).logits[0]

    def check(self, request: GenerateRequest, tokens: list[int], eos: frozenset[int]) -> None:
        """Every token of a greedy answer is the best one after its own penalties, or as good."""
        prompt, sampling = request.prompt_token_ids, request.sampling
        ends = {*sampling.stop_token_ids} | (set() if sampling.ignore_eos else set(eos))
        logits = self.logits([*prompt, *tokens])[len(prompt) - 1 :]
        for at, token in enumerate(tokens):
            values = self.penalised(logits[at].clone(), prompt, tokens[:at], sampling)
            if at < sampling.min_tokens:
                values[list(ends)] = -math.inf
            assert values[token] >= values.max() - TIE, f"token {at} of {sampling}"

    @staticmethod
    def penalised(
        values: torch.Tensor, prompt: list[int], answer: list[int], sampling: SamplingParams
    ) -> torch.Tensor:
        for token, bias in sampling.logit_bias:
            values[token] += bias
        for token in {*prompt, *answer}:
            by = sampling.repetition_penalty
            values[token] = values[token] / by if values[token] > 0 else values[token] * by
        for token, count in Counter(answer).items():
            values[token] -= sampling.frequency_penalty * count + sampling.presence_penalty
        return values

    def check_logprobs(
        self, reported: Sequence[TokenLogprobs | None], before: list[int], num_top: int
    ) -> None:
        """`reported` are those of the tokens that follow `before`, without penalties of any kind."""
        tokens = [one.token_id for one in reported]
        expected = self.logits([*before, *tokens])[len(before) - 1 : -1].log_softmax(-1)
        for one, row in zip(reported, expected, strict=True):
            assert one.logprob == pytest.approx(row[one.token_id].item(), abs=TIE)
            assert len(one.top) == num_top
            best = row.topk(num_top).values.tolist()
            assert [value for _, value in one.top] == pytest.approx(best, abs=TIE)
            for token, value in one.top:
                assert value == pytest.approx(row[token].item(), abs=TIE)


@pytest.fixture(scope="module")
def plain(reference_model: PreTrainedModel) -> Plain:
    return Plain(reference_model)


def penalised_requests(prompts: list[list[int]]) -> list[GenerateRequest]:
    return [
        new_request(prompt, max_tokens=14, **penalties)
        for prompt, penalties in zip(prompts, PENALTIES, strict=True)
    ]


@pytest.fixture(scope="module")
def alone(parts: EngineParts, prompts: list[list[int]]) -> list[list[int]]:
    """The tokens of each penalised request on an engine of its own."""
    return [
        ask(fresh_engine(parts), [request])[0].tokens for request in penalised_requests(prompts)
    ]


def test_penalised_answers_are_those_of_plain_logits(
    alone: list[list[int]], prompts: list[list[int]], parts: EngineParts, plain: Plain
):
    for request, tokens in zip(penalised_requests(prompts), alone, strict=True):
        plain.check(request, tokens, parts.eos_token_ids)


def test_each_penalty_changes_the_answer(
    alone: list[list[int]], prompts: list[list[int]], engine: ModelEngine
):
    without = ask(engine, [new_request(prompt, max_tokens=14) for prompt in prompts])
    for tokens, answer, penalties in zip(alone, without, PENALTIES, strict=True):
        assert tokens != answer.tokens, penalties


def test_rows_with_different_parameters_share_a_step(
    engine: ModelEngine, prompts: list[list[int]], alone: list[list[int]], plain: Plain
):
    requests = penalised_requests(prompts)
    others = [
        new_request(prompts[i % 9], max_tokens=12, ignore_eos=True, **MIXED[i % len(MIXED)])
        for i in range(20)
    ]
    for request, answer, before in zip(
        requests, ask(engine, [*requests, *others]), alone, strict=False
    ):
        if answer.tokens != before:
            plain.check(request, answer.tokens, engine._parts.eos_token_ids)


def test_preemption_keeps_what_a_row_has_said(
    parts: EngineParts, prompts: list[list[int]], plain: Plain
):
    engine = fresh_engine(parts, num_blocks=CONTEXT_LEN // parts.block_len)
    requests = [
        new_request(prompt * 2, max_tokens=24, ignore_eos=True, **penalties)
        for prompt, penalties in zip(prompts, PENALTIES, strict=True)
    ]
    answers = ask(engine, requests)
    assert engine._scheduler.num_preemptions > 0
    for request, answer in zip(requests, answers, strict=True):
        plain.check(request, answer.tokens, parts.eos_token_ids)


@pytest.mark.parametrize("when", ["dispatch", "collect"])
def test_a_lost_step_loses_no_penalty(
    engine: ModelEngine, prompts: list[list[int]], alone: list[list[int]], plain: Plain, when: str
):
    requests = penalised_requests(prompts)
    driver = Driver(engine)
    ids = [driver.add(request) for request in requests]
    lose_a_step(driver, when)
    driver.run()
    assert engine._scheduler.num_preemptions > 0
    for request, request_id, before in zip(requests, ids, alone, strict=True):
        tokens = driver.answer(request_id).tokens
        if tokens != before:
            plain.check(request, tokens, engine._parts.eos_token_ids)


def test_a_seed_gives_the_same_text_alone_and_among_all_kinds(
    parts: EngineParts, prompts: list[list[int]]
):
    def seeded(sampling: dict[str, object]) -> GenerateRequest:
        fields = {"max_tokens": 7, "temperature": 0.9, "ignore_eos": True, **sampling, "seed": 77}
        return new_request(prompts[4], **fields)

    others = [
        new_request(prompts[i % 9], max_tokens=12, ignore_eos=True, **MIXED[i % len(MIXED)])
        for i in range(32 - len(MIXED))
    ]
    crowd = ask(fresh_engine(parts), [*others[:13], *map(seeded, MIXED), *others[13:]])
    for sampling, answer in zip(MIXED, crowd[13:], strict=False):
        (alone,) = ask(fresh_engine(parts), [seeded(sampling)])
        assert answer.tokens == alone.tokens, sampling
        assert answer.text == alone.text


def test_choices_of_a_penalised_request_keep_their_own_counts(
    engine: ModelEngine, prompts: list[list[int]], plain: Plain
):
    bias = tuple((token, 60.0) for token in (28, 30, 198))
    request = new_request(
        prompts[0], n=4, max_tokens=9, temperature=1.0, logit_bias=bias, frequency_penalty=30.0
    )
    driver = Driver(engine)
    request_id = driver.add(request)
    driver.run()
    for choice in range(4):
        tokens = driver.answer(request_id, choice).tokens
        # Each of them is worth 60 and costs 30 a time.
        assert Counter(tokens[:6]) == {28: 2, 30: 2, 198: 2}


def deltas_of(engine: ModelEngine, requests: list[GenerateRequest]) -> list[list[OutputDelta]]:
    driver = Driver(engine)
    ids = [driver.add(request) for request in requests]
    driver.run()
    return [driver.collected.deltas[request_id] for request_id in ids]


def joined(deltas: list[OutputDelta], choice: int = 0) -> list[TokenLogprobs]:
    """The log-probabilities of a choice; each delta has one for each token it counts."""
    own = [delta for delta in deltas if delta.choice == choice]
    for delta in own:
        assert delta.logprobs is not None
        assert len(delta.logprobs) == delta.num_tokens
    return [one for delta in own for one in delta.logprobs]


def test_logprobs_are_the_models_own(engine: ModelEngine, prompts: list[list[int]], plain: Plain):
    samplings = [
        {"logprobs": 0},
        {"logprobs": 1, "temperature": 1.2, "seed": 8},
        {"logprobs": 20, "temperature": 0.9, "top_k": 20, "repetition_penalty": 1.5},
        {"logprobs": 5, "logit_bias": ((30, 100.0),), "frequency_penalty": 40.0},
    ]
    driver = Driver(engine)
    ids = [
        driver.add(new_request(prompts[i], max_tokens=8, ignore_eos=True, **sampling))
        for i, sampling in enumerate(samplings)
    ]
    driver.run()
    for prompt, request_id, sampling in zip(prompts, ids, samplings, strict=False):
        reported = joined(driver.collected.deltas[request_id])
        assert [one.token_id for one in reported] == driver.answer(request_id).tokens
        plain.check_logprobs(reported, prompt, sampling["logprobs"])


def test_held_back_tokens_keep_their_logprobs(engine: ModelEngine, prompts: list[list[int]]):
    whole = ask_one(engine, prompts[2], max_tokens=10, ignore_eos=True).text
    assert len(whole) > 20
    stop = whole[12:18] + "never"  # held back until it turns out to be no stop string
    request = new_request(prompts[2], max_tokens=10, ignore_eos=True, logprobs=1, stop=(stop,))
    (deltas,) = deltas_of(engine, [request])
    assert len(joined(deltas)) == 10
    assert max(delta.num_tokens for delta in deltas) > 1


def test_a_request_that_asks_for_no_logprobs_gets_none(
    engine: ModelEngine, prompts: list[list[int]]
):
    requests = [new_request(prompts[0]), new_request(prompts[1], logprobs=3, prompt_logprobs=1)]
    without, _ = deltas_of(engine, requests)
    assert all(delta.logprobs is None and delta.prompt_logprobs is None for delta in without)


@pytest.mark.parametrize("length", [1, 2, 17, NUM_SCORED, NUM_SCORED + 1, 150])
def test_prompt_logprobs_are_the_models_own(
    engine: ModelEngine, text: list[int], plain: Plain, length: int
):
    prompt = text[:length]
    ask_one(engine, prompt)  # its blocks are in the cache now
    request = new_request(prompt, n=2, max_tokens=3, prompt_logprobs=2, ignore_eos=True)
    (deltas,) = deltas_of(engine, [request])
    first, *later = [delta for delta in deltas if delta.choice == 0]
    assert all(delta.prompt_logprobs is None for delta in later)
    assert all(delta.prompt_logprobs is None for delta in deltas if delta.choice == 1)
    check_prompt(plain, first, prompt, 2)
    assert ask_one(engine, prompt, max_tokens=3, ignore_eos=True).text == "".join(
        delta.text for delta in deltas if delta.choice == 0
    )


def check_prompt(plain: Plain, delta: OutputDelta, prompt: list[int], num_top: int) -> None:
    assert delta.prompt_logprobs is not None
    nothing, *scored = delta.prompt_logprobs
    assert nothing is None
    assert [one.token_id for one in scored] == prompt[1:]
    if scored:
        plain.check_logprobs(scored, prompt[:1], num_top)


def test_prompts_are_scored_beside_others_and_through_preemption(
    parts: EngineParts, text: list[int], plain: Plain
):
    engine = fresh_engine(parts, num_blocks=CONTEXT_LEN // parts.block_len)
    prompts = [text[i : i + 20 + 30 * i] for i in range(4)]
    requests = [
        new_request(prompt, max_tokens=40, ignore_eos=True, logprobs=1, prompt_logprobs=3)
        for prompt in prompts
    ]
    others = [new_request(text[i : i + 40], max_tokens=50, ignore_eos=True) for i in (50, 60)]
    answers = deltas_of(engine, [*others, *requests])[2:]
    assert engine._scheduler.num_preemptions > 0
    for prompt, deltas in zip(prompts, answers, strict=True):
        check_prompt(plain, deltas[0], prompt, 3)
        plain.check_logprobs(joined(deltas), prompt, 1)


def test_what_would_spoil_a_step_is_refused_and_hurts_nobody(
    engine: ModelEngine, prompts: list[list[int]]
):
    driver = Driver(engine)
    good = driver.add(new_request(prompts[0], max_tokens=6, frequency_penalty=0.5))
    driver.step()
    for bad in (
        new_request(prompts[1], logit_bias=((10**6, 1.0),)),
        new_request(prompts[1], stop_token_ids=(engine._parts.vocab_size,)),
        new_request([5, engine._parts.vocab_size]),
        new_request(prompts[1], presence_penalty=math.nan),
    ):
        with pytest.raises(RequestError):
            engine.add(bad)
    driver.run()
    again = ask_one(engine, prompts[0], max_tokens=6, frequency_penalty=0.5)
    assert driver.answer(good).tokens == again.tokens
    assert engine.stats().num_running == 0


def test_no_mixture_of_parameters_compiles_anything(engine: ModelEngine, prompts: list[list[int]]):
    driver = Driver(engine)
    sent = []
    for i, sampling in enumerate([*PENALTIES, *MIXED]):
        fields = {"max_tokens": 1 + i % 7, "ignore_eos": i % 2 == 0, **sampling}
        sent.append(driver.add(new_request(prompts[i % 9], n=1 + i % 3, **fields)))
        driver.step()
    driver.run()
    assert all(driver.collected.is_over(request_id) for request_id in sent)
    assert engine.stats().num_compiles_after_warmup == 0
