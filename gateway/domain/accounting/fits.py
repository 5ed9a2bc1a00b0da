"""Fits the affine cost of steps to the log, by model, chip and bucket, and tells workers of it.

    length = α + b_p·Σn + b_a·Σn(c + n/2) + b_d·Σn' + b_kv·Σc'         ' of decoding members

Least squares by the normal equations, with coefficients below 0 left out one after the other: a cost is never
negative. A bucket keeps its fit only if that foretells steps which it was not made of better than their numbers
of tokens do; otherwise its steps are shared by tokens. Plain Python: five unknowns.
"""

import asyncio
import hashlib
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from msgspec.structs import asdict, astuple
from sqlalchemy import and_, func, insert, select
from sqlalchemy.ext.asyncio import AsyncSession

from gateway.db.engine import Database
from gateway.domain.accounting.tables import ChipEntry, ChipGroup, Fit
from workers.chip_time import Coefficients, Fits, Step, decode_entry

MIN_STEPS = 100
"""Of a bucket, for a fit of it."""
MAX_STEPS = 4000
"""Of a model, the newest."""
_HELD_OUT = 5
"""Every fifth step tests the fit."""
_PS = 1000
"""Picoseconds of a nanosecond: what coefficients are counted in."""
_PPM = 1_000_000
_TINY = 1e-12

Row = tuple[float, ...]
"""1, Σn, Σn(c + n/2), Σn', Σc' of a step, and its length in nanoseconds."""


@dataclass(frozen=True)
class StoredFits:
    """Of one model."""

    fits: Fits
    fitted_unix_ns: int

    def age_s(self, now_s: float) -> float:
        return now_s - self.fitted_unix_ns / 1e9


@dataclass(frozen=True)
class BucketFit:
    """What was found for a bucket, and how far it is off on steps that were held out."""

    coefficients: Coefficients
    residual_ppm: int
    proportional_ppm: int
    num_steps: int


async def refit(database: Database, model: str, sku: str) -> Fits | None:
    """Fit the newest steps and store what is found; None if nothing beats the share by tokens.

    Raises `UnavailableError`.
    """
    async with database.session() as session:
        payloads, first_ns, last_ns = await _newest_steps(session, model, sku)
    found = await asyncio.to_thread(fit_buckets, payloads)
    if not found:
        return None
    now_ns = time.time_ns()
    fits = Fits(_fit_id(model, now_ns), {name: fit.coefficients for name, fit in found.items()})
    rows = [
        {
            "fit_id": fits.id,
            "bucket": bucket,
            "model": model,
            "sku": sku,
            **asdict(fit.coefficients),
            "residual_ppm": fit.residual_ppm,
            "proportional_ppm": fit.proportional_ppm,
            "num_steps": fit.num_steps,
            "first_unix_ns": first_ns,
            "last_unix_ns": last_ns,
            "fitted_unix_ns": now_ns,
        }
        for bucket, fit in found.items()
    ]
    async with database.session() as session:
        await session.execute(insert(Fit), rows)
    return fits


async def adopt(session: AsyncSession, fits: Fits, model: str, sku: str) -> None:
    """Store what workers share steps by and SQL does not know. How far off it is, nobody can tell: all of it."""
    query = select(Fit.bucket).where(Fit.fit_id == fits.id)
    known = set(await session.scalars(query))
    now_ns = time.time_ns()
    rows = [
        {
            "fit_id": fits.id,
            "bucket": bucket,
            "model": model,
            "sku": sku,
            **asdict(coefficients),
            "residual_ppm": _PPM,
            "proportional_ppm": _PPM,
            "num_steps": 0,
            "first_unix_ns": now_ns,
            "last_unix_ns": now_ns,
            "fitted_unix_ns": now_ns,
        }
        for bucket, coefficients in fits.buckets.items()
        if bucket not in known
    ]
    if rows:
        await session.execute(insert(Fit), rows)


async def newest_fits(database: Database) -> dict[str, StoredFits]:
    """By model, as they were stored last. Raises `UnavailableError`."""
    newest = (
        select(Fit.model, func.max(Fit.fitted_unix_ns).label("at")).group_by(Fit.model).subquery()
    )
    query = select(Fit).join(
        newest, and_(Fit.model == newest.c.model, Fit.fitted_unix_ns == newest.c.at)
    )
    found: dict[str, StoredFits] = {}
    async with database.session() as session:
        for row in await session.scalars(query):
            stored = found.setdefault(
                row.model, StoredFits(Fits(row.fit_id, {}), row.fitted_unix_ns)
            )
            stored.fits.buckets[row.bucket] = coefficients_of(row)
    return found


def coefficients_of(row: Fit) -> Coefficients:
    return Coefficients(row.fixed, row.prefill, row.attention, row.decode, row.context)


