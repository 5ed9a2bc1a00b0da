"""Protects the step log: every dispatched step has one record, lost ones too; members add up to tokens and
to the engine's own counters; no moment of the device is counted twice."""

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest

from tests.contract.test_worker_engine import Collected, run
from tests.fakes.toy_engine import LADDER, new_request, toy_engine
from workers.engine.engine import ModelEngine
from workers.engine.step_log import EngineLoad, StepLog, StepRecord, StepWork
from workers.protocol import FinishReason

BUCKETS = {bucket.name: bucket for bucket in LADDER.buckets}
PROMPTS = [[1], [1, 2, 3, 4, 5], [1, 2, 3, 4, 5, 6, 1, 2, 3], [4] * 20, [5, 6]]


class Kept:
    """A sink that keeps all."""

    def __init__(self) -> None:
        self.records: list[StepRecord] = []

    def record(self, step: StepRecord) -> None:
        self.records.append(step)


def logged(**settings: int) -> tuple[ModelEngine, list[StepRecord]]:
    """A toy engine, and where its records gather."""
    sink = Kept()
    return ModelEngine(replace(toy_engine(**settings)._parts, step_sink=sink)), sink.records


def busy() -> tuple[ModelEngine, list[StepRecord]]:
    """An engine that has answered requests of one and of two choices, twice."""
    engine, records = logged()
    for round_ in range(2):
        for prompt in PROMPTS:
            engine.add(new_request(prompt, n=1 + (len(prompt) == 5), max_tokens=6 - round_))
        run(engine)
    return engine, records


def test_the_members_of_a_step_add_up_to_its_tokens_and_its_bucket():
    engine, records = busy()
    assert [record.number for record in records] == list(range(len(records)))
    assert len(records) == engine.stats().steps
    for record in records:
        assert record.members
        assert sum(member.num_tokens for member in record.members) == record.num_tokens
        assert record.num_tokens + record.num_padded == BUCKETS[record.bucket].num_tokens
        assert record.rows == BUCKETS[record.bucket].rows
        assert not record.is_failed


def test_the_records_add_up_to_the_counters_of_the_engine():
    engine, records = busy()
    stats, members = engine.stats(), [m for record in records for m in record.members]
    assert sum(m.is_kept for m in members) == stats.generation_tokens
    assert sum(m.num_tokens for m in members if m.phase == "prefill") == stats.prompt_tokens
    assert sum(m.num_cached for m in members) == stats.num_prefix_hits > 0
    assert stats.num_prefix_queries == 2 * (sum(map(len, PROMPTS)) + 5)
    assert sum(record.device_s for record in records) == pytest.approx(stats.device_seconds)
    assert sum(record.host_s for record in records) == pytest.approx(stats.host_seconds)


def test_each_sequence_computes_its_tokens_one_after_the_other():
    _, records = busy()
    reached: dict[tuple[str, int], int] = {}
    for member in (m for record in records for m in record.members):
        choice = (member.request_id, member.choice)
        assert member.context_len == reached.get(choice, member.num_cached)
        assert member.num_cached in (0, member.context_len)
        assert member.phase == "prefill" or member.num_tokens == 1
        reached[choice] = member.context_len + member.num_tokens


def test_the_times_of_a_step_are_in_order_and_steps_follow_each_other():
    _, records = busy()
    for r in records:
        on_host = [r.scheduled_s, r.dispatched_s, r.launched_s, r.collected_s, r.completed_s]
        assert [*on_host, r.emitted_s] == sorted([*on_host, r.emitted_s])
        assert r.began_s == max(r.dispatched_s, r.previous_s) <= r.completed_s
        assert all(0 < m.arrived_s <= r.dispatched_s for m in r.members)
    for before, after in pairwise(records):
        assert after.previous_s == before.completed_s
        assert after.completed_unix_s >= before.completed_unix_s
    first, last = records[0], records[-1]
    gaps = sum(record.began_s - record.previous_s for record in records)
    steps = sum(record.device_s for record in records)
    assert gaps + steps == pytest.approx(last.completed_s - first.previous_s)


