"""The same ledger at another accelerator's price, on another term, or at another utilisation.

    loaded′ = price′ × loaded time × speed            as it was used
    loaded′ = price′ × active time × speed / U        if U, the share of steps in all time, is given

`speed` is how long the other chip takes for what this one does in a second; without it the chips are taken to
be equally fast, which no two are: then only prices are compared, not machines.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation

from sqlalchemy import or_, select
from sqlalchemy.ext.asyncio import AsyncSession

from gateway.db.engine import Database
from gateway.domain.accounting.reading import snapshot
from gateway.domain.accounting.report import Cell, Line, Report, rate
from gateway.domain.accounting.tables import PriceRow
from gateway.errors import BadRequestError

_NANOS_PER_HOUR = 3600 * 10**9
_NAMES = ("sku", "term", "region", "utilisation", "speed", "usd")
PARAM = "what_if"
USAGE = "sku=v5e,term=spot,region=gcp/us-central1,utilisation=0.8,speed=1.3, or usd=1.20 for a price of your own"


@dataclass(frozen=True)
class WhatIf:
    """What is asked. A field that is None stays as it was."""

    sku: str | None = None
    term: str | None = None
    region: str | None = None
    utilisation: Decimal | None = None
    """Σ D / M, above 0 and at most 1."""
    speed: Decimal = Decimal(1)
    usd: Decimal | None = None
    """Per chip-hour: a price that is not in the book."""


@dataclass(frozen=True)
class Repriced:
    line: Line
    loaded_usd: Decimal | None
    reason: str | None
    per_million_mix: Decimal | None
    ratio: Decimal | None
    """To what was paid."""


@dataclass(frozen=True)
class Answer:
    assumptions: list[str]
    lines: list[Repriced]
    total: Repriced
    price: PriceRow | None
    """None if the price is one of the asker's own, or the ledger's."""


def parse(text: str) -> WhatIf:
    """See `USAGE`. Raises `BadRequestError`."""
    values: dict[str, str] = {}
    for part in text.split(","):
        name, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals or name not in _NAMES or name in values or not value:
            raise _wrong(f"it is written {USAGE}")
        values[name] = value
    if "usd" in values and {"sku", "term", "region"} & values.keys():
        raise _wrong("a price of your own, usd, goes without sku, term and region")
    return WhatIf(
        sku=values.get("sku"),
        term=values.get("term"),
        region=values.get("region"),
        utilisation=_number(values, "utilisation", Decimal(1)),
        speed=_number(values, "speed", Decimal(1000)) or Decimal(1),
        usd=_number(values, "usd", Decimal(10000)),
    )


def _number(values: Mapping[str, str], name: str, most: Decimal) -> Decimal | None:
    if name not in values:
        return None
    try:
        number = (
            Decimal(values[name]) if re.fullmatch(r"[0-9.]{1,20}", values[name]) else Decimal(0)
        )
    except InvalidOperation:
        number = Decimal(0)
    if not 0 < number <= most:
        raise _wrong(f"{name} is a number above 0 and at most {most}")
    return number


async def reprice(database: Database, report: Report, asked: WhatIf, now_ns: int) -> Answer:
    """A report's lines as they would have been. Raises `BadRequestError` if there is no such price."""
    price = None
    if asked.sku or asked.term or asked.region:
        async with snapshot(database) as session:
            price = await _find(session, report, asked, now_ns)
    parts: dict[tuple[str, ...], list[Cell]] = {}
    for cell in report.cells:
        parts.setdefault(cell.keys, []).append(cell)
    found = [
        _repriced(line, _sum(parts[tuple(line.keys.values())], report, asked, price))
        for line in report.lines
    ]
    total = _repriced(report.total, _sum(report.cells, report, asked, price))
    return Answer(_assumptions(asked, price), found, total, price)


async def _find(session: AsyncSession, report: Report, asked: WhatIf, now_ns: int) -> PriceRow:
    """The row that is valid now; what is not asked for is what the report's own prices agree on."""
    wanted = {
        name: getattr(asked, name) or _common(report, name) for name in ("sku", "term", "region")
    }
    if asked.sku and not asked.region:
        wanted["region"] = None
    query = select(PriceRow).where(
        PriceRow.effective_from_ns <= now_ns,
        or_(PriceRow.effective_to_ns.is_(None), PriceRow.effective_to_ns > now_ns),
        *(getattr(PriceRow, name) == value for name, value in wanted.items() if value),
    )
    newest: dict[tuple[str, str, str], PriceRow] = {}
    for row in await session.scalars(query.order_by(PriceRow.effective_from_ns)):
        newest[row.sku, row.region, row.term] = row
    if not newest:
        said = ", ".join(f"{name} {value}" for name, value in wanted.items() if value)
        raise _wrong(f"the price book has no price for {said} that is valid now")
    if len(newest) > 1:
        lines = "; ".join(" ".join(key) for key in sorted(newest)[:6])
        raise _wrong(f"several prices are meant, name sku, term and region: {lines}")
    return next(iter(newest.values()))


def _common(report: Report, name: str) -> str | None:
    values = {getattr(row, name) for row in report.prices.values()}
    return values.pop() if len(values) == 1 else None


def _repriced(line: Line, usd: Decimal | None) -> Repriced:
    tokens = line.input_tokens + line.amounts["delivered_tokens"]
    before = line.loaded_usd
    return Repriced(
        line=line,
        loaded_usd=usd,
        reason=None if usd is not None else "no_price",
        per_million_mix=rate(usd, tokens),
        ratio=usd / before if usd is not None and before else None,
    )


def _sum(
    cells: Sequence[Cell], report: Report, asked: WhatIf, price: PriceRow | None
) -> Decimal | None:
    total = Decimal(0)
    for cell in cells:
        row = price or report.prices.get(cell.price_id)
        usd = asked.usd or (row.usd_per_chip_hour if row is not None else None)
        if usd is None:
            return None
        active = cell.amounts["prefill_ns"] + cell.amounts["decode_ns"]
        time = Decimal(cell.amounts["loaded_ns"])
        if asked.utilisation is not None:
            time = Decimal(active) / asked.utilisation
        total += usd * time * asked.speed / _NANOS_PER_HOUR
    return total


def _assumptions(asked: WhatIf, price: PriceRow | None) -> list[str]:
    """Sentences for people: without them the figures mean nothing."""
    said = []
    if price is not None:
        said.append(
            f"{price.sku} {price.region} {price.term} at US$ {price.usd_per_chip_hour} per chip-hour: "
            f"{price.source} ({price.retrieved_at})"
        )
    elif asked.usd is not None:
        said.append(f"US$ {asked.usd} per chip-hour: a price of your own")
    else:
        said.append("prices as they were")
    if asked.speed != 1:
        said.append(f"one second of the chips that ran takes {asked.speed} seconds: your figure")
    elif price is not None or asked.usd is not None:
        said.append("the other chip takes as long for each step as the one that ran: not measured")
    if asked.utilisation is None:
        said.append("idle time and overhead as they were")
    else:
        said.append(f"{asked.utilisation:%} of all chip-time is steps, evenly over all lines")
    return said


def _wrong(why: str) -> BadRequestError:
    return BadRequestError(f"Invalid '{PARAM}': {why}.", param=PARAM, code="invalid_value")
