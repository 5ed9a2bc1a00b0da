"""Weights from the Hugging Face hub.

huggingface_hub verifies each file, and resumes a file whose connection breaks. What a killed pull had not
finished is fetched anew, file by file; its finished files stay.
"""

import shutil
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download

# HTTPError is httpx's or httpx2's, as the library's version has it.
from huggingface_hub.errors import (  # type: ignore[attr-defined]
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    HTTPError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from tqdm.asyncio import tqdm_asyncio

from models.catalogue import HubSource
from models.errors import (
    ModelError,
    ModelNotFoundError,
    ModelReferenceError,
    SourceUnavailableError,
)
from models.progress import Progress
from models.sources.folder import check_folder
from models.store import Staging, is_disk_error

_RECORDS = ".cache/huggingface/download"
_WANTED = ["*.safetensors", "*.json", "*.jinja", "*.model", "merges.txt", "vocab.txt"]
# Sub-folders hold other formats (onnx/, original/); consolidated* repeats the weights in Mistral's own.
_UNWANTED = ["*/*", "consolidated*"]


def fetch_hub(source: HubSource, staging: Staging, progress: Progress) -> dict[str, str]:
    """Fill `staging.model_dir` from the hub; returns repository, revision and commit.

    Raises `ModelNotFoundError`, `SourceUnavailableError`, or what `check_folder` raises.
    """
    folder = staging.download_dir / "hub"
    for partial in folder.glob(f"{_RECORDS}/*.incomplete"):
        partial.unlink()  # of a killed process; the library never takes them up again
    try:
        snapshot_download(
            source.repo_id,
            revision=source.revision,
            local_dir=folder,
            allow_patterns=_WANTED,
            ignore_patterns=_UNWANTED,
            tqdm_class=_bar_class(f"download {source.repo_id}", progress),
        )
    except (OSError, HTTPError, HFValidationError) as error:
        if is_disk_error(error):
            raise
        raise _clear(source, error) from error
    folder.mkdir(exist_ok=True)  # snapshot_download makes none where no file matches
    commit = _commit(folder)
    check_folder(folder, source.repo_id)
    shutil.rmtree(folder / ".cache", ignore_errors=True)
    folder.rename(staging.model_dir)
    return {"kind": "hub", "repo": source.repo_id, "revision": source.revision, "commit": commit}


def _clear(source: HubSource, error: Exception) -> ModelError:
    name = source.repo_id
    if isinstance(error, GatedRepoError):
        return SourceUnavailableError(
            f"{name} is gated: accept its terms on the hub, then set HF_TOKEN to a token of yours"
        )
    if isinstance(error, RevisionNotFoundError):
        return ModelNotFoundError(f"{name} has no revision {source.revision!r} on the hub")
    if isinstance(error, RepositoryNotFoundError):
        return ModelNotFoundError(
            f"the hub has no model {name} that you may see; if it is private, set HF_TOKEN"
        )
    if isinstance(error, HFValidationError):
        return ModelReferenceError(f"{name!r} is no valid hub id")
    if isinstance(error, HfHubHTTPError) and error.response is not None:
        code = error.response.status_code
        return SourceUnavailableError(f"the hub answered {code} when asked for {name}")
    return _unreachable(source)


def _unreachable(source: HubSource) -> SourceUnavailableError:
    return SourceUnavailableError(
        f"{source.repo_id} is not in the model cache and the Hugging Face hub cannot be reached; "
        "check the network and HF_HUB_OFFLINE, or name a local folder"
    )


def _commit(folder: Path) -> str:
    """The commit that was downloaded: the first line of any of the library's own records."""
    for record in folder.glob(f"{_RECORDS}/*.metadata"):
        return record.read_text().split("\n", 1)[0]
    return ""


def _bar_class(what: str, progress: Progress) -> type[Any]:
    """A tqdm that draws nothing and passes its byte count on."""

    class Bar(tqdm_asyncio):  # type: ignore[misc]  # tqdm has no types
        def __init__(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401
            self._counts_bytes = kwargs.get("unit") == "B"
            kwargs.pop("name", None)
            super().__init__(*args, **{**kwargs, "disable": True})

        def update(self, n: float | None = 1) -> bool | None:
            self.n += n or 0
            if self._counts_bytes and self.total:
                progress(what, min(1.0, self.n / self.total))
            return None

    return Bar
