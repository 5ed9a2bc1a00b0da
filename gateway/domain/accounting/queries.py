"""What may be asked of reports, on the command line and over HTTP alike; a mistake names its parameter."""

import re
from collections.abc import Iterable
from datetime import UTC, datetime

from gateway.domain.accounting.report import By, Window
from gateway.domain.accounting.tables import DAY_S, HOUR_S
from gateway.errors import BadRequestError

DEFAULT_DAYS = 30
MAX_DAYS = 3660
PARAMETERS = ("from", "to", "by", "what_if", "waste", "format", "limit", "offset")
"""Over HTTP."""
FORMATS = ("json", "csv", "focus")
_WHEN = re.compile(r"\d{4}-\d{2}-\d{2}(T\d{2}(:00(:00)?)?Z?)?")


def window_of(from_text: str | None, to_text: str | None, now_s: float) -> Window:
    """[from, to); without them the last 30 days and what there is of today. Raises `BadRequestError`."""
    to_s = _seconds(to_text, "to") if to_text else -(-int(now_s) // HOUR_S) * HOUR_S
    from_s = to_s // DAY_S * DAY_S - DEFAULT_DAYS * DAY_S
    if from_text:
        from_s = _seconds(from_text, "from")
    if from_s >= to_s:
        raise _wrong("from", "it has to be before 'to'")
    if to_s - from_s > MAX_DAYS * DAY_S:
        raise _wrong("from", f"at most {MAX_DAYS} days can be asked for")
    return Window(from_s, to_s)


def by_of(text: str | None) -> tuple[By, ...]:
    """`model,day`: names with commas between, none twice. Raises `BadRequestError`."""
    names = [name.strip() for name in (text or By.MODEL.value).split(",")]
    known = [by.value for by in By]
    if any(name not in known for name in names) or len(set(names)) < len(names):
        raise _wrong(
            "by", f"names of {', '.join(known)} are wanted, with commas between, none twice"
        )
    if By.DAY in names and By.HOUR in names:
        raise _wrong("by", "either day or hour")
    return tuple(By(name) for name in names)


def refuse_unknown(names: Iterable[str]) -> None:
    """A misspelt filter would answer another question. Raises `BadRequestError`."""
    for name in names:
        if name not in PARAMETERS:
            raise _wrong(name[:50], f"parameters are {', '.join(PARAMETERS)}")


def format_of(given: str | None, accept: str) -> str:
    """`json`, `csv` or `focus`: as it was said, else by the Accept header. Raises `BadRequestError`."""
    if given is None:
        return "csv" if "text/csv" in accept.lower() else FORMATS[0]
    if given not in FORMATS:
        raise _wrong("format", f"one of {', '.join(FORMATS)} is wanted")
    return given


def _seconds(text: str, param: str) -> int:
    wanted = "a date, 2026-12-01, or a whole hour, 2026-12-01T07:00Z, is wanted (UTC)"
    if _WHEN.fullmatch(text) is None:
        raise _wrong(param, wanted)
    try:
        moment = datetime.fromisoformat(text.removesuffix("Z"))
    except ValueError as error:
        raise _wrong(param, wanted) from error
    return int(moment.replace(tzinfo=UTC).timestamp())


def _wrong(param: str, why: str) -> BadRequestError:
    return BadRequestError(f"Invalid '{param}': {why}.", param=param, code="invalid_value")