@pytest.mark.parametrize(("when", "num_failed"), [("dispatch", 2), ("collect", 2)])
def test_a_lost_step_is_recorded_and_what_it_held_runs_again(when: str, num_failed: int):
    engine, records = logged()
    requests = [new_request(prompt) for prompt in PROMPTS[:3]]
    for request in requests:
        engine.add(request)
    collected = Collected()
    for _ in range(3):
        collected.take(engine.step())
    engine._runner.lose_next = when
    collected.take(engine.step())
    run(engine, collected)
    failed = [record for record in records if record.is_failed]
    assert len(failed) == num_failed  # the one in flight beside it is lost too
    assert not any(member.is_kept for record in failed for member in record.members)
    assert [record.number for record in records] == list(range(len(records)))
    assert [r.completed_s for r in records] == sorted(r.completed_s for r in records)
    again = [m for record in records[failed[-1].number + 1 :] for m in record.members]
    assert {m.num_preemptions for m in again} == {1}
    assert all(collected.is_over(request.request_id) for request in requests)


def test_every_choice_ends_in_one_record():
    engine, records = logged()
    answered, dropped = new_request([1, 2], n=2), new_request([3], max_tokens=20)
    engine.add(answered)
    engine.add(dropped)
    while engine.has_work():
        engine.step()
        if len(records) == 3:
            engine.abort(dropped.request_id)
    ended = [(end.request_id, end.choice, end.reason) for r in records for end in r.ended]
    assert sorted(ended) == [
        (answered.request_id, 0, FinishReason.LENGTH),
        (answered.request_id, 1, FinishReason.LENGTH),
        (dropped.request_id, 0, FinishReason.ABORT),
    ]
    assert any(not m.is_kept for r in records for m in r.members if m.samples)


def test_a_step_that_is_given_up_is_recorded_as_failed():
    engine, records = logged()
    engine.add(new_request([1, 2, 3]))
    engine.step()
    engine.fail_all("It broke.")
    (record,) = records
    assert record.is_failed
    assert [end.reason for end in record.ended] == [FinishReason.ERROR]


def test_usage_tells_how_long_prefill_and_decode_took():
    engine = toy_engine()
    request = new_request([1, 2, 3])
    engine.add(request)
    usage = run(engine).deltas[request.request_id][-1].usage
    assert usage.prefill_s > 0
    assert usage.decode_s > 0


class Clock:
    """Moves by hand."""

    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s

    def after(self, seconds: float) -> None:
        self.now_s += seconds


@pytest.fixture
def clock() -> Clock:
    return Clock()


def dispatch(log: StepLog, clock: Clock, describe: Callable[[], StepWork]) -> None:
    """1 s to schedule, 2 s to dispatch."""
    log.begin()
    clock.after(1)
    log.scheduled(describe)
    clock.after(2)
    log.launched()


def collect(log: StepLog, clock: Clock, seconds: float) -> None:
    """`seconds` of waiting, 3 s to emit."""
    clock.after(seconds)
    log.collected()
    clock.after(3)
    log.emitted(lambda: EngineLoad(1, 0, 0.5))


def work() -> StepWork:
    return StepWork("r8-c128", 8, 8, "greedy", ())


def test_a_step_has_the_device_from_the_end_of_the_one_before_it(clock: Clock):
    sink = Kept()
    log = StepLog(sink, clock, unix_clock=lambda: clock() + 1000)
    clock.after(5)
    log.resident()
    dispatch(log, clock, work)  # 106 … 108
    dispatch(log, clock, work)  # 109 … 111
    collect(log, clock, 4)  # completed at 115
    collect(log, clock, 2)  # 118 … completed at 120
    first, second = sink.records
    assert (first.previous_s, first.resident_s) == (100, 105)  # 5 s idle, 1 s bubble
    assert (first.began_s, first.completed_s) == (106, 115)
    assert (second.previous_s, second.began_s, second.completed_s) == (115, 115, 120)
    assert (first.host_s, second.host_s) == (6, 6)
    assert first.completed_unix_s == 1115
    assert (log.device_s, log.host_s) == (14, 12)


def test_without_a_sink_steps_are_timed_and_not_described(clock: Clock):
    def never() -> StepWork:
        raise AssertionError("nobody asked for it")

    log = StepLog(None, clock)
    dispatch(log, clock, never)
    collect(log, clock, 4)
    assert (log.device_s, log.host_s) == (6, 6)


def test_compilations_are_counted_to_the_step_in_which_they_happened(clock: Clock):
    sink = Kept()
    log = StepLog(sink, clock)
    for num_compiles in (0, 2, 2):
        dispatch(log, clock, work)
        log.collected()
        log.emitted(lambda num=num_compiles: EngineLoad(0, 0, 0.0, num))
    assert [record.num_compiles for record in sink.records] == [0, 2, 0]
