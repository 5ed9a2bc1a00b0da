"""What `load_model` puts on a device is what transformers loads, for each family of checkpoint layouts.

Also: a folder without tokenizer or generation config is served, and one with missing or broken weights is refused.
"""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import BPE
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    Llama4TextConfig,
    LlamaConfig,
    MixtralConfig,
    Phi3Config,
)

from models.chat_templates import ChatTemplate
from models.errors import (
    ModelCorruptError,
    ModelNotFoundError,
    NoTokenizerError,
    UnsupportedModelError,
)
from models.library import resolve
from models.loader import LoadOptions, load_model, read_info, read_tokenizer
from models.settings import ModelSettings

SMALL = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
}
FAMILIES = {
    "llama": LlamaConfig(**SMALL),
    "llama_tied": LlamaConfig(**SMALL, tie_word_embeddings=True, eos_token_id=[2, 5]),
    "gemma3": Gemma3TextConfig(**SMALL, sliding_window=16),
    "mixtral": MixtralConfig(**SMALL, num_local_experts=4),
}


def save_random(config, folder):
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    (folder / "generation_config.json").unlink()
    return folder


def state(model):
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def assert_equal_models(ours, reference):
    got, wanted = state(ours), state(reference)
    assert got.keys() == wanted.keys()
    different = [name for name in wanted if not torch.equal(got[name].cpu(), wanted[name])]
    assert different == []
    assert not ours.training
    assert not any(p.requires_grad for p in ours.parameters())


@pytest.mark.parametrize("family", FAMILIES)
def test_random_models_load_as_transformers_loads_them(family, tmp_path):
    folder = save_random(FAMILIES[family], tmp_path / family)
    options = LoadOptions("eager", "batched_mm" if family == "mixtral" else None)
    ours = load_model(folder, torch.float32, "cpu", options)
    reference = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    assert_equal_models(ours, reference)
    ids = torch.arange(1, 9)[None]
    with torch.no_grad():
        torch.testing.assert_close(ours(ids).logits, reference(ids).logits, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_embedded_model_loads_as_transformers_loads_it(smollm2_dir, dtype):
    ours = load_model(smollm2_dir, dtype)
    assert_equal_models(ours, AutoModelForCausalLM.from_pretrained(smollm2_dir, dtype=dtype))
    assert ours.lm_head.weight is ours.get_input_embeddings().weight


def test_the_embedded_model_knows_the_capital_of_france(smollm2_dir):
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_str(read_tokenizer(smollm2_dir).tokenizer_json.decode())
    prompt = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    ids = torch.tensor([tokenizer.encode(prompt).ids])
    with torch.no_grad():
        out = load_model(smollm2_dir, torch.float32).generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=16, do_sample=False
        )
    answer = out[0, ids.shape[1] :].tolist()
    assert "Paris" in tokenizer.decode(answer)
    assert answer[-1] in read_info(smollm2_dir).eos_token_ids


def test_loading_reports_to_the_caller_and_draws_nothing(tmp_path, capfd):
    folder = save_random(FAMILIES["llama"], tmp_path / "m")
    capfd.readouterr()
    shares = []
    load_model(folder, torch.float32, progress=lambda what, share: shares.append(share))
    assert shares == sorted(shares) and (shares[0], shares[-1]) == (0.0, 1.0)
    assert capfd.readouterr() == ("", "")


def test_weights_arrive_on_the_tpu_device(tpu_device, tmp_path):
    folder = save_random(FAMILIES["llama_tied"], tmp_path / "m")
    ours = load_model(folder, torch.float32, tpu_device.torch_device)
    assert {tensor.device.type for tensor in state(ours).values()} == {"tpu"}
    assert_equal_models(ours, AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))
    assert ours.lm_head.weight is ours.get_input_embeddings().weight


def test_a_bare_folder_is_enough_until_a_tokenizer_is_needed(tmp_path):
    folder = save_random(FAMILIES["llama_tied"], tmp_path / "bare")
    local = resolve(str(folder), ModelSettings(tmp_path / "cache"))
    assert (local.id, local.path, local.manifest) == ("bare", folder, None)
    info = read_info(folder)
    assert (info.context_len, info.vocab_size) == (64, 97)
    assert info.eos_token_ids == {2, 5}
    with pytest.raises(NoTokenizerError, match=r"no tokenizer\.json"):
        read_tokenizer(folder)


