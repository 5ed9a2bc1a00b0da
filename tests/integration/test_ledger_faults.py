"""Protects the ledger from deaths: the gateway (and its accountant), workers and Valkey are killed at random moments under
load, and at the end every group's line is whole, each request is booked once and the audit finds nothing.

Longer by hand: LEDGER_FAULTS_SEEDS=20 python -m pytest tests/integration/test_ledger_faults.py
"""

import asyncio
import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from sqlalchemy import func, select, update

from gateway.db.engine import Database
from gateway.domain.accounting.audit import Audit, audit
from gateway.domain.accounting.closing import close_hours
from gateway.domain.accounting.tables import Charge, ChipEntry, ChipGroup, Period, Rollup
from gateway.settings import GatewaySettings
from tests.fakes.gateway import GatewayUnderTest, chat_body, free_port
from tests.fakes.processes import WorkerUnderTest
from tests.fakes.valkey import OwnValkey
from tests.fakes.wire import wait_until

SEEDS = range(int(os.environ.get("LEDGER_FAULTS_SEEDS", "2")))
LOAD_S = 5.0
CLIENTS = 4


class Stack:
    """Valkey, a gateway with SQLite and two scripted workers; each part can be killed and started again."""

    def __init__(self, folder: Path, valkey: OwnValkey) -> None:
        self._folder, self._valkey = folder, valkey
        self.port = free_port()
        self.num_workers = 0
        self.workers: list[WorkerUnderTest] = []
        self.gateway = self._gateway()
        for _ in range(2):
            self.start_worker()
        self.gateway.wait_for_ready()

    def _gateway(self) -> GatewayUnderTest:
        return GatewayUnderTest(self._valkey.url, self._folder / "data", port=str(self.port))

    def start_worker(self) -> None:
        name = f"w{self.num_workers}"
        self.num_workers += 1
        self.workers.append(
            WorkerUnderTest(
                self._valkey.url, name, self._folder / f"{name}.log", step_delay_s="0.003"
            )
        )

    def kill_gateway(self) -> None:
        self.gateway.kill()
        self.gateway = self._gateway()

    def kill_worker(self, chance: random.Random) -> None:
        self.workers.pop(chance.randrange(len(self.workers))).kill()
        self.start_worker()

    def kill_valkey(self) -> None:
        self._valkey.stop()
        self._valkey.start()

    def stop_workers(self) -> None:
        for worker in self.workers:
            worker.send(signal.SIGTERM)
        for worker in self.workers:
            worker.wait()

    def close(self) -> None:
        for worker in self.workers:
            worker.kill()
        self.gateway.kill()


@contextmanager
def stack(folder: Path) -> Iterator[Stack]:
    with OwnValkey() as valkey:
        made = Stack(folder, valkey)
        try:
            yield made
        finally:
            made.close()


class Load:
    """Clients that ask again whatever happens, until told to stop."""

    def __init__(self, port: int) -> None:
        self._url = f"http://127.0.0.1:{port}"
        self._is_over = threading.Event()
        self.num_answered = 0
        self._threads = [threading.Thread(target=self._ask, args=(i,)) for i in range(CLIENTS)]
        for thread in self._threads:
            thread.start()

    def _ask(self, number: int) -> None:
        chance = random.Random(number)
        headers = {"authorization": "Bearer tpg-admin-key-for-tests-0001"}
        while not self._is_over.is_set():
            words = " ".join(f"w{i}" for i in range(chance.randrange(1, 30)))
            body = chat_body(messages=[{"role": "user", "content": words}], max_tokens=40)
            try:
                answer = httpx.post(
                    f"{self._url}/v1/chat/completions", json=body, headers=headers, timeout=20
                )
                self.num_answered += answer.status_code == 200
            except httpx.TransportError:
                time.sleep(0.05)

    def stop(self) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join()


async def look(folder: Path) -> tuple[Audit, list[ChipGroup]]:
    database = Database(GatewaySettings(data_dir=folder / "data"))
    try:
        async with database.session() as session:
            groups = list(await session.scalars(select(ChipGroup)))
        return await audit(database), groups
    finally:
        await database.close()


async def groups_of(folder: Path) -> list[ChipGroup]:
    database = Database(GatewaySettings(data_dir=folder / "data"))
    try:
        async with database.session() as session:
            return list(await session.scalars(select(ChipGroup)))
    finally:
        await database.close()


