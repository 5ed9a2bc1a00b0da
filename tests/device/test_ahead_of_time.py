"""Protects that the engine's own step programs compile for TPUs that are not here, that a decode step there
moves little more than it must, and that a plan says so. The compiler is libtpu's, in its own process."""

import dataclasses
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from transformers import LlamaConfig

from models.library import LocalModel
from torchtpu.ahead_of_time.chips import CHIPS
from torchtpu.buckets import Bucket, BucketLadder, PrefillShape
from torchtpu.device import Device
from workers.engine.build import EngineConfig
from workers.engine.planner import Captured, PlannedStep, capture_steps, compile_steps

ROWS, CONTEXT, BLOCK_LEN = 8, 512, 16
NUM_BLOCKS = 4096
"""As for 32 rows of 2,048 tokens: the compiler copies a cache that fits into VMEM there and back."""
PREFILL = PrefillShape(64, 8, 64)
MIXED_LAYERS = 4
WEIGHTS = 134_515_008 * 2
KV_BYTES = 2 * 3 * 64 * 2
"""Of one token and layer."""
MOST = 1.1
"""HBM bytes of a decode step, to those it must read."""


def write_config(folder: Path, **changes: object) -> LocalModel:
    """SmolLM2-135M's shapes, without weights."""
    shape = {
        "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
        "num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49152,
        "max_position_embeddings": 8192, "rope_theta": 100000.0, "tie_word_embeddings": True,
    }  # fmt: skip
    LlamaConfig(architectures=["LlamaForCausalLM"], **(shape | changes)).save_pretrained(folder)
    return LocalModel("smollm2-shapes", folder, None, None)


def capture(device: Device, folder: Path, bucket: Bucket, **changes: object) -> Captured:
    """Blocks are given, so that chips make no difference."""
    ladder = BucketLadder(
        rows=(ROWS,),
        mixed_rows=(ROWS,),
        prefill=(PREFILL,),
        contexts=(CONTEXT,),
        mixed_contexts=(CONTEXT,),
    )
    config = EngineConfig(model="", served_name="", num_blocks=NUM_BLOCKS, ladder=ladder)
    local = write_config(folder, **changes)
    return capture_steps(config, CHIPS["v5e"], device, local, lambda ladder: [bucket])


@pytest.fixture(scope="module")
def steps(
    tpu_device: Device, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[PlannedStep, PlannedStep]]:
    """For each chip the decode step of the whole model, and a step with prefill of its first layers."""
    decode = capture(tpu_device, tmp_path_factory.mktemp("decode"), Bucket(ROWS, CONTEXT))
    folder, bucket = tmp_path_factory.mktemp("mixed"), Bucket(ROWS, CONTEXT, PREFILL)
    mixed = capture(tpu_device, folder, bucket, num_hidden_layers=MIXED_LAYERS)
    # In one process of the compiler for each chip; the groups of inputs are those of the first.
    both = dataclasses.replace(
        decode,
        buckets=decode.buckets + mixed.buckets,
        captures=decode.captures + mixed.captures,
        live_kv=decode.live_kv + mixed.live_kv,
    )
    with ThreadPoolExecutor(2) as threads:
        plans = threads.map(lambda chip: compile_steps(both, chip), CHIPS.values())
        return {plan.chip.name: (plan.steps[0], plan.steps[1]) for plan in plans}


@pytest.mark.parametrize("chip", CHIPS)
def test_decode_and_prefill_programs_fit(
    steps: dict[str, tuple[PlannedStep, PlannedStep]], chip: str
) -> None:
    for step, num_layers in zip(steps[chip], (30, MIXED_LAYERS), strict=True):
        assert step.compiled.fits
        memory = step.compiled.memory
        assert memory is not None
        assert memory.peak < CHIPS[chip].hbm_bytes
        # The cache is one: the program's result lies where its input lay.
        cache = num_layers * (NUM_BLOCKS + 1) * BLOCK_LEN * KV_BYTES
        assert memory.shared >= cache
        assert memory.peak < 1.5 * (WEIGHTS + cache)


@pytest.mark.parametrize("chip", CHIPS)
def test_a_decode_step_moves_little_more_than_it_must(
    steps: dict[str, tuple[PlannedStep, PlannedStep]], chip: str
) -> None:
    decode, _ = steps[chip]
    kv = ROWS * CONTEXT * 30 * KV_BYTES
    assert abs(decode.live_bytes - WEIGHTS - kv) < 1000  # rotary frequencies
    assert decode.hbm_ratio is not None
    assert decode.hbm_ratio <= MOST
    cost = decode.compiled.cost
    assert cost is not None
    assert WEIGHTS <= cost.of("weights") <= MOST * WEIGHTS  # the tied table is read once
    assert kv <= cost.of("kv") <= 1.01 * kv
    assert cost.of("other") < 0.01 * decode.live_bytes


def test_matrix_products_are_those_of_the_model(
    steps: dict[str, tuple[PlannedStep, PlannedStep]],
) -> None:
    projections = 30 * (2 * 576 * 576 + 2 * 192 * 576 + 3 * 1536 * 576) + 49152 * 576
    kernel = (
        30 * ROWS * 16 * CONTEXT * (256 + 256)
    )  # 9 heads padded, whole lanes of keys and values
    for decode, _ in steps.values():
        cost = decode.compiled.cost
        assert cost is not None
        assert cost.flops == 2 * (ROWS * projections + kernel)


def test_the_command_says_that_a_model_does_not_fit(tmp_path: Path) -> None:
    write_config(
        tmp_path, hidden_size=16384, intermediate_size=131072, num_attention_heads=128,
        num_key_value_heads=8, num_hidden_layers=2,
    )  # fmt: skip
    shape = ["--max-rows", "8", "--context-len", "256", "--num-blocks", "128"]
    command = [sys.executable, "-m", "cli.main", "plan", "--model", str(tmp_path), "--chip", "v5e"]
    # As a user starts it: this process's own environment knows a device already.
    known = ("TORCH_DEVICE_BACKEND_AUTOLOAD", "TPU_LIBRARY_PATH", "TPUGATE_PJRT_PLUGIN")
    environment = {name: value for name, value in os.environ.items() if name not in known}
    run = subprocess.run(
        [*command, *shape, "--json"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 1, run.stderr
    plan = json.loads(run.stdout)
    assert not plan["fits"]
    assert "15.75G" in plan["programs"][0]["refusal"]


def test_the_command_refuses_a_chip_that_it_does_not_know() -> None:
    command = [sys.executable, "-m", "cli.main", "plan", "--model", "x", "--chip", "v9"]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 2
    assert "v5e" in run.stderr
