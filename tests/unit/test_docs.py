"""Protects the documents: versions, commands, links and dependency reasons match the project."""

import dataclasses
import json
import os
import re
import subprocess
import tomllib
from pathlib import Path

import pytest

from cli.gateway import gateway
from cli.serve import serve
from cli.worker import worker
from gateway.settings import GatewaySettings
from workers.config import WorkerConfig

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
README = (ROOT / "README.md").read_text()
DOCUMENTS = [
    ROOT / "README.md",
    *sorted(ROOT.glob("*/README.md")),
    *sorted(ROOT.glob("docs/**/*.md")),
]


def code_blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, flags=re.MULTILINE | re.DOTALL)


def make_targets() -> set[str]:
    text = (ROOT / "Makefile").read_text()
    return set(re.findall(r"^([a-z][a-z-]*):", text, flags=re.MULTILINE))


def test_the_changelog_begins_with_the_version_of_the_project() -> None:
    versions = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)
    assert versions[0] == PROJECT["version"]


def test_the_readme_starts_with_its_two_commands() -> None:
    commands = [line.split("#")[0].strip() for line in code_blocks("sh")[0].splitlines()]
    assert commands == ["make serve", "make test"]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_make_command_of_a_document_exists(document: Path) -> None:
    named = set(re.findall(r"(?:^|`)make ([a-z][a-z-]*)", document.read_text(), flags=re.MULTILINE))
    assert named <= make_targets()


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_link_of_a_document_leads_to_a_file(document: Path) -> None:
    links = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", document.read_text())
    missing = [
        link for link in links if "://" not in link and not (document.parent / link).exists()
    ]
    assert not missing


def test_help_of_make_is_readable_without_utf8() -> None:
    command = ["make", "--no-print-directory", "help"]
    text = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "LC_ALL": "C"}, capture_output=True, check=True
    ).stdout.decode()
    assert "\\x" not in text
    named = set(re.findall(r"^  make ([a-z-]+)  +\S", text, flags=re.MULTILINE))
    assert {"serve", "test", "clean"} <= named <= make_targets()


def _written(default: object) -> str:
    return f"{default:g}" if isinstance(default, float) else str(default)


def settings_rows() -> dict[str, tuple[str, str]]:
    """Flag and default of each variable on the settings page."""
    text = (ROOT / "docs" / "settings.md").read_text()
    rows = re.findall(r"^\| `(TPUGATE_\w+)` \| (.*?) \| (.*?) \|", text, flags=re.MULTILINE)
    return {name: (flag, default) for name, flag, default in rows}


def settings_defaults() -> dict[str, object]:
    """What the code reads, with its default; None where that is decided later."""
    worker = {field.name: field.default for field in dataclasses.fields(WorkerConfig)}
    gateway = {name: field.default for name, field in GatewaySettings.model_fields.items()}
    read = {f"TPUGATE_{name.upper()}": value for name, value in (worker | gateway).items()}
    for file in ("torchtpu/environment.py", "models/settings.py", "cli/settings.py"):
        for name in re.findall(r"\"(TPUGATE_[A-Z_]*[A-Z])\"", (ROOT / file).read_text()):
            read.setdefault(name, None)
    read.pop("TPUGATE_PJRT_PLUGIN")  # from tpugate to its own shim
    return read


def test_the_settings_page_has_every_variable_and_its_default() -> None:
    rows, defaults = settings_rows(), settings_defaults()
    assert set(rows) == set(defaults)
    wrong = [
        name
        for name, default in defaults.items()
        if default not in (None, "") and f"`{_written(default)}`" not in rows[name][1]
    ]
    assert wrong == []


def test_the_settings_page_has_every_flag_beside_its_variable() -> None:
    parameters = [p for command in (serve, worker, gateway) for p in command.params]
    spoken = {parameter.opts[0] for parameter in parameters}
    flags = {"TPUGATE_" + flag.strip("-").replace("-", "_").upper(): f"`{flag}`" for flag in spoken}
    assert {name: flag for name, (flag, _) in settings_rows().items() if flag} == flags


def test_the_examples_of_the_readme_are_well_formed() -> None:
    for source in code_blocks("python"):
        compile(source, "README.md", "exec")
    for text in code_blocks("json"):
        json.loads(text)


def test_every_dependency_has_a_reason() -> None:
    text = (ROOT / "docs" / "dependencies.md").read_text().lower()
    cells = " ".join(line.split("|")[1] for line in text.splitlines() if line.startswith("|"))
    explained = set(re.findall(r"[a-z0-9][a-z0-9._-]*", cells))
    groups = [PROJECT["dependencies"], *PROJECT["optional-dependencies"].values()]
    names = {re.split(r"[^A-Za-z0-9._-]", r)[0].lower() for group in groups for r in group}
    assert names - {PROJECT["name"]} <= explained


def test_the_lock_names_exact_public_versions_of_every_dependency() -> None:
    lines = (ROOT / "requirements" / "lock.txt").read_text().splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    assert [pin for pin in pins if not re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.]+", pin)] == []
    locked = {_normal(pin.split("==")[0]) for pin in pins}
    groups = [PROJECT["dependencies"], *PROJECT["optional-dependencies"].values()]
    wanted = {_normal(re.split(r"[^A-Za-z0-9._-]", r)[0]) for group in groups for r in group}
    assert wanted - {PROJECT["name"]} <= locked


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_the_architecture_page_stays_short() -> None:
    assert len((ROOT / "docs" / "architecture.md").read_text().splitlines()) <= 60
