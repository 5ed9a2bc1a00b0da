"""A worker's settings: flags win over the environment, and a wrong value is named in one sentence."""

import zlib
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from workers.config import load_config
from workers.engine.scripted import scripted_card
from workers.errors import ConfigError


def test_flags_win_over_the_environment_and_that_over_defaults():
    config = load_config(
        {"max_rows": "8", "engine": None},
        {"TPUGATE_ENGINE": "fake", "TPUGATE_MAX_ROWS": "4", "TPUGATE_DRAIN_TIMEOUT_S": "2.5"},
    )
    assert (config.engine, config.max_rows, config.drain_timeout_s) == ("fake", 8, 2.5)
    assert (config.device, config.context_len) == ("tpu", None)


def test_an_empty_variable_is_not_given():
    assert load_config({"engine": "fake"}, {"TPUGATE_MAX_ROWS": ""}).max_rows is None


def test_each_process_has_an_id_of_its_own():
    first, second = (load_config({"engine": "fake"}, {}) for _ in range(2))
    assert first.worker_id != second.worker_id


@pytest.mark.parametrize(
    ("flags", "name"),
    [
        ({"engine": "fake"}, "m-small"),
        ({"engine": "fake", "model": "my-model"}, "my-model"),
        ({"model": "smollm2-135m-instruct"}, "smollm2-135m-instruct"),
        ({"model": "HuggingFaceTB/SmolLM2-360M"}, "HuggingFaceTB/SmolLM2-360M"),
        ({"model": "HuggingFaceTB/SmolLM2-360M", "served_name": "small"}, "small"),
    ],
)
def test_the_served_name(flags: dict[str, str], name: str):
    assert load_config(flags, {}).served_name == name


def test_a_folder_is_served_under_its_own_name(tmp_path: Path):
    folder = tmp_path / "my model"
    folder.mkdir()
    assert load_config({"model": str(folder)}, {}).served_name == "my-model"


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ({}, "--model"),
        ({"model": "/no/such/folder"}, "/no/such/folder"),
        ({"model": "no-such-model"}, "no-such-model"),
        ({"engine": "magic"}, "--engine"),
        ({"engine": "fake", "device": "abacus"}, "--device"),
        ({"engine": "fake", "memory_share": "1.5"}, "--memory-share"),
        ({"engine": "fake", "memory_share": "0"}, "--memory-share"),
        ({"engine": "fake", "max_step_tokens": "none"}, "--max-step-tokens"),
        ({"engine": "fake", "dtype": "float8"}, "--dtype"),
        ({"engine": "fake", "max_rows": "0"}, "--max-rows"),
        ({"engine": "fake", "context_len": "long"}, "--context-len"),
        ({"engine": "fake", "step_delay_s": "-1"}, "--step-delay-s"),
        ({"engine": "fake", "drain_timeout_s": "nan"}, "--drain-timeout-s"),
        ({"engine": "fake", "log_level": "chatty"}, "--log-level"),
        ({"engine": "fake", "tool_parser": "xml"}, "--tool-parser"),
        ({"engine": "fake", "reasoning_parser": "loud"}, "--reasoning-parser"),
        ({"engine": "fake", "redis_url": "localhost:6379"}, "Redis URL"),
        ({"engine": "fake", "served_name": "a b\n"}, "--served-name"),
    ],
)
def test_a_wrong_value_is_named_in_one_sentence(flags: dict[str, str], named: str):
    with pytest.raises(ConfigError) as caught:
        load_config(flags, {})
    text = str(caught.value)
    assert named in text
    assert "\n" not in text


def test_the_scripted_card_has_a_token_for_each_byte():
    card = scripted_card("m-small")
    tokenizer = Tokenizer.from_str(zlib.decompress(card.tokenizer_json).decode())
    text = "Crab 🦀\n"
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert len(ids) == len(text.encode())
    assert tokenizer.decode(ids) == text
    assert len(tokenizer.encode("<|im_start|>", add_special_tokens=False).ids) == 1
    assert card.vocab_size == 258
    assert card.digest == scripted_card("another").digest
