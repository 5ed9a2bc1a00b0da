"""Protects `--profile`: the trace is whole JSON whenever its worker may be killed, its slices and counters
say what the steps did, and a disk that is full or a file that grows too long never disturbs serving."""

import itertools
import json
import os
import resource
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.contract.test_worker_engine import Collected, run
from tests.fakes.toy_engine import new_request, toy_engine
from workers.engine.engine import ModelEngine
from workers.errors import ConfigError
from workers.trace_file import MAX_BYTES, TraceFile, open_trace

Event = dict[str, Any]


def traced(path: Path, max_bytes: int = MAX_BYTES) -> ModelEngine:
    sink = TraceFile(path, "toy", max_bytes)
    return ModelEngine(replace(toy_engine()._parts, step_sink=sink))


def answer(engine: ModelEngine, num_requests: int) -> Collected:
    """Requests of two choices that share four rows."""
    for i in range(num_requests):
        engine.add(new_request([1, 2, 3, i % 7], n=2, max_tokens=10))
    return run(engine)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "trace.json"


@pytest.fixture
def events(path: Path) -> list[Event]:
    """Of two times three requests, one of which is aborted, and a lost step; nothing was closed."""
    engine = traced(path)
    answer(engine, 3)
    gone = new_request([5] * 12, max_tokens=15)
    for request in (new_request([4] * 9), gone, new_request([6])):
        engine.add(request)
    for step in itertools.takewhile(lambda _: engine.has_work(), itertools.count()):
        engine._runner.lose_next = "collect" if step == 4 else None
        engine.step()
        if step == 8:
            engine.abort(gone.request_id)
    assert engine.stats().num_preemptions
    return json.loads(path.read_text())


def test_the_device_track_has_a_slice_for_each_step(events: list[Event]):
    steps = [e for e in events if e["ph"] == "X" and e["tid"] == 1]
    assert [step["args"]["step"] for step in steps] == list(range(len(steps)))
    assert sum(step["name"].endswith(" failed") for step in steps) == 2
    assert all(step["name"].startswith("r") and step["args"]["tokens"] > 0 for step in steps)
    ends = [0.0]
    for step in steps:
        assert step["ts"] >= ends[-1] - 0.01
        assert step["dur"] >= 0
        ends.append(step["ts"] + step["dur"])


def test_the_host_track_has_four_slices_a_step_that_do_not_overlap(events: list[Event]):
    slices = [e for e in events if e["ph"] == "X" and e["tid"] == 2]
    names = Counter(e["name"] for e in slices)
    assert names.keys() == {"schedule", "dispatch", "collect", "emit"}
    assert len(set(names.values())) == 1
    end = 0.0
    for event in sorted(slices, key=lambda e: (e["ts"], e["dur"])):
        assert event["ts"] >= end - 0.01
        end = max(end, event["ts"] + event["dur"])


def test_each_choice_has_a_row_of_closed_phases(events: list[Event]):
    rows = defaultdict(list)
    for event in events:
        if event["ph"] in "be":
            rows[event["id"]].append(event)
    assert len(rows) == 2 * 3 + 3
    for choice, row in rows.items():
        opened: list[str] = []
        for event in row:
            if event["ph"] == "b":
                opened.append(event["name"])
            else:
                assert opened.pop() == event["name"]
        assert opened == []
        names = [event["name"] for event in row if event["ph"] == "b"]
        assert names[:4] == [choice, "queued", "prefill", "decode"]
        assert [event["ts"] for event in row] == sorted(event["ts"] for event in row)
    phases = Counter(e["name"] for row in rows.values() for e in row if e["ph"] == "b")
    assert phases["prefill"] > phases["queued"]  # preempted ones


def test_counters_follow_the_engine_down_to_nothing(events: list[Event]):
    last = {event["name"]: event["args"] for event in events if event["ph"] == "C"}
    assert last == {"choices": {"running": 0, "waiting": 0}, "KV cache": {"% in use": 0.0}}


def test_names_of_tracks_and_the_time_of_day_are_told(events: list[Event]):
    told = {str(event["args"]) for event in events if event["ph"] == "M"}
    assert "{'name': 'tpugate toy'}" in told
    assert any("labels" in args for args in told)


def test_the_file_is_whole_json_after_every_step(path: Path):
    engine = traced(path)
    lengths = {len(json.loads(path.read_text()))}
    for _ in range(3):
        answer(engine, 2)
        lengths.add(len(json.loads(path.read_text())))
    assert len(lengths) == 4


def test_a_file_that_is_cut_anywhere_opens_without_its_last_line(path: Path, events: list[Event]):
    whole = path.read_bytes()
    for cut in range(2, len(whole), 997):
        lines = whole[:cut].split(b"\n")[:-1]
        text = b"\n".join(lines).removesuffix(b",") + b"]"
        assert json.loads(text) == events[: len(lines) - 1]


def test_a_file_that_is_full_ends_whole_and_says_so(path: Path, caplog: pytest.LogCaptureFixture):
    engine = traced(path, max_bytes=20_000)
    for _ in range(30):
        collected = answer(engine, 2)
    assert len(collected.deltas) == 2
    assert 10_000 < path.stat().st_size <= 20_000
    assert json.loads(path.read_text())
    assert [r.levelname for r in caplog.records if "is full" in r.message] == ["WARNING"]


@contextmanager
def disk_full_at(num_bytes: int) -> Iterator[None]:
    """No file of this process may grow beyond that."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_disk_that_fills_ends_the_trace_and_not_the_answers(
    path: Path, caplog: pytest.LogCaptureFixture
):
    engine = traced(path)
    answer(engine, 1)
    size = path.stat().st_size
    with disk_full_at(size + 100):
        collected = answer(engine, 4)
    answer(engine, 1)
    assert all(collected.is_over(request_id) for request_id in collected.deltas)
    assert path.stat().st_size == size
    assert json.loads(path.read_text())
    assert [r.levelname for r in caplog.records if "ends here" in r.message] == ["WARNING"]


def test_a_folder_is_made_and_gets_a_file_of_its_own_for_each_worker(tmp_path: Path):
    folder = tmp_path / "new" / "traces"
    files = [open_trace(folder, "org/model:1", worker_id).path for worker_id in ("a/b", "c")]
    assert sorted(folder.iterdir()) == sorted(files)
    assert files[0].name.endswith("-org-model-1-a-b.json")
    assert all(json.loads(file.read_text()) for file in files)


def test_an_older_file_is_replaced(path: Path):
    path.write_text("x" * 100_000)
    open_trace(path, "toy", "a")
    assert path.stat().st_size < 1000
    assert json.loads(path.read_text())


def test_a_place_that_cannot_be_written_is_refused_in_one_sentence(path: Path, tmp_path: Path):
    path.write_text("")
    full = tmp_path / "full.json"
    full.symlink_to("/dev/full")
    for target, reason in {
        path / "below": "Not a directory",
        tmp_path / "missing" / "x.json": "No such file or directory",
        full: os.strerror(28),
    }.items():
        with pytest.raises(ConfigError) as caught:
            open_trace(target, "toy", "a")
        assert str(caught.value) == (
            f"The profile (--profile, TPUGATE_PROFILE) cannot be written to {target}: {reason}."
        )
