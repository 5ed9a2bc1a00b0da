"""One worker process: claims requests, runs the engine, publishes what it emits.

    requests stream ─> claim loop ─┐                        ┌─> publisher ─> reply streams
    gone workers ──> reclaim loop ─┼─> engine thread ─> on_deltas
    aborts stream ──> abort loop ──┘                        └─> claims: room for the next read

It stops in one of three ways. A signal drains it: nothing more is claimed, what has not begun is given
back, the rest is finished within the drain timeout. A failed load or a failed engine ends it with exit
code 1 (2 if another start would fail the same), every request it held having got its terminal delta or being left for other workers to claim.
"""

import asyncio
import logging
import os
import signal
from collections.abc import Coroutine
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import msgspec

from workers.chip_time import Opened
from workers.chip_time_writer import ChipTimeWriter
from workers.claims import Claim, Claims
from workers.config import Chips, WorkerConfig, sentence
from workers.consumer import RequestQueue
from workers.engine.interface import EngineFactory, LoadedEngine
from workers.engine_thread import ENGINE_FAILED, EngineThread
from workers.heartbeat import Heartbeat
from workers.intake import Intake
from workers.link import OUTAGE, connect
from workers.meter import Meter
from workers.progress import INTERVAL_S, StartLog
from workers.protocol import (
    FinishReason,
    OutputDelta,
    Usage,
    WorkerState,
    WorkerStatus,
)
from workers.publisher import Publisher

FLUSH_TIMEOUT_S = 5.0
SAY_WAITING_S = 5.0
FAILED, HOPELESS = 1, 2
"""Exit codes."""
WARMING_WORDS = ("compil", "warm")
"""A progress phrase that begins so means that the weights are there."""
SHUTTING_DOWN = "The worker shut down before the request was finished."

log = logging.getLogger("worker")


async def run_worker(config: WorkerConfig, factory: EngineFactory) -> int:
    """Serve until a signal or a failure; returns the process's exit code."""
    return await Service(config, factory).run()


