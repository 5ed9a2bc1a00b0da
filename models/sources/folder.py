"""A local folder in the layout of the Hugging Face hub, checked before it is used."""

import json
from pathlib import Path

from models.errors import ModelCorruptError, ModelNotFoundError, UnsupportedModelError
from models.store import safetensors_problem


def check_folder(folder: Path, label: str) -> None:
    """Whether a model can be loaded from here, without reading its weights.

    Raises `ModelNotFoundError` (no config.json), `UnsupportedModelError` (weights in another format)
    or `ModelCorruptError` (a shard is missing or broken).
    """
    if not (folder / "config.json").is_file():
        ggufs = sorted(folder.glob("*.gguf"))
        hint = f"; name the file itself: {ggufs[0]}" if ggufs else ""
        raise ModelNotFoundError(f"{label} has no config.json{hint}")
    weights = _weight_files(folder)
    if not weights:
        raise UnsupportedModelError(f"{label} has no *.safetensors weights, the only format read")
    for file in weights:
        problem = safetensors_problem(file) if file.exists() else "is missing"
        if problem:
            raise ModelCorruptError(f"{file} {problem}; fetch this model again")


def _weight_files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return sorted(folder.glob("*.safetensors"))
    try:
        names = set(json.loads(index.read_text())["weight_map"].values())
    except (ValueError, KeyError, AttributeError, UnicodeDecodeError) as error:
        raise ModelCorruptError(f"{index} is no valid index; fetch this model again") from error
    return [folder / name for name in sorted(names)]
