"""Prices on a terminal and in JSON, each with its source."""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gateway.domain.accounting.prices import Price

_TITLES = ("sku", "region", "term", "US$/chip-hour", "on demand", "from", "to", "source")


def fields(price: "Price", listed: "Price | None" = None) -> dict[str, object]:
    """For JSON; money is text. `listed` is the on-demand price of the same place."""
    shown: dict[str, object] = {
        "price_id": price.id,
        "sku": price.sku,
        "region": price.region,
        "term": price.term.value,
        "usd_per_chip_hour": format(price.usd_per_chip_hour, "f"),
        "effective_from": moment(price.effective_from_ns),
        "effective_to": None if price.effective_to_ns is None else moment(price.effective_to_ns),
        "currency": price.currency,
        "source": price.source,
        "retrieved_at": price.retrieved_at,
        **price.detail,
    }
    if listed is not None:
        shown["list_usd_per_chip_hour"] = format(listed.usd_per_chip_hour, "f")
    return shown


def render(rows: "Sequence[tuple[Price, Price | None]]") -> str:
    """A table, and the sources that its last column numbers."""
    sources: dict[str, int] = {}
    table = [_TITLES]
    for price, listed in rows:
        number = sources.setdefault(price.source_line, len(sources) + 1)
        until = "" if price.effective_to_ns is None else moment(price.effective_to_ns)
        table.append(
            (
                price.sku,
                price.region,
                price.term.value,
                _money(price),
                "-" if listed is None else _money(listed),
                moment(price.effective_from_ns),
                until,
                f"[{number}]",
            )
        )
    widths = [max(len(row[column]) for row in table) for column in range(len(_TITLES))]
    lines = []
    for row in table:
        cells = [
            cell.rjust(width) if at in (3, 4) else cell.ljust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    notes = [f"[{number}] {source}" for source, number in sources.items()]
    return "\n".join([*lines, "", *notes])


def moment(unix_ns: int) -> str:
    """A date if it is midnight (UTC), else a time."""
    when = datetime.fromtimestamp(unix_ns // 10**9, UTC)
    is_midnight = when.hour == when.minute == when.second == 0
    return f"{when:%Y-%m-%d}" if is_midnight else f"{when:%Y-%m-%dT%H:%M:%SZ}"


def _money(price: "Price") -> str:
    return f"{price.usd_per_chip_hour.normalize():f}"