class Service:
    def __init__(self, config: WorkerConfig, factory: EngineFactory) -> None:
        self._config = config
        chips = config.chips
        self._meter = meter = Meter(chips, partial(_opened, config, chips))
        self._redis = connect(config.redis_url)
        self._queue = RequestQueue(self._redis, config.served_name, config.worker_id)
        self._publisher = Publisher(self._redis, self._queue.stream, config.worker_id)
        self._heartbeat = Heartbeat(self._redis, self._status)
        self._engine = EngineThread(factory, self, meter)
        self._chip_time = ChipTimeWriter(self._redis, config.worker_id, config.served_name, meter)
        self._intake = Intake(
            self._redis, self._queue, self._publisher, self._engine, self.on_deltas
        )
        self._state = WorkerState.STARTING
        self._progress = StartLog()
        self._loaded = asyncio.Event()
        self._stop = asyncio.Event()
        self._exit_code = 0
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> int:
        self._watch_signals()
        log.info("%s starts as %s.", self._config.served_name, self._config.worker_id)
        self._spawn(self._heartbeat.run())
        self._spawn(self._chip_time.run())
        self._engine.start()
        await self._wait_until_loaded()
        if not self._stop.is_set():
            await self._serve()
        await self._leave()
        return self._exit_code

    @property
    def _claims(self) -> Claims:
        return self._intake.claims

    # What the engine thread reports

    def on_progress(self, what: str, share: float) -> None:
        is_new, line = self._progress.update(what, share)
        if line:
            log.info("%s", line)
        if self._state is WorkerState.STARTING and what.lower().startswith(WARMING_WORDS):
            self._state = WorkerState.WARMING
        if is_new:
            self._heartbeat.beat_now()

    def on_loaded(self, loaded: LoadedEngine) -> None:
        self._intake.claims = Claims(loaded.engine.capacity)
        self._heartbeat.announce(
            msgspec.structs.replace(
                loaded.card,
                tool_parser=self._config.tool_parser,
                reasoning_parser=self._config.reasoning_parser,
            )
        )
        self._loaded.set()

    def on_load_failed(self, error: str, *, is_hopeless: bool) -> None:
        log.error("%s", sentence(error))
        self._exit_code = HOPELESS if is_hopeless else FAILED
        self._stop.set()
        self._loaded.set()

    def on_deltas(self, deltas: list[OutputDelta]) -> None:
        """Pass deltas on; those of requests that were given back meanwhile are dropped."""
        for delta in deltas:
            claim = self._claims.get(delta.request_id)
            if claim is None:
                continue
            published = claim.to_publish(delta)
            if published is not None:
                self._publisher.put(claim.request.reply_to, published)
            if delta.usage is not None:
                self._claims.release(delta.request_id)
                self._publisher.finish(claim.entry_ids)

    def on_crashed(self) -> None:
        self._end_started(ENGINE_FAILED)
        self._exit_code = FAILED
        self._stop.set()

    async def _wait_until_loaded(self) -> None:
        while not self._loaded.is_set():
            try:
                async with asyncio.timeout(INTERVAL_S / 2):
                    await self._loaded.wait()
            except TimeoutError:
                if line := self._progress.remind():
                    log.info("%s", line)

    # Serving

    async def _serve(self) -> None:
        self._state = WorkerState.READY
        self._progress.what, self._progress.share = "", 1.0
        self._heartbeat.beat_now()
        log.info("%s is ready.", self._config.served_name)
        self._spawn(self._publisher.run())
        self._spawn(self._intake.abort_loop())
        claiming = self._spawn(self._intake.claim_loop())
        reclaiming = self._spawn(self._intake.reclaim_loop())
        await self._stop.wait()
        self._intake.close()
        self._meter.is_draining = True
        self._state = WorkerState.DRAINING
        self._heartbeat.beat_now()
        # A read that is under way is let finish, or what it brings would be lost until this worker is gone.
        await asyncio.wait({claiming, reclaiming})
        if self._exit_code == 0:
            await self._drain()

    # Stopping

    async def _drain(self) -> None:
        log.info("Draining %s.", requests(len(self._claims)))
        stats = self._engine.stats
        num_unstarted = stats.num_waiting + self._engine.num_queued
        unstarted = self._claims.without_output()
        await self._give_back(unstarted[max(0, len(unstarted) - num_unstarted) :])
        saying = asyncio.create_task(self._say_waiting())
        try:
            async with asyncio.timeout(self._config.drain_timeout_s):
                await self._claims.wait_until_empty()
        except TimeoutError:
            log.warning("%d requests are cut off by the drain timeout.", len(self._claims))
            await self._give_back(self._claims.without_output())
            self._engine.fail_all(SHUTTING_DOWN)
            await self._engine_answer()
        finally:
            saying.cancel()

    async def _say_waiting(self) -> None:
        while True:
            await asyncio.sleep(SAY_WAITING_S)
            log.info("Waiting for %s.", requests(len(self._claims)))

    async def _engine_answer(self) -> None:
        try:
            async with asyncio.timeout(FLUSH_TIMEOUT_S):
                await self._claims.wait_until_empty()
        except TimeoutError:
            log.warning("The engine does not answer; its requests are ended without it.")
            self._end_started(SHUTTING_DOWN)

    async def _give_back(self, claims: list[Claim]) -> None:
        if not claims:
            return
        for claim in claims:
            self._claims.release(claim.request.request_id)
            self._engine.abort(claim.request.request_id)
        try:
            await self._queue.give_back([e for claim in claims for e in claim.entry_ids])
        except OUTAGE as error:
            log.warning("Nothing could be given back (%s); others claim it later.", error)

    def _end_started(self, error: str) -> None:
        """End what gateways have heard of; the rest stays pending, for other workers to claim."""
        for claim in self._claims.all():
            if not claim.num_deltas:
                continue
            self.on_deltas(
                [
                    OutputDelta(
                        request_id=claim.request.request_id,
                        seq=claim.num_deltas,
                        finish_reason=FinishReason.ERROR,
                        error=error,
                        usage=Usage(
                            prompt_tokens=len(claim.request.prompt_token_ids), completion_tokens=0
                        ),
                    )
                ]
            )

    async def _leave(self) -> None:
        if not await self._publisher.flush(FLUSH_TIMEOUT_S):
            log.warning("Redis is away: the last answers could not be delivered.")
        self._intake.leave()
        self._heartbeat.close()
        for task in self._tasks:
            task.cancel()
        # Not for ever: the Redis client sometimes turns a cancellation into an ordinary failed read.
        await asyncio.wait(self._tasks, timeout=FLUSH_TIMEOUT_S)
        self._engine.stop()
        await self._engine.join(1.0)
        self._meter.release()
        try:
            async with asyncio.timeout(FLUSH_TIMEOUT_S):
                # Before the status goes, or an accountant might take the group for lost.
                await self._chip_time.finish()
                await self._heartbeat.take_back()
                await self._queue.leave()
        except (*OUTAGE, TimeoutError) as error:
            log.warning("The status could not be taken back (%s); it expires by itself.", error)
        await self._redis.aclose()
        log.info("Stopped.")

    def _watch_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)

    def _on_signal(self, number: signal.Signals) -> None:
        if self._stop.is_set():
            os._exit(128 + number)
        log.info("%s: stopping.", number.name)
        self._stop.set()
        self._loaded.set()

    # Helpers

    def _status(self) -> WorkerStatus:
        stats = self._engine.stats
        num_waiting = stats.num_waiting + self._engine.num_queued
        return WorkerStatus(
            worker_id=self._config.worker_id,
            model=self._config.served_name,
            state=self._state,
            progress=self._progress.share,
            detail=self._progress.what,
            engine="scripted" if self._config.engine == "fake" else "model",
            **asdict(replace(stats, num_waiting=num_waiting)),
        )

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run a loop beside the others; if one ends by a bug, the process ends with exit code 1."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._on_task_done)
        return task

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        if task.cancelled() or task.exception() is None:
            return
        log.error("A loop of the worker failed.", exc_info=task.exception())
        self._exit_code = FAILED
        self._stop.set()
        self._loaded.set()


def _opened(config: WorkerConfig, chips: Chips, granted_unix_ns: int) -> Opened:
    return Opened(
        number=0,
        begin_ns=0,
        end_ns=0,
        model=config.served_name,
        worker_id=config.worker_id,
        engine="scripted" if config.engine == "fake" else "model",
        sku=chips.sku,
        num_chips=chips.num,
        region=chips.region,
        granted_unix_ns=granted_unix_ns,
    )


def requests(number: int) -> str:
    return f"{number} request{'' if number == 1 else 's'}"
