"""GGUF files become bfloat16 safetensors once, in a child process whose memory goes with it."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import IO

from models import gguf_child
from models.errors import (
    ModelCorruptError,
    ModelError,
    ModelNotFoundError,
    StorageError,
    UnsupportedModelError,
)
from models.progress import Progress
from models.settings import child_environment
from models.store import Staging

_MAGIC = b"GGUF"
_SIGKILL = -9


def convert_gguf(
    gguf: Path, staging: Staging, chat_template: str | None, progress: Progress
) -> None:
    """Fill `staging.model_dir` with config, bfloat16 weights, tokenizer and chat template.

    `chat_template` replaces the file's own. Raises `ModelCorruptError`, `UnsupportedModelError` (an
    architecture that transformers cannot read from GGUF) or `StorageError`.
    """
    check_magic(gguf)
    task = {"gguf": str(gguf), "out": str(staging.model_dir), "chat_template": chat_template}
    with tempfile.TemporaryFile("w+") as log:
        child = subprocess.Popen(
            # -P: the script's folder is not searched for modules.
            [sys.executable, "-P", gguf_child.__file__, json.dumps(task)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env=child_environment(TORCH_DEVICE_BACKEND_AUTOLOAD="0", HF_HUB_OFFLINE="1"),
            pass_fds=[staging.lock_fd],
        )
        assert child.stdout is not None
        try:
            failure = _follow(child.stdout, progress)
            code = child.wait()
        except BaseException:
            child.terminate()
            raise
        finally:
            child.communicate()
        if code != 0:
            log.seek(0)
            raise failure or _crashed(gguf, code, log.read())


def check_magic(gguf: Path) -> None:
    """Raises `ModelCorruptError` if this is no GGUF file at all, `ModelNotFoundError` if it cannot be read."""
    try:
        with gguf.open("rb") as stream:
            magic = stream.read(len(_MAGIC))
    except OSError as error:
        raise ModelNotFoundError(f"{gguf} cannot be read ({error.strerror})") from error
    if magic != _MAGIC:
        raise ModelCorruptError(f"{gguf} is no GGUF file (its first bytes are others)")


def _follow(lines: IO[str], progress: Progress) -> ModelError | None:
    failure: ModelError | None = None
    for line in lines:
        try:
            record = json.loads(line)
        except ValueError:
            continue  # a library's print
        if "error" in record:
            failure = _named(record["kind"], str(record["error"]))
        else:
            progress(record["phrase"], record["share"])
    return failure


def _named(kind: str, error: str) -> ModelError:
    text = " ".join(error.split())[:300]
    if kind == "full":
        return StorageError(
            "no space left to write the converted model; free some or set TPUGATE_MODELS_DIR"
        )
    if kind == "unreadable":
        return ModelCorruptError(f"the GGUF file cannot be read: {text}")
    return UnsupportedModelError(f"this GGUF file cannot be converted: {text}")


def _crashed(gguf: Path, code: int, log: str) -> ModelError:
    if code == _SIGKILL:
        return UnsupportedModelError(
            f"converting {gguf.name} was killed, most likely for want of memory"
        )
    lines = log.strip().splitlines() or ["no message"]
    return UnsupportedModelError(f"converting {gguf.name} failed (exit {code}): {lines[-1][:300]}")
