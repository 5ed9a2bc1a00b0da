"""A pull that is killed, meets a full disk or another pull harms nothing, and the next one succeeds.

A GGUF file of a few kilobytes, written here, goes through the real conversion in real processes.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest

from models.errors import ModelCorruptError, ModelNotFoundError, UnsupportedModelError
from models.library import resolve
from models.settings import ModelSettings, child_environment

TPUGATE = [sys.executable, "-m", "cli.main", "models"]
TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
HIDDEN, HEADS, FFN, LAYERS = 64, 4, 128, 2
TOKENS = ["<s>", "</s>", "<unk>", *(chr(c) for c in range(ord("a"), ord("z") + 1)), "ab", "Ġ"]


def write_gguf(path: Path, architecture: str = "llama") -> Path:
    """A random Llama with the 31 tokens above; its EOS is id 1."""
    rng = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(len(TOKENS))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 3, 2] + [1] * (len(TOKENS) - 3))
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_unk_token_id(2)
    writer.add_chat_template(TEMPLATE)

    def add(name, *shape):
        writer.add_tensor(name, rng.normal(0, 0.02, shape).astype(np.float32))

    add("token_embd.weight", len(TOKENS), HIDDEN)
    add("output_norm.weight", HIDDEN)
    add("output.weight", len(TOKENS), HIDDEN)
    for i in range(LAYERS):
        for part in ("attn_q", "attn_k", "attn_v", "attn_output"):
            add(f"blk.{i}.{part}.weight", HIDDEN, HIDDEN)
        add(f"blk.{i}.ffn_gate.weight", FFN, HIDDEN)
        add(f"blk.{i}.ffn_up.weight", FFN, HIDDEN)
        add(f"blk.{i}.ffn_down.weight", HIDDEN, FFN)
        add(f"blk.{i}.attn_norm.weight", HIDDEN)
        add(f"blk.{i}.ffn_norm.weight", HIDDEN)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def tiny_gguf(tmp_path_factory):
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf")


@pytest.fixture
def cache(tmp_path):
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def pulled_once(tiny_gguf, tmp_path_factory):
    settings, phrases = ModelSettings(tmp_path_factory.mktemp("pulled")), []
    local = resolve(str(tiny_gguf), settings, lambda what, share: phrases.append(what))
    return settings.cache_dir, local, phrases


@pytest.fixture
def pulled(pulled_once, cache):
    """A cache of this test's own that has the tiny model."""
    shutil.copytree(pulled_once[0], cache)
    return cache


def start(cache: Path, *args: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*TPUGATE, *args],
        env=child_environment(TPUGATE_MODELS_DIR=str(cache)),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(cache: Path, *args: str) -> subprocess.CompletedProcess[str]:
    with start(cache, *args) as process:
        out, err = process.communicate(timeout=120)
    assert "Traceback" not in err
    return subprocess.CompletedProcess(args, process.returncode, out, err)


def wait_for_conversion(process: subprocess.Popen[str]) -> None:
    """Until the child has begun on the tensors: the next lines are the tokenizer and the writing."""
    assert process.stderr is not None
    for line in process.stderr:
        if "dequantise" in line:
            return
    raise AssertionError("the conversion never began")


