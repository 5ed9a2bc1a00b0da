"""What a user may write after `--model`, and what it means.

    smollm2-135m-instruct          an entry of the catalogue, by id or alias
    HuggingFaceTB/SmolLM2-360M     a repository on the Hugging Face hub
    org/name@v1.2                  … at a branch, tag or commit
    ./my-model  /data/my-model     a folder with config.json and *.safetensors
    ./model.Q4_K_M.gguf            one GGUF file

Something that begins with `.`, `/` or `~`, or ends in `.gguf`, is a path. `org/name` is a hub id unless
a folder of that name exists here; then it is refused, as both could be meant.
"""

import re
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from models import catalogue
from models.catalogue import CatalogueEntry, FolderSource, GgufSource, HubSource, Source
from models.errors import ModelNotFoundError, ModelReferenceError

_PART = r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,94}[A-Za-z0-9_])?"
_HUB_ID = re.compile(rf"(?P<repo>{_PART}/{_PART})(?:@(?P<revision>[A-Za-z0-9._/-]{{1,100}}))?")
_SERVED_ID = re.compile(r"[^A-Za-z0-9._-]+")


@dataclass(frozen=True)
class ModelReference:
    id: str
    """The model's name in the HTTP API: catalogue id, `org/name`, or the folder's or file's name."""
    source: Source
    entry: CatalogueEntry | None = None


def parse_reference(text: str) -> ModelReference:
    """Raises `ModelReferenceError`, or `ModelNotFoundError` for a path where nothing lies."""
    text = text.strip()
    if not text:
        raise ModelReferenceError("the model reference is empty; try `smollm2-135m-instruct`")
    entry = catalogue.find(text)
    if entry is not None:
        return ModelReference(entry.id, entry.source, entry)
    if text.startswith((".", "/", "~")) or text.lower().endswith(".gguf"):
        return _parse_path(text)
    match = _HUB_ID.fullmatch(text)
    if match and "--" not in text and ".." not in text:
        if Path(text).is_dir():
            raise ModelReferenceError(
                f"{text!r} could be a hub id or the folder here; write './{text}' for the folder"
            )
        source = HubSource(match["repo"], match["revision"] or "main")
        return ModelReference(source.repo_id, source)
    raise ModelReferenceError(_unknown(text))


def _parse_path(text: str) -> ModelReference:
    path = Path(text).expanduser().absolute()
    if path.is_dir():
        return ModelReference(_served_id(path.resolve().name), FolderSource(str(path)))
    if not path.exists():
        raise ModelNotFoundError(f"there is no file or folder {path}")
    if path.suffix.lower() != ".gguf":
        raise ModelReferenceError(
            f"{path} is neither a folder nor a .gguf file; name the folder that holds config.json"
        )
    return ModelReference(_served_id(path.stem), GgufSource(str(path)))


def _served_id(name: str) -> str:
    return _SERVED_ID.sub("-", name).strip("-") or "model"


def _unknown(text: str) -> str:
    if Path(text).is_dir():
        return f"{text!r} is not in the catalogue; write './{text}' for the folder here"
    names = catalogue.known_ids()
    close = get_close_matches(text.lower(), names, n=1)
    hint = f"did you mean {close[0]!r}?" if close else f"the catalogue has {', '.join(names)};"
    return (
        f"{text!r} is no known model: {hint} "
        "a hub id is written organisation/name, a path starts with ./ or /"
    )
