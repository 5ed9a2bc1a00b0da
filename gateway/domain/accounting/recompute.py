"""The ledger's figures worked out again from the raw log, by code that posting has no part in.

Audits compare the two; `explain` shows the way from the one to the other. An entry's time goes to classes,
and a step's to its members:

    length × chips = Σ classes          D of a step = Σ shares of its members (`workers.attribution`)
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from workers.attribution import shares, weights
from workers.chip_time import AnyEntry, Coefficients, Member, Span, Spent, Step

HOUR_S = 3600
_NANOS = 10**9

Fits = Mapping[str, Mapping[str, Coefficients]]
"""Coefficients by fit and bucket."""


class UnknownFitError(Exception):
    """A step was shared by a fit that the ledger does not have."""


class Part(NamedTuple):
    """What a step cost one of its members."""

    member: Member
    weight: int
    """Own u, and below Σ u of the step: in units that leave no fraction."""
    weight_of_all: int
    share_ns: int
    """Nano-chip-seconds."""


@dataclass(frozen=True)
class StepParts:
    """A step, shared."""

    is_fitted: bool
    cost_ns: int
    """D: length × chips."""
    parts: list[Part]


def hour_of(unix_ns: int) -> int:
    """Unix seconds of the beginning of the hour in which an entry that ends then is booked."""
    return unix_ns // _NANOS // HOUR_S * HOUR_S


def classes(entry: AnyEntry, num_chips: int) -> dict[Spent, int]:
    """Nano-chip-seconds of an entry by what they went to; they add up to its length × chips."""
    if isinstance(entry, Span):
        return {entry.spent: num_chips * (entry.end_ns - entry.begin_ns)}
    if not isinstance(entry, Step):
        return {}
    between = Spent.DRAIN if entry.is_draining else Spent.BUBBLE
    work = Spent.FAULT if entry.is_failed else Spent.STEP
    found: dict[Spent, int] = {}
    for spent, length in (
        (Spent.IDLE, entry.idle_ns),
        (between, entry.bubble_ns),
        (Spent.COMPILE, entry.compile_ns),
        (work, entry.length_ns),
    ):
        found[spent] = found.get(spent, 0) + num_chips * length
    return found


def share_step(step: Step, num_chips: int, fits: Fits) -> StepParts:
    """What each member of a step is charged with; nobody pays for a failed step or one without members.

    Raises `UnknownFitError`.
    """
    cost = num_chips * step.length_ns
    if step.is_failed or not step.members:
        return StepParts(False, cost, [])
    coefficients = None
    if step.fit:
        if step.fit not in fits:
            raise UnknownFitError(f"the fit {step.fit} of step {step.step} is not in the ledger")
        coefficients = fits[step.fit].get(step.bucket)
    each = weights(step.members, coefficients)
    paid = shares(cost, step.members, coefficients)
    whole = sum(each)
    parts = [Part(m, u, whole, a) for m, u, a in zip(step.members, each, paid, strict=True)]
    return StepParts(coefficients is not None, cost, parts)
