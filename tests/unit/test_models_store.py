"""The model cache shows a model only when all of it is there, and says what to do when a file has changed."""

import fcntl
import os
import threading
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from models.errors import ModelCorruptError, ModelNotFoundError, StorageError
from models.settings import ModelSettings
from models.store import Header, ModelStore

HEADER = Header("tiny", "tiny", "none")


@pytest.fixture
def store(tmp_path):
    return ModelStore(ModelSettings(tmp_path / "cache"))


def fill(staging):
    staging.model_dir.mkdir()
    (staging.model_dir / "config.json").write_text("{}")
    save_file({"w": np.ones(4)}, staging.model_dir / "model.safetensors")
    return {"kind": "test"}


def test_a_model_is_added_once_and_recorded(store):
    store.add("tiny--1", HEADER, fill)
    manifest = store.check("tiny--1", verify=True)
    assert set(manifest.files) == {"config.json", "model.safetensors"}
    assert manifest.source == {"kind": "test"}
    assert manifest.size == sum(
        p.stat().st_size for p in store.path("tiny--1").iterdir() if p.name != "manifest.json"
    )

    def never(staging):
        raise AssertionError("it was there already")

    store.add("tiny--1", HEADER, never)
    assert [m.key for m in store.list()] == ["tiny--1"]
    assert list((store.root / ".staging").iterdir()) == []


def test_a_failed_fill_shows_nothing_and_the_next_one_resumes_its_download(store):
    def fails(staging):
        (staging.download_dir / "half").write_text("half of it")
        staging.model_dir.mkdir()
        (staging.model_dir / "config.json").write_text("{")
        raise ModelCorruptError("in the middle")

    with pytest.raises(ModelCorruptError):
        store.add("tiny--1", HEADER, fails)
    assert store.list() == []
    with pytest.raises(ModelNotFoundError):
        store.check("tiny--1")

    def resumes(staging):
        assert (staging.download_dir / "half").read_text() == "half of it"
        assert not staging.model_dir.exists()
        return fill(staging)

    store.add("tiny--1", HEADER, resumes)
    assert store.check("tiny--1").id == "tiny"
    assert list((store.root / ".staging").iterdir()) == []


def test_what_others_left_long_ago_is_swept_but_not_what_is_being_worked_on(store):
    staging = store.root / ".staging"
    for name in ("old--1", "held--1", "new--1"):
        (staging / name / "download").mkdir(parents=True)
    for name in ("old--1", "held--1"):
        os.utime(staging / name, (0, 0))
    (store.root / ".locks").mkdir()
    with open(store.root / ".locks" / "held--1.lock", "w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        store.add("tiny--1", HEADER, fill)
    assert sorted(p.name for p in staging.iterdir()) == ["held--1", "new--1"]


def test_a_second_process_waits_and_says_for_whom(store):
    waiting, phrases = threading.Event(), []

    def progress(what, share):
        phrases.append(what)
        waiting.set()

    store.add("other--1", HEADER, fill)  # makes the lock folder
    with open(store.root / ".locks" / "tiny--1.lock", "w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        held.write("process 1234")
        held.flush()
        thread = threading.Thread(target=store.add, args=("tiny--1", HEADER, fill, progress))
        thread.start()
        assert waiting.wait(timeout=30)
        assert not store.path("tiny--1").exists()
        fcntl.flock(held, fcntl.LOCK_UN)
    thread.join(timeout=30)
    assert store.check("tiny--1").id == "tiny"
    assert phrases[0] == "wait for process 1234, which prepares tiny"


def shorten(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flip(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1] + b"\xff")


def break_header(path: Path) -> None:
    path.write_bytes(b"\xff" * 8 + path.read_bytes()[8:])


@pytest.mark.parametrize(
    ("name", "damage", "verify", "words"),
    [
        ("model.safetensors", shorten, False, "bytes instead of"),
        ("model.safetensors", break_header, False, "no valid safetensors file"),
        ("model.safetensors", flip, True, "sha256"),
        ("config.json", Path.unlink, False, "is missing"),
        ("config.json", flip, False, "sha256"),
        ("manifest.json", shorten, False, "missing or unreadable"),
    ],
)
def test_a_damaged_file_is_named_together_with_the_repair(store, name, damage, verify, words):
    store.add("tiny--1", HEADER, fill)
    damage(store.path("tiny--1") / name)
    with pytest.raises(ModelCorruptError) as caught:
        store.check("tiny--1", reference="tiny", verify=verify)
    sentence = str(caught.value)
    assert words in sentence and name in sentence and "\n" not in sentence
    assert "`tpugate models rm tiny` and then `tpugate models pull tiny`" in sentence


def test_a_model_without_manifest_or_reference_can_be_removed_by_its_key(store):
    store.add("tiny--1", HEADER, fill)
    shorten(store.path("tiny--1") / "manifest.json")
    with pytest.raises(ModelCorruptError, match="`tpugate models rm tiny--1` and then pull"):
        store.check("tiny--1")


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "manifest.json"])
def test_a_listed_model_with_a_shortened_file_is_not_whole(store, name):
    store.add("tiny--1", HEADER, fill)
    assert [model.is_whole for model in store.list()] == [True]
    shorten(store.path("tiny--1") / name)
    assert [model.is_whole for model in store.list()] == [False]


def test_remove_takes_the_model_and_what_an_interrupted_pull_left(store):
    store.add("tiny--1", HEADER, fill)
    (store.root / ".staging" / "tiny--1" / "download").mkdir(parents=True)
    assert store.remove("tiny--1")
    assert store.list() == [] and list((store.root / ".staging").iterdir()) == []
    assert not store.remove("tiny--1")


def test_a_disk_without_room_is_one_sentence(store):
    def fills_the_disk(staging):
        with open("/dev/full", "wb", buffering=0) as full:
            full.write(b"x")

    with pytest.raises(StorageError, match="no space left"):
        store.add("tiny--1", HEADER, fills_the_disk)
    assert store.list() == []


def test_a_forbidden_cache_is_one_sentence():
    store = ModelStore(ModelSettings(Path("/proc/tpugate")))
    with pytest.raises(StorageError, match="cannot be used"):
        store.add("tiny--1", HEADER, fill)
