"""Protects what a worker computes with by default, bfloat16: log-probabilities close to those that
transformers computes in float32, no farther than its own bfloat16, and a text as likely to the model.

The engine scores a text as a prompt, token by token through its own step program.
"""

import math
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from models.loader import load_model
from tests.device.driving import MODEL, Driver, build_parts, fresh_engine, new_request
from tests.device.reference import one_thread
from torchtpu.buckets import BucketLadder, PrefillShape
from torchtpu.device import Device
from workers.engine.engine import EngineParts
from workers.protocol import TokenLogprobs

TEXT = Path(__file__).parent / "data" / "voyage_of_the_beagle.txt"
"""The first two paragraphs of Charles Darwin's journal, about 330 words, in the public domain."""
NUM_TOP = 20
CONTEXT_LEN = 256
LADDER = BucketLadder(
    rows=(8,),
    mixed_rows=(8,),
    prefill=(PrefillShape(tokens=32, segments=8, segment_len=32),),
    contexts=(CONTEXT_LEN,),
    mixed_contexts=(CONTEXT_LEN,),
)


@dataclass(frozen=True)
class Scores:
    """Of all tokens of a text but the first one."""

    tokens: Tensor
    """[N, 1 + NUM_TOP] int64: the text's token, then the engine's likeliest."""
    logprobs: Tensor
    """[N, 1 + NUM_TOP] float32"""

    @property
    def perplexity(self) -> float:
        return math.exp(-self.logprobs[:, 0].double().mean().item())

    def distance(self, other: "Scores") -> Tensor:
        """[N, 1 + NUM_TOP]"""
        return (self.logprobs - other.logprobs).abs()


@pytest.fixture(scope="module")
def half(tpu_device: Device, smollm2_dir: Path) -> EngineParts:
    return build_parts(MODEL, LADDER, dtype="auto")


@pytest.fixture(scope="module")
def paragraphs(half: EngineParts) -> list[list[int]]:
    return [half.tokenizer.encode(part).ids for part in TEXT.read_text().split("\n\n")]


@pytest.fixture(scope="module")
def ours(half: EngineParts, paragraphs: list[list[int]]) -> Scores:
    driver = Driver(fresh_engine(half))
    asked = [new_request(ids, max_tokens=1, prompt_logprobs=NUM_TOP) for ids in paragraphs]
    names = [driver.add(request) for request in asked]
    driver.run()
    scored: list[TokenLogprobs] = []
    for name, ids in zip(names, paragraphs, strict=True):
        _, *found = driver.collected.deltas[name][0].prompt_logprobs
        assert [one.token_id for one in found] == ids[1:]
        scored += found
    pairs = torch.tensor([[(one.token_id, one.logprob), *one.top] for one in scored])
    return Scores(pairs[..., 0].long(), pairs[..., 1])


def theirs(model: PreTrainedModel, paragraphs: list[list[int]], tokens: Tensor) -> Scores:
    """What transformers gives for the same tokens."""
    with one_thread(), torch.no_grad():
        logits = [model(torch.tensor([ids])).logits[0, :-1] for ids in paragraphs]
    logprobs = torch.cat(logits).float().log_softmax(-1)
    return Scores(tokens, logprobs.gather(1, tokens))


@pytest.fixture(scope="module")
def exact(reference_model: PreTrainedModel, paragraphs: list[list[int]], ours: Scores) -> Scores:
    """In float32, of the same weights: they are kept in bfloat16."""
    return theirs(reference_model, paragraphs, ours.tokens)


@pytest.fixture(scope="module")
def plain(smollm2_dir: Path, paragraphs: list[list[int]], ours: Scores) -> Scores:
    """In bfloat16."""
    return theirs(load_model(smollm2_dir, torch.bfloat16), paragraphs, ours.tokens)


def test_log_probabilities_are_as_close_as_those_of_transformers(
    ours: Scores, plain: Scores, exact: Scores
):
    distance, usual = ours.distance(exact), plain.distance(exact)
    assert distance.max() < 1.0
    assert distance.mean() < 1.2 * usual.mean()


def test_a_text_is_as_likely_as_to_transformers(ours: Scores, plain: Scores, exact: Scores):
    assert len(ours.tokens) > 300
    assert ours.perplexity == pytest.approx(exact.perplexity, rel=0.01)
    assert ours.perplexity == pytest.approx(plain.perplexity, rel=0.01)
