"""What an audit has looked at, and what it found."""

from dataclasses import dataclass, field
from datetime import UTC, datetime
from decimal import Decimal
from fractions import Fraction
from typing import Any

_MAX_SHOWN = 20
"""Of one invariant's faults: the first say what is wrong, thousands say no more."""


@dataclass
class Check:
    """One invariant."""

    name: str
    text: str
    unit: str
    """Of the residual."""
    checked: int = 0
    """Sums that were compared, or rows that were looked at."""
    residual: Fraction = Fraction(0)
    """Σ |difference|."""
    num_faults: int = 0
    faults: list[str] = field(default_factory=list)

    @property
    def is_sound(self) -> bool:
        return self.num_faults == 0

    def equal(
        self, found: int | Fraction, wanted: int | Fraction, what: str, *, is_counted: bool = True
    ) -> None:
        """`is_counted`: a difference has the residual's unit."""
        self.checked += 1
        if found != wanted:
            self.fail(f"{what}: {_shown(found)} instead of {_shown(wanted)}")
            if is_counted:
                self.residual += abs(Fraction(found) - Fraction(wanted))

    def fail(self, what: str, amount: int = 0) -> None:
        self.num_faults += 1
        self.residual += amount
        if len(self.faults) < _MAX_SHOWN:
            self.faults.append(what)

    def as_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "text": self.text,
            "is_sound": self.is_sound,
            "checked": self.checked,
            "residual": _shown(self.residual),
            "unit": self.unit,
            "num_faults": self.num_faults,
            "faults": self.faults,
        }


@dataclass
class Scope:
    """How much of the ledger there was to look at."""

    num_groups: int = 0
    num_running: int = 0
    num_entries: int = 0
    first_unix_ns: int | None = None
    """Ends of the first and the last raw entry."""
    last_unix_ns: int | None = None
    num_open_hours: int = 0
    """By model: they are checked up to the last entry; money when they are closed."""
    num_pruned_groups: int = 0
    """Of which retention has removed raw entries."""
    num_pruned_entries: int = 0
    num_pruned_hours: int = 0
    """Of these the entries are there in part: the hour's lines are not worked out again."""

    def as_dict(self) -> dict[str, Any]:
        return {
            "groups": self.num_groups,
            "running_groups": self.num_running,
            "entries": self.num_entries,
            "first": iso(self.first_unix_ns),
            "last": iso(self.last_unix_ns),
            "open_hours": self.num_open_hours,
            "pruned_groups": self.num_pruned_groups,
            "pruned_entries": self.num_pruned_entries,
            "partly_pruned_hours": self.num_pruned_hours,
        }


def iso(unix_ns: int | None) -> str | None:
    """To the microsecond, UTC."""
    if unix_ns is None:
        return None
    moment = datetime.fromtimestamp(unix_ns // 10**9, UTC)
    return f"{moment:%Y-%m-%dT%H:%M:%S}.{unix_ns % 10**9 // 1000:06}Z"


def _shown(number: int | Fraction) -> str:
    exact = Fraction(number)
    if exact.denominator == 1:
        return str(exact.numerator)
    return f"{Decimal(exact.numerator) / Decimal(exact.denominator):.15f}"