async def sums(folder: Path) -> tuple[int, int, int]:
    """Chip-time of the periods, of the groups' lines, and of the ledger's lines when all hours are closed."""
    database = Database(GatewaySettings(data_dir=folder / "data"))
    try:
        await close_hours(database, time.time() + 2 * 3600)
        async with database.session() as session:
            measured = await session.scalar(select(func.sum(Period.measured_ns)))
            lines = await session.scalar(select(func.sum(ChipGroup.num_chips * ChipGroup.end_ns)))
            loaded = await session.scalar(select(func.sum(Charge.loaded_ns)))
            return int(measured or 0), int(lines or 0), int(loaded or 0)
    finally:
        await database.close()


def failures(found: Audit) -> list[dict[str, object]]:
    return [check.as_dict() for check in found.checks if not check.is_sound]


@pytest.mark.parametrize("seed", SEEDS)
def test_nothing_is_lost_or_counted_twice_whoever_dies(tmp_path: Path, seed: int):
    chance = random.Random(seed)
    with stack(tmp_path) as made:
        load = Load(made.port)
        end_s = time.monotonic() + LOAD_S
        kills = [made.kill_gateway, lambda: made.kill_worker(chance), made.kill_valkey]
        chance.shuffle(kills)
        while time.monotonic() < end_s:
            time.sleep(chance.uniform(0.3, 1.5))
            if kills:
                kills.pop()()
        load.stop()
        assert load.num_answered > 0
        made.stop_workers()
        wait_until(
            lambda: (
                len(found := asyncio.run(groups_of(tmp_path))) == made.num_workers
                and all(group.ended for group in found)
            ),
            "every group's line has its end",
            seconds=60,
        )
        found, groups = asyncio.run(look(tmp_path))
        assert failures(found) == []
        assert {group.ended for group in groups} <= {"released", "fault"}
        measured, lines, loaded = asyncio.run(sums(tmp_path))
        assert measured == lines == loaded > 0
        found, _ = asyncio.run(look(tmp_path))
        assert failures(found) == []


async def tampered(folder: Path, change: object) -> Audit:
    database = Database(GatewaySettings(data_dir=folder / "data"))
    try:
        async with database.session() as session:
            await session.execute(change)  # type: ignore[call-overload]
        return await audit(database)
    finally:
        await database.close()


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small ledger that is sound."""
    folder = tmp_path_factory.mktemp("kept")
    with stack(folder) as made:
        for _ in range(5):
            assert made.gateway.chat().status_code == 200
        made.stop_workers()
        wait_until(
            lambda: (
                len(found := asyncio.run(groups_of(folder))) == 2
                and all(group.ended for group in found)
            ),
            "both lines have their ends",
        )
    assert asyncio.run(sums(folder))[0] > 0
    assert failures(asyncio.run(look(folder))[0]) == []
    return folder


@pytest.mark.parametrize(
    ("table", "column"),
    [
        (ChipEntry, "payload"), (ChipEntry, "hash"), (ChipEntry, "end_ns"), (ChipEntry, "begin_ns"),
        (ChipEntry, "unix_end_ns"), (Charge, "prefill_ns"), (Charge, "loaded_ns"), (Charge, "delivered_tokens"),
        (Period, "measured_ns"), (Period, "step_ns"), (Period, "prefill_tokens"), (Rollup, "loaded_ns"),
        (ChipGroup, "end_ns"), (ChipGroup, "head"), (ChipGroup, "computed_tokens"), (ChipGroup, "num_chips"),
    ],
)  # fmt: skip
def test_a_row_that_was_tampered_with_is_found(
    kept: Path, tmp_path: Path, table: type[ChipEntry], column: str
):
    copied = tmp_path / "data"
    copied.mkdir()
    for file in (kept / "data").glob("tpugate.sqlite*"):
        (copied / file.name).write_bytes(file.read_bytes())
    attribute = getattr(table, column)
    changed = b"\x00tampered" if column in ("payload", "hash", "head") else attribute + 1
    first = select(func.max(attribute)).scalar_subquery()
    change = update(table).where(attribute == first).values({column: changed})
    found = asyncio.run(tampered(tmp_path, change))
    assert not found.is_sound, "nobody noticed"


@pytest.mark.parametrize("table", [ChipEntry, Charge, Period, Rollup, ChipGroup])
def test_a_row_that_is_gone_is_missed(kept: Path, tmp_path: Path, table: type[ChipEntry]):
    copied = tmp_path / "data"
    copied.mkdir()
    for file in (kept / "data").glob("tpugate.sqlite*"):
        (copied / file.name).write_bytes(file.read_bytes())

    async def without() -> Audit:
        database = Database(GatewaySettings(data_dir=copied))
        try:
            async with database.session() as session:
                query = select(table).limit(1)
                if table is ChipEntry:
                    query = query.where(ChipEntry.kind == "step")
                row = (await session.scalars(query)).first()
                assert row is not None
                await session.delete(row)
            return await audit(database)
        finally:
            await database.close()

    assert not asyncio.run(without()).is_sound
