"""Prices from a YAML file, checked row by row; what is wrong is told, what is doubtful is put aside.

    prices:
    - sku: v6e
      region: gcp/us-east5            cloud/region, cloud/all, or any
      term: on_demand                 on_demand, spot, flex, 1y, 3y
      usd_per_chip_hour: 2.70         or original_price, currency, exchange_rate, exchange_source
      upfront_usd: 5000               optional, of 1y and 3y: paid in advance, spread over the term's hours
      effective_from: 2026-12-01      a date (UTC), or a time with its zone
      effective_to: 2027-06-01        optional, exclusive
      source: title, address
      retrieved_at: 2026-12-01
      confirmed_by: title, address    optional: a second source, of a row that would be doubtful
      note: host included             optional

Refused are rows without a source or a date, the 700.0 that one public catalogue writes for "none", and pages known to
contradict the bills. `price_rules.py` has what is asked of rows beside each other.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from importlib.resources import as_file, files
from pathlib import Path

from gateway.domain.accounting.price_rules import CONFIRMED, DOUBTFUL, sort_out
from gateway.domain.accounting.prices import Price, Term
from gateway.domain.accounting.strict_yaml import YamlError, read_yaml

MAX_ROWS = 5000
_REQUIRED = {"sku", "region", "term", "effective_from", "source", "retrieved_at"}
_EXCHANGE = {"original_price", "exchange_rate", "exchange_source"}
_OPTIONAL = {"usd_per_chip_hour", "upfront_usd", "currency", "effective_to", "note", CONFIRMED}
_SKU = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
_REGION = re.compile(r"any|[a-z0-9-]{1,20}/[a-z0-9-]{1,40}")
_NO_PRICE = Decimal(700)
_DEAREST = Decimal(1000)
"""US dollars for an hour of a chip: more is a mistake of units."""
_PLACES = Decimal("1e-12")
_NOT_TO_BE_TRUSTED = ("deploybase.ai", "digiteria")
_MAX_SOURCE = 1000
_DAY = re.compile(r"\d{4}-\d{2}-\d{2}")
_NANOS = 10**9
_YEARS = range(2010, 2200)
"""Others are mistakes, and do not fit nanoseconds of 64 bits."""


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
    if len(rows) > MAX_ROWS:
        raise YamlError(f"{path}: more than {MAX_ROWS} rows")
    return check_rows(rows, now)


def read_builtin(now: datetime) -> Checked:
    """The prices that come with the package."""
    with as_file(files("gateway.domain.accounting") / "data" / "prices.yaml") as path:
        return read_price_file(path, now)


def check_rows(rows: Sequence[object], now: datetime) -> Checked:
    """Each row, and the rows beside each other."""
    checked = Checked()
    read: list[Price] = []
    for number, row in enumerate(rows, 1):
        try:
            read.append(price_of(row, now))
        except ValueError as error:
            checked.refused.append(f"row {number}: {error}")
    found = sort_out(read)
    checked.good = found.good
    checked.refused += found.refused
    checked.quarantined = [(price, DOUBTFUL) for price in found.doubtful]
    return checked


def price_of(row: object, now: datetime) -> Price:
    """Raises ValueError with the field that is wrong."""
    if not isinstance(row, dict):
        raise ValueError("a mapping is wanted")  # noqa: TRY004  one kind of error for all of a row
    names = set(row)
    if missing := sorted(_REQUIRED - names):
        raise ValueError(f"{', '.join(missing)} is missing")
    if unknown := sorted(names - _REQUIRED - _OPTIONAL - _EXCHANGE):
        raise ValueError(f"{', '.join(unknown)[:100]} is unknown")
    source = _source(row, "source")
    term = _term(row)
    usd, currency, detail = _money(row, term)
    begin, end = _moment(row, "effective_from"), None
    if row.get("effective_to") is not None:
        end = _moment(row, "effective_to")
        if end <= begin:
            raise ValueError("effective_to is not after effective_from")
    if "note" in row:
        detail["note"] = _text(row, "note", _MAX_SOURCE)
    if CONFIRMED in row:
        detail[CONFIRMED] = _source(row, CONFIRMED)
        if detail[CONFIRMED] == source:
            raise ValueError(f"{CONFIRMED} is the source itself: another one is wanted")
    return Price(
        sku=_matching(row, "sku", _SKU),
        region=_matching(row, "region", _REGION),
        term=term,
        usd_per_chip_hour=usd,
        effective_from_ns=begin,
        effective_to_ns=end,
        source=source,
        retrieved_at=_retrieved(row, now),
        currency=currency,
        detail=detail,
    )


def _money(row: Mapping[str, object], term: Term) -> tuple[Decimal, str, dict[str, str]]:
    """In dollars, the currency of the source, and how the one came from the other."""
    currency = str(row.get("currency", "USD"))
    if not re.fullmatch(r"[A-Z]{3}", currency):
        raise ValueError("currency is three capital letters")
    usd, detail = _dollars(row) if currency == "USD" else _exchanged(row)
    if "upfront_usd" in row:
        if term.hours is None:
            raise ValueError("upfront_usd is for the terms 1y and 3y")
        upfront = _number(row, "upfront_usd", _DEAREST * term.hours)
        detail |= {"hourly_usd": format(usd, "f"), "upfront_usd": format(upfront, "f")}
        usd = (usd + upfront / term.hours).quantize(_PLACES)
    return usd, currency, detail


def _dollars(row: Mapping[str, object]) -> tuple[Decimal, dict[str, str]]:
    if needless := sorted(_EXCHANGE & set(row)):
        raise ValueError(f"{needless[0]} is for a price in another currency")
    return _number(row, "usd_per_chip_hour"), {}


def _exchanged(row: Mapping[str, object]) -> tuple[Decimal, dict[str, str]]:
    if not set(row) >= _EXCHANGE:
        raise ValueError(f"a price in another currency needs {', '.join(sorted(_EXCHANGE))}")
    original = _number(row, "original_price", _DEAREST * 10**6)
    rate = _number(row, "exchange_rate", _DEAREST * 10**3)
    usd = (original * rate).quantize(_PLACES)
    if not 0 < usd <= _DEAREST:
        raise ValueError(f"original_price x exchange_rate is not between 0 and {_DEAREST} dollars")
    if "usd_per_chip_hour" in row:
        said = _number(row, "usd_per_chip_hour")
        if abs(said - usd) > usd / 1000:
            raise ValueError(f"usd_per_chip_hour is not original_price x exchange_rate, {usd:f}")
    return usd, {
        "original_price": format(original, "f"),
        "exchange_rate": format(rate, "f"),
        "exchange_source": _source(row, "exchange_source"),
    }


def _number(row: Mapping[str, object], name: str, most: Decimal = _DEAREST) -> Decimal:
    """Above 0 and at most `most`, with at most 12 places."""
    if name not in row:
        raise ValueError(f"{name} is missing")
    value = row[name]
    if isinstance(value, bool) or not isinstance(value, int | Decimal):
        raise ValueError(f"{name} is no number")
    number = Decimal(value)
    if number == _NO_PRICE and name in ("usd_per_chip_hour", "original_price"):
        raise ValueError(f"{name}: 700 is one catalogue's word for 'no price'")
    if not 0 < number <= most:
        raise ValueError(f"{name} has to be above 0 and at most {most}")
    if number.as_tuple().exponent < -12:  # type: ignore[operator]  # it is finite
        raise ValueError(f"{name} has more than 12 places")
    return number


def _source(row: Mapping[str, object], name: str) -> str:
    source = _text(row, name, _MAX_SOURCE)
    if any(page in source.lower() for page in _NOT_TO_BE_TRUSTED):
        raise ValueError(f"{name}: this page is known to contradict the bills")
    return source


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
        or not value.strip().isprintable()
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
    if moment.year not in _YEARS:
        raise ValueError(f"{name} is not between {_YEARS[0]} and {_YEARS[-1]}")
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
