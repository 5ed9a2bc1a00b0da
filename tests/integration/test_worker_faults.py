"""What a worker does when Redis goes away, when its engine fails and when its model cannot be loaded."""

import asyncio
import logging
import os
import signal
from collections.abc import Callable, Iterator

import pytest

from tests.fakes.processes import WorkerUnderTest
from tests.fakes.valkey import OwnValkey
from tests.fakes.wire import GatewayPeer, wait_until
from workers import service
from workers.config import WorkerConfig, load_config
from workers.engine.interface import EngineFactory, LoadedEngine, Progress
from workers.engine.scripted import ScriptedEngine, build_scripted
from workers.engine.step_log import StepSink
from workers.engine_thread import ENGINE_FAILED
from workers.errors import HopelessLoadError, LoadError
from workers.process import engine_factory
from workers.protocol import FinishReason, OutputDelta, WorkerState, card_key
from workers.service import run_worker

Start = Callable[..., WorkerUnderTest]


@pytest.fixture
def restartable() -> Iterator[OwnValkey]:
    with OwnValkey() as valkey:
        yield valkey


def test_a_worker_recovers_when_redis_comes_back_empty(restartable: OwnValkey, start_worker: Start):
    worker = start_worker("a", url=restartable.url)
    peer = GatewayPeer(restartable.url)
    assert peer.text(peer.enqueue([b"before"])) == "before"
    restartable.stop()
    wait_until(lambda: "Redis does not answer" in worker.output, "the worker notices")
    restartable.start()
    peer.wait_for_ready("a")
    wait_until(lambda: peer.redis.exists(card_key("m-small")), "the card is announced again")
    second = GatewayPeer(restartable.url)
    assert second.text(second.enqueue([b"after"])) == "after"
    wait_until(lambda: second.num_entries() == 0, "every entry is gone")
    for each in (peer, second):
        each.close()


def test_deltas_made_while_redis_is_away_are_delivered_in_order(
    restartable: OwnValkey, start_worker: Start
):
    worker = start_worker("a", url=restartable.url, step_delay_s="0.05")
    peer = GatewayPeer(restartable.url)
    script = [b"%d " % i for i in range(60)]
    request_id = peer.enqueue(script)
    peer.wait_for_start(request_id)
    restartable.stop()
    wait_until(lambda: "publisher: Redis does not answer" in worker.output, "a write fails")
    restartable.start()
    late = GatewayPeer(restartable.url)
    late.reply_to = peer.reply_to
    seqs = [h.delta.seq for h in late.wait_for_end(request_id)]
    # What was not written before is there without a gap (one write may come twice).
    unique = sorted(set(seqs))
    assert unique == list(range(unique[0], len(script)))
    for each in (peer, late):
        each.close()


def test_a_worker_started_before_redis_serves_once_it_is_there(
    restartable: OwnValkey, start_worker: Start
):
    restartable.stop()
    worker = start_worker("a", url=restartable.url)
    wait_until(lambda: "Redis does not answer" in worker.output, "the worker notices")
    restartable.start()
    peer = GatewayPeer(restartable.url)
    assert peer.text(peer.enqueue([b"hello"])) == "hello"
    peer.close()


class BreakingEngine(ScriptedEngine):
    """Fails as a whole at its third step."""

    def step(self) -> list[OutputDelta]:
        if self.stats().steps == 2:
            raise RuntimeError("the device is gone")
        return super().step()


def config_for(url: str, worker_id: str = "a") -> WorkerConfig:
    return load_config({"engine": "fake", "redis_url": url, "worker_id": worker_id}, {})


async def test_a_failed_engine_ends_its_requests_with_an_error_and_the_process_with_1(
    redis_url: str, peer: GatewayPeer
):
    def build(progress: Progress, sink: StepSink) -> LoadedEngine:
        return build_scripted("m-small", BreakingEngine(capacity=2), progress)

    ids = [peer.enqueue([b"a", b"b", b"c"]) for _ in range(3)]
    assert await run_worker(config_for(redis_url), build) == 1
    for request_id in ids[:2]:
        last = peer.wait_for_end(request_id)[-1].delta
        assert (last.finish_reason, last.error) == (FinishReason.ERROR, ENGINE_FAILED)
    assert peer.statuses() == {}
    # The third was never claimed: a worker that works answers it.
    assert peer.num_entries() == 1
    config = config_for(redis_url, "b")
    serving = asyncio.create_task(run_worker(config, engine_factory(config)))
    assert await asyncio.to_thread(peer.text, ids[2]) == "abc"
    os.kill(os.getpid(), signal.SIGTERM)
    assert await serving == 0


@pytest.mark.parametrize(
    ("error", "code", "sentence"),
    [
        (LoadError("the disk is full"), 1, "The disk is full."),
        (HopelessLoadError("The weights are torn."), 2, "The weights are torn."),
        (ValueError("internal"), 1, "The model could not be loaded (see the log)."),
    ],
)
async def test_a_failed_load_ends_the_process_with_its_code_and_one_sentence(
    redis_url: str, caplog: pytest.LogCaptureFixture, error: Exception, code: int, sentence: str
):
    def build(progress: Progress, sink: StepSink) -> LoadedEngine:
        raise error

    with caplog.at_level(logging.ERROR):
        assert await run_worker(config_for(redis_url), build) == code
    assert caplog.messages[-1] == sentence


async def test_a_drain_says_what_it_waits_for(
    redis_url: str,
    peer: GatewayPeer,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(service, "SAY_WAITING_S", 0.02)
    config = load_config(
        {"engine": "fake", "redis_url": redis_url, "worker_id": "a", "step_delay_s": "0.05"}, {}
    )
    with caplog.at_level(logging.INFO):
        serving = asyncio.create_task(run_worker(config, engine_factory(config)))
        request_id = peer.enqueue([b"x"] * 20)
        await asyncio.to_thread(peer.wait_for_start, request_id)
        os.kill(os.getpid(), signal.SIGTERM)
        assert await serving == 0
    assert "Waiting for 1 request." in caplog.messages


async def test_progress_is_published_while_the_model_loads(redis_url: str, peer: GatewayPeer):
    seen: list[tuple[WorkerState, str, float]] = []
    factory: EngineFactory = engine_factory(config_for(redis_url))

    def build(progress: Progress, sink: StepSink) -> LoadedEngine:
        for what, share in (("reading weights", 0.5), ("compiling buckets", 0.25)):
            progress(what, share)
            status = wait_until(
                lambda what=what: (s := peer.statuses().get("a")) and s.detail == what and s,
                f"the status says {what}",
            )
            seen.append((status.state, status.detail, status.progress))
        factory(progress, sink)
        raise LoadError("Enough.")

    assert await run_worker(config_for(redis_url), build) == 1
    assert seen == [
        (WorkerState.STARTING, "reading weights", 0.5),
        (WorkerState.WARMING, "compiling buckets", 0.25),
    ]
