"""How long a report of a month takes on SQLite: rollups of many keys, as the ledger writes them.

    python -m benchmarks.cost_report

Each key asks one model every day, in some hours of it. The window begins and ends in mid-day, so that hours of two days and
all the days between are read.
"""

import asyncio
import random
import statistics
import tempfile
import time
from decimal import Decimal
from pathlib import Path

import click
from sqlalchemy import insert

from benchmarks import report as tables
from gateway.db.engine import Database
from gateway.domain.accounting.documents import csv_of, document
from gateway.domain.accounting.report import AMOUNTS, By, Window, report
from gateway.domain.accounting.tables import DAY_S, HOUR_S, PriceRow, Rollup
from gateway.domain.accounting.what_if import parse, reprice
from gateway.settings import GatewaySettings

_FIRST = 1_800_000_000 // DAY_S * DAY_S
_ASKED = ((By.MODEL,), (By.KEY,), (By.MODEL, By.DAY), (By.MODEL, By.KEY), (By.KEY, By.DAY))


@click.command()
@click.option("--keys", default=1000, show_default=True)
@click.option("--days", default=31, show_default=True)
@click.option("--hours", default=4, show_default=True, help="Of a day in which a key asks.")
@click.option("--rounds", default=7, show_default=True)
def main(keys: int, days: int, hours: int, rounds: int) -> None:
    """Medians by what is asked."""
    rows = asyncio.run(_measured(keys, days, hours, rounds))
    header = [
        f"{keys} keys, {days} days, by",
        "lines",
        "report, ms",
        "processor, ms",
        "as JSON and CSV, ms",
        "what if, ms",
    ]
    click.echo(tables.table(header, rows))


async def _measured(keys: int, days: int, hours: int, rounds: int) -> list[list[object]]:
    with tempfile.TemporaryDirectory() as folder:
        database = Database(GatewaySettings(data_dir=Path(folder)))
        await database.create_tables()
        await _fill(database, keys, days, hours)
        window = Window(_FIRST + 9 * HOUR_S, _FIRST + days * DAY_S - 9 * HOUR_S)
        rows = [await _row(database, window, by, rounds) for by in _ASKED]
        await database.close()
    return rows


async def _row(database: Database, window: Window, by: tuple[By, ...], rounds: int) -> list[object]:
    seconds: list[list[float]] = [[], [], [], []]
    for _ in range(rounds):
        began_s, cpu_s = time.perf_counter(), time.process_time()
        made = await report(database, window, by)
        seconds[0].append(time.perf_counter() - began_s)
        seconds[1].append(time.process_time() - cpu_s)
        began_s = time.perf_counter()
        document({"report": made})
        csv_of(made)
        seconds[2].append(time.perf_counter() - began_s)
        began_s = time.perf_counter()
        await reprice(database, made, parse("usd=1.2"), time.time_ns())
        seconds[3].append(time.perf_counter() - began_s)
    times = [f"{1000 * statistics.median(each):.0f}" for each in seconds]
    return [", ".join(by), len(made.lines), *times]


async def _fill(database: Database, keys: int, days: int, hours: int) -> None:
    chance = random.Random(0)
    async with database.session() as session:
        session.add(
            PriceRow(
                price_id="p", sku="v6e", region="any", term="on_demand",
                usd_per_chip_hour=Decimal("2.7"), currency="USD", effective_from_ns=0,
                source="a benchmark", retrieved_at="2026-12-01", added_unix_ns=0,
            )
        )  # fmt: skip
        for day in range(days):
            start = _FIRST + day * DAY_S
            rows = []
            for key in range(keys):
                own = {
                    "model": f"model-{key % 3}",
                    "key_id": f"key-{key:04}",
                    "tag": "",
                    "price_id": "p",
                }
                of_hours = [
                    {name: chance.randrange(10**9) for name in AMOUNTS} for _ in range(hours)
                ]
                for hour, amounts in zip(chance.sample(range(24), hours), of_hours, strict=True):
                    rows.append(own | amounts | {"grain_s": HOUR_S, "start": start + hour * HOUR_S})
                sums = {name: sum(amounts[name] for amounts in of_hours) for name in AMOUNTS}
                rows.append(own | sums | {"grain_s": DAY_S, "start": start})
            await session.execute(insert(Rollup), rows)


if __name__ == "__main__":
    main()
