"""Prices from a YAML file, checked row by row; what is wrong is told, what is doubtful is put aside.

    prices:
    - sku: v6e
      region: gcp/us-east5            cloud/region, cloud/all, or any
      term: on_demand                 on_demand, spot, flex, 1y, 3y
      usd_per_chip_hour: 2.70
      effective_from: 2026-12-01      a date, or a time with its zone
      effective_to: 2027-06-01        optional, exclusive
      source: title, address
      retrieved_at: 2026-12-01

Refused are rows without a source or a date, on-demand prices below the spot price of the same place, the 700.0 that
one public catalogue writes for "none", and pages known to contradict the bills. Put aside (quarantined) are the lower
on-demand prices of a chip whose prices within one cloud lie more than 1.5 times apart: often they are of another kind
of purchase.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from importlib.resources import as_file, files
from pathlib import Path

from gateway.domain.accounting.prices import Price, Term
from gateway.domain.accounting.strict_yaml import YamlError, read_yaml

_REQUIRED = {
    "sku", "region", "term", "usd_per_chip_hour", "effective_from", "source", "retrieved_at",
}  # fmt: skip
_OPTIONAL = {
    "effective_to",
    "note",
    "currency",
    "original_price",
    "exchange_rate",
    "exchange_source",
}
_WORD = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_REGION = re.compile(r"any|[a-z0-9-]{1,20}/[a-z0-9-]{1,40}")
_NO_PRICE = Decimal(700)
_DEAREST = Decimal(1000)
"""US dollars for an hour of a chip: more is a mistake of units."""
_FURTHEST_APART = Decimal("1.5")
_NOT_TO_BE_TRUSTED = ("deploybase.ai", "digiteria")
_MAX_SOURCE = 1000
_DAY = re.compile(r"\d{4}-\d{2}-\d{2}")
_NANOS = 10**9


@dataclass
class Checked:
    """A file's rows, sorted out."""

    good: list[Price] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    """Why, each a sentence that names the row."""
    quarantined: list[tuple[Price, str]] = field(default_factory=list)


def read_price_file(path: Path, now: datetime) -> Checked:
    """Raises `YamlError` if the file is none of prices at all."""
    document = read_yaml(path)
    rows = document.get("prices") if isinstance(document, dict) else None
    if not isinstance(rows, list) or not rows:
        raise YamlError(f"{path}: a list of rows under 'prices' is wanted")
    return check_rows(rows, now)


def read_builtin(now: datetime) -> Checked:
    """The prices that come with the package."""
    with as_file(files("gateway.domain.accounting") / "data" / "prices.yaml") as path:
        return read_price_file(path, now)


def check_rows(rows: Sequence[object], now: datetime) -> Checked:
    checked = Checked()
    read: list[Price] = []
    for number, row in enumerate(rows, 1):
        try:
            read.append(price_of(row, now))
        except ValueError as error:
            checked.refused.append(f"row {number}: {error}")
    below = _below_spot(read)
    checked.refused += [
        f"{_name(price)}: an on-demand price below the spot price of the same place"
        for price in below
    ]
    kept = [price for price in read if price not in below]
    low = _low_cluster(kept)
    reason = "far below the chip's other on-demand prices of this cloud: a second source is wanted"
    checked.quarantined = [(price, reason) for price in kept if price in low]
    checked.good = [price for price in kept if price not in low]
    return checked


def price_of(row: object, now: datetime) -> Price:
    """Raises ValueError with the field that is wrong."""
    if not isinstance(row, dict):
        raise ValueError("a mapping is wanted")  # noqa: TRY004  one kind of error for all of a row
    names = set(row)
    if missing := sorted(_REQUIRED - names):
        raise ValueError(f"{', '.join(missing)} is missing")
    if unknown := sorted(names - _REQUIRED - _OPTIONAL):
        raise ValueError(f"{', '.join(unknown)[:100]} is unknown")
    source = _text(row, "source", _MAX_SOURCE)
    if any(name in source.lower() for name in _NOT_TO_BE_TRUSTED):
        raise ValueError("source: this page is known to contradict the bills")
    usd, currency, detail = _money(row)
    begin, end = _moment(row, "effective_from"), None
    if row.get("effective_to") is not None:
        end = _moment(row, "effective_to")
        if end <= begin:
            raise ValueError("effective_to is not after effective_from")
    if "note" in row:
        detail["note"] = _text(row, "note", _MAX_SOURCE)
    return Price(
        sku=_matching(row, "sku", _WORD),
        region=_matching(row, "region", _REGION),
        term=_term(row),
        usd_per_chip_hour=usd,
        effective_from_ns=begin,
        effective_to_ns=end,
        source=source,
        retrieved_at=_retrieved(row, now),
        currency=currency,
        detail=detail,
    )


