"""The part of the audit that holds rollups against the ledger's lines: by hour and day, model, key, tag and price.

The database compares, and tells what differs: a month of many keys is no more to hold than a sound one.
"""

from typing import Any

from sqlalchemy import ColumnElement, Select, and_, case, func, or_, select, union_all
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import InstrumentedAttribute

from gateway.domain.accounting.findings import Check
from gateway.domain.accounting.tables import DAY_S, HOUR_S, Amounts, Charge, Rollup

_KEYS = ("start", "model", "key_id", "tag", "price_id")
_ALIKE = (
    *(name for name in Amounts.__annotations__),
    "loaded_ns",
    "loaded_prefill_ns",
    "loaded_decode_ns",
)
"""Columns that lines have too; the others tell their status."""
_OF_STATUS = ("num_requests", "aborted_ns", "failed_ns", "aborted_tokens", "failed_tokens")
_NAMES = (*_ALIKE, *_OF_STATUS)


async def check_rollups(session: AsyncSession, check: Check) -> None:
    """Hours are the sums of their lines, days those of their hours; in `check`'s unit of chip-time or tokens."""
    lines = _lines()
    for what, one, other in (
        ("hour", lines, _rollups(HOUR_S, +1, -1)),
        ("day", _rollups(HOUR_S, DAY_S, +1), _rollups(DAY_S, +1, -1)),
    ):
        both = union_all(one, other).subquery()
        sums = [func.sum(both.c[name]) for name in _NAMES]
        query = (
            select(*(both.c[name] for name in _KEYS), *sums)
            .group_by(*(both.c[name] for name in _KEYS))
            .having(or_(*(amount != 0 for amount in sums)))
        )
        for row in await session.execute(query):
            wrong = ", ".join(
                name for name, amount in zip(_NAMES, row[len(_KEYS) :], strict=True) if amount
            )
            check.fail(
                f"the rollup of {row.model} for key {row.key_id or 'none'} by {what} {row.start} "
                f"is not the sum of its lines: {wrong}"
            )
    check.checked += await session.scalar(select(func.count()).select_from(Rollup)) or 0


def _lines() -> Select[Any]:
    active = Charge.prefill_ns + Charge.decode_ns
    is_charge = Charge.kind == "charge"
    is_aborted = and_(is_charge, Charge.status == "abort")
    has_failed = and_(is_charge, Charge.status.in_(("error", "fault")))
    of_status = {
        "num_requests": _if(and_(is_charge, Charge.status != "running"), 1),
        "aborted_ns": _if(is_aborted, active),
        "failed_ns": _if(has_failed, active),
        "aborted_tokens": _if(is_aborted, Charge.delivered_tokens),
        "failed_tokens": _if(has_failed, Charge.delivered_tokens),
    }
    return select(
        Charge.hour.label("start"),
        *(getattr(Charge, name).label(name) for name in _KEYS[1:]),
        *(getattr(Charge, name).label(name) for name in _ALIKE),
        *(of_status[name].label(name) for name in _OF_STATUS),
    )


def _rollups(grain_s: int, start_s: int, sign: int) -> Select[Any]:
    """Of one grain; `start_s` > 1 moves their starts back to its multiples."""
    return select(
        (Rollup.start - Rollup.start % start_s).label("start"),
        *(getattr(Rollup, name).label(name) for name in _KEYS[1:]),
        *((sign * getattr(Rollup, name)).label(name) for name in _NAMES),
    ).where(Rollup.grain_s == grain_s)


def _if(
    condition: ColumnElement[bool], value: ColumnElement[int] | InstrumentedAttribute[int] | int
) -> ColumnElement[int]:
    return case((condition, value), else_=0)
