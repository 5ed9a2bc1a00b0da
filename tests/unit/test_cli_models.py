"""`tpugate models list` and `show`: each model once, in the state its files are in."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from cli.main import main
from models import catalogue
from models.library import store_key
from models.references import parse_reference
from models.settings import ModelSettings
from models.store import Header, ModelStore, Staging

ID = catalogue.ENTRIES[0].id


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModelStore:
    monkeypatch.setenv("TPUGATE_MODELS_DIR", str(tmp_path))
    return ModelStore(ModelSettings(tmp_path))


def fill(staging: Staging) -> dict[str, str]:
    staging.model_dir.mkdir()
    (staging.model_dir / "model.safetensors").write_bytes(b"weights")
    return {}


def keep(store: ModelStore, key: str, name: str) -> Path:
    store.add(key, Header(name, name, "none"), fill)
    return store.path(key)


def listed() -> dict[str, dict[str, Any]]:
    result = CliRunner().invoke(main, ["models", "list", "--json"])
    assert result.exit_code == 0, result.output
    rows = json.loads(result.output)
    assert len({row["id"] for row in rows}) == len(rows)
    return {row["id"]: row for row in rows}


def shown(name: str) -> str:
    result = CliRunner().invoke(main, ["models", "show", name, "--json"])
    return str(json.loads(result.output)["state"])


@pytest.mark.parametrize("name", ["model.safetensors", "manifest.json"])
def test_a_model_of_the_catalogue_is_listed_once_in_its_state(store: ModelStore, name: str):
    assert (listed()[ID]["state"], shown(ID)) == ("not pulled", "not pulled")
    folder = keep(store, store_key(parse_reference(ID)), ID)
    assert (listed()[ID]["state"], shown(ID)) == ("ready", "ready")
    (folder / name).write_bytes(b"{")
    assert (listed()[ID]["state"], shown(ID)) == ("corrupt", "corrupt")
    assert len(listed()) == len(catalogue.ENTRIES)


def test_another_preparation_of_a_model_of_the_catalogue_is_outdated(store: ModelStore):
    keep(store, f"{ID}--older", ID)
    assert listed()[ID]["state"] == "outdated"
    keep(store, store_key(parse_reference(ID)), ID)
    assert listed()[ID]["state"] == "ready"


def test_two_versions_of_another_model_are_one_row(store: ModelStore):
    keep(store, "own--1", "own")
    keep(store, "own--2", "own")
    row = listed()["own"]
    assert (row["state"], row["bytes"], row["licence"]) == ("ready", 2 * len(b"weights"), "none")
