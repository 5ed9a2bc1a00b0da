"""`tpugate models`: what can be served, and what of it is on this machine."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from cli.errors import CommandError, SettingError
from models import catalogue
from models.catalogue import FolderSource
from models.errors import ModelError, ModelReferenceError
from models.progress import Progress
from models.references import ModelReference, parse_reference
from models.settings import ModelSettings

if TYPE_CHECKING:
    from models.store import StoredModel


@click.group()
def models() -> None:
    """Models: which there are, fetch them, look at them, delete them.

    REF is a name of the catalogue, a Hugging Face hub id (org/name[@revision]), a folder, or a .gguf file.
    """


_json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


@models.command("list")
@_json_option
def list_models(as_json: bool) -> None:
    """List the catalogue and the models on this machine."""
    with _clear_errors():
        rows = _rows(ModelSettings.from_environment())
    if as_json:
        click.echo(json.dumps(rows, indent=2))
        return
    for row in rows:
        size = _size(row["bytes"]) if row["bytes"] is not None else "-"
        click.echo(f"{row['id']:28} {row['state']:11} {size:>9}  {row['description']}".rstrip())


@models.command()
@click.argument("ref")
@click.option("--verify", is_flag=True, help="Compare the hash of every file with its record.")
@_json_option
def pull(ref: str, verify: bool, as_json: bool) -> None:
    """Fetch REF and make it ready to serve.

    An interrupted pull resumes. A model that is here stays as it is: `rm` it to fetch a newer revision.
    """
    from models.library import resolve

    with _clear_errors(), _bar() as progress:
        local = resolve(ref, ModelSettings.from_environment(), progress, verify=verify)
    if as_json:
        click.echo(json.dumps({"id": local.id, "path": str(local.path)}))
    else:
        click.echo(f"{local.id} is ready in {local.path}")


@models.command()
@click.argument("ref")
@_json_option
def show(ref: str, as_json: bool) -> None:
    """Show what is known of REF, without fetching it."""
    with _clear_errors():
        facts = _facts(ref, ModelSettings.from_environment())
    if as_json:
        click.echo(json.dumps(facts, indent=2))
        return
    for name, value in facts.items():
        click.echo(f"{name:14} {value if value is not None else '-'}")


@models.command()
@click.argument("ref")
@_json_option
def rm(ref: str, as_json: bool) -> None:
    """Delete REF from this machine's model cache. Files of your own are never touched."""
    from models.library import remove

    with _clear_errors():
        keys = remove(ref, ModelSettings.from_environment())
    click.echo(json.dumps({"removed": keys}) if as_json else f"removed {', '.join(keys)}")


def _rows(settings: ModelSettings) -> list[dict[str, Any]]:
    """One row for each model, of the catalogue or in the cache, however many versions are there."""
    from models.library import store_key
    from models.store import ModelStore

    rows: dict[str, dict[str, Any]] = {}
    current: dict[str, str] = {}
    for entry in catalogue.ENTRIES:
        about = {"licence": entry.licence, "description": entry.description}
        rows[entry.id] = _row(entry.id, "not pulled") | about
        current[store_key(ModelReference(entry.id, entry.source, entry))] = entry.id
    for model in ModelStore(settings).list():
        name = current.get(model.key) or (model.manifest.id if model.manifest else model.key)
        # Another key for a name of the catalogue: another version of tpugate prepares it otherwise.
        is_outdated = name in current.values() and model.key not in current
        state = "outdated" if is_outdated else _state(model)
        row = rows.setdefault(name, _row(name, state))
        if not is_outdated or row["state"] == "not pulled":
            row["state"] = state
        if model.manifest is not None:
            row["bytes"] = (row["bytes"] or 0) + model.manifest.size
            row["licence"] = row["licence"] or model.manifest.licence
    return list(rows.values())


def _state(model: "StoredModel") -> str:
    return "ready" if model.is_whole else "corrupt"


def _facts(ref: str, settings: ModelSettings) -> dict[str, Any]:
    from models.library import find_stored

    reference = parse_reference(ref)
    entry = reference.entry
    stored = find_stored(ref, settings)
    facts: dict[str, Any] = {
        "id": reference.id,
        "source": type(reference.source).__name__.removesuffix("Source").lower(),
        "state": _state(stored[0]) if stored else "not pulled",
        "path": str(stored[0].path) if stored else None,
    }
    if isinstance(reference.source, FolderSource):
        facts |= {"state": "a folder of your own", "path": reference.source.path}
    if entry is not None:
        facts |= {
            "description": entry.description,
            "aliases": ", ".join(entry.aliases),
            "context_len": entry.context_len,
            "dtype": entry.dtype,
            "licence": entry.licence,
            "chat_template": "from the catalogue" if entry.chat_template else "the model's own",
        }
    if stored and stored[0].manifest is not None:
        manifest = stored[0].manifest
        facts |= {"bytes": manifest.size, "created": manifest.created, "licence": manifest.licence}
        facts |= {f"source.{name}": value for name, value in manifest.source.items()}
    return facts


def _row(name: str, state: str) -> dict[str, Any]:
    return {"id": name, "state": state, "bytes": None, "licence": "", "description": ""}


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.2f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.0f} MB"


@contextmanager
def _clear_errors() -> Iterator[None]:
    try:
        yield
    except ModelReferenceError as error:
        raise SettingError(str(error)) from error
    except ModelError as error:
        raise CommandError(str(error)) from error
    except ModuleNotFoundError as error:
        raise CommandError(
            f"{error.name} is not installed, which models need: pip install 'tpugate[worker]'"
        ) from error


@contextmanager
def _bar() -> Iterator[Progress]:
    """A bar on stderr; where that is no terminal, one line for each phrase."""
    from tqdm import tqdm

    bar = tqdm(total=100, bar_format="{desc} {percentage:3.0f}% |{bar}|", leave=False, disable=None)
    said: set[str] = set()

    def progress(what: str, share: float) -> None:
        if bar.disable:
            if what not in said:
                said.add(what)
                click.echo(f"{what} …", err=True)
            return
        bar.set_description_str(what, refresh=False)
        bar.n = round(100 * share)
        bar.refresh()

    with bar:
        yield progress
