"""Settings of `tpugate serve`, and the environment its child processes get."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cli.errors import SettingError
from torchtpu.environment import worker_preload
from workers.config import WorkerConfig, load_config
from workers.errors import ConfigError

DEFAULT_MODEL = "smollm2-135m-instruct"
DEFAULT_PORT = 8000
DEFAULT_DATA_DIR = "~/.local/share/tpugate"
PACKAGE_ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class ServeSettings:
    """What `serve` starts. Each worker's own settings travel to it as `TPUGATE_*` variables."""

    host: str
    port: int
    data_dir: Path
    redis_url: str | None
    """None is an embedded Valkey."""
    workers: tuple[WorkerConfig, ...]
    flags: Mapping[str, str]
    """Command-line flags for the workers."""
    is_admin_key_given: bool
    """By `TPUGATE_ADMIN_KEY`; else the gateway makes one and keeps it in a file."""

    @property
    def url(self) -> str:
        host = {"0.0.0.0": "127.0.0.1", "::": "[::1]", "": "127.0.0.1"}.get(self.host, self.host)
        return f"http://{f'[{host}]' if ':' in host and host[0] != '[' else host}:{self.port}"

    @property
    def model_names(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(worker.served_name for worker in self.workers))

    @property
    def drain_timeout_s(self) -> float:
        return max(worker.drain_timeout_s for worker in self.workers)


def load_serve_settings(
    models: tuple[str, ...], flags: Mapping[str, Any], environ: Mapping[str, str] | None = None
) -> ServeSettings:
    """Flags, then `TPUGATE_*`, then defaults. Raises `SettingError` with one sentence."""
    environ = os.environ if environ is None else environ

    def value(name: str, default: str) -> str:
        return str(flags.get(name) or environ.get(f"TPUGATE_{name.upper()}") or default)

    worker_flags = {name: str(flag) for name, flag in flags.items() if flag is not None}
    if not models:
        models = tuple(re.split(r"[,\s]+", environ.get("TPUGATE_MODEL", "").strip()))
    if models == ("",):
        models = ("",) if value("engine", "model") == "fake" else (DEFAULT_MODEL,)
    try:
        workers = tuple(
            load_config({**worker_flags, "model": model or None}, environ) for model in models
        )
    except ConfigError as error:
        raise SettingError(str(error)) from error
    return ServeSettings(
        host=value("host", "127.0.0.1"),
        port=_port(value("port", str(DEFAULT_PORT))),
        data_dir=Path(value("data_dir", DEFAULT_DATA_DIR)).expanduser().absolute(),
        redis_url=value("redis_url", "") or None,
        workers=workers,
        flags=worker_flags,
        is_admin_key_given=bool(environ.get("TPUGATE_ADMIN_KEY")),
    )


def _port(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 65535:
        raise SettingError(f"--port (TPUGATE_PORT) must be a number from 1 to 65535, not {text!r}.")
    return int(text)


def worker_environment(engine: str, /, **settings: str) -> dict[str, str]:
    """`child_environment` for a worker; one with a model gets the allocator that TorchTPU wants.

    Only the parent can give it that.
    """
    preload = worker_preload() if engine == "model" else {}
    return {**child_environment(**settings), **preload}


def child_environment(**settings: str) -> dict[str, str]:
    """This process's environment with `TPUGATE_*` settings on top, in capitals."""
    path = os.pathsep.join(filter(None, (str(PACKAGE_ROOT), os.environ.get("PYTHONPATH"))))
    return {
        **os.environ,
        **{f"TPUGATE_{name.upper()}": value for name, value in settings.items()},
        "PYTHONPATH": path,
        "PYTHONUNBUFFERED": "1",
    }