def test_a_context_ends_with_the_first_chunk_of_chunked_layers(tmp_path):
    Llama4TextConfig(max_position_embeddings=4096, attention_chunk_size=512).save_pretrained(
        tmp_path
    )
    assert read_info(tmp_path).context_len == 512


@pytest.mark.parametrize(("context_len", "factor"), [(32, 1.0), (33, 4.0)])
def test_a_context_length_decides_between_short_and_long_frequencies(tmp_path, context_len, factor):
    rope = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
    settings = {"original_max_position_embeddings": 32, "rope_parameters": rope}
    folder = save_random(Phi3Config(**SMALL, **settings, pad_token_id=0), tmp_path / "m")
    ours = load_model(folder, torch.float32, options=LoadOptions(context_len=context_len))
    rotary = ours.model.rotary_emb
    plain = 10_000.0 ** (-torch.arange(0, 8, 2) / 8)
    assert torch.allclose(rotary.inv_freq, plain / factor)
    before = rotary.inv_freq.clone()
    ours(torch.arange(40)[None])
    assert torch.equal(rotary.inv_freq, before)


def test_a_long_request_leaves_dynamic_frequencies_alone(tmp_path):
    rope = {"rope_type": "dynamic", "factor": 2.0}
    folder = save_random(LlamaConfig(**SMALL, rope_parameters=rope), tmp_path / "m")
    ours = load_model(folder, torch.float32, options=LoadOptions(context_len=64))
    before = ours.model.rotary_emb.inv_freq.clone()
    ours(torch.zeros(1, 70, dtype=torch.long))
    assert torch.equal(ours.model.rotary_emb.inv_freq, before)


def test_end_tokens_of_both_files_count(tmp_path):
    folder = save_random(FAMILIES["llama_tied"], tmp_path / "m")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [7]}))
    assert read_info(folder).eos_token_ids == {2, 5, 7}


def test_a_checkpoint_that_lacks_tensors_is_refused(tmp_path):
    folder = save_random(FAMILIES["llama"], tmp_path / "m")
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelCorruptError, match=r"lack 1 tensors, such as .*layers\.1\.mlp\.up"):
        load_model(folder, torch.float32)


def test_a_misshapen_tensor_is_refused(tmp_path):
    folder = save_random(FAMILIES["llama"], tmp_path / "m")
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"] = torch.ones(7)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelCorruptError, match=r"model\.norm\.weight has shape \[7\].* \[32\]"):
        load_model(folder, torch.float32)


def test_a_truncated_or_missing_shard_is_refused_before_loading(tmp_path):
    folder = save_random(FAMILIES["llama"], tmp_path / "m")
    settings = ModelSettings(tmp_path / "cache")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(ModelCorruptError, match=r"model\.safetensors is no valid safetensors"):
        resolve(str(folder), settings)
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelCorruptError, match=r"model-00001-of-00002\.safetensors is missing"):
        resolve(str(folder), settings)
    (folder / "config.json").unlink()
    with pytest.raises(ModelNotFoundError, match=r"no config\.json"):
        resolve(str(folder), settings)


@pytest.mark.parametrize("config", ['{"model_type": "oddity"}', "{}", "{not json"])
def test_an_unusable_configuration_is_one_line(tmp_path, config):
    (tmp_path / "config.json").write_text(config)
    with pytest.raises(UnsupportedModelError) as caught:
        read_info(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("in_files", [False, True])
def test_a_template_for_tools_is_joined_with_the_plain_one(tmp_path, in_files):
    Tokenizer(BPE()).save(str(tmp_path / "tokenizer.json"))
    plain, with_tools = "\nplain {{ messages }}\n", "with {{ tools }}\n"
    if in_files:
        (tmp_path / "chat_template.jinja").write_text(plain)
        (tmp_path / "additional_chat_templates").mkdir()
        (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text(with_tools)
    else:
        named = {"default": plain, "tool_use": with_tools, "rag": "?"}
        templates = [{"name": name, "template": text} for name, text in named.items()]
        config = {"chat_template": templates}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    template = ChatTemplate(read_tokenizer(tmp_path).chat_template)
    assert template.render([]).strip() == "plain []"
    assert template.render([], tools=[{}]) == "with [{}]"
