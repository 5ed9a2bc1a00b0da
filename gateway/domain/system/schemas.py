"""Bodies of the probes."""

from typing import Literal

from pydantic import BaseModel


class Health(BaseModel):
    """The process lives; says nothing of workers."""

    status: Literal["ok"] = "ok"


class Readiness(BaseModel):
    """`ready` is also the HTTP status: 200 or 503."""

    ready: bool
    redis: bool
    """Whether the queue can be reached."""
    models: dict[str, list[str]]
    """States of each model's workers, `warming 0.40` among them."""
