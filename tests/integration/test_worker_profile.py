"""Protects `tpugate worker --profile`: a worker that is killed leaves a trace that opens, and a place that
cannot be written is told before anything starts."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from tests.fakes.processes import WorkerUnderTest
from tests.fakes.wire import GatewayPeer, wait_until

Start = Callable[..., WorkerUnderTest]


def test_a_killed_worker_leaves_a_trace_of_its_steps(
    peer: GatewayPeer, start_worker: Start, tmp_path: Path
):
    folder = tmp_path / "traces"
    worker = start_worker("a", profile=str(folder), step_delay_s="0.01")
    ids = [peer.enqueue([b"one ", b"two ", b"three"]) for _ in range(3)]
    for request_id in ids:
        peer.wait_for_end(request_id)
    (file,) = folder.iterdir()

    def ended() -> set[str]:
        return {e["id"] for e in json.loads(file.read_text()) if e["ph"] == "e"}

    wait_until(lambda: len(ended()) == 3, "the last step is written")
    worker.kill()
    events = json.loads(file.read_text())
    assert {e["id"] for e in events if e["ph"] == "b"} == {f"{i}/0" for i in ids} == ended()
    steps = [e for e in events if e["ph"] == "X" and e["name"] == "script"]
    assert sum(step["args"]["decoding"] for step in steps) == 3 * 2
    assert all(step["dur"] >= 10_000 for step in steps)
    assert str(file) in worker.output


def test_a_worker_whose_profile_cannot_be_written_does_not_start(tmp_path: Path):
    file = tmp_path / "file"
    file.write_text("")
    for command in (["-m", "cli.main", "worker", "--profile", str(file)], ["-m", "workers"]):
        run = subprocess.run(
            [sys.executable, *command],
            env={"TPUGATE_ENGINE": "fake", "TPUGATE_PROFILE": str(file / "below")},
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert run.returncode == 2
        assert run.stderr.startswith("Error: The profile (--profile, TPUGATE_PROFILE) cannot be ")
        assert len(run.stderr.splitlines()) == 1
