"""Builds the PJRT shim and its kernels from C, once for each source, compiler and processor."""

import fcntl
import hashlib
import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from torchtpu.environment import find_on_path, processor_flags
from torchtpu.errors import NoCompilerError, ShimBuildError

FOLDER = Path(__file__).parent
SOURCES = tuple(FOLDER / f"{name}.c" for name in ("shim", "work", "attention", "linear"))
HEADERS = tuple(FOLDER / f"{name}.h" for name in ("xla_ffi", "work", "vectors"))
COMPILERS = ("cc", "gcc", "clang")
_FLAGS = ("-O3", "-std=gnu11", "-fPIC", "-shared", "-fvisibility=hidden", "-Wno-psabi")
_NATIVE = "-march=native"
_LIBRARIES = ("-ldl", "-lpthread", "-lm")
_COMPILE_TIMEOUT_S = 1200
"""It takes 20 seconds of a core, which may be a slow one with other work."""


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

    Safe in several processes at once: one compiles to a file of its own and renames it into place, and the
    others wait for it.
    Raises NoCompilerError, or ShimBuildError when the compiler fails or the cache cannot be written.
    """
    compiler = find_compiler()
    key = hashlib.sha256()
    # Made for this processor: a cache folder may be shared by machines of several kinds.
    about_tools = (compiler_version(compiler), " ".join(_FLAGS), processor_flags())
    for part in (*(path.read_bytes() for path in SOURCES + HEADERS), *map(str.encode, about_tools)):
        key.update(hashlib.sha256(part).digest())
    target = cache_dir / "pjrt_cpu" / f"shim-{key.hexdigest()[:16]}.so"
    if _is_whole(target):
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _alone_in(target.parent), tempfile.TemporaryDirectory(dir=target.parent) as folder:
            if _is_whole(target):
                return target
            built = Path(folder) / "shim.so"
            _compile(compiler, built)
            digest = Path(folder) / "digest"
            digest.write_text(_digest(built), encoding="ascii")
            os.replace(digest, _digest_file(target))
            os.replace(built, target)
    except OSError as error:
        raise ShimBuildError(
            f"The PJRT shim cannot be kept in {target.parent}: {error}."
        ) from error
    return target


def _compile(compiler: Path, target: Path) -> None:
    command = [str(compiler), *_FLAGS, *map(str, SOURCES), "-o", str(target), *_LIBRARIES]
    try:
        _run([*command, _NATIVE])
    except ShimBuildError:
        # Some compilers do not know the processor they run on.
        _run(command)


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """While no other process or thread is, where the file system has locks."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


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
