"""Lets go of old entries of the raw log: what was made of them stays, and sums stay exact.

An entry goes when it is older than the log is kept for, its hour is closed, and all before it in its group
have gone. The group keeps the hash of the last one that went, so the chain of the rest can still be checked.
"""

from sqlalchemy import delete, func, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from gateway.db.engine import Database
from gateway.domain.accounting.tables import HOUR_S, ChipEntry, ChipGroup, Period

_NANOS = 10**9
_PIECE = 2000
"""Entries of one transaction."""


async def prune(database: Database, before_s: float) -> int:
    """Delete what ended before `before_s` (unix), a piece of each group; gives how many entries went.

    Raises `UnavailableError`.
    """
    async with database.session() as session:
        oldest_open = await session.scalar(
            select(func.min(Period.hour)).where(Period.is_closed.is_(False))
        )
        limit_s = int(before_s) // HOUR_S * HOUR_S
        if oldest_open is not None:
            limit_s = min(limit_s, oldest_open)
        query = select(ChipEntry.group_id).where(ChipEntry.unix_end_ns < limit_s * _NANOS)
        group_ids = list(await session.scalars(query.distinct()))
    num_gone = 0
    for group_id in group_ids:
        async with database.session() as session:
            num_gone += await _prune(session, group_id, limit_s * _NANOS)
    return num_gone


async def _prune(session: AsyncSession, group_id: str, limit_ns: int) -> int:
    query = (
        select(ChipEntry.number, ChipEntry.hash)
        .where(ChipEntry.group_id == group_id, ChipEntry.unix_end_ns < limit_ns)
        .order_by(ChipEntry.number)
        .limit(_PIECE)
    )
    rows = (await session.execute(query)).all()
    if not rows:
        return 0
    last, head = rows[-1]
    await session.execute(
        delete(ChipEntry).where(ChipEntry.group_id == group_id, ChipEntry.number <= last)
    )
    await session.execute(
        update(ChipGroup)
        .where(ChipGroup.group_id == group_id)
        .values(first_kept=last + 1, checkpoint=head)
        .execution_options(synchronize_session=False)
    )
    return len(rows)
