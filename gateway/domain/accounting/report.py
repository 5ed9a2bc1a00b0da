"""What was spent, from the rollups: by model, key, tag, day or hour, with the price of a million tokens.

    active = price × time of the steps       loaded = price × all time (idle and overhead included)

    US$ per million uncached input tokens    1e6 · loaded(prefill) / uncached input tokens
    …               cached input tokens      0 by the method: whoever wrote the cache has paid
    …               output tokens            1e6 · loaded(decode) / delivered tokens
    …               mix                      1e6 · loaded / (input + delivered tokens)
    …               4:1 convention           a delivered token counts as four of input: for other tools' figures

The first token of an answer is made by its last prompt segment, so its time is prefill's. What was aborted or
failed is in the dollars; only delivered tokens are in the divisors. Chip-time without a price makes a line's
dollars null, never smaller.
"""

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from decimal import Decimal
from enum import StrEnum
from typing import Any

from sqlalchemy import ColumnElement, SQLColumnExpression, and_, func, literal, or_, select
from sqlalchemy.ext.asyncio import AsyncSession

from gateway.db.engine import Database
from gateway.domain.accounting.reading import read_price_rows, snapshot
from gateway.domain.accounting.tables import DAY_S, HOUR_S, Period, PriceRow, Rollup

_MILLION = 10**6
_NANOS_PER_HOUR = 3600 * 10**9
AMOUNTS = (
    "num_requests",
    "prefill_ns",
    "decode_ns",
    "loaded_ns",
    "loaded_prefill_ns",
    "loaded_decode_ns",
    "uncached_tokens",
    "cached_tokens",
    "written_tokens",
    "delivered_tokens",
)


class By(StrEnum):
    """What lines are made of."""

    MODEL = "model"
    KEY = "key"
    TAG = "tag"
    DAY = "day"
    HOUR = "hour"


