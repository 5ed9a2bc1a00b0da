"""Protects a second real model, Gemma 3 270M: in float32, greedy answers are those of transformers, with a
prompt longer than its sliding window, and with prefix hits, chunked prefill and preemption forced on.

One test and two step programs: a gigabyte of weights and logits of 262,144 tokens are slow on few cores.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from models.loader import load_model
from tests.device.driving import build_parts
from tests.device.forced import ask_forced
from tests.device.reference import Reference
from torchtpu.buckets import BucketLadder, PrefillShape
from torchtpu.device import Device
from workers.engine.engine import EngineParts

TEXT = Path(__file__).parent / "data" / "voyage_of_the_beagle.txt"
WINDOW = 512
LADDER = BucketLadder(
    rows=(8,),
    mixed_rows=(8,),
    prefill=(PrefillShape(tokens=128, segments=8, segment_len=128),),
    contexts=(768,),
    mixed_contexts=(768,),
)
LENGTHS = (570, 31, 47, 63)
"""Of the prompts, tokens. The first one begins to leave its window in its fifth chunk."""
MAX_TOKENS = 6
NUM_BLOCKS = 38
"""The longest request takes 36 of them."""


@pytest.fixture(scope="module")
def gemma(tpu_device: Device, gemma3_dir: Path) -> EngineParts:
    return build_parts(str(gemma3_dir), LADDER)


def test_prompts_longer_than_the_window_give_the_tokens_of_transformers(
    gemma: EngineParts, gemma3_dir: Path, report: Callable[[str], None]
):
    assert {group.window for group in gemma.cache.groups} == {None, WINDOW}
    assert LENGTHS[0] > WINDOW
    text = gemma.tokenizer.encode(TEXT.read_text() * 2).ids
    prompts = [text[:length] for length in LENGTHS]
    limits = [MAX_TOKENS] * len(prompts)
    reference = Reference(load_model(gemma3_dir, torch.float32), report)
    # Apart: the short ones would be padded to the long one's length.
    expected = reference.generate(prompts[:1], limits[:1])
    expected += reference.generate(prompts[1:], limits[1:])
    answers = ask_forced(gemma, prompts, limits, NUM_BLOCKS)
    for index, (answer, generated) in enumerate(zip(answers, expected, strict=True)):
        reference.check(f"gemma-3-270m, prompt {index}", answer.tokens, generated)
