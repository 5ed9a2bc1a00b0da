"""A bad setting stops the start with one sentence that names it, and a wrong start never ends in a traceback."""

import asyncio
import socket
from pathlib import Path

import pytest

from gateway.asgi import serve
from gateway.errors import PortTakenError, SettingsError, StartupError
from gateway.settings import GatewaySettings


def test_environment_and_overrides():
    environ = {"TPUGATE_PORT": "9000", "TPUGATE_QUEUE_LIMIT": "7", "TPUGATE_HOST": ""}
    settings = GatewaySettings.from_environment(environ, port=9001, host=None)
    assert (settings.port, settings.queue_limit, settings.host) == (9001, 7, "127.0.0.1")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("TPUGATE_PORT", "http"),
        ("TPUGATE_PORT", "70000"),
        ("TPUGATE_REDIS_URL", "localhost:6379"),
        ("TPUGATE_QUEUE_LIMIT", "0"),
        ("TPUGATE_ADMIN_KEY", "short"),
    ],
)
def test_a_bad_value_is_named(name: str, value: str):
    with pytest.raises(SettingsError, match=name):
        GatewaySettings.from_environment({name: value})


def test_the_admin_key_is_not_shown():
    settings = GatewaySettings(admin_key="tpg-a-secret-admin-key")
    assert "secret" not in repr(settings)


def test_a_taken_port(tmp_path: Path):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(PortTakenError, match=f"cannot listen on 127.0.0.1:{port}"):
            asyncio.run(serve(GatewaySettings(port=port, data_dir=tmp_path)))


def test_a_data_folder_that_is_a_file(tmp_path: Path):
    (tmp_path / "file").touch()
    with pytest.raises(StartupError, match="data folder"):
        asyncio.run(serve(GatewaySettings(port=0, data_dir=tmp_path / "file")))


def test_a_database_that_is_none(tmp_path: Path):
    (tmp_path / "tpugate.sqlite").write_bytes(b"this is no database" * 100)
    with pytest.raises(StartupError, match="database"):
        asyncio.run(serve(GatewaySettings(port=0, data_dir=tmp_path)))


def test_a_database_server_that_is_away(tmp_path: Path):
    with socket.socket() as unheard:
        unheard.bind(("127.0.0.1", 0))
        place = f"127.0.0.1:{unheard.getsockname()[1]}/keys"
        url = f"postgresql+asyncpg://user:hidden@{place}"
        settings = GatewaySettings(port=0, data_dir=tmp_path, database_url=url)
        with pytest.raises(StartupError, match=f"the database {place} cannot") as caught:
            asyncio.run(serve(settings))
    assert "hidden" not in str(caught.value)


def test_the_default_folder_is_the_users(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert GatewaySettings().data_dir == tmp_path / ".local/share/tpugate"
