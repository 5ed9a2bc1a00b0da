"""A measurement as a baseline: what an accelerator did with a load, for reports to stand beside."""

import platform
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

from gateway.db.engine import Database
from gateway.domain.accounting.baseline_store import save_baseline
from gateway.domain.accounting.baselines import Baseline, Grade
from gateway.domain.accounting.comparison import prices_beside
from gateway.domain.accounting.price_store import read_book

MIN_TURNS = 4
"""Requests of each client: with fewer, start and end of the load are most of it."""
SAME_LENGTH = 0.05
_TIMES = (
    "ttft_p50_ms", "ttft_p99_ms", "inter_token_p50_ms", "inter_token_p99_ms", "per_token_p50_ms",
    "per_token_p99_ms", "e2e_p50_ms", "e2e_p99_ms",
)  # fmt: skip


@dataclass(frozen=True)
class Subject:
    """What was measured."""

    accelerator: str
    engine: str
    """Name and version."""
    dtype: str


def shortcomings(facts: Mapping[str, Any]) -> list[str]:
    """Why a measurement is for orientation only; none if it is complete."""
    load, lengths = facts["load"], facts["load"]["lengths"]
    found = []
    if facts["num_errors"]:
        found.append(f"{facts['num_errors']} requests failed")
    if facts["num_requests"] < MIN_TURNS * load["concurrency"]:
        found.append(f"fewer than {MIN_TURNS} requests of each client")
    for mean, wanted in (
        (facts["prompt_tokens_mean"], lengths["input_tokens"]),
        (facts["output_tokens_mean"], lengths["output_tokens"]),
    ):
        if abs(mean - wanted) > SAME_LENGTH * wanted:
            found.append(f"{mean} tokens on average where {wanted} were asked for")
    return found


def baseline_of(facts: Mapping[str, Any], subject: Subject) -> Baseline:
    """`facts` are those of `Measured.facts`, with the load. Lengths are what the server counted."""
    wanting = shortcomings(facts)
    detail = {name: f"{facts[name]:.2f}" for name in _TIMES if facts[name] is not None}
    detail |= {"requests": str(facts["num_requests"]), "seconds": f"{facts['wall_s']:.1f}"}
    if wanting:
        detail["note"] = "; ".join(wanting)
    return Baseline(
        accelerator=subject.accelerator,
        num_chips=facts["num_chips"],
        model=facts["model"],
        engine=subject.engine,
        dtype=subject.dtype,
        isl=round(facts["prompt_tokens_mean"]),
        osl=round(facts["output_tokens_mean"]),
        concurrency=facts["load"]["concurrency"],
        output_tokens_per_s_chip=_rate(facts["output_tokens_per_s_per_chip"]),
        grade=Grade.C if wanting else Grade.MEASURED,
        source=f"measured by tpugate bench on {platform.node()}",
        date=datetime.now(UTC).date().isoformat(),
        total_tokens_per_s_chip=_rate(facts["total_tokens_per_s_per_chip"]),
        detail=detail,
    )


def _rate(per_second: float) -> Decimal:
    return Decimal(str(round(per_second, 3)))


async def keep(database: Database, baseline: Baseline) -> str:
    """Save it, with the price of now if the book has one; gives its id. Raises `UnavailableError`."""
    async with database.session() as session:
        valid = (await read_book(session)).valid_at(time.time_ns())
    for price in prices_beside(valid, [baseline.accelerator]):
        baseline = replace(baseline, detail={**baseline.detail, "price_id": price.id})
    return await save_baseline(database, baseline)
