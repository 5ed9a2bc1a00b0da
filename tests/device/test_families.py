"""Protects that models run unmodified: every family of `tests.device.families` gives the tokens of
transformers, in float32, with prefix hits, chunked prefill and preemption forced on; a model that the
cache has no place for is refused.

Their weights are random; `test_engine.py` asks the same of a real model.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from models.loader import LoadOptions, load_model
from tests.device.driving import ask, ask_one, build_parts, fresh_engine, new_request
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
from workers.engine.engine import ModelEngine
from workers.engine.kv_cache import BlockPool, CacheGroup, KVCache, most_held
from workers.engine.scheduler import Scheduler
from workers.errors import HopelessLoadError
from workers.protocol import GenerateRequest

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


def plain_model(folder: Path) -> PreTrainedModel:
    # The one form of attention that every family has.
    options = LoadOptions(attn_implementation="eager")
    return load_model(folder, torch.float32, options=options)


def variety(answers: list[Generated]) -> int:
    """Different tokens in all answers: one who repeats himself hides what he got wrong."""
    return len({token for answer in answers for token in answer.tokens})


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_a_family_gives_the_tokens_of_transformers(
    family: Family, tpu_device: Device, tmp_path: Path, report: Callable[[str], None]
):
    write_family(family, tmp_path)
    reference = Reference(plain_model(tmp_path), report)
    parts = build_parts(str(tmp_path), LADDER)
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


def test_blocks_behind_a_window_come_back(tpu_device: Device, tmp_path: Path):
    (gemma,) = (family for family in FAMILIES if family.name == "gemma-3")
    write_family(gemma, tmp_path)
    parts = build_parts(str(tmp_path), LADDER)
    (whole, _), block_len, max_chunk = parts.cache.groups, parts.block_len, parts.cache.max_chunk
    expected = ask(fresh_engine(parts), requests())
    # As many blocks as one window needs: a second request could not even begin if they did not come back.
    most = most_held(WINDOW, block_len, max_chunk)
    groups = [CacheGroup(BlockPool(whole.pool.num_blocks)), CacheGroup(BlockPool(most + 1), WINDOW)]
    cache = KVCache(groups, block_len, max_chunk)
    scheduler = Scheduler(parts.scheduler._config, cache)
    answers = ask(ModelEngine(replace(parts, cache=cache, scheduler=scheduler)), requests())
    assert [answer.tokens for answer in answers] == [answer.tokens for answer in expected]
    cache.check([])


def requests() -> list[GenerateRequest]:
    return [new_request(prompt, max_tokens=MAX_TOKENS) for prompt in PROMPTS]


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
        build_parts(str(tmp_path), LADDER)
    assert "\n" not in str(caught.value)
