"""What accounting costs: the meter in a worker, for each step, and the accountant, for each membership of a step.

    python -m benchmarks.ledger

Steps of 64 decoding rows, as a worker's step log tells them. Processor time, which says more than the clock on a
machine that is shared: of the meter and its encoding beside a step of 8 ms, a small model's on a chip; of the accountant
into SQLite, everything included.
"""

import asyncio
import tempfile
import time
from pathlib import Path

import click

from benchmarks import report
from gateway.db.engine import Database
from gateway.domain.accounting.booking import Booking
from gateway.domain.accounting.prices import PriceBook, Pricing
from gateway.settings import GatewaySettings
from workers.chip_time import AnyEntry, Fits, Opened, chain, encode, first_hash
from workers.config import Chips
from workers.engine.step_log import EngineLoad, StepLog, StepMember, StepWork
from workers.meter import Meter
from workers.protocol import GenerateRequest, SamplingParams

STEP_S = 0.008
_SLICE = 100


@click.command()
@click.option("--rows", default=64, show_default=True, help="Decoding rows of a step.")
@click.option("--steps", default=5000, show_default=True)
def main(rows: int, steps: int) -> None:
    """Meter and accountant, processor time."""
    entries, meter_us = _metered(rows, steps)
    began_s = time.thread_time()
    payloads = [encode(entry) for entry in entries]
    chain(first_hash("g"), payloads)
    encode_us = 1e6 * (time.thread_time() - began_s) / steps
    seconds, cpu_s = asyncio.run(_booked(list(zip(entries, payloads, strict=True))))
    share = (meter_us + encode_us) / (1e6 * STEP_S)
    table = [
        ["meter, µs a step", f"{meter_us:.0f}"],
        ["encoding and hashing, µs a step", f"{encode_us:.0f}"],
        [f"both, of a step of {1000 * STEP_S:.0f} ms", f"{100 * share:.2f} %"],
        ["accountant, memberships a second", f"{rows * steps / seconds:,.0f}"],
        ["accountant, memberships a second of processor time", f"{rows * steps / cpu_s:,.0f}"],
    ]
    click.echo(report.table([f"{rows} rows, {steps} steps", ""], table))


def _metered(rows: int, steps: int) -> tuple[list[AnyEntry], float]:
    now_s = 1000.0

    def clock() -> float:
        return now_s

    meter = Meter(Chips("cpu", 1, ""), _opened, clock)
    log = StepLog(meter, clock, clock)
    meter.loaded()
    meter.fits = Fits("", {})
    ids = [f"request-{i:08}" for i in range(rows)]
    for name in ids:
        meter.joined(
            GenerateRequest(
                request_id=name, model="m", reply_to="r", prompt_token_ids=[1],
                sampling=SamplingParams(max_tokens=1), fair_key="key",
            )
        )  # fmt: skip
    spent_s = 0.0
    for step in range(steps):
        members = tuple(
            StepMember(
                request_id=name, choice=0, phase="decode", num_tokens=1, context_len=100 + step
            )
            for name in ids
        )
        work = StepWork("rows-64", rows, 0, "greedy", members)
        log.begin()
        log.scheduled(lambda work=work: work)  # type: ignore[misc]
        log.launched()
        now_s += STEP_S
        log.collected()
        began_s = time.thread_time()
        log.emitted(lambda: EngineLoad(rows, 0, 0.5))
        spent_s += time.thread_time() - began_s
    return meter.take(), 1e6 * spent_s / steps


def _opened(unix_ns: int) -> Opened:
    return Opened(
        number=0, begin_ns=0, end_ns=0, model="m", worker_id="g", engine="model", sku="cpu",
        num_chips=1, granted_unix_ns=unix_ns,
    )  # fmt: skip


async def _booked(pairs: list[tuple[AnyEntry, bytes]]) -> tuple[float, float]:
    """Seconds by the clock and of processor time."""
    with tempfile.TemporaryDirectory() as folder:
        database = Database(GatewaySettings(data_dir=Path(folder)))
        await database.create_tables()
        booking, pricing = Booking(database), Pricing(PriceBook([]))
        began_s, cpu_s = time.perf_counter(), time.process_time()
        for at in range(0, len(pairs), _SLICE):
            await booking.book("g", pairs[at : at + _SLICE], pricing)
        spent = time.perf_counter() - began_s, time.process_time() - cpu_s
        await database.close()
    return spent


if __name__ == "__main__":
    main()