def children(pid: int) -> list[int]:
    return [int(n) for n in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_a_gguf_file_becomes_a_folder_that_says_all_a_server_needs(pulled_once):
    from models.loader import read_info, read_tokenizer

    _, local, phrases = pulled_once
    assert local.id == "tiny" and local.entry is None
    info, tokenizer = read_info(local.path), read_tokenizer(local.path)
    assert (info.context_len, info.vocab_size) == (128, len(TOKENS))
    assert (info.eos_token_ids, info.bos_token_id) == (frozenset({1}), 0)
    assert tokenizer.chat_template == TEMPLATE
    assert tokenizer.special_tokens["eos_token"] == "</s>"
    generation = json.loads((local.path / "generation_config.json").read_text())
    assert generation["eos_token_id"] == 1
    assert json.loads((local.path / "config.json").read_text())["dtype"] == "bfloat16"
    assert list(dict.fromkeys(phrases)) == [
        "dequantise",
        "convert the tokenizer",
        "write the weights",
        "write the tokenizer",
        "write to disk",
    ]


def test_a_pull_killed_in_the_middle_shows_nothing_and_the_next_one_succeeds(tiny_gguf, cache):
    with start(cache, "pull", str(tiny_gguf)) as process:
        wait_for_conversion(process)
        process.kill()
    assert process.returncode == -signal.SIGKILL
    assert [p for p in cache.iterdir() if p.name[0] != "."] == []
    again = run(cache, "pull", str(tiny_gguf))
    assert again.returncode == 0, again.stderr
    assert list((cache / ".staging").iterdir()) == []
    assert run(cache, "pull", "--verify", str(tiny_gguf)).returncode == 0


def test_a_killed_converter_is_one_sentence(tiny_gguf, cache):
    with start(cache, "pull", str(tiny_gguf)) as process:
        wait_for_conversion(process)
        (converter,) = children(process.pid)
        os.kill(converter, signal.SIGKILL)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert err.splitlines()[-1].startswith("Error: Converting tiny.gguf was killed")
    assert run(cache, "pull", str(tiny_gguf)).returncode == 0


def test_two_pulls_at_once_convert_once(tiny_gguf, cache):
    with start(cache, "pull", str(tiny_gguf)) as first:
        wait_for_conversion(first)
        second = run(cache, "pull", str(tiny_gguf))
        first.communicate(timeout=60)
    assert (first.returncode, second.returncode) == (0, 0)
    assert re.search(r"wait for process \d+, which prepares tiny", second.stderr)
    assert "dequantise" not in second.stderr


def test_a_full_disk_is_one_sentence(tmp_path):
    mount = "mount -t tmpfs -o size=100k none"
    unshare = ["unshare", "-Urm", "sh", "-c"]
    small = tmp_path / "small"
    small.mkdir()
    if (
        shutil.which("unshare") is None
        or subprocess.run([*unshare, f"{mount} {small}"], capture_output=True).returncode != 0
    ):
        pytest.skip("needs user namespaces, to mount a small disk")
    big = write_gguf(tmp_path / "big.gguf")
    script = f'{mount} {small} && exec "$@"'
    done = subprocess.run(
        [*unshare, script, "sh", *TPUGATE, "pull", str(big)],
        env=child_environment(TPUGATE_MODELS_DIR=str(small)),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 1
    assert "No space left" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("content", "kind", "words"),
    [
        (b"PK\x03\x04 no gguf", ModelCorruptError, "no GGUF file"),
        (b"GGUF\x03\x00\x00\x00", UnsupportedModelError, "cannot be converted"),
    ],
)
def test_a_broken_gguf_file_is_one_sentence(tmp_path, cache, content, kind, words):
    (tmp_path / "broken.gguf").write_bytes(content)
    with pytest.raises(kind, match=words) as caught:
        resolve(str(tmp_path / "broken.gguf"), ModelSettings(cache))
    assert "\n" not in str(caught.value)


def test_an_unknown_architecture_is_named(tmp_path, cache):
    path = write_gguf(tmp_path / "odd.gguf", architecture="oddity")
    with pytest.raises(UnsupportedModelError, match="oddity"):
        resolve(str(path), ModelSettings(cache))


def test_list_show_and_rm_tell_the_same_story(tiny_gguf, pulled):
    def listed() -> dict[str, str]:
        rows = json.loads(run(pulled, "list", "--json").stdout)
        return {row["id"]: row["state"] for row in rows}

    catalogue = {"smollm2-135m-instruct": "not pulled", "gemma-3-270m": "not pulled"}
    assert listed() == {**catalogue, "tiny": "ready"}
    shown = json.loads(run(pulled, "show", "--json", str(tiny_gguf)).stdout)
    assert (shown["state"], shown["source.kind"]) == ("ready", "gguf")
    removed = run(pulled, "rm", "tiny")
    assert removed.returncode == 0 and "tiny--" in removed.stdout
    assert listed() == catalogue
    assert run(pulled, "rm", "smollm2").returncode == 1
    assert run(pulled, "pull", "no such model").returncode == 2


def test_the_repair_that_a_corrupt_model_names_works(tiny_gguf, pulled):
    settings = ModelSettings(pulled)
    weights = resolve(str(tiny_gguf), settings).path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-8])
    with pytest.raises(ModelCorruptError) as caught:
        resolve(str(tiny_gguf), settings)
    rm = re.search(r"`tpugate models (rm [^`]+)`", str(caught.value))
    assert rm and run(pulled, *rm[1].split(maxsplit=1)).returncode == 0
    assert resolve(str(tiny_gguf), settings, verify=True).path.is_dir()


def test_an_unknown_hub_id_without_a_network_is_one_sentence(cache):
    done = subprocess.run(
        [*TPUGATE, "pull", "nobody/nothing"],
        env=child_environment(TPUGATE_MODELS_DIR=str(cache), HF_HUB_OFFLINE="1"),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1
    assert "nobody/nothing is not in the model cache and the Hugging Face hub" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_embedded_model_is_what_its_package_carries(smollm2_dir):
    from models.loader import read_info, read_tokenizer

    info, tokenizer = read_info(smollm2_dir), read_tokenizer(smollm2_dir)
    assert (info.context_len, info.eos_token_ids) == (8192, frozenset({2}))
    assert tokenizer.special_tokens["eos_token"] == "<|im_end|>"
    assert not tokenizer.add_bos
    assert tokenizer.chat_template and "<|im_start|>" in tokenizer.chat_template


def test_a_folder_with_other_formats_says_what_to_do(tmp_path, cache):
    settings = ModelSettings(cache)
    (tmp_path / "m").mkdir()
    shutil.copy(write_gguf(tmp_path / "a.gguf"), tmp_path / "m" / "a.gguf")
    with pytest.raises(ModelNotFoundError, match=r"name the file itself: .*a\.gguf"):
        resolve(str(tmp_path / "m"), settings)
    (tmp_path / "m" / "config.json").write_text("{}")
    (tmp_path / "m" / "pytorch_model.bin").touch()
    with pytest.raises(UnsupportedModelError, match="safetensors"):
        resolve(str(tmp_path / "m"), settings)
