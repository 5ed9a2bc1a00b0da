"""Protects the ledger from deaths: the gateway (and its accountant), workers and Valkey (with and without its data) are
killed at random moments under load. At the end every group's line is whole, each request is booked once and the audit
finds nothing.

Longer by hand: LEDGER_FAULTS_SEEDS=20 LEDGER_FAULTS_LOAD_S=60 python -m pytest tests/integration/test_ledger_faults.py
"""

import asyncio
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import httpx
import pytest
from sqlalchemy import func, select

from gateway.db.engine import Database
from gateway.domain.accounting.audit import audit
from gateway.domain.accounting.closing import close_hours
from gateway.domain.accounting.tables import Charge, ChipGroup, OpenCharge, Period, Rollup
from gateway.settings import GatewaySettings
from tests.fakes.gateway import ADMIN_KEY, GatewayUnderTest, chat_body, free_port
from tests.fakes.processes import WorkerUnderTest
from tests.fakes.valkey import OwnValkey
from tests.fakes.wire import wait_until
from workers.protocol import HEARTBEAT_TTL_S

SEEDS = range(int(os.environ.get("LEDGER_FAULTS_SEEDS", "2")))
LOAD_S = float(os.environ.get("LEDGER_FAULTS_LOAD_S", "4"))
CLIENTS = 4
NANOS = 10**9
FINISHED = ("stop", "length")
T = TypeVar("T")


class Ledger:
    """What is in a gateway's SQLite file, read from outside."""

    def __init__(self, folder: Path) -> None:
        self._settings = GatewaySettings(data_dir=folder)

    def _ask(self, ask: Callable[[Database], Awaitable[T]]) -> T:
        async def run() -> T:
            database = Database(self._settings)
            try:
                return await ask(database)
            finally:
                await database.close()

        return asyncio.run(run())

    def groups(self) -> dict[str, ChipGroup]:
        """By worker."""

        async def ask(database: Database) -> dict[str, ChipGroup]:
            async with database.session() as session:
                return {row.worker_id: row for row in await session.scalars(select(ChipGroup))}

        return self._ask(ask)

    def lines(self) -> list[Charge]:
        """Without what hours add to them."""

        async def ask(database: Database) -> list[Charge]:
            async with database.session() as session:
                query = select(Charge).where(Charge.kind == "charge")
                return list(await session.scalars(query))

        return self._ask(ask)

    def sums(self) -> tuple[int, ...]:
        """Chip-time of groups' lines, of periods, of all that is charged, and of rollups, with all hours closed."""

        async def ask(database: Database) -> tuple[int, ...]:
            await close_hours(database, time.time() + 2 * 3600)
            async with database.session() as session:
                assert not await session.scalar(select(func.count()).select_from(OpenCharge))
                queries = (
                    select(func.sum(ChipGroup.num_chips * ChipGroup.end_ns)),
                    select(func.sum(Period.measured_ns)),
                    select(func.sum(Charge.loaded_ns)),
                    select(func.sum(Rollup.loaded_ns)).where(Rollup.grain_s == 3600),
                )
                return tuple([int(await session.scalar(query) or 0) for query in queries])

        return self._ask(ask)

    def assert_sound(self) -> None:
        found = self._ask(audit)
        assert [check.as_dict() for check in found.checks if not check.is_sound] == []
        assert [check.name for check in found.checks] == [f"I{number}" for number in range(1, 7)]
        assert all(check.residual == 0 < check.checked for check in found.checks)


class Stack:
    """Valkey, a gateway with SQLite and two scripted workers; each part can be killed and started again."""

    def __init__(self, folder: Path, valkey: OwnValkey, chance: random.Random) -> None:
        self._folder, self._valkey, self._chance = folder, valkey, chance
        self.port = free_port()
        self.workers: dict[str, WorkerUnderTest] = {}
        self.killed_ns: dict[str, int] = {}
        """When workers were killed …"""
        self.seen_ns: dict[str, int] = {}
        """… and the last sign of life that was in SQL then."""
        self.gateway = self._gateway()
        self.ledger = Ledger(folder / "data")
        for _ in range(2):
            self._start_worker()
        self.gateway.wait_for_ready()

    @property
    def num_workers(self) -> int:
        return len(self.workers) + len(self.killed_ns)

    def _gateway(self) -> GatewayUnderTest:
        return GatewayUnderTest(self._valkey.url, self._folder / "data", port=str(self.port))

    def _start_worker(self) -> None:
        name = f"w{self.num_workers}"
        log = self._folder / f"{name}.log"
        self.workers[name] = WorkerUnderTest(self._valkey.url, name, log, step_delay_s="0.003")

    def kill_gateway(self) -> None:
        self.gateway.kill()
        self.gateway = self._gateway()

    def kill_worker(self) -> None:
        """One that the ledger knows: nobody can know of a process that died before it had said a word."""
        known = wait_until(
            lambda: sorted(self.ledger.groups().keys() & self.workers.keys()), "a worker is known"
        )
        name = self._chance.choice(known)
        self.seen_ns[name] = self.ledger.groups()[name].seen_unix_ns
        self.workers.pop(name).kill()
        self.killed_ns[name] = time.time_ns()
        self._start_worker()

    def kill_valkey(self) -> None:
        self._valkey.stop()
        self._valkey.start()

    def empty_valkey(self) -> None:
        self._valkey.stop(forget=True)
        self._valkey.start()

    def stop_workers(self) -> None:
        wait_until(
            lambda: self.workers.keys() <= self.ledger.groups().keys(), "all workers are known"
        )
        for worker in self.workers.values():
            worker.send(signal.SIGTERM)
        for worker in self.workers.values():
            assert worker.wait() == 0

    def wait_for_ends(self) -> None:
        wait_until(
            lambda: (
                len(found := self.ledger.groups()) == self.num_workers
                and all(group.ended for group in found.values())
            ),
            "every group's line has its end",
            seconds=60,
        )

    def close(self) -> None:
        for worker in self.workers.values():
            worker.kill()
        self.gateway.kill()


