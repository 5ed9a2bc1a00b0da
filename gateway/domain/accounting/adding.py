"""Adds amounts to rows of sums, which are made where they are missing."""

from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import Table
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.ext.asyncio import AsyncSession

_SUMS = ("_ns", "_tokens", "num_steps", "num_requests")
"""How the names of amounts end."""


async def add_up(session: AsyncSession, table: Table, rows: Sequence[Mapping[str, Any]]) -> None:
    """Insert rows, or add their amounts to those that are there; other columns are set."""
    dialect = postgresql if session.get_bind().dialect.name == "postgresql" else sqlite
    keys = {column.name for column in table.primary_key}
    empty = {
        column.name: 0
        for column in table.columns
        if column.name not in keys and column.name.endswith(_SUMS)
    }
    for row in rows:
        values = {**empty, **row}
        adding = dialect.insert(table).values(values)
        changed = {
            name: table.c[name] + adding.excluded[name] if name in empty else adding.excluded[name]
            for name in values
            if name not in keys
        }
        await session.execute(
            adding.on_conflict_do_update(index_elements=sorted(keys), set_=changed)
        )
