"""Builds the PJRT shim from its C source, once for each source and compiler."""

import hashlib
import os
import subprocess
import tempfile
from pathlib import Path

from torchtpu.environment import find_on_path
from torchtpu.errors import NoCompilerError, ShimBuildError

SOURCE = Path(__file__).with_name("shim.c")
COMPILERS = ("cc", "gcc", "clang")
_FLAGS = ("-O2", "-std=gnu11", "-fPIC", "-shared", "-fvisibility=hidden")
_LIBRARIES = ("-ldl", "-lpthread")
_COMPILE_TIMEOUT_S = 120


def find_compiler() -> Path:
    """The C compiler on PATH. Raises NoCompilerError."""
    compiler = find_on_path(COMPILERS)
    if compiler is None:
        raise NoCompilerError(
            f"No C compiler ({', '.join(COMPILERS)}) is on PATH; one is needed to run the tpu "
            "device without a TPU: install gcc or clang, for example with `apt-get install gcc`."
        )
    return compiler


def compiler_version(compiler: Path) -> str:
    """First line of `compiler --version`. Raises ShimBuildError when it does not run."""
    return _run([str(compiler), "--version"]).partition("\n")[0].strip()


def build_shim(cache_dir: Path) -> Path:
    """Path of the built shim under `cache_dir`, compiling it if it is not there or damaged.

    Safe in several processes at once: each compiles to a file of its own and renames it into place.
    Raises NoCompilerError, or ShimBuildError when the compiler fails or the cache cannot be written.
    """
    compiler = find_compiler()
    key = hashlib.sha256()
    for part in (
        SOURCE.read_bytes(),
        compiler_version(compiler).encode(),
        " ".join(_FLAGS).encode(),
    ):
        key.update(hashlib.sha256(part).digest())
    target = cache_dir / "pjrt_cpu" / f"shim-{key.hexdigest()[:16]}.so"
    if _is_whole(target):
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as folder:
            built = Path(folder) / "shim.so"
            _run([str(compiler), *_FLAGS, str(SOURCE), "-o", str(built), *_LIBRARIES])
            digest = Path(folder) / "digest"
            digest.write_text(_digest(built), encoding="ascii")
            os.replace(digest, _digest_file(target))
            os.replace(built, target)
    except OSError as error:
        raise ShimBuildError(
            f"The PJRT shim cannot be kept in {target.parent}: {error}."
        ) from error
    return target


def _is_whole(shim: Path) -> bool:
    """Whether it is there as it was built. Loading a damaged one to see may end this process."""
    try:
        return _digest_file(shim).read_text(encoding="ascii") == _digest(shim)
    except (OSError, UnicodeDecodeError):
        return False


def _digest_file(shim: Path) -> Path:
    return shim.with_suffix(".sha256")


def _digest(shim: Path) -> str:
    return hashlib.sha256(shim.read_bytes()).hexdigest()


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=_COMPILE_TIMEOUT_S
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ShimBuildError(f"The C compiler does not run: {error}.") from error
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or ["no message"]
        reason = next((line for line in lines if "error" in line), lines[0])
        raise ShimBuildError(f"{command[0]} failed to build the PJRT shim: {reason}")
    return done.stdout