@contextmanager
def stack(folder: Path, chance: random.Random) -> Iterator[Stack]:
    with OwnValkey(durable=True) as valkey:
        made = Stack(folder, valkey, chance)
        try:
            yield made
        finally:
            made.close()


class Load:
    """Clients that ask again whatever happens, until told to stop."""

    def __init__(self, port: int) -> None:
        self._url = f"http://127.0.0.1:{port}/v1/chat/completions"
        self._is_over = threading.Event()
        self.answered: dict[str, int] = {}
        """When requests were sent that got their whole answer, by the ledger's name for them."""
        self._threads = [threading.Thread(target=self._ask, args=(i,)) for i in range(CLIENTS)]
        for thread in self._threads:
            thread.start()

    def _ask(self, number: int) -> None:
        chance = random.Random(number)
        headers = {"authorization": f"Bearer {ADMIN_KEY}", "x-tpugate-tag": f"client-{number}"}
        with httpx.Client(headers=headers, timeout=20) as client:
            while not self._is_over.is_set():
                words = " ".join(f"w{i}" for i in range(chance.randrange(1, 30)))
                body = chat_body(messages=[{"role": "user", "content": words}], max_tokens=40)
                sent_ns = time.time_ns()
                try:
                    answer = client.post(self._url, json=body)
                except httpx.TransportError:
                    time.sleep(0.05)
                    continue
                if answer.status_code == 200:
                    self.answered[answer.json()["id"].removeprefix("chatcmpl-")] = sent_ns

    def stop(self) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join()


@pytest.mark.parametrize("seed", SEEDS)
def test_nothing_is_lost_or_counted_twice_whoever_dies(tmp_path: Path, seed: int):
    chance = random.Random(seed)
    with stack(tmp_path, chance) as made:
        load = Load(made.port)
        end_s = time.monotonic() + LOAD_S
        kills = [made.kill_gateway, made.kill_worker, made.kill_valkey, made.empty_valkey]
        while time.monotonic() < end_s:
            for kill in chance.sample(kills, len(kills)):
                time.sleep(chance.uniform(0, 0.9))
                kill()
        made.gateway.wait_for_ready()
        served = len(load.answered)
        wait_until(lambda: len(load.answered) > served + CLIENTS, "all is well again")
        load.stop()
        made.stop_workers()
        made.wait_for_ends()
        made.ledger.assert_sound()
        assert_ends_are_true(made)
        assert_booked_once(made, load.answered)
        lines, *others = made.ledger.sums()
        assert others == [lines] * 3
        made.ledger.assert_sound()


def assert_ends_are_true(made: Stack) -> None:
    """A killed worker's line reaches its death, and no further than it could be thought alive.

    If nobody was left to hear of it for long (no accountant, and a Valkey that forgot), it reaches as far as is known.
    """
    groups = made.ledger.groups()
    assert {name for name, group in groups.items() if group.ended == "fault"} == set(made.killed_ns)
    for name, killed_ns in made.killed_ns.items():
        end_ns = groups[name].granted_unix_ns + groups[name].end_ns
        known_ns = made.seen_ns[name] + int(HEARTBEAT_TTL_S * NANOS)
        assert min(killed_ns, known_ns) <= end_ns
        assert end_ns <= killed_ns + int((2 * HEARTBEAT_TTL_S + 1) * NANOS)


def assert_booked_once(made: Stack, answered: dict[str, int]) -> None:
    """No run of a request has two ends; what was answered has been finished.

    A request runs again if Valkey has lost its answer, even in the same group: both runs took chips. And what a
    killed worker had not sent yet nobody knows of, so it can only be told of requests that came after.
    """
    lines = made.ledger.lines()
    ends = Counter(
        (line.group_id, line.request_id, line.last_number)
        for line in lines
        if line.status != "running"
    )
    assert set(ends.values()) == {1}
    groups_of: dict[str, set[str]] = {}
    for line in lines:
        groups_of.setdefault(line.request_id, set()).add(line.group_id)
    finished = {line.request_id for line in lines if line.status in FINISHED}
    groups = made.ledger.groups()
    killed = {groups[name].group_id for name in made.killed_ns}
    last_ns = max(made.killed_ns.values())
    late = {request_id for request_id, sent_ns in answered.items() if sent_ns > last_ns}
    assert late, "there was load after the last kill"
    sure = late | {r for r in answered.keys() & groups_of.keys() if not groups_of[r] & killed}
    assert sure <= finished
