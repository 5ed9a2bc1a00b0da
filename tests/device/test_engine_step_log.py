"""Protects the step log on the real device: what it says of buckets, tokens, sampling and time is what ran."""

import time
from dataclasses import replace

import pytest

from tests.device.driving import LADDER, ask, fresh_engine, new_request
from workers.engine.engine import EngineParts
from workers.engine.step_log import StepRecord

PROMPT = [504, 3575, 282, 4649, 314]


class Kept:
    """A sink that keeps all."""

    def __init__(self) -> None:
        self.records: list[StepRecord] = []

    def record(self, step: StepRecord) -> None:
        self.records.append(step)


def test_steps_tell_what_ran_and_for_how_long(parts: EngineParts):
    sink = Kept()
    engine = fresh_engine(replace(parts, step_sink=sink))
    began_s = time.monotonic()
    requests = [new_request(PROMPT, max_tokens=5, ignore_eos=True) for _ in range(2)]
    ask(engine, [*requests, new_request(PROMPT * 4, max_tokens=9, temperature=0.9, seed=1)])
    elapsed_s = time.monotonic() - began_s
    buckets = {bucket.name: bucket for bucket in LADDER.buckets}
    for record in sink.records:
        assert record.num_tokens + record.num_padded == buckets[record.bucket].num_tokens
        assert record.device_s > 0
        assert record.num_compiles == 0
    assert sum(record.num_tokens for record in sink.records) >= 2 * (5 + 4) + 20 + 8
    stats = engine.stats()
    assert 0 < stats.device_seconds < elapsed_s
    assert 0 < stats.host_seconds < elapsed_s
    assert stats.device_seconds == pytest.approx(sum(r.device_s for r in sink.records))
    assert "plain" in {record.draw for record in sink.records}
