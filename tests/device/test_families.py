"""Protects that models run unmodified: every family of `tests.device.families` gives the tokens of
transformers, in float32, with prefix hits, chunked prefill and preemption forced on; a model that the
cache has no place for is refused.

Their weights are random; `test_engine.py` asks the same of a real model.
"""

from pathlib import Path

import pytest
import torch

from models.loader import LoadOptions, load_model
from tests.device.driving import ask_one, engine_config, fresh_engine
from tests.device.families import (
    FAMILIES,
    OTHER_KINDS,
    OWN_ATTENTION,
    VOCAB,
    WINDOW,
    Family,
    write_family,
)
from tests.device.forced import ask_forced
from tests.device.reference import Generated, Reference
from torchtpu.buckets import BucketLadder, PrefillShape
from torchtpu.device import Device
from workers.engine.build import build_engine
from workers.engine.engine import EngineParts
from workers.errors import HopelessLoadError

CONTEXT_LEN = 64
MAX_TOKENS = 20
NUM_BLOCKS = 9
"""A request takes up to 4 of them, and 8 requests may run at once."""
LADDER = BucketLadder(
    rows=(8,),
    mixed_rows=(8,),
    prefill=(PrefillShape(tokens=32, segments=4, segment_len=16),),
    contexts=(CONTEXT_LEN,),
    mixed_contexts=(CONTEXT_LEN,),
)


def make_prompts() -> list[list[int]]:
    """Shorter than a sliding window, as long, longer, longer than a chunk; the last ones begin alike."""
    generator = torch.Generator().manual_seed(1)
    lengths = [1, 5, WINDOW - 1, WINDOW, WINDOW + 1, 24, 33]
    made = [torch.randint(3, VOCAB, (n,), generator=generator).tolist() for n in lengths]
    return [*made, made[-1] + made[3][:6], made[-1][:32] + made[5][:10], made[-1] + made[4][:9]]


PROMPTS = make_prompts()
LIMITS = [MAX_TOKENS] * len(PROMPTS)


def build(folder: Path) -> EngineParts:
    config = engine_config(str(folder), ladder=LADDER, context_len=CONTEXT_LEN, max_rows=8)
    return build_engine(config, lambda what, share: None).engine._parts


def reference_of(folder: Path, pytestconfig: pytest.Config) -> Reference:
    reporter = pytestconfig.pluginmanager.getplugin("terminalreporter")
    # The one form of attention that every family has.
    options = LoadOptions(attn_implementation="eager")
    return Reference(load_model(folder, torch.float32, options=options), reporter.write_line)


def variety(answers: list[Generated]) -> int:
    """Different tokens in all answers: one who repeats himself hides what he got wrong."""
    return len({token for answer in answers for token in answer.tokens})


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_a_family_gives_the_tokens_of_transformers(
    family: Family, tpu_device: Device, tmp_path: Path, pytestconfig: pytest.Config
):
    write_family(family, tmp_path)
    reference, parts = reference_of(tmp_path, pytestconfig), build(tmp_path)
    expected = reference.generate(PROMPTS, LIMITS)
    answers = ask_forced(parts, PROMPTS, LIMITS, NUM_BLOCKS)
    for index, (answer, generated) in enumerate(zip(answers, expected, strict=True)):
        reference.check(f"{family.name}, prompt {index}", answer.tokens, generated)
    assert variety(expected) >= MAX_TOKENS

    engine = fresh_engine(parts)
    first, second = (ask_one(engine, PROMPTS[-1], max_tokens=MAX_TOKENS) for _ in range(2))
    assert first.usage.cached_tokens == 0
    assert second.usage.cached_tokens > WINDOW
    assert first.tokens == second.tokens


@pytest.mark.parametrize(
    ("family", "words"),
    [
        *((family, "something other than keys and values") for family in OTHER_KINDS),
        (OWN_ATTENTION, "no attention that another could take the place of"),
    ],
    ids=[family.name for family in (*OTHER_KINDS, OWN_ATTENTION)],
)
def test_layers_that_are_no_attention_are_refused_with_one_sentence(
    family: Family, words: str, tpu_device: Device, tmp_path: Path
):
    write_family(family, tmp_path)
    with pytest.raises(HopelessLoadError, match=f"cannot be served: .* {words}") as caught:
        build(tmp_path)
    assert "\n" not in str(caught.value)
