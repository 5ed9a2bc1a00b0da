"""Settings of a worker process: the only reader of `TPUGATE_*` variables in `workers`.

Where models are kept is set in `models.settings`, the device's own variables in `torchtpu.environment`.
"""

import math
import os
import re
import secrets
import socket
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, get_args
from urllib.parse import urlsplit

from models.chat_format import REASONING_MARKS, TOOL_FORMATS
from models.errors import ModelError
from models.references import parse_reference
from torchtpu.environment import granted_chips
from workers.errors import ConfigError

EngineKind = Literal["model", "fake"]
Device = Literal["tpu", "cpu", "cuda"]
Dtype = Literal["auto", "bfloat16", "float16", "float32"]

REDIS_SCHEMES = ("redis", "rediss", "unix")
SCRIPTED_MODEL = "m-small"
SCRIPTED_ROWS = 256
WORD = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
MODEL_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@+-]{0,199}")


@dataclass(frozen=True)
class Chips:
    """What the process is granted, and billed for."""

    sku: str
    """What a price is asked for: `v6e`, `v5e`, `v7x`, `h200` …, or `cpu`."""
    num: int
    region: str


@dataclass(frozen=True)
class WorkerConfig:
    """One replica's settings. `None` leaves the choice to the engine."""

    model: str = ""
    """A catalogue id, hub id, folder or file; empty only for the scripted engine."""
    served_name: str = ""
    """The model's name in HTTP bodies, streams and keys; filled in by `load_config` if not given."""
    engine: EngineKind = "model"
    redis_url: str = "redis://127.0.0.1:6379/0"
    worker_id: str = ""
    """Unique for each process that ever lived; made from host name and chance if empty."""
    device: Device = "tpu"
    dtype: Dtype = "auto"
    max_rows: int | None = None
    """Choices that run at once."""
    max_step_tokens: int | None = None
    """Tokens of one step: a row each of running choices, and parts of prompts beside them."""
    memory_share: float | None = None
    """Of the device's memory, for weights, programs and KV cache together."""
    num_blocks: int | None = None
    block_len: int | None = None
    """Tokens of one KV block."""
    context_len: int | None = None
    """Tokens of prompt and answer together."""
    tool_parser: str = "auto"
    """How the model writes calls of tools; auto: as its template shows them."""
    reasoning_parser: str = "auto"
    """Which marks are around its reasoning; auto: those of its template or vocabulary."""
    drain_timeout_s: float = 30.0
    step_delay_s: float = 0.0
    """Length of a step of the scripted engine."""
    compile_cache_dir: Path | None = None
    """Where compiled programs are kept; with the device layer's caches if not given."""
    profile: Path | None = None
    """A folder, or a .json file, that takes a trace of every step."""
    sku: str | None = None
    """The accelerator as the price book names it; found out on a TPU VM, `cpu` without an accelerator."""
    num_chips: int | None = None
    """Chips that this process holds, whether it uses them or not; found out on a TPU VM, else 1."""
    region: str = ""
    """Where they are, for prices that differ by region."""
    log_level: str = "INFO"

    @property
    def chips(self) -> Chips:
        found = granted_chips()
        if self.device != "tpu" or self.engine == "fake" or found is None:
            found = ("cpu" if self.device != "cuda" else "cuda", 1)
        return Chips(self.sku or found[0], self.num_chips or found[1], self.region)


def load_config(
    overrides: Mapping[str, Any], environ: Mapping[str, str] | None = None
) -> WorkerConfig:
    """Settings from command-line flags (`overrides`, None is not given), then `TPUGATE_*`, then defaults.

    Raises `ConfigError` with one sentence that names the setting.
    """
    environ = os.environ if environ is None else environ
    values: dict[str, Any] = {}
    for item in fields(WorkerConfig):
        given = overrides.get(item.name)
        if given is None:
            given = environ.get(f"TPUGATE_{item.name.upper()}") or None
        if given is not None:
            values[item.name] = _PARSERS.get(item.name, _text)(item.name, given)
    values.setdefault("worker_id", _fresh_worker_id())
    values["served_name"] = values.get("served_name") or _own_name(values)
    config = WorkerConfig(**values)
    _check(config)
    return config