def _money(row: Mapping[str, object]) -> tuple[Decimal, str, dict[str, str]]:
    """In dollars, the currency of the source, and what it was exchanged at."""
    value = row["usd_per_chip_hour"]
    if isinstance(value, bool) or not isinstance(value, int | Decimal):
        raise ValueError("usd_per_chip_hour is no number")
    usd = Decimal(value)
    if usd == _NO_PRICE:
        raise ValueError("usd_per_chip_hour: 700 is one catalogue's word for 'no price'")
    if not 0 < usd <= _DEAREST:
        raise ValueError(f"usd_per_chip_hour has to be above 0 and at most {_DEAREST}")
    if usd.as_tuple().exponent < -12:  # type: ignore[operator]  # it is finite
        raise ValueError("usd_per_chip_hour has more than 12 places")
    currency = str(row.get("currency", "USD"))
    if not re.fullmatch(r"[A-Z]{3}", currency):
        raise ValueError("currency is three capital letters")
    if currency == "USD":
        return usd, currency, {}
    exchange = {
        name: row.get(name) for name in ("original_price", "exchange_rate", "exchange_source")
    }
    if any(value is None for value in exchange.values()):
        raise ValueError(
            "a price in another currency needs original_price, exchange_rate and exchange_source"
        )
    return usd, currency, {name: str(value)[:_MAX_SOURCE] for name, value in exchange.items()}


def _term(row: Mapping[str, object]) -> Term:
    try:
        return Term(str(row["term"]))
    except ValueError as error:
        raise ValueError(f"term is one of {', '.join(Term)}") from error


def _matching(row: Mapping[str, object], name: str, pattern: re.Pattern[str]) -> str:
    text = _text(row, name, 100)
    if not pattern.fullmatch(text):
        raise ValueError(f"{name} {text[:40]!r} is not written as it should be")
    return text


def _text(row: Mapping[str, object], name: str, most: int) -> str:
    value = row[name]
    if (
        not isinstance(value, str)
        or not value.strip()
        or len(value) > most
        or "\n" in value.strip()
    ):
        raise ValueError(f"{name} has to be one line of text of at most {most} characters")
    return value.strip()


def _moment(row: Mapping[str, object], name: str) -> int:
    """Unix nanoseconds of a date, or of a time that tells its zone."""
    text = str(row[name])
    try:
        if _DAY.fullmatch(text):
            moment = datetime.combine(date.fromisoformat(text), time(), UTC)
        else:
            moment = datetime.fromisoformat(text)
    except ValueError as error:
        raise ValueError(f"{name} is no date") from error
    if moment.tzinfo is None:
        raise ValueError(f"{name} is a time without a zone: write Z, or +01:00")
    return int(moment.timestamp()) * _NANOS


def _retrieved(row: Mapping[str, object], now: datetime) -> str:
    text = str(row["retrieved_at"])
    if not _DAY.fullmatch(text):
        raise ValueError("retrieved_at is a date, 2026-12-01")
    try:
        day = date.fromisoformat(text)
    except ValueError as error:
        raise ValueError("retrieved_at is no date") from error
    if day > now.date() + timedelta(days=1):
        raise ValueError("retrieved_at lies in the future")
    return text


def _below_spot(prices: Iterable[Price]) -> list[Price]:
    by_line = {(price.sku, price.region, price.term): price for price in prices}
    found = []
    for (sku, region, term), price in by_line.items():
        spot = by_line.get((sku, region, Term.SPOT))
        if term is Term.ON_DEMAND and spot and price.usd_per_chip_hour < spot.usd_per_chip_hour:
            found.append(price)
    return found


def _low_cluster(prices: Iterable[Price]) -> list[Price]:
    """On-demand prices that lie more than 1.5 times below the dearest one of the same chip and cloud."""
    by_cloud: dict[tuple[str, str], list[Price]] = {}
    for price in prices:
        if price.term is Term.ON_DEMAND:
            by_cloud.setdefault((price.sku, price.cloud), []).append(price)
    return [
        price
        for those in by_cloud.values()
        for price in those
        if price.usd_per_chip_hour * _FURTHEST_APART < max(p.usd_per_chip_hour for p in those)
    ]


def _name(price: Price) -> str:
    return f"{price.sku} {price.region} {price.term.value}"
