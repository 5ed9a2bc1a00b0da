"""The model cache: one folder for each model at one revision of its source.

    <cache_dir>/
      smollm2-135m-instruct--0f3c5a1b9d2e/    complete, never changed after it appears
        manifest.json  config.json  model.safetensors  tokenizer.json  …
      .staging/<same name>/download/          survives an interrupted pull: the next one resumes here
      .staging/<same name>/model/             rebuilt from nothing by the next pull
      .locks/<same name>.lock                 held (flock) by the one process that works in staging

A model appears by one rename, after every file and the manifest are on disk: who sees the folder sees
all of it. The lock belongs to the open file, so children that inherit it keep it if their parent dies.
"""

import errno
import fcntl
import hashlib
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import msgspec

from models.errors import ModelCorruptError, ModelNotFoundError, StorageError
from models.progress import Progress, silent
from models.settings import ModelSettings

MANIFEST = "manifest.json"
_FORMAT = 1
_STALE_STAGING_S = 7 * 86400.0
"""Staging of other models that nobody touched for this long is given up."""
_HASH_BLOCK = 1 << 20
_LOCK_POLL_S = 0.2
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_FORBIDDEN = {errno.EACCES, errno.EPERM, errno.EROFS}


class FileRecord(msgspec.Struct, frozen=True):
    size: int
    """Bytes."""
    sha256: str


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """What a stored model is and what its files must be."""

    id: str
    reference: str
    """What to write after `tpugate models pull` to get it again."""
    source: dict[str, str]
    licence: str
    created: str
    """UTC, ISO 8601."""
    tpugate_version: str
    files: dict[str, FileRecord]
    format: int = _FORMAT

    @property
    def size(self) -> int:
        """Bytes on disk."""
        return sum(record.size for record in self.files.values())


@dataclass(frozen=True)
class Header:
    """The part of a manifest that is known before the files are."""

    id: str
    reference: str
    licence: str


@dataclass(frozen=True)
class Staging:
    """Folders of one model being prepared; only the lock's holder may touch them."""

    download_dir: Path
    """Kept when the work is interrupted."""
    model_dir: Path
    """Becomes the stored model. Absent or empty at the start."""
    lock_fd: int
    """Pass it to children that write here."""


@dataclass(frozen=True)
class StoredModel:
    key: str
    path: Path
    manifest: Manifest | None
    """None if it cannot be read."""

    @property
    def is_whole(self) -> bool:
        """Whether every file is there in its size; looks at no contents."""
        return self.manifest is not None and not any(
            _size_problem(self.path / name, record) for name, record in self.manifest.files.items()
        )


Fill = Callable[[Staging], dict[str, str]]
"""Puts a model's files into `model_dir`; returns where they came from, for the manifest."""


