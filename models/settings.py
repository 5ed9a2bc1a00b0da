"""The one place of `models` that reads the environment.

`TPUGATE_MODELS_DIR` is the model cache; else it is `models` in `TPUGATE_CACHE_DIR` (default
`~/.cache/tpugate`).
`HF_TOKEN`, `HF_HUB_OFFLINE` and their kin are read by huggingface_hub itself.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from models.errors import ModelReferenceError
from torchtpu.environment import cache_dir


@dataclass(frozen=True)
class ModelSettings:
    cache_dir: Path
    """Absolute; made on first use."""

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None) -> "ModelSettings":
        """Raises `ModelReferenceError` if the folder named there is not a folder."""
        env = os.environ if environ is None else environ
        chosen = env.get("TPUGATE_MODELS_DIR")
        folder = Path(chosen).expanduser().absolute() if chosen else cache_dir(env) / "models"
        if folder.exists() and not folder.is_dir():
            raise ModelReferenceError(f"the model cache {folder} is a file, not a folder")
        return cls(folder)


def child_environment(**overrides: str) -> dict[str, str]:
    """This process's environment for a child, with `overrides` on top."""
    return {**os.environ, **overrides}
