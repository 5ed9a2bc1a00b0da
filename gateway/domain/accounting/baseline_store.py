"""Baselines: the published ones that come with the package, and those of our own benchmark in SQL."""

from dataclasses import fields
from decimal import Decimal
from importlib.resources import as_file, files

from sqlalchemy import insert, select

from gateway.db.engine import Database
from gateway.domain.accounting.baselines import Baseline, Grade
from gateway.domain.accounting.strict_yaml import YamlError, read_yaml
from gateway.domain.accounting.tables import BaselineRow

_KNOWN = {
    "accelerator", "num_chips", "model", "engine", "dtype", "isl", "osl", "concurrency",
    "output_tokens_per_s_chip", "total_tokens_per_s_chip", "grade", "source", "date",
}  # fmt: skip

_FIELDS = tuple(item.name for item in fields(Baseline))
"""Columns have the same names."""


def published_baselines() -> list[Baseline]:
    """Raises `YamlError` if the package is damaged."""
    with as_file(files("gateway.domain.accounting") / "data" / "baselines.yaml") as path:
        document = read_yaml(path)
    if not isinstance(document, dict) or not isinstance(document.get("baselines"), list):
        raise YamlError("a list of rows under 'baselines' is wanted")
    return [_baseline(row) for row in document["baselines"]]


def _baseline(row: dict[str, object]) -> Baseline:
    total = row.get("total_tokens_per_s_chip")
    return Baseline(
        accelerator=str(row["accelerator"]),
        num_chips=int(str(row["num_chips"])),
        model=str(row["model"]),
        engine=str(row["engine"]),
        dtype=str(row["dtype"]),
        isl=_length(row["isl"]),
        osl=_length(row["osl"]),
        concurrency=_length(row["concurrency"]),
        output_tokens_per_s_chip=Decimal(str(row["output_tokens_per_s_chip"])),
        grade=Grade(str(row["grade"])),
        source=str(row["source"]),
        date=str(row["date"]),
        total_tokens_per_s_chip=None if total is None else Decimal(str(total)),
        detail={name: str(value) for name, value in row.items() if name not in _KNOWN},
    )


def _length(value: object) -> int | None:
    return None if value is None else int(str(value))


async def read_baselines(database: Database) -> list[Baseline]:
    """Published ones and measured ones. Raises `UnavailableError`."""
    async with database.session() as session:
        rows = await session.scalars(
            select(BaselineRow).where(BaselineRow.output_tokens_per_s_chip.is_not(None))
        )
        measured = [
            Baseline(
                **{**{name: getattr(row, name) for name in _FIELDS}, "grade": Grade(row.grade)}
            )
            for row in rows
        ]
    return [*published_baselines(), *measured]


async def save_baseline(database: Database, baseline: Baseline) -> str:
    """Keep a measured one; gives its id. Raises `UnavailableError`."""
    async with database.session() as session:
        if await session.get(BaselineRow, baseline.id) is None:
            own = {name: getattr(baseline, name) for name in _FIELDS}
            await session.execute(insert(BaselineRow), [{**own, "baseline_id": baseline.id}])
    return baseline.id
