"""Protects `bring_up`: the tpu device computes exactly what the CPU computes, and a device that cannot
be had is refused with one sentence."""

import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from torchtpu import environment
from torchtpu.bringup import bring_up
from torchtpu.errors import DeviceMissingError, PluginRejectedError
from torchtpu.pjrt_cpu.build import build_shim, find_compiler
from torchtpu.pjrt_cpu.plugin import choose_plugin

CRASHING_PLUGIN = """
#include <stddef.h>
#include <stdlib.h>
static struct {
  size_t struct_size; void *extensions;
  size_t version_size; void *version_extensions; int major, minor;
  void *functions[60];
} api = {520, 0, 24, 0, 0, 115};
static void *crash(void) { abort(); }
void *GetPjrtApi(void) {
  for (int i = 0; i < 60; i++) api.functions[i] = (void *)crash;
  return &api;
}
"""

CONFLICT = """
import os, sys
os.environ.update(TORCH_DEVICE_BACKEND_AUTOLOAD="0", TPU_LIBRARY_PATH="/elsewhere.so")
sys.modules["torch_tpu"] = object()  # what an import that came before us leaves behind
from torchtpu.bringup import bring_up
from torchtpu.errors import EnvironmentConflictError
try:
    bring_up("tpu")
except EnvironmentConflictError as error:
    sys.exit(str(error))
"""


@pytest.fixture
def integers():
    torch.manual_seed(0)
    return [torch.randint(-8, 8, (64, 64)).float() for _ in range(3)]


def product(a, b, c):
    return a @ b + c


def test_eager_arithmetic_is_exact(tpu_device, integers):
    result = product(*(x.to(tpu_device.torch_device) for x in integers))
    assert result.device.type == "tpu"
    assert torch.equal(result.cpu(), product(*integers))


def test_compiled_arithmetic_is_exact(tpu_device, integers):
    compiled = torch.compile(product, backend="tpu")
    result = compiled(*(x.to(tpu_device.torch_device) for x in integers))
    assert torch.equal(result.cpu(), product(*integers))


def test_what_was_started_is_done_after_synchronize(tpu_device):
    result = (torch.ones(8, 8, device=tpu_device.torch_device) * 2).add_(1)
    tpu_device.synchronize()
    assert result.cpu().flatten().tolist() == [3.0] * 64


def test_device_describes_itself(tpu_device):
    assert tpu_device.kind == "tpu"
    assert tpu_device.platform in ("tpu", "xla-cpu")
    assert tpu_device.is_xla
    assert tpu_device.num_chips >= 1
    assert tpu_device.memory_bytes > 0
    assert tpu_device.versions["torch"].startswith("2.")
    assert ("pjrt-cpu-api" in tpu_device.versions) == (tpu_device.platform == "xla-cpu")


def test_second_call_returns_the_same_device(tpu_device):
    assert bring_up("tpu") is tpu_device


def test_cpu():
    device = bring_up("cpu")
    assert (device.kind, device.platform, device.num_chips) == ("cpu", "cpu", 1)
    assert device.torch_device == torch.device("cpu")
    assert not device.is_xla
    device.synchronize()


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a CUDA GPU")
def test_cuda_is_refused_without_a_gpu():
    with pytest.raises(DeviceMissingError, match=r"^Device cuda cannot be used: .*\.$"):
        bring_up("cuda")


@pytest.mark.skipif(environment.num_tpu_chips() > 0, reason="needs a machine without a TPU")
def test_libtpu_is_refused_without_a_tpu(tmp_path):
    program = (
        "import sys\nfrom torchtpu.bringup import bring_up\n"
        "from torchtpu.errors import DeviceMissingError\n"
        "try:\n    bring_up('tpu')\nexcept DeviceMissingError as error:\n    sys.exit(str(error))\n"
    )
    env = environment.child_environment(replace(environment.read_settings(), tpu_platform="libtpu"))
    answer = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, env=env
    )
    assert "this machine has no TPU" in answer.stderr
    assert answer.returncode == 1


def test_environment_that_comes_too_late_is_refused():
    env = environment.child_environment(
        replace(environment.read_settings(), tpu_platform="xla-cpu")
    )
    answer = subprocess.run(
        [sys.executable, "-c", CONFLICT], capture_output=True, text=True, check=False, env=env
    )
    assert "torch_tpu was imported before the device was brought up" in answer.stderr
    assert "TPU_LIBRARY_PATH" in answer.stderr
    assert answer.returncode == 1


def test_plugin_that_crashes_is_refused(tmp_path):
    source, plugin = tmp_path / "crash.c", tmp_path / "crash.so"
    source.write_text(CRASHING_PLUGIN)
    command = [str(find_compiler()), "-shared", "-fPIC", str(source), "-o", str(plugin)]
    subprocess.run(command, check=True)
    settings = environment.read_settings()
    shim = build_shim(settings.cache_dir)
    settings = replace(settings, pjrt_cpu_plugin=plugin, tpu_platform="xla-cpu")
    with pytest.raises(PluginRejectedError, match=r"crash\.so crashes in its trial \(SIGABRT\)"):
        choose_plugin(settings, shim)
