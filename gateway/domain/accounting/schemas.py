"""Shapes of cost reports, for the OpenAPI document alone. Money is text: a float would round it."""

from typing import Any

from pydantic import BaseModel, ConfigDict

_AMOUNTS = {
    "num_requests": 500,
    "prefill_ns": 41_000_000_000,
    "decode_ns": 159_000_000_000,
    "loaded_ns": 360_000_000_000,
    "loaded_prefill_ns": 73_800_000_000,
    "loaded_decode_ns": 286_200_000_000,
    "uncached_tokens": 60_000,
    "cached_tokens": 20_000,
    "written_tokens": 30_000,
    "delivered_tokens": 40_000,
}
_FIGURES = {
    **_AMOUNTS,
    "active_usd": "0.15",
    "loaded_usd": "0.27",
    "reason": None,
    "usd_per_million": {
        "uncached_input": "0.9225",
        "cached_input": "0",
        "output": "5.36625",
        "mix": "2.25",
        "input_4_to_1": "1.125",
        "output_4_to_1": "4.5",
    },
}
_EXAMPLE: Any = {
    "from": "2026-11-01T00:00Z",
    "to": "2026-12-01T00:00Z",
    "lines": [{"model": "smollm2-135m-instruct", **_FIGURES}],
    "total": _FIGURES,
    "prices": [
        {
            "price_id": "5f0c2d8e9a1b4c6d7e8f90a1b2c3d4e5",
            "sku": "v6e",
            "region": "gcp/us-central1",
            "term": "on_demand",
            "usd_per_chip_hour": "2.70",
            "source": "a title and an address",
            "retrieved_at": "2026-12-01",
        }
    ],
    "open_hours": 0,
    "num_lines": 1200,
    "next_offset": 1000,
}


class CostReport(BaseModel):
    """`from` and `to`, whole hours (UTC), are the window; the second is exclusive."""

    model_config = ConfigDict(json_schema_extra={"examples": [_EXAMPLE]})

    lines: list[dict[str, Any]]
    """Keys as asked by `by`, sums of tokens and nano-chip-seconds, `active_usd`, `loaded_usd` (null with a `reason`),
    and `usd_per_million` tokens by kind."""
    total: dict[str, Any]
    """Of all lines, whatever the page."""
    prices: list[dict[str, Any]]
    """With their sources."""
    open_hours: int
    """Hours whose idle time and overhead are not in the lines yet."""
    num_lines: int
    """On all pages."""
    next_offset: int | None
    """Where the next page begins; null on the last one."""
    what_if: dict[str, Any] | None = None
    """If it was asked for: assumptions, dollars, ratio to what was paid."""
    waste: list[dict[str, Any]] | None = None
    """If it was asked for: what was spent on nobody, by model, day and kind."""
