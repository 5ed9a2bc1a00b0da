"""Protects `tpugate doctor`: what it prints, and its exit status."""

import json
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from click.testing import CliRunner

from cli.doctor import doctor
from torchtpu import environment


def test_table(tpu_device):
    result = CliRunner().invoke(doctor)
    assert result.exit_code == 0
    assert result.output.startswith("Device tpu can run on this machine.")
    assert tpu_device.versions["torch-tpu"] in result.output


def test_json(tpu_device):
    result = CliRunner().invoke(doctor, ["--json"])
    assert result.exit_code == 0
    report = json.loads(result.output)
    assert report["can_run"] is True
    assert report["self_test"] == "passed"
    assert report["platform"] == tpu_device.platform
    assert report["versions"]["torch"] == tpu_device.versions["torch"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a CUDA GPU")
def test_device_that_cannot_run():
    result = CliRunner().invoke(doctor, ["--device", "cuda"])
    assert result.exit_code == 1
    assert "Device cuda cannot run on this machine." in result.output
    assert "install the CUDA wheel of torch" in result.output


def test_without_a_compiler(tmp_path):
    settings = replace(environment.read_settings(), cache_dir=tmp_path, tpu_platform="xla-cpu")
    answer = subprocess.run(
        [sys.executable, "-c", "from cli.doctor import doctor; doctor()"],
        env={**environment.child_environment(settings), "PATH": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert answer.returncode == 1
    assert "No C compiler (cc, gcc, clang) is on PATH" in answer.stdout
    assert "apt-get install gcc" in answer.stdout
    assert answer.stderr == ""


def test_bad_setting(monkeypatch):
    monkeypatch.setenv("TPUGATE_TPU_PLATFORM", "gpu")
    result = CliRunner().invoke(doctor)
    assert result.exit_code == 2
    assert "TPUGATE_TPU_PLATFORM is 'gpu'" in result.output
