"""Protects that the KV cache takes what weights and programs leave, no more."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from torchtpu.buckets import default_ladder
from torchtpu.ops import attention
from workers.engine.memory_plan import (
    GIB,
    PROGRAM_BYTES,
    MemoryPlan,
    forward_bytes,
    programs_bytes,
    weights_bytes,
)

HIDDEN, INTERMEDIATE, VOCAB = 32, 512, 100


@pytest.fixture(scope="module")
def llama() -> LlamaForCausalLM:
    attention.register()
    config = LlamaConfig(
        hidden_size=HIDDEN,
        intermediate_size=INTERMEDIATE,
        num_hidden_layers=3,
        num_attention_heads=2,
        vocab_size=VOCAB,
        tie_word_embeddings=True,
        attn_implementation=attention.ATTENTION_NAME,
    )
    return LlamaForCausalLM(config).to(torch.bfloat16).eval()


def test_the_cache_gets_the_share_without_weights_and_programs():
    plan = MemoryPlan(memory=10 * GIB, share=0.5, weights=2 * GIB, programs=GIB)
    assert plan.cache == 2 * GIB
    assert "10.0 GiB" in str(plan)
    assert MemoryPlan(memory=4 * GIB, share=0.5, weights=2 * GIB, programs=GIB).cache < 0


def test_tied_weights_count_once(llama: LlamaForCausalLM):
    tied = llama.lm_head.weight.nbytes
    counted = sum(tensor.nbytes for tensor in llama.state_dict().values())
    buffers = sum(tensor.nbytes for tensor in llama.buffers())
    assert weights_bytes(llama) == counted - tied + buffers


def test_a_forward_pass_holds_a_layer_s_widest_tensors_and_not_all_layers(llama: LlamaForCausalLM):
    widest = 2 * 1000 * INTERMEDIATE
    assert 2 * widest <= forward_bytes(llama, 1000, 8) < 5 * widest
    assert forward_bytes(llama, 8, 8) < widest / 10


def test_the_experts_that_a_step_gathers_count():
    attention.register()
    config = Qwen3MoeConfig(
        hidden_size=HIDDEN,
        moe_intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_experts=4,
        num_experts_per_tok=2,
        vocab_size=VOCAB,
        attn_implementation=attention.ATTENTION_NAME,
        experts_implementation="batched_mm",
    )
    model = Qwen3MoeForCausalLM(config).to(torch.bfloat16).eval()
    gathered = 100 * 2 * 2 * (2 * 64 * HIDDEN)
    assert forward_bytes(model, 100, 8) > gathered


def test_programs_take_their_code_and_the_largest_one_s_temporaries(llama: LlamaForCausalLM):
    ladder = default_ladder(8, 256)
    total = programs_bytes(llama, ladder, kv_bytes=4096, vocab_size=VOCAB)
    code = PROGRAM_BYTES * len(ladder.buckets)
    assert code + 8 * 256 * 4096 < total < code + 4 * 8 * 256 * 4096


def test_what_sampling_keeps_grows_with_the_vocabulary(llama: LlamaForCausalLM):
    ladder = default_ladder(8, 256)
    few, many = (programs_bytes(llama, ladder, 4096, vocab) for vocab in (VOCAB, VOCAB + 1000))
    assert many - few > 9 * 1000 * 8