@dataclass(frozen=True)
class Window:
    """[from, to), whole hours, unix seconds."""

    from_s: int
    to_s: int

    @property
    def days(self) -> tuple[int, int]:
        """The whole days within; equal if there are none."""
        first = -(-self.from_s // DAY_S) * DAY_S
        return first, max(first, self.to_s // DAY_S * DAY_S)


@dataclass(frozen=True)
class Cell:
    """Sums of one line at one price."""

    keys: tuple[str, ...]
    """Values of `by`, in its order."""
    price_id: str
    amounts: Mapping[str, int]


@dataclass(frozen=True)
class Line:
    """Sums of one line; dollars are None, with a reason, if any part of it has no price."""

    keys: Mapping[str, str]
    amounts: Mapping[str, int]
    active_usd: Decimal | None
    loaded_usd: Decimal | None
    prefill_usd: Decimal | None
    """Loaded; so is the next."""
    decode_usd: Decimal | None
    unpriced_ns: int
    """Of `loaded_ns`."""
    price_ids: tuple[str, ...]

    @property
    def reason(self) -> str | None:
        return None if self.loaded_usd is not None else "no_price"

    @property
    def input_tokens(self) -> int:
        return self.amounts["uncached_tokens"] + self.amounts["cached_tokens"]

    def per_million(self) -> dict[str, Decimal | None]:
        """None where nothing was counted, or nothing can be priced."""
        outputs, inputs = self.amounts["delivered_tokens"], self.input_tokens
        each = rate(self.loaded_usd, inputs + 4 * outputs)
        has_cached = self.amounts["cached_tokens"] > 0 and self.loaded_usd is not None
        return {
            "uncached_input": rate(self.prefill_usd, self.amounts["uncached_tokens"]),
            "cached_input": Decimal(0) if has_cached else None,
            "output": rate(self.decode_usd, outputs),
            "mix": rate(self.loaded_usd, inputs + outputs),
            "input_4_to_1": each,
            "output_4_to_1": None if each is None else 4 * each,
        }


@dataclass(frozen=True)
class Report:
    window: Window
    by: tuple[By, ...]
    lines: list[Line]
    total: Line
    prices: Mapping[str, PriceRow]
    """That the lines are made with."""
    num_open_hours: int
    """Hours of models that are not closed yet: their idle time and overhead are not in the lines."""
    cells: list[Cell] = field(repr=False, default_factory=list)


async def report(database: Database, window: Window, by: Sequence[By]) -> Report:
    """Lines in the order of their keys. Raises `UnavailableError`."""
    async with snapshot(database) as session:
        cells = await read_cells(session, window, by)
        prices = await read_price_rows(session)
        num_open = await _num_open(session, window)
    # Not in the loop that answers go through, as there may be many lines.
    return await asyncio.to_thread(_made, window, by, cells, prices, num_open)


def _made(
    window: Window,
    by: Sequence[By],
    cells: list[Cell],
    prices: Mapping[str, PriceRow],
    num_open: int,
) -> Report:
    used = {cell.price_id for cell in cells}
    return Report(
        window=window,
        by=tuple(by),
        lines=lines_of(cells, [name.value for name in by], prices),
        total=total_of(cells, prices),
        prices={name: row for name, row in prices.items() if name in used},
        num_open_hours=num_open,
        cells=cells,
    )


async def read_cells(
    session: AsyncSession, window: Window, by: Sequence[By], names: Sequence[str] = AMOUNTS
) -> list[Cell]:
    """Sums of the columns `names`; each takes its time.

    From days where whole days are asked for, else from hours: never both for one hour.
    """
    columns = [_column(name) for name in by]
    sums = [func.sum(getattr(Rollup, name)) for name in names]
    query = select(*columns, Rollup.price_id, *sums).where(_within(window, by))
    rows = await session.execute(query.group_by(*columns, Rollup.price_id))
    num_keys = len(by)
    cells = []
    for row in rows:
        keys = tuple(_shown(name, key) for name, key in zip(by, row[:num_keys], strict=True))
        amounts = dict(zip(names, map(int, row[num_keys + 1 :]), strict=True))
        cells.append(Cell(keys, row[num_keys], amounts))
    return cells


def _column(by: By) -> SQLColumnExpression[Any]:
    return {
        By.MODEL: Rollup.model,
        By.KEY: Rollup.key_id,
        By.TAG: Rollup.tag,
        By.DAY: (Rollup.start - Rollup.start % literal(DAY_S)).label("day"),
        By.HOUR: Rollup.start,
    }[by]


def _within(window: Window, by: Sequence[By]) -> ColumnElement[bool]:
    first, last = window.days
    if By.HOUR in by or first == last:
        return and_(Rollup.grain_s == HOUR_S, _between(window.from_s, window.to_s))
    edges = or_(_between(window.from_s, first), _between(last, window.to_s))
    return or_(
        and_(Rollup.grain_s == DAY_S, _between(first, last)),
        and_(Rollup.grain_s == HOUR_S, edges),
    )


def _between(first: int, last: int) -> ColumnElement[bool]:
    return and_(Rollup.start >= first, Rollup.start < last)


def _shown(by: By, key: str | int) -> str:
    if by in (By.DAY, By.HOUR):
        moment = datetime.fromtimestamp(int(key), UTC)
        return f"{moment:%Y-%m-%d}" if by is By.DAY else f"{moment:%Y-%m-%dT%H:00Z}"
    return str(key)


async def _num_open(session: AsyncSession, window: Window) -> int:
    query = (
        select(Period.model, Period.hour)
        .where(Period.hour >= window.from_s, Period.hour < window.to_s)
        .where(Period.is_closed.is_(False))
        .distinct()
    )
    return await session.scalar(select(func.count()).select_from(query.subquery())) or 0


def lines_of(
    cells: Iterable[Cell], names: Sequence[str], prices: Mapping[str, PriceRow]
) -> list[Line]:
    """One for each combination of keys, whatever number of prices it has."""
    groups: dict[tuple[str, ...], list[Cell]] = {}
    for cell in cells:
        groups.setdefault(cell.keys, []).append(cell)
    return [
        _line(dict(zip(names, keys, strict=True)), groups[keys], prices) for keys in sorted(groups)
    ]


def total_of(cells: Sequence[Cell], prices: Mapping[str, PriceRow]) -> Line:
    return _line({}, cells, prices)


def _line(keys: dict[str, str], cells: Sequence[Cell], prices: Mapping[str, PriceRow]) -> Line:
    by_price = _by_price(cells)
    amounts = by_price.popitem()[1] if len(by_price) == 1 else _added(list(by_price.values()))
    priced = _by_price(cell for cell in cells if cell.price_id in prices)
    rated = [(prices[price_id].usd_per_chip_hour, spent) for price_id, spent in priced.items()]
    unpriced = amounts["loaded_ns"] - sum(spent["loaded_ns"] for _, spent in rated)

    def dollars(*names: str) -> Decimal | None:
        if unpriced:
            return None
        spent = (usd * sum(spent[name] for name in names) for usd, spent in rated)
        return sum(spent, Decimal(0)) / _NANOS_PER_HOUR

    return Line(
        keys=keys,
        amounts=amounts,
        active_usd=dollars("prefill_ns", "decode_ns"),
        loaded_usd=dollars("loaded_ns"),
        prefill_usd=dollars("loaded_prefill_ns"),
        decode_usd=dollars("loaded_decode_ns"),
        unpriced_ns=unpriced,
        price_ids=tuple(sorted({cell.price_id for cell in cells if cell.price_id})),
    )


def _by_price(cells: Iterable[Cell]) -> dict[str, Mapping[str, int]]:
    """Integers are added before any of them meets a Decimal: exact, and quick."""
    groups: dict[str, list[Mapping[str, int]]] = {}
    for cell in cells:
        groups.setdefault(cell.price_id, []).append(cell.amounts)
    return {name: each[0] if len(each) == 1 else _added(each) for name, each in groups.items()}


def _added(amounts: Sequence[Mapping[str, int]]) -> Mapping[str, int]:
    return {name: sum(each[name] for each in amounts) for name in AMOUNTS}


def rate(usd: Decimal | None, num_tokens: int) -> Decimal | None:
    """Dollars per million tokens."""
    return None if usd is None or num_tokens == 0 else usd * _MILLION / num_tokens
