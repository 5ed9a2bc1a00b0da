"""Shapes of cost reports, for the OpenAPI document alone. Money is text: a float would round it."""

from typing import Any

from pydantic import BaseModel


class CostReport(BaseModel):
    """`from` and `to`, whole hours (UTC), are the window; the second is exclusive."""

    lines: list[dict[str, Any]]
    """Keys as asked by `by`, sums of tokens and nano-chip-seconds, `active_usd`, `loaded_usd` (null with a `reason`),
    and `usd_per_million` tokens by kind."""
    total: dict[str, Any]
    prices: list[dict[str, Any]]
    """With their sources."""
    open_hours: int
    """Hours whose idle time and overhead are not in the lines yet."""