def fit_buckets(payloads: Sequence[bytes]) -> dict[str, BucketFit]:
    """Of encoded steps, those buckets whose fit beats the share by tokens."""
    rows: dict[str, list[Row]] = defaultdict(list)
    for payload in payloads:
        step = decode_entry(payload)
        if isinstance(step, Step) and step.members and not step.is_failed and not step.compile_ns:
            rows[step.bucket].append(_row(step))
    found = {bucket: _fit(steps) for bucket, steps in rows.items() if len(steps) >= MIN_STEPS}
    return {
        bucket: fit
        for bucket, fit in found.items()
        if fit.residual_ppm < fit.proportional_ppm and any(astuple(fit.coefficients))
    }


def _row(step: Step) -> Row:
    prefill = attention = decode = context = 0.0
    for member in step.members:
        n, c = member.num_tokens, member.context_len
        if member.is_prefill:
            prefill += n
            attention += n * (c + n / 2)
        else:
            decode += n
            context += c
    return 1.0, prefill, attention, decode, context, float(step.length_ns)


def _fit(rows: list[Row]) -> BucketFit:
    used = [row for number, row in enumerate(rows) if number % _HELD_OUT]
    held = [row for number, row in enumerate(rows) if not number % _HELD_OUT]
    by_cost = non_negative([row[:-1] for row in used], [row[-1] for row in used])
    tokens = [(row[1] + row[3],) for row in used]
    by_tokens = non_negative(tokens, [row[-1] for row in used])
    return BucketFit(
        Coefficients(*(round(_PS * value) for value in by_cost)),
        _off_ppm([(_dot(by_cost, row[:-1]), row[-1]) for row in held]),
        _off_ppm([(_dot(by_tokens, (row[1] + row[3],)), row[-1]) for row in held]),
        len(rows),
    )


def non_negative(rows: Sequence[Sequence[float]], targets: Sequence[float]) -> list[float]:
    """Coefficients >= 0 that minimise Σ (row · coefficients - target)², the most negative left out first."""
    width = len(rows[0])
    kept = [i for i in range(width) if sum(row[i] ** 2 for row in rows)]
    while kept:
        solution = _solve(rows, targets, kept)
        worst = min(range(len(kept)), key=solution.__getitem__)
        if solution[worst] >= 0:
            found = [0.0] * width
            for place, value in zip(kept, solution, strict=True):
                found[place] = value
            return found
        kept.pop(worst)
    return [0.0] * width


def _solve(
    rows: Sequence[Sequence[float]], targets: Sequence[float], kept: list[int]
) -> list[float]:
    """The normal equations by elimination; columns are scaled to length 1 first, dependent ones get 0."""
    scales = [sum(row[i] ** 2 for row in rows) ** 0.5 for i in kept]
    matrix = [
        [sum(row[i] * row[j] for row in rows) / (a * b) for j, b in zip(kept, scales, strict=True)]
        for i, a in zip(kept, scales, strict=True)
    ]
    right = [
        sum(row[i] * target for row, target in zip(rows, targets, strict=True)) / a
        for i, a in zip(kept, scales, strict=True)
    ]
    size = len(kept)
    solved = [False] * size
    for pivot in range(size):
        if matrix[pivot][pivot] < _TINY:
            continue
        solved[pivot] = True
        for other in range(size):
            if other == pivot:
                continue
            factor = matrix[other][pivot] / matrix[pivot][pivot]
            matrix[other] = [
                a - factor * b for a, b in zip(matrix[other], matrix[pivot], strict=True)
            ]
            right[other] -= factor * right[pivot]
    return [right[i] / matrix[i][i] / scales[i] if solved[i] else 0.0 for i in range(size)]


def _dot(coefficients: Sequence[float], row: Sequence[float]) -> float:
    return sum(a * b for a, b in zip(coefficients, row, strict=True))


def _off_ppm(pairs: list[tuple[float, float]]) -> int:
    """Σ |measured - predicted| / Σ measured, in millionths."""
    whole = sum(measured for _, measured in pairs)
    return round(_PPM * sum(abs(m - p) for p, m in pairs) / whole) if whole else 0


async def _newest_steps(
    session: AsyncSession, model: str, sku: str
) -> tuple[list[bytes], int, int]:
    query = (
        select(ChipEntry.payload, ChipEntry.unix_end_ns)
        .join(ChipGroup, ChipGroup.group_id == ChipEntry.group_id)
        .where(ChipGroup.model == model, ChipGroup.sku == sku, ChipEntry.kind == "step")
        .order_by(ChipEntry.unix_end_ns.desc())
        .limit(MAX_STEPS)
    )
    rows = (await session.execute(query)).all()
    if not rows:
        return [], 0, 0
    return [row[0] for row in rows], int(rows[-1][1]), int(rows[0][1])


def _fit_id(model: str, now_ns: int) -> str:
    return "fit-" + hashlib.blake2b(f"{model} {now_ns}".encode(), digest_size=8).hexdigest()
