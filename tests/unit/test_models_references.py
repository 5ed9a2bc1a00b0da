"""What a user writes after `--model` means one thing, or is refused with a sentence that helps."""

import os
from pathlib import Path

import pytest

from models import catalogue
from models.catalogue import FolderSource, GgufSource, HubSource
from models.errors import ModelError, ModelNotFoundError, ModelReferenceError
from models.library import store_key
from models.references import parse_reference
from models.settings import ModelSettings


@pytest.mark.parametrize("name", ["smollm2-135m-instruct", "SmolLM2-135M-Instruct", "smollm2"])
def test_a_catalogue_entry_is_found_by_id_alias_and_any_case(name):
    reference = parse_reference(name)
    assert reference.id == "smollm2-135m-instruct"
    assert reference.entry is catalogue.SMOLLM2


@pytest.mark.parametrize(
    ("text", "repo", "revision"),
    [
        ("org/name", "org/name", "main"),
        ("HuggingFaceTB/SmolLM2-360M", "HuggingFaceTB/SmolLM2-360M", "main"),
        ("org/name.v1_2@refs/pr/3", "org/name.v1_2", "refs/pr/3"),
        (" org/name@9f2b ", "org/name", "9f2b"),
    ],
)
def test_a_hub_id_may_name_a_revision(text, repo, revision):
    reference = parse_reference(text)
    assert reference.source == HubSource(repo, revision)
    assert reference.id == repo


def test_a_folder_and_a_gguf_file_are_served_under_their_names(tmp_path, monkeypatch):
    folder = tmp_path / "My model (1)"
    folder.mkdir()
    (tmp_path / "tiny.Q4.gguf").write_bytes(b"GGUF")
    assert parse_reference(str(folder)).id == "My-model-1"
    assert parse_reference(str(folder)).source == FolderSource(str(folder))
    monkeypatch.chdir(tmp_path)
    reference = parse_reference("tiny.Q4.gguf")
    assert (reference.id, reference.source) == (
        "tiny.Q4",
        GgufSource(str(tmp_path / reference.source.path)),
    )


@pytest.mark.parametrize(
    ("text", "kind", "words"),
    [
        ("", ModelReferenceError, "empty"),
        ("gemma-3-271m", ModelReferenceError, "did you mean 'gemma-3-270m'"),
        ("llama", ModelReferenceError, "organisation/name"),
        ("a/b/c", ModelReferenceError, "organisation/name"),
        ("org/na me", ModelReferenceError, "no known model"),
        ("org/..", ModelReferenceError, "no known model"),
        ("./nowhere", ModelNotFoundError, "no file or folder"),
        ("/nowhere/x.gguf", ModelNotFoundError, "/nowhere/x.gguf"),
        ("nowhere.gguf", ModelNotFoundError, "nowhere.gguf"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(text, kind, words):
    with pytest.raises(kind) as caught:
        parse_reference(text)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_of_another_kind_is_refused(tmp_path):
    (tmp_path / "model.bin").write_bytes(b"x")
    with pytest.raises(ModelReferenceError, match=r"neither a folder nor a \.gguf file"):
        parse_reference(str(tmp_path / "model.bin"))


def test_a_folder_that_reads_like_a_hub_id_is_not_guessed_at(tmp_path, monkeypatch):
    (tmp_path / "org" / "name").mkdir(parents=True)
    (tmp_path / "plain").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelReferenceError, match=r"write './org/name' for the folder"):
        parse_reference("org/name")
    with pytest.raises(ModelReferenceError, match=r"write './plain' for the folder"):
        parse_reference("plain")
    assert isinstance(parse_reference("./org/name").source, FolderSource)


def test_each_source_has_its_own_place_in_the_cache(tmp_path):
    gguf = tmp_path / "a.gguf"
    gguf.write_bytes(b"GGUF")
    names = ["smollm2", "gemma-3-270m", "org/name", "org/name@v1", "org/other", str(gguf)]
    keys = {store_key(parse_reference(name)) for name in names}
    assert len(keys) == len(names)
    assert all("/" not in key and not key.startswith(".") for key in keys)
    before = store_key(parse_reference(str(gguf)))
    gguf.write_bytes(b"GGUF, another")
    assert store_key(parse_reference(str(gguf))) != before


def test_settings_come_from_the_environment_given(tmp_path):
    here = ModelSettings.from_environment({"TPUGATE_MODELS_DIR": str(tmp_path / "m")})
    assert here.cache_dir == tmp_path / "m"
    home = ModelSettings.from_environment({"TPUGATE_CACHE_DIR": str(tmp_path)})
    assert home.cache_dir == tmp_path / "models"
    default = ModelSettings.from_environment({})
    assert default.cache_dir == Path(os.path.expanduser("~/.cache/tpugate/models"))
    (tmp_path / "file").touch()
    with pytest.raises(ModelError, match="not a folder"):
        ModelSettings.from_environment({"TPUGATE_MODELS_DIR": str(tmp_path / "file")})
