"""Small models of many families with random weights, as folders that the product loads like any other.

Each has at least one layer of every kind that its family knows, grouped query heads, and the multipliers,
caps, biases and position encodings by which it differs from the others, at values that change its tokens.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import AutoConfig, AutoModelForCausalLM

VOCAB = 96
WINDOW = 12
"""Neither a chunk's length nor a block's."""
_COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    # Wide enough that the best tokens lie well apart.
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_SLIDING = {
    "num_hidden_layers": 3,
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0 + i / 4 for i in range(8)],
    "long_factor": [2.0 + i for i in range(8)],
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


@dataclass(frozen=True)
class Family:
    name: str
    model_type: str
    """As transformers calls it."""
    settings: Mapping[str, object] = field(default_factory=dict)
    """Of the configuration, beside what all have in common."""


FAMILIES = (
    Family("llama", "llama", {"rope_parameters": _LLAMA3}),
    Family("qwen2", "qwen2", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}),
    Family("qwen3", "qwen3", {"tie_word_embeddings": True}),
    Family("qwen3-moe", "qwen3_moe", {**_EXPERTS, "num_experts": 8, "mlp_only_layers": [0]}),
    Family(
        "gemma-3",
        "gemma3_text",
        {**_SLIDING, "initializer_range": 0.08, "query_pre_attn_scalar": 4},
    ),
    Family("mistral", "mistral", {"sliding_window": WINDOW}),
    Family("mixtral", "mixtral", {"num_local_experts": 4}),
    Family(
        "phi-3", "phi3", {"rope_parameters": _LONGROPE, "original_max_position_embeddings": 128}
    ),
    Family("gpt-oss", "gpt_oss", {**_SLIDING, **_EXPERTS, "num_local_experts": 4}),
    Family(
        "granite",
        "granite",
        {
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.1,
            "residual_multiplier": 0.7,
            "logits_scaling": 2.0,
        },
    ),
    Family("olmo-2", "olmo2"),
    Family("cohere-2", "cohere2", {**_SLIDING, "logit_scale": 0.5}),
    Family(
        "gemma-2",
        "gemma2",
        {
            **_SLIDING,
            "initializer_range": 0.1,
            "query_pre_attn_scalar": 1,
            "attn_logit_softcapping": 3.0,
            "final_logit_softcapping": 2.0,
        },
    ),
    Family("starcoder-2", "starcoder2", {"sliding_window": WINDOW}),
    Family("smollm3", "smollm3", {"no_rope_layers": [1, 0]}),
    Family("glm-4", "glm4"),
    Family(
        "deepseek-v3",
        "deepseek_v3",
        {
            **_EXPERTS,
            "head_dim": 8,
            "num_key_value_heads": 4,
            "n_routed_experts": 8,
            "n_group": 2,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "q_lora_rank": 24,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 16,
            "v_head_dim": 12,
        },
    ),
    Family("gpt-neox", "gpt_neox"),
    Family("gpt-2", "gpt2", {"n_embd": 64, "n_head": 4, "n_layer": 2, "n_positions": 256}),
)

OTHER_KINDS = (
    # Mamba beside attention, first as layers of their own, then in one layer; short convolutions.
    Family("jamba", "jamba", {"attn_layer_period": 2, "attn_layer_offset": 1}),
    Family("falcon-h1", "falcon_h1"),
    Family("lfm-2", "lfm2", {"layer_types": ["conv", "full_attention"]}),
)
"""With layers that keep a state beside keys and values: no model of these can be served."""
OWN_ATTENTION = Family("bloom", "bloom", {"n_head": 4, "n_layer": 2})
"""It does not go through transformers' interface."""


def write_family(family: Family, path: Path) -> None:
    """Configuration, weights and a tokenizer in the folder `path`; the same at every call."""
    config = AutoConfig.for_model(family.model_type, **{**_COMMON, **family.settings})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:  # biases start as zeros and norms as ones: no part of the sum
                parameter.add_(0.2 * torch.randn(parameter.shape))
    model.save_pretrained(path)
    tokenizer = Tokenizer(WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w3"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.save(str(path / "tokenizer.json"))
