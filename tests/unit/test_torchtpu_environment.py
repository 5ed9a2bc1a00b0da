"""Protects what devices read from their surroundings (variables, device files, control groups) and
what they ask of the allocator."""

import platform
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from torchtpu import environment
from torchtpu.errors import SettingError
from torchtpu.memory import available_memory_bytes


@pytest.fixture(autouse=True)
def clean(monkeypatch):
    for name in ("CACHE_DIR", "PJRT_CPU_PLUGIN", "TPU_PLATFORM", "XLA_FLAGS"):
        monkeypatch.delenv(f"TPUGATE_{name}", raising=False)
    monkeypatch.delenv("XLA_FLAGS", raising=False)


@pytest.mark.parametrize("module", ["environment", "bringup", "report", "pjrt_cpu.plugin"])
def test_import_leaves_torch_out(module):
    program = f"import sys, torchtpu.{module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_defaults(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    settings = environment.read_settings()
    assert settings.cache_dir == Path("/somewhere/tpugate")
    assert settings.pjrt_cpu_plugin is None
    assert settings.tpu_platform == "auto"
    assert settings.xla_flags == ""


def test_xla_flags_are_joined_once(monkeypatch):
    monkeypatch.setenv("TPUGATE_XLA_FLAGS", "--a=1 --b=2")
    monkeypatch.setenv("XLA_FLAGS", "--b=2 --c=3")
    assert environment.read_settings().xla_flags == "--a=1 --b=2 --c=3"


def test_unknown_platform_is_refused(monkeypatch):
    monkeypatch.setenv("TPUGATE_TPU_PLATFORM", "gpu")
    with pytest.raises(SettingError, match="TPUGATE_TPU_PLATFORM is 'gpu': use auto, libtpu"):
        environment.read_settings()


def test_child_reads_the_same_settings(monkeypatch, tmp_path):
    settings = replace(
        environment.read_settings(), cache_dir=tmp_path, pjrt_cpu_plugin=tmp_path / "p.so"
    )
    for name, value in environment.child_environment(settings).items():
        monkeypatch.setenv(name, value)
    assert environment.read_settings() == settings


def test_preload_keeps_what_is_preloaded(monkeypatch):
    monkeypatch.setenv("LD_PRELOAD", "/lib/other.so")
    library = environment.find_tcmalloc()
    expected = {"LD_PRELOAD": f"{library}:/lib/other.so"} if library else {}
    assert environment.worker_preload() == expected


def _pci(folder, vendor, device, group):
    folder.mkdir(parents=True)
    (folder / "vendor").write_text(f"{vendor}\n")
    (folder / "device").write_text(f"{device}\n")
    (folder / "iommu_group").symlink_to(f"/sys/kernel/iommu_groups/{group}")


def test_counts_chips_behind_vfio_and_not_google_network_cards(tmp_path):
    devices, pci = tmp_path / "dev", tmp_path / "pci"
    (devices / "vfio").mkdir(parents=True)
    for group in (3, 4, 5):
        (devices / "vfio" / str(group)).touch()
    _pci(pci / "a", "0x1ae0", "0x0063", 3)
    _pci(pci / "b", "0x1ae0", "0x0063", 4)
    _pci(pci / "network", "0x1ae0", "0x0042", 5)
    _pci(pci / "not-given-to-us", "0x1ae0", "0x0063", 9)
    assert environment.num_tpu_chips(devices, pci) == 2


def test_counts_accelerator_files(tmp_path):
    (tmp_path / "accel").mkdir()  # the folder of other vendors' accelerators
    assert environment.num_tpu_chips(tmp_path, tmp_path / "none") == 0
    for index in range(4):
        (tmp_path / f"accel{index}").touch()
    assert environment.num_tpu_chips(tmp_path, tmp_path / "none") == 4


@pytest.mark.parametrize("text", ["max 100000", "", "50000 0"])
def test_cores_without_a_usable_quota(tmp_path, text):
    (tmp_path / "cpu.max").write_text(text)
    assert environment.num_cpu_cores(tmp_path) == environment.num_cpu_cores(tmp_path / "none")


def test_cores_are_limited_by_the_quota(tmp_path):
    (tmp_path / "cpu.max").write_text("50000 100000")
    assert environment.num_cpu_cores(tmp_path) == 1


@pytest.mark.parametrize(
    ("limit", "expected"), [("3000", 2000), ("max", 8192), ("1000000", 8192), ("10", 0)]
)
def test_memory_is_what_kernel_and_control_group_leave(tmp_path, limit, expected):
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 99 kB\nMemAvailable: 8 kB\n")
    (tmp_path / "memory.max").write_text(limit)
    (tmp_path / "memory.current").write_text("1000")
    assert available_memory_bytes(meminfo, tmp_path) == expected


def test_memory_is_unknown_without_meminfo(tmp_path):
    assert available_memory_bytes(tmp_path / "none", tmp_path) == 0


KEPT_MEMORY = """
import ctypes, resource
from torchtpu.memory import keep_freed_memory
assert keep_freed_memory()
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]
size = 256 << 20
for _ in range(2):
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    block = libc.malloc(size)
    ctypes.memset(block, 1, size)
    libc.free(block)
    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc's allocator")
def test_freed_memory_is_kept():
    answer = subprocess.run(
        [sys.executable, "-c", KEPT_MEMORY], capture_output=True, text=True, check=True
    )
    first, second = (int(line) for line in answer.stdout.split())
    assert second < first / 10
