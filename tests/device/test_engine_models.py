"""Protects that models run unmodified: another architecture than the default one's, with sliding windows,
scaled embeddings and tied weights, gives the tokens of transformers."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, PreTrainedModel

from models.loader import load_model
from tests.device.driving import ask, ask_one, engine_config, fresh_engine, new_request
from tests.device.reference import Reference
from torchtpu.buckets import BucketLadder, PrefillShape
from torchtpu.device import Device
from workers.engine.build import build_engine
from workers.engine.engine import EngineParts, ModelEngine
from workers.engine.kv_cache import BlockPool, CacheGroup, KVCache, most_held
from workers.engine.scheduler import Scheduler

VOCAB = 96
WINDOW = 16
CONTEXT_LEN = 64
LADDER = BucketLadder(
    rows=(8,),
    mixed_rows=(8,),
    prefill=(PrefillShape(40, 4, 16),),
    contexts=(CONTEXT_LEN,),
    mixed_contexts=(CONTEXT_LEN,),
)


@pytest.fixture(scope="module")
def gemma_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three layers, of which the last one sees everything and the others a window of 16 tokens."""
    config = Gemma3TextConfig(
        vocab_size=VOCAB,
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=3,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"],
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=16,
        sliding_window=WINDOW,
        query_pre_attn_scalar=16,
        max_position_embeddings=CONTEXT_LEN,
        # Wide enough that the best tokens lie well apart.
        initializer_range=0.5,
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("gemma3")
    Gemma3ForCausalLM(config).save_pretrained(path)
    tokenizer = Tokenizer(WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w3"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.save(str(path / "tokenizer.json"))
    return path


@pytest.fixture(scope="module")
def gemma(tpu_device: Device, gemma_dir: Path) -> EngineParts:
    config = engine_config(str(gemma_dir), ladder=LADDER, context_len=CONTEXT_LEN, max_rows=8)
    return build_engine(config, lambda what, share: None).engine._parts


@pytest.fixture(scope="module")
def plain(tpu_device: Device, gemma_dir: Path) -> PreTrainedModel:
    return load_model(gemma_dir, torch.float32)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """Shorter than the window, as long, longer; the last ones begin alike."""
    generator = torch.Generator().manual_seed(1)
    lengths = [1, 5, WINDOW - 1, WINDOW, WINDOW + 1, 24, 33, 40]
    made = [torch.randint(3, VOCAB, (n,), generator=generator).tolist() for n in lengths]
    return [*made, made[-1][:32] + made[3][:4], made[-1][:36]]


def test_a_sliding_window_model_gives_the_tokens_of_transformers(
    gemma: EngineParts,
    plain: PreTrainedModel,
    prompts: list[list[int]],
    request: pytest.FixtureRequest,
):
    report = request.config.pluginmanager.getplugin("terminalreporter").write_line
    reference = Reference(plain, report)
    lengths = [20] * len(prompts)
    expected = reference.generate(prompts, lengths)
    answers = ask(fresh_engine(gemma), [new_request(p, max_tokens=20) for p in prompts])
    for index, (answer, generated) in enumerate(zip(answers, expected, strict=True)):
        reference.check(f"prompt {index}", answer.tokens, generated)
    assert any(len(generated.tokens) > 10 for generated in expected)


def test_the_window_does_not_disturb_the_prefix_cache(gemma: EngineParts, prompts: list[list[int]]):
    engine = fresh_engine(gemma)
    first, second = (ask_one(engine, prompts[7], max_tokens=20) for _ in range(2))
    assert second.usage.cached_tokens > WINDOW
    assert second.tokens == first.tokens


def test_blocks_behind_the_window_come_back(gemma: EngineParts, prompts: list[list[int]]):
    whole, window = gemma.cache.groups
    assert (whole.window, window.window) == (None, WINDOW)
    expected = ask(fresh_engine(gemma), [new_request(p, max_tokens=20) for p in prompts])
    # As many blocks as one window needs: a second request could not even begin if they did not come back.
    most = most_held(WINDOW, gemma.block_len, gemma.cache.max_chunk)
    cache = KVCache(
        [CacheGroup(BlockPool(whole.pool.num_blocks)), CacheGroup(BlockPool(most + 1), WINDOW)],
        gemma.block_len,
        gemma.cache.max_chunk,
    )
    scheduler = Scheduler(gemma.scheduler._config, cache)
    engine = ModelEngine(replace(gemma, cache=cache, scheduler=scheduler))
    answers = ask(engine, [new_request(p, max_tokens=20) for p in prompts])
    assert [answer.tokens for answer in answers] == [answer.tokens for answer in expected]
    cache.check([])
