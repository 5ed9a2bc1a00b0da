"""Protects the roads from a function to a program: each gives the same results and updates its donated
input, the best one is found by trying, and what is kept on disk is never trusted blindly."""

import logging
import os
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor

from torchtpu.compiler import ProgramCompiler, Road, probe
from torchtpu.device import Device

DONATED = 2


def step(slots: Tensor, rows: Tensor, cache: Tensor) -> tuple[Tensor, ...]:
    cache[slots] = rows
    return cache[slots].sum(-1) * 2, cache


def inputs(device: Device) -> list[Tensor]:
    rows = torch.arange(8, dtype=torch.float32).view(2, 4)
    tensors = [torch.tensor([1, 3]), rows, torch.zeros(6, 4)]
    return [tensor.to(device.torch_device) for tensor in tensors]


def run(
    compiler: ProgramCompiler, device: Device, *, has_model: bool = True
) -> tuple[Tensor, Tensor]:
    started = compiler.start("step", step, inputs(device), [DONATED], has_model=has_model)
    program = started.result()
    sums, cache = program(inputs(device))
    return sums.cpu(), cache.cpu()


@pytest.mark.parametrize("road", [Road.DONATED, Road.PUBLIC, Road.COMPILED])
def test_every_road_computes_the_same(tpu_device: Device, road: Road) -> None:
    sums, cache = run(ProgramCompiler(tpu_device, {}, None, road), tpu_device)
    assert sums.tolist() == [12.0, 44.0]
    assert cache[[1, 3]].flatten().tolist() == list(range(8))
    assert not cache[[0, 2, 4, 5]].any()


def test_the_best_road_is_found_by_trying(tpu_device: Device) -> None:
    assert probe(tpu_device) is Road.DONATED


def test_a_donated_input_cannot_be_used_again(tpu_device: Device) -> None:
    program = (
        ProgramCompiler(tpu_device, {}, None).start("step", step, inputs(tpu_device), [DONATED])
    ).result()
    given = inputs(tpu_device)
    program(given)[0].cpu()  # wait: the device takes the input when the program runs
    with pytest.raises(RuntimeError, match="donated"):
        given[DONATED].cpu()


def test_a_second_compiler_reads_what_the_first_one_kept(
    tpu_device: Device, tmp_path: Path
) -> None:
    first = ProgramCompiler(tpu_device, {"source": "a"}, tmp_path)
    wanted = run(first, tpu_device)
    second = ProgramCompiler(tpu_device, {"source": "a"}, tmp_path)
    got = run(second, tpu_device)
    assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))
    assert (first.counters.num_compiled, first.counters.num_loaded) == (1, 0)
    assert (second.counters.num_compiled, second.counters.num_loaded) == (0, 1)


def test_another_model_does_not_get_its_program(tpu_device: Device, tmp_path: Path) -> None:
    run(ProgramCompiler(tpu_device, {}, tmp_path, model={"layers": 1}), tpu_device)
    other = ProgramCompiler(tpu_device, {}, tmp_path, model={"layers": 2})
    run(other, tpu_device)
    assert other.counters.num_compiled == 1


def test_programs_without_the_model_are_kept_for_all(tpu_device: Device, tmp_path: Path) -> None:
    one = ProgramCompiler(tpu_device, {"source": "1"}, tmp_path, model={"layers": 1})
    run(one, tpu_device, has_model=False)
    same = ProgramCompiler(tpu_device, {"source": "1"}, tmp_path, model={"layers": 2})
    run(same, tpu_device, has_model=False)
    assert (same.counters.num_compiled, same.counters.num_loaded) == (0, 1)
    changed = ProgramCompiler(tpu_device, {"source": "2"}, tmp_path, model={"layers": 1})
    run(changed, tpu_device, has_model=False)
    assert changed.counters.num_compiled == 1


@pytest.mark.parametrize("damage", [b"", b"short", b"x" * 4000])
def test_a_damaged_file_is_compiled_anew_and_replaced(
    tpu_device: Device, tmp_path: Path, damage: bytes
) -> None:
    run(ProgramCompiler(tpu_device, {}, tmp_path), tpu_device)
    (kept,) = tmp_path.iterdir()
    kept.write_bytes(damage)
    compiler = ProgramCompiler(tpu_device, {}, tmp_path)
    sums, _ = run(compiler, tpu_device)
    assert sums.tolist() == [12.0, 44.0]
    assert compiler.counters.num_compiled == 1
    assert kept.stat().st_size > len(damage)


@contextmanager
def files_of_at_most(num_bytes: int) -> Iterator[None]:
    """As on a full disk: a write beyond it fails with an `OSError`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def twice(compiler: ProgramCompiler, device: Device) -> list[float]:
    """Two programs, one after the other; the sums of the first."""
    sums, _ = run(compiler, device)
    compiler.start("another", step, inputs(device), [DONATED]).result()
    return [float(x) for x in sums]


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.name == "torchtpu.compiler"]


def test_a_full_disk_costs_only_the_kept_programs(
    tpu_device: Device, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    compiler = ProgramCompiler(tpu_device, {}, tmp_path)
    with caplog.at_level(logging.WARNING), files_of_at_most(100):
        assert twice(compiler, tpu_device) == [12.0, 44.0]
    assert [str(tmp_path) in text for text in warnings(caplog)] == [True]
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_made_costs_only_the_kept_programs(
    tpu_device: Device, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "file" / "programs"
    folder.parent.write_text("no folder")
    with caplog.at_level(logging.WARNING):
        assert twice(ProgramCompiler(tpu_device, {}, folder), tpu_device) == [12.0, 44.0]
    assert [str(folder) in text for text in warnings(caplog)] == [True]


def test_programs_that_nobody_used_for_a_month_are_removed(
    tpu_device: Device, tmp_path: Path
) -> None:
    run(ProgramCompiler(tpu_device, {}, tmp_path), tpu_device)
    (used,) = tmp_path.iterdir()
    unused, stale, recent = (tmp_path / name for name in ("a.program", "b.staging", "c.program"))
    day_s = 86400
    for path, days in ((unused, 31), (stale, 31), (recent, 29), (used, 31)):
        path.touch()
        os.utime(path, (time.time() - days * day_s,) * 2)
    compiler = ProgramCompiler(tpu_device, {}, tmp_path)
    twice(compiler, tpu_device)
    assert compiler.counters.num_loaded == 1
    assert not unused.exists() and not stale.exists()
    assert recent.exists() and used.exists()


def test_a_plain_device_runs_the_function_itself() -> None:
    from torchtpu.bringup import bring_up

    cpu = bring_up("cpu")
    compiler = ProgramCompiler(cpu, {}, None)
    sums, cache = run(compiler, cpu)
    assert compiler.road is Road.EAGER
    assert sums.tolist() == [12.0, 44.0]
    assert cache[3].tolist() == [4.0, 5.0, 6.0, 7.0]