def _own_name(values: Mapping[str, Any]) -> str:
    """What a model is called if nobody says otherwise."""
    model = values.get("model", "")
    if values.get("engine") == "fake":
        return model or SCRIPTED_MODEL
    if not model:
        raise ConfigError("No model is named: give --model (or TPUGATE_MODEL).")
    try:
        return parse_reference(model).id
    except ModelError as error:
        raise ConfigError(sentence(str(error))) from error


def sentence(text: str) -> str:
    """`text` with a capital and one full stop, also where a library's own sentence ends it.

    A name at its beginning (a model's, a flag's, a file's) stays as it is written.
    """
    text = re.sub(r"(?<!\.)\.\.$", ".", text.strip())
    if text.partition(" ")[0].isalpha():
        text = text[:1].upper() + text[1:]
    return text + ("" if text.endswith((".", "!", "?")) else ".")


def _fresh_worker_id() -> str:
    host = re.sub(r"[^A-Za-z0-9-]", "-", socket.gethostname())[:40] or "worker"
    return f"{host}-{secrets.token_hex(4)}"


def _check(config: WorkerConfig) -> None:
    if not MODEL_NAME.fullmatch(config.served_name):
        raise ConfigError(f"{config.served_name!r} is no name for a model: give --served-name.")
    scheme = urlsplit(config.redis_url).scheme
    if scheme not in REDIS_SCHEMES:
        raise ConfigError(
            f"The Redis URL must begin with redis://, rediss:// or unix://, not {scheme or 'nothing'}."
        )


def _text(name: str, value: object) -> str:
    return str(value).strip()


def _word(name: str, value: object) -> str:
    text = str(value).strip()
    if not WORD.fullmatch(text):
        raise ConfigError(
            f"{_spoken(name)} must be up to 64 letters, digits and any of . _ -, not {text!r}."
        )
    return text


def _path(name: str, value: object) -> Path:
    return Path(str(value)).expanduser().absolute()


def _count(name: str, value: object) -> int:
    try:
        number = int(str(value))
    except ValueError:
        number = 0
    if number < 1:
        raise ConfigError(f"{_spoken(name)} must be a whole number of at least 1, not {value!r}.")
    return number


def _seconds(name: str, value: object) -> float:
    try:
        number = float(str(value))
    except ValueError:
        number = -1.0
    if not math.isfinite(number) or number < 0:
        raise ConfigError(f"{_spoken(name)} must be a number of seconds, not {value!r}.")
    return number


def _share(name: str, value: object) -> float:
    try:
        number = float(str(value))
    except ValueError:
        number = 0.0
    if not 0 < number <= 1:
        raise ConfigError(f"{_spoken(name)} must be above 0 and at most 1, not {value!r}.")
    return number


def _choice(name: str, value: object) -> str:
    allowed = _CHOICES[name]
    text = str(value).strip()
    if name == "log_level":
        text = text.upper()
    if text not in allowed:
        raise ConfigError(f"{_spoken(name)} must be one of {', '.join(allowed)}, not {text!r}.")
    return text


def _spoken(name: str) -> str:
    return f"--{name.replace('_', '-')} (TPUGATE_{name.upper()})"


_CHOICES: dict[str, tuple[str, ...]] = {
    "engine": get_args(EngineKind),
    "device": get_args(Device),
    "dtype": get_args(Dtype),
    "log_level": ("DEBUG", "INFO", "WARNING", "ERROR"),
    "tool_parser": ("auto", *TOOL_FORMATS),
    "reasoning_parser": ("auto", "none", *REASONING_MARKS),
}
_PARSERS: dict[str, Any] = {
    **dict.fromkeys(("compile_cache_dir", "profile"), _path),
    **dict.fromkeys(_CHOICES, _choice),
    **dict.fromkeys(
        ("max_rows", "max_step_tokens", "num_blocks", "block_len", "context_len", "num_chips"),
        _count,
    ),
    "memory_share": _share,
    **dict.fromkeys(("sku", "region"), _word),
    **dict.fromkeys(("drain_timeout_s", "step_delay_s"), _seconds),
}
