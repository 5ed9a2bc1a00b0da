"""The command line itself: quick help, a version, commands that are imported only when called, and
settings of `serve` that come from flags, environment and defaults in this order."""

import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from click.testing import CliRunner

from cli.errors import CommandError, SettingError
from cli.main import COMMANDS, main
from cli.settings import (
    DEFAULT_MODEL,
    child_environment,
    load_serve_settings,
    worker_environment,
)


def test_the_version_is_the_distributions():
    result = CliRunner().invoke(main, ["--version"])
    assert (result.exit_code, result.output) == (0, f"tpugate {version('tpugate')}\n")


def test_help_names_every_command():
    result = CliRunner().invoke(main, ["--help"])
    assert result.exit_code == 0
    assert all(f"  {name} " in result.output for name in COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(name: str):
    result = CliRunner().invoke(main, [name, "--help"])
    assert result.exit_code == 0, result.output


def test_an_unknown_command_is_a_usage_error():
    result = CliRunner().invoke(main, ["dance"])
    assert result.exit_code == 2
    assert "No such command 'dance'" in result.output


def loaded_by(statement: str) -> set[str]:
    program = f"import sys; {statement}; print(*sorted(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    return set(done.stdout.split())


def test_help_loads_no_subcommand():
    loaded = loaded_by("import cli.main; cli.main.main(['--help'], standalone_mode=False)")
    assert not loaded & {"cli.serve", "redis", "litestar", "torch", "transformers"}


@pytest.mark.parametrize("module", ["cli.gateway", "cli.worker", "cli.serve", "workers.process"])
def test_commands_load_no_torch(module: str):
    assert not loaded_by(f"import {module}") & {"torch", "transformers", "jax", "torch_tpu"}


def test_serve_has_a_default_model():
    settings = load_serve_settings((), {}, {})
    assert settings.model_names == (DEFAULT_MODEL,)
    assert settings.url == "http://127.0.0.1:8000"
    assert settings.redis_url is None
    assert settings.data_dir.is_absolute()


def test_the_fake_engine_needs_no_model():
    assert load_serve_settings((), {"engine": "fake"}, {}).model_names == ("m-small",)
    assert load_serve_settings((), {}, {"TPUGATE_ENGINE": "fake"}).model_names == ("m-small",)


def test_each_model_has_a_worker_and_each_name_is_shown_once():
    settings = load_serve_settings(("a", "b", "a"), {"engine": "fake"}, {})
    assert len(settings.workers) == 3
    assert settings.model_names == ("a", "b")


def test_models_may_come_from_the_environment():
    settings = load_serve_settings((), {"engine": "fake"}, {"TPUGATE_MODEL": "a, b"})
    assert settings.model_names == ("a", "b")


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("0.0.0.0", "http://127.0.0.1:9000"),
        ("::1", "http://[::1]:9000"),
        ("::", "http://[::1]:9000"),
        ("example.org", "http://example.org:9000"),
    ],
)
def test_the_url_that_is_shown_can_be_opened(host: str, url: str):
    flags = {"engine": "fake", "host": host}
    assert load_serve_settings((), flags, {"TPUGATE_PORT": "9000"}).url == url


@pytest.mark.parametrize("port", ["0", "65536", "-1", "http"])
def test_a_wrong_port_is_refused(port: str):
    with pytest.raises(SettingError, match="--port"):
        load_serve_settings((), {"engine": "fake", "port": port}, {})


def test_workers_with_a_model_get_the_allocator_where_it_is_installed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    library = tmp_path / "libtcmalloc_minimal.so.4"
    library.touch()
    monkeypatch.setattr("torchtpu.environment._LIBRARY_DIRS", (str(tmp_path),))
    monkeypatch.delenv("LD_PRELOAD", raising=False)
    assert worker_environment("model", model="m")["LD_PRELOAD"] == str(library)
    assert worker_environment("model", model="m")["TPUGATE_MODEL"] == "m"
    assert "LD_PRELOAD" not in worker_environment("fake")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("there is no model x", "There is no model x."),
        ("Repair it with `tpugate models rm x`", "Repair it with `tpugate models rm x`."),
        ("It did not answer: timed out..", "It did not answer: timed out."),
        ("Already whole.", "Already whole."),
    ],
)
def test_what_a_command_fails_with_is_a_sentence(text: str, said: str):
    assert CommandError(text).message == said


def test_children_get_settings_as_variables_and_find_the_package(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    environment = child_environment(redis_url="unix:///x", max_rows="4")
    assert environment["TPUGATE_REDIS_URL"] == "unix:///x"
    assert environment["TPUGATE_MAX_ROWS"] == "4"
    first, second = environment["PYTHONPATH"].split(":")
    assert (Path(first) / "cli" / "main.py").exists()
    assert second == "/elsewhere"
