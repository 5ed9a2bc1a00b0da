"""Settings of a gateway process; the one module of the package that reads the environment.

Every field is read from `TPUGATE_` + its name in capitals: `TPUGATE_REDIS_URL`, `TPUGATE_QUEUE_LIMIT` …
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from gateway.errors import SettingsError

_PREFIX = "TPUGATE_"
_REDIS_SCHEMES = ("redis://", "rediss://", "unix://")


class GatewaySettings(BaseModel):
    """Frozen. Durations are seconds."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)

    host: str = "127.0.0.1"
    port: int = Field(default=8000, ge=0, le=65535)
    """0 takes a free port."""
    redis_url: str = "redis://127.0.0.1:6379"
    data_dir: Path = Path("~/.local/share/tpugate")
    """Holds the SQLite file, the secret of the key hashes and admin.key."""
    database_url: str | None = None
    """SQLAlchemy URL with an async driver; None is SQLite in `data_dir`."""
    admin_key: str | None = Field(default=None, min_length=16, repr=False)
    """Sets the admin's API key; None makes one at first start."""
    max_body_bytes: int = Field(default=4 * 1024 * 1024, ge=1024)
    body_timeout_s: float = Field(default=30.0, gt=0)
    """How long a client may take to send a request's head, and its body."""
    stalled_timeout_s: float = Field(default=60.0, gt=0)
    """How long a client may leave an answer unread before it is given up."""
    queue_limit: int = Field(default=512, ge=1)
    """Requests of one model that may be queued or running; one more gets 429."""
    key_limit: int | None = Field(default=None, ge=1)
    """Requests of one API key that may be queued or running at this gateway; None is half of `queue_limit`."""
    request_timeout_s: float = Field(default=600.0, gt=0)
    idempotency_ttl_s: float = Field(default=3600.0, gt=0)
    """How long the answer to a request with an Idempotency-Key is kept."""
    idempotency_grace_s: float = Field(default=30.0, ge=0)
    """How long such a request goes on after its client has left."""
    no_worker_timeout_s: float = Field(default=60.0, gt=0)
    """How long a queued request waits for a worker to come back after the last one died."""
    ping_interval_s: float = Field(default=10.0, gt=0)
    """Silence after which a stream gets a comment line, so that proxies keep it open."""
    poll_interval_s: float = Field(default=0.5, gt=0)
    """How often heartbeats of workers are read."""
    redis_timeout_s: float = Field(default=5.0, ge=2)
    """Longer than a blocking read, which is one second."""
    key_cache_s: float = Field(default=5.0, ge=0)
    """How long a revoked key may still work on this gateway."""
    inline_text_bytes: int = Field(default=8 * 1024, ge=0)
    """Prompts with more text than this are tokenised in a thread."""
    response_ttl_s: int = Field(default=24 * 3600, ge=1)
    """How long a stored response can be fetched."""
    responses_per_key: int = Field(default=500, ge=1)
    """Stored responses of one API key; the oldest give way."""
    cost_refresh_s: float = Field(default=30.0, gt=0)
    """How old the prices and the idle share may be that answers tell their cost with."""
    response_max_bytes: int = Field(default=1024 * 1024, ge=1024)
    """A response that is larger, with its input and compressed, is not stored."""
    accountant: Literal["on", "off"] = "on"
    """Whether this process may write the ledger; of all that may, one does at a time."""
    price_term: Literal["on_demand", "spot", "flex", "1y", "3y"] = "on_demand"
    """How the chips are bought: which of their prices counts."""
    price_region: str = Field(default="", max_length=64)
    """Of workers that do not know theirs, `cloud/region`."""
    keep_log_days: float = Field(default=30.0, gt=0)
    """How long single steps are kept; what was made of them stays."""
    cors_origin: str = Field(default="*", pattern=r"^(\*|none|https?://[\x21-\x7e]+)$")
    """Origin whose pages may ask from a browser: any, none, or the one that is named."""
    retry_after_full_s: int = Field(default=1, ge=1)
    retry_after_unavailable_s: int = Field(default=2, ge=1)
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    graceful_shutdown_s: int = Field(default=30, ge=0)
    """How long running answers may go on after SIGTERM."""

    @property
    def most_of_a_key(self) -> int:
        """Requests that one API key can have in a model's queue."""
        if self.key_limit is None:
            return max(1, self.queue_limit // 2)
        return min(self.key_limit, self.queue_limit)

    @field_validator("data_dir")
    @classmethod
    def _absolute(cls, value: Path) -> Path:
        return value.expanduser().absolute()

    @field_validator("log_level", mode="before")
    @classmethod
    def _upper(cls, value: object) -> object:
        return value.upper() if isinstance(value, str) else value

    @field_validator("redis_url")
    @classmethod
    def _known_scheme(cls, value: str) -> str:
        if not value.startswith(_REDIS_SCHEMES):
            raise ValueError("a Redis URL starts with redis://, rediss:// or unix://")
        return value

    @classmethod
    def from_environment(
        cls, environ: Mapping[str, str] | None = None, **overrides: object
    ) -> "GatewaySettings":
        """Environment, with `overrides` (command line) on top; raises `SettingsError` naming the bad variable."""
        env = os.environ if environ is None else environ
        values: dict[str, object] = {
            name: env[_PREFIX + name.upper()]
            for name in cls.model_fields
            if env.get(_PREFIX + name.upper())
        }
        values.update({name: value for name, value in overrides.items() if value is not None})
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            first = error.errors(include_input=False, include_url=False)[0]
            name = ".".join(str(part) for part in first["loc"])
            raise SettingsError(f"{_PREFIX}{name.upper()} is wrong: {first['msg']}") from error
