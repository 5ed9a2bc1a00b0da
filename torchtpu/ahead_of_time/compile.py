"""Captured programs and a chip go in, what the compiler of that chip says of them comes out."""

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torchtpu.ahead_of_time.capture import Capture
from torchtpu.ahead_of_time.chips import Chip
from torchtpu.ahead_of_time.hlo import parse
from torchtpu.ahead_of_time.hlo_cost import Cost, Groups, read_cost
from torchtpu.environment import tpu_compiler_environment
from torchtpu.errors import AheadOfTimeError

_DOES_NOT_FIT = re.compile(
    r"^RESOURCE_EXHAUSTED: .*(Ran out of memory (?:on|in)[^\n]*\bhbm[^\n]*?)\. ", re.I | re.S
)


@dataclass(frozen=True)
class Memory:
    """Bytes of the device's memory that a program needs, as its compiler counts."""

    arguments: int
    outputs: int
    shared: int
    """Of outputs that lie in donated arguments."""
    temporaries: int
    code: int
    peak: int


@dataclass(frozen=True)
class Compiled:
    """A program on a chip: `refusal` is the compiler's sentence where it does not fit."""

    name: str
    memory: Memory | None
    cost: Cost | None
    refusal: str | None = None

    @property
    def fits(self) -> bool:
        return self.refusal is None


def compile_programs(chip: Chip, captures: Sequence[Capture], groups: Groups) -> list[Compiled]:
    """Compile one after the other in a process of its own; `groups` name the programs' inputs.

    Raises AheadOfTimeError if a program is refused for another reason than its size.
    """
    with tempfile.TemporaryDirectory(prefix="tpugate-aot-") as name:
        folder = Path(name)
        printed = folder / "printed"
        printed.mkdir()
        programs = [_files(folder, index, capture) for index, capture in enumerate(captures)]
        job = {"topology": chip.topology, "printed": str(printed), "programs": programs}
        (folder / "job.json").write_text(json.dumps(job))
        _run_child(folder / "job.json", printed)
        return [
            _read(capture, program, groups)
            for capture, program in zip(captures, programs, strict=True)
        ]


def _files(folder: Path, index: int, capture: Capture) -> dict[str, object]:
    stablehlo = folder / f"{index}.mlir"
    stablehlo.write_text(capture.stablehlo)
    return {
        "stablehlo": str(stablehlo),
        "donated": list(capture.donated),
        "result": str(folder / f"{index}.json"),
        "hlo": str(folder / f"{index}.hlo"),
    }


def _run_child(job: Path, printed: Path) -> None:
    child = subprocess.run(
        [sys.executable, "-m", "torchtpu.ahead_of_time.child", str(job)],
        env=tpu_compiler_environment(printed),
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )
    if child.returncode:
        lines = child.stderr.strip().splitlines() or [f"exit status {child.returncode}"]
        raise AheadOfTimeError(f"The TPU compiler's process failed: {lines[-1]}")


def _read(capture: Capture, program: dict[str, object], groups: Groups) -> Compiled:
    result = json.loads(Path(str(program["result"])).read_text())
    refusal = result.get("refusal")
    if refusal is None:
        text = Path(str(program["hlo"])).read_text()
        return Compiled(capture.name, Memory(**result["memory"]), read_cost(parse(text), groups))
    too_large = _DOES_NOT_FIT.search(refusal)
    if too_large is None:
        reason = refusal.strip().splitlines()[0][:300]
        raise AheadOfTimeError(f"The TPU compiler refuses program {capture.name}: {reason}")
    return Compiled(capture.name, None, None, too_large[1])