class ModelStore:
    def __init__(self, settings: ModelSettings) -> None:
        self.root = settings.cache_dir

    def path(self, key: str) -> Path:
        return self.root / key

    def add(self, key: str, header: Header, fill: Fill, progress: Progress = silent) -> None:
        """Prepare a model unless it is there; returns when it is complete.

        Waits while another process prepares the same one. Raises what `fill` raises, and `StorageError`.
        """
        with disk_errors(self.root), self._locked(key, header.id, progress) as lock_fd:
            if self.path(key).exists():
                return
            self._sweep(key)
            staging = self._staging(key, lock_fd)
            try:
                source = fill(staging)
                self._commit(key, staging, header, source, progress)
            finally:
                _drop_if_empty(staging.download_dir)

    def check(
        self,
        key: str,
        *,
        reference: str | None = None,
        verify: bool = False,
        progress: Progress = silent,
    ) -> Manifest:
        """The manifest of a stored model whose files are as recorded.

        Sizes, headers of weight files and hashes of all others are always compared, hashes of weights
        with `verify`. Raises `ModelNotFoundError` or `ModelCorruptError`, which names the file and the
        repair. `reference` is what the model was asked for by; an unreadable manifest does not tell.
        """
        folder = self.path(key)
        if not folder.is_dir():
            raise ModelNotFoundError(f"{key} is not in the model cache {self.root}")
        manifest = self._read_manifest(key)
        if manifest is None:
            raise _corrupt(folder / MANIFEST, "is missing or unreadable", key, reference)
        for done, (name, record) in enumerate(manifest.files.items()):
            file = folder / name
            problem = _size_problem(file, record)
            is_weights = file.suffix == ".safetensors"
            if not problem and (verify or not is_weights):
                if verify:
                    progress(f"verify {manifest.id}", done / len(manifest.files))
                if sha256_of(file) != record.sha256:
                    problem = "does not have its recorded sha256"
            if not problem and is_weights:
                problem = safetensors_problem(file)
            if problem:
                raise _corrupt(file, problem, key, manifest.reference)
        return manifest

    def list(self) -> list[StoredModel]:
        """Every stored model, whole or not, by key."""
        if not self.root.is_dir():
            return []
        keys = sorted(p.name for p in self.root.iterdir() if p.is_dir() and p.name[0] != ".")
        return [StoredModel(key, self.path(key), self._read_manifest(key)) for key in keys]

    def remove(self, key: str, progress: Progress = silent) -> bool:
        """Delete a stored model and what an interrupted pull left of it; False if there was nothing."""
        with disk_errors(self.root), self._locked(key, key, progress):
            staging = self.root / ".staging" / key
            found = self.path(key).exists() or staging.exists()
            if self.path(key).exists():
                trash = staging / "removed"
                trash.parent.mkdir(parents=True, exist_ok=True)
                shutil.rmtree(trash, ignore_errors=True)
                self.path(key).rename(trash)
            shutil.rmtree(staging, ignore_errors=True)
        return found

    def _read_manifest(self, key: str) -> Manifest | None:
        try:
            return msgspec.json.decode((self.path(key) / MANIFEST).read_bytes(), type=Manifest)
        except (OSError, msgspec.DecodeError):
            return None

    def _staging(self, key: str, lock_fd: int) -> Staging:
        base = self.root / ".staging" / key
        staging = Staging(base / "download", base / "model", lock_fd)
        if staging.model_dir.exists():
            shutil.rmtree(staging.model_dir)
        staging.download_dir.mkdir(parents=True, exist_ok=True)
        os.utime(base)
        return staging

    def _commit(
        self,
        key: str,
        staging: Staging,
        header: Header,
        source: dict[str, str],
        progress: Progress,
    ) -> None:
        folder = staging.model_dir
        files = sorted(p for p in folder.rglob("*") if p.is_file())
        (folder / MANIFEST).touch()
        mode = (folder / MANIFEST).stat().st_mode  # as the umask has it; safetensors writes 0600
        records = {}
        for done, file in enumerate(files):
            progress("write to disk", done / len(files))
            records[str(file.relative_to(folder))] = FileRecord(
                file.stat().st_size, sha256_of(file)
            )
            file.chmod(mode)
            _fsync(file)
        manifest = Manifest(
            id=header.id,
            reference=header.reference,
            source=source,
            licence=header.licence,
            created=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            tpugate_version=_own_version(),
            files=records,
        )
        text = msgspec.json.format(msgspec.json.encode(manifest), indent=2)
        (folder / MANIFEST).write_bytes(text)
        _fsync(folder / MANIFEST)
        _fsync(folder)
        folder.rename(self.path(key))
        _fsync(self.root)
        shutil.rmtree(self.root / ".staging" / key, ignore_errors=True)
        progress("write to disk", 1.0)

    def _sweep(self, own_key: str) -> None:
        """Give up what other interrupted pulls left long ago."""
        for base in self.root.glob(".staging/*"):
            if base.name == own_key or time.time() - base.stat().st_mtime < _STALE_STAGING_S:
                continue
            with open(self._lock_path(base.name), "a+b") as lock:
                if _try_lock(lock.fileno()):
                    shutil.rmtree(base, ignore_errors=True)

    def _lock_path(self, key: str) -> Path:
        path = self.root / ".locks" / f"{key}.lock"
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    @contextmanager
    def _locked(self, key: str, label: str, progress: Progress) -> Iterator[int]:
        with open(self._lock_path(key), "a+b") as lock:
            while not _try_lock(lock.fileno()):
                lock.seek(0)
                holder = lock.read().decode(errors="replace") or "another process"
                progress(f"wait for {holder}, which prepares {label}", 0.0)
                time.sleep(_LOCK_POLL_S)
            lock.truncate(0)
            lock.write(f"process {os.getpid()}".encode())
            lock.flush()
            yield lock.fileno()


@contextmanager
def disk_errors(where: Path) -> Iterator[None]:
    """Turn what the disk refuses (full, read-only, forbidden) into a `StorageError` of one sentence."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise StorageError(
                f"no space left for the model in {where}; free some or set TPUGATE_MODELS_DIR"
            ) from error
        raise StorageError(
            f"the model cache {where} cannot be used ({error}); "
            "set TPUGATE_MODELS_DIR to a folder that can be written"
        ) from error


def is_disk_error(error: Exception) -> bool:
    """Whether it is the disk's own, and not a library's that is also an `OSError`."""
    return isinstance(error, OSError) and error.errno in _FULL | _FORBIDDEN


def sha256_of(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def safetensors_problem(file: Path) -> str | None:
    """What is wrong with the header of a weight file, or None. Reads the header only."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="numpy"):
            return None
    except (SafetensorError, OSError) as error:
        return f"is no valid safetensors file ({error})"


def _size_problem(file: Path, record: FileRecord) -> str | None:
    if not file.is_file():
        return "is missing"
    size = file.stat().st_size
    return None if size == record.size else f"has {size} bytes instead of {record.size}"


def _corrupt(file: Path, problem: str, key: str, reference: str | None) -> ModelCorruptError:
    """`reference` is what can be pulled; without it only the key in the cache is known."""
    pull = f"`tpugate models pull {reference}`" if reference else "pull the model"
    return ModelCorruptError(
        f"{file} {problem}; repair it with `tpugate models rm {reference or key}` and then {pull}"
    )


def _drop_if_empty(download_dir: Path) -> None:
    """Leave nothing behind where nothing was fetched that could be resumed."""
    with suppress(OSError):
        download_dir.rmdir()
        download_dir.parent.rmdir()


def _try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _fsync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _own_version() -> str:
    try:
        return version("tpugate")
    except PackageNotFoundError:
        return "source tree"
