"""Protects the PJRT shim: it builds from source, and refuses every plugin that does not fit with one
sentence instead of a crash. The plugins here are real shared objects, compiled by the tests."""

import ctypes
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from torchtpu import environment
from torchtpu.errors import NoCompilerError, NoPluginError, ShimBuildError
from torchtpu.pjrt_cpu import build
from torchtpu.pjrt_cpu.build import build_shim, find_compiler
from torchtpu.pjrt_cpu.plugin import find_plugins

# The head of a PJRT function table, with 60 functions that are never called.
FAKE_PLUGIN = """
#include <stddef.h>
static struct {
  size_t struct_size; void *extensions;
  size_t version_size; void *version_extensions; int major, minor;
  void *functions[60];
} api = {API_SIZE, 0, VERSION_SIZE, 0, MAJOR, 7};
void *GetPjrtApi(void) {
  for (int i = 0; i < 60; i++) api.functions[i] = i == HOLE ? 0 : (void *)GetPjrtApi;
  return NOTHING ? 0 : (void *)&api;
}
"""
FITTING = {"API_SIZE": 520, "VERSION_SIZE": 24, "MAJOR": 0, "HOLE": -1, "NOTHING": 0}

ASK_SHIM = """
import sys
from pathlib import Path
from torchtpu import environment
from torchtpu.errors import PluginRejectedError
from torchtpu.pjrt_cpu.plugin import load_shim
shim, plugin = Path(sys.argv[1]), Path(sys.argv[2])
environment.apply(environment.xla_cpu_variables(shim, plugin, threads=1))
try:
    print(load_shim(shim).pjrt_version)
except PluginRejectedError as error:
    sys.exit(f"refused: {error}")
"""


@pytest.fixture(scope="module")
def shim():
    """Where the device tests look for it too: its attention takes the compiler long."""
    return build_shim(environment.read_settings().cache_dir)


@pytest.fixture
def small_sources(tmp_path, monkeypatch):
    """Instead of the shim's: how it is kept does not depend on what it is."""
    source = tmp_path / "small.c"
    source.write_text('__attribute__((visibility("default"))) int answer(void) { return 42; }')
    monkeypatch.setattr(build, "SOURCES", (source,))


def compile_plugin(folder: Path, **changes: int) -> Path:
    source, built = folder / "plugin.c", folder / "plugin.so"
    source.write_text(FAKE_PLUGIN)
    defines = [f"-D{name}={value}" for name, value in {**FITTING, **changes}.items()]
    command = [str(find_compiler()), "-shared", "-fPIC", *defines, str(source), "-o", str(built)]
    subprocess.run(command, check=True)
    return built


def ask_shim(shim: Path, plugin: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "error", "-c", ASK_SHIM, str(shim), str(plugin)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_fitting_plugin_is_accepted(shim, tmp_path):
    answer = ask_shim(shim, compile_plugin(tmp_path))
    assert (answer.stdout.strip(), answer.stderr, answer.returncode) == ("0.7", "", 0)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"MAJOR": 1}, "it speaks PJRT API 1.7, major version 0 is needed"),
        ({"API_SIZE": 16}, "16 bytes long and holds no version"),
        ({"API_SIZE": 200}, "its PJRT function table is 200 bytes long, 424 are needed"),
        ({"VERSION_SIZE": 16}, "its PJRT version record is 16 bytes long, 24 are needed"),
        ({"HOLE": 10}, "its PJRT function table has holes where functions are needed"),
        ({"HOLE": 47}, "its PJRT function table has holes where functions are needed"),
        ({"NOTHING": 1}, "GetPjrtApi returned nothing"),
    ],
)
def test_plugin_that_does_not_fit_is_refused(shim, tmp_path, changes, reason):
    answer = ask_shim(shim, compile_plugin(tmp_path, **changes))
    assert answer.returncode == 1
    own, ours = answer.stderr.strip().splitlines()
    assert own.startswith("tpugate pjrt shim: ")
    assert reason in own
    assert ours.startswith("refused: ")
    assert reason in ours


def test_library_that_is_no_plugin_is_refused(shim):
    answer = ask_shim(shim, shim.with_name("none.so"))
    assert answer.returncode == 1
    assert "cannot load the PJRT CPU plugin" in answer.stderr


def test_other_library_is_refused(shim, tmp_path):
    source, built = tmp_path / "other.c", tmp_path / "other.so"
    source.write_text("int unrelated(void) { return 0; }")
    command = [str(find_compiler()), "-shared", "-fPIC", str(source), "-o", str(built)]
    subprocess.run(command, check=True)
    answer = ask_shim(shim, built)
    assert answer.returncode == 1
    assert "not a PJRT plugin, it has no function GetPjrtApi" in answer.stderr


def test_built_once_and_kept(shim):
    written = shim.stat().st_mtime_ns
    assert build_shim(shim.parents[1]) == shim
    assert shim.stat().st_mtime_ns == written


def test_of_builds_at_once_one_compiles(small_sources, tmp_path, monkeypatch):
    compiled, plainly = [], build._compile
    monkeypatch.setattr(build, "_compile", lambda *args: (compiled.append(args), plainly(*args)))
    with ThreadPoolExecutor(4) as pool:
        paths = set(pool.map(build_shim, [tmp_path] * 4))
    assert len(compiled) == 1
    assert len(paths) == 1
    (path,) = paths
    assert {*(tmp_path / "pjrt_cpu").iterdir()} == {path, path.with_suffix(".sha256")}


@pytest.mark.parametrize("keep", [0, 4000])
def test_a_damaged_one_is_built_again(small_sources, tmp_path, keep):
    kept = build_shim(tmp_path)
    whole = kept.read_bytes()
    assert len(whole) > keep
    kept.write_bytes(whole[:keep])
    assert build_shim(tmp_path) == kept
    assert kept.stat().st_size == len(whole)
    assert ctypes.CDLL(str(kept)).answer() == 42


def test_no_compiler(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(NoCompilerError, match="No C compiler .* is on PATH"):
        build_shim(tmp_path)


def test_failing_compiler(tmp_path, monkeypatch):
    compiler = tmp_path / "cc"
    compiler.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && echo odd 1.0 && exit 0\n'
        "echo 'shim.c:1: error: no such header' >&2\nexit 1\n"
    )
    compiler.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ShimBuildError, match="failed to build the PJRT shim: .*no such header"):
        build_shim(tmp_path / "cache")


def test_cache_that_cannot_be_written(tmp_path):
    (tmp_path / "pjrt_cpu").write_text("a file where the folder should be")
    with pytest.raises(ShimBuildError, match="cannot be kept"):
        build_shim(tmp_path)


def test_plugin_named_but_absent(tmp_path, monkeypatch):
    monkeypatch.setenv("TPUGATE_PJRT_CPU_PLUGIN", str(tmp_path / "none.so"))
    with pytest.raises(
        NoPluginError, match="TPUGATE_PJRT_CPU_PLUGIN names .*, which is not a file"
    ):
        find_plugins(environment.read_settings())


def test_no_plugin_installed(monkeypatch):
    monkeypatch.delenv("TPUGATE_PJRT_CPU_PLUGIN", raising=False)
    monkeypatch.setitem(sys.modules, "lammps_jax_pjrt_cpu", None)  # as if it were not installed
    with pytest.raises(NoPluginError, match="pip install lammps-jax-pjrt-cpu"):
        find_plugins(environment.read_settings())
