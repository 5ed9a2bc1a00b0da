"""The end of an hour: what no step took is spread over the requests that ran, so that the lines add up to M.

    κ = M / Σ D        M: chips × time, of all groups of a model, hour and price;  D: steps
    a request's part of M - Σ D is in proportion to its active time, in integers (largest remainder)

Lines are appended, never edited. Should entries of a closed hour arrive late, its new remainder is spread by
another closing. If nothing ran, it stays on the model's `IDLE` line.
"""

import time
from collections import defaultdict
from dataclasses import dataclass

from sqlalchemy import BigInteger, Table, cast, func, insert, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from gateway.db.engine import Database
from gateway.domain.accounting.adding import add_up
from gateway.domain.accounting.tables import (
    DAY_S,
    HOUR_S,
    IDLE,
    Charge,
    ChipGroup,
    Closing,
    Period,
    Rollup,
)
from workers.attribution import apportion

GRACE_S = 30.0
"""After an hour's end, for entries that are on their way."""
_NANOS = 10**9


@dataclass(frozen=True)
class _Share:
    """A request's active time in an hour."""

    group_id: str
    request_id: str
    key_id: str
    tag: str
    prefill_ns: int
    decode_ns: int


async def close_hours(database: Database, now_s: float) -> int:
    """Close every (model, hour, price) that is over; gives their number. Raises `UnavailableError`."""
    async with database.session() as session:
        keys = (Period.model, Period.hour, Period.price_id)
        query = (
            select(*keys)
            .where(Period.is_closed.is_(False), Period.hour <= now_s - HOUR_S - GRACE_S)
            .group_by(*keys)
        )
        over = [(row[0], row[1], row[2]) for row in await session.execute(query)]
        late = await _hours_reached(session) if over else {}
    closed = 0
    for model, hour, price_id in over:
        # A group that is behind would bring more of this hour: it closes when all have passed it.
        if hour + HOUR_S <= late.get(model, now_s):
            async with database.session() as session:
                await _close(session, model, hour, price_id)
            closed += 1
    return closed


async def _hours_reached(session: AsyncSession) -> dict[str, float]:
    """Unix seconds to which the slowest running group of each model is in SQL."""
    end = func.min(ChipGroup.granted_unix_ns + ChipGroup.end_ns)
    query = select(ChipGroup.model, end).where(ChipGroup.ended == "").group_by(ChipGroup.model)
    return {model: int(end_ns) / _NANOS for model, end_ns in await session.execute(query)}


async def _close(session: AsyncSession, model: str, hour: int, price_id: str) -> None:
    where = (Period.model == model, Period.hour == hour, Period.price_id == price_id)
    measured, active = (
        int(amount or 0)
        for amount in (
            await session.execute(
                select(func.sum(Period.measured_ns), func.sum(Period.step_ns)).where(*where)
            )
        ).one()
    )
    spread = measured - active - await _spread_before(session, model, hour, price_id)
    closing_id = await session.scalar(
        insert(Closing)
        .values(
            model=model,
            hour=hour,
            price_id=price_id,
            measured_ns=measured,
            active_ns=active,
            spread_ns=spread,
            closed_unix_ns=time.time_ns(),
        )
        .returning(Closing.id)
    )
    if spread:
        shares = await _shares(session, model, hour, price_id)
        await _correct(session, (model, hour, price_id), closing_id, shares, spread)
    await session.execute(
        update(Period)
        .where(*where)
        .values(is_closed=True)
        .execution_options(synchronize_session=False)
    )


async def _spread_before(session: AsyncSession, model: str, hour: int, price_id: str) -> int:
    query = select(func.coalesce(func.sum(Closing.spread_ns), 0)).where(
        Closing.model == model, Closing.hour == hour, Closing.price_id == price_id
    )
    return int(await session.scalar(select(cast(query.scalar_subquery(), BigInteger))) or 0)


async def _shares(session: AsyncSession, model: str, hour: int, price_id: str) -> list[_Share]:
    keys = (Charge.group_id, Charge.request_id, Charge.key_id, Charge.tag)
    query = (
        select(*keys, func.sum(Charge.prefill_ns), func.sum(Charge.decode_ns))
        .where(
            Charge.model == model,
            Charge.hour == hour,
            Charge.price_id == price_id,
            Charge.kind == "charge",
        )
        .group_by(*keys)
        .order_by(*keys)
        .having(func.sum(Charge.prefill_ns + Charge.decode_ns) > 0)
    )
    return [
        _Share(row[0], row[1], row[2], row[3], int(row[4]), int(row[5]))
        for row in await session.execute(query)
    ]


async def _correct(
    session: AsyncSession,
    period: tuple[str, int, str],
    closing_id: int | None,
    shares: list[_Share],
    spread: int,
) -> None:
    model, hour, price_id = period
    weights = [amount for share in shares for amount in (share.prefill_ns, share.decode_ns)]
    parts = apportion(spread, weights) if weights else []
    own = {"kind": "correction", "hour": hour, "price_id": price_id, "model": model}
    rows: list[dict[str, object]] = [
        {
            **own,
            "group_id": share.group_id,
            "request_id": share.request_id,
            "key_id": share.key_id,
            "tag": share.tag,
            "status": "correction",
            "loaded_ns": prefill + decode,
            "loaded_prefill_ns": prefill,
            "loaded_decode_ns": decode,
            "closing_id": closing_id,
        }
        for share, prefill, decode in zip(shares, parts[::2], parts[1::2], strict=True)
        if prefill + decode
    ]
    if not shares:
        nobody = dict.fromkeys(("request_id", "key_id"), IDLE)
        rows = [
            {
                **own, **nobody, "group_id": "", "tag": "", "status": "idle",
                "loaded_ns": spread, "closing_id": closing_id,
            }
        ]  # fmt: skip
    await session.execute(insert(Charge), rows)
    await _roll_up(session, period, rows)


async def _roll_up(
    session: AsyncSession, period: tuple[str, int, str], rows: list[dict[str, object]]
) -> None:
    model, hour, price_id = period
    table: Table = Rollup.__table__  # type: ignore[assignment]
    names = ("loaded_ns", "loaded_prefill_ns", "loaded_decode_ns")
    sums: dict[tuple[object, object], dict[str, int]] = defaultdict(lambda: dict.fromkeys(names, 0))
    for row in rows:
        for name in names:
            sums[row["key_id"], row["tag"]][name] += int(str(row.get(name, 0)))
    for grain_s in (HOUR_S, DAY_S):
        await add_up(
            session,
            table,
            [
                {
                    "grain_s": grain_s, "start": hour // grain_s * grain_s, "model": model,
                    "key_id": key_id, "tag": tag, "price_id": price_id, **amounts,
                }
                for (key_id, tag), amounts in sums.items()
            ],
        )  # fmt: skip
