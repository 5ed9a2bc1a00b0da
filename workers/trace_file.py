"""The steps of a worker as a trace that chrome://tracing and https://ui.perfetto.dev open.

The file is Chrome's trace event format, a JSON array. It is whole after each write: the closing bracket
is overwritten by the next events. So a worker that is killed leaves a file that opens, without at most
the last `FLUSH_S`. Tracks:

    device    one slice a step, named by its bucket
    host      schedule, dispatch, collect (waiting for the device), emit
    requests  one row a choice; in it queued, prefill, decode, and prefill again after a preemption
    counters  running and waiting choices, share of the KV cache in use
"""

import logging
import os
import re
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from workers.engine.step_log import StepMember, StepRecord
from workers.errors import ConfigError

MAX_BYTES = 128 * 2**20
"""About what a browser opens without trouble; some 200,000 steps."""
FLUSH_BYTES = 64 * 2**10
FLUSH_S = 0.5
BEGIN, SEPARATOR, END = b"[\n", b",\n", b"\n]\n"
DEVICE, HOST, COUNTERS = 1, 2, 3
"""Threads of the one process that a trace knows."""

log = logging.getLogger("worker")

Event = dict[str, Any]
Choice = tuple[str, int]


def open_trace(target: Path, served_name: str, worker_id: str) -> "TraceFile":
    """A trace in the folder `target`, made if need be, or in the file `target` if it ends in .json.

    Raises `ConfigError` if it cannot be written.
    """
    try:
        path = target
        if target.suffix != ".json" or target.is_dir():
            target.mkdir(parents=True, exist_ok=True)
            path = target / _file_name(served_name, worker_id)
        return TraceFile(path, served_name)
    except OSError as error:
        raise ConfigError(
            f"The profile (--profile, TPUGATE_PROFILE) cannot be written to {target}: "
            f"{error.strerror}."
        ) from error


def _file_name(served_name: str, worker_id: str) -> str:
    began = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", f"{served_name}-{worker_id}")[:150]
    return f"steps-{began}-{name}.json"


class TraceFile:
    """A `StepSink`. Writing ends, with a line in the log, at `max_bytes` or when a write fails."""

    def __init__(self, path: Path, served_name: str, max_bytes: int = MAX_BYTES) -> None:
        """Raises OSError if the file cannot be made or takes nothing. An older one is replaced."""
        self.path = path
        self._max_bytes = max_bytes
        self._zero_s = time.monotonic()
        self._encoder = msgspec.json.Encoder()
        self._buffer = bytearray(BEGIN)
        self._end = 0
        """Where the next events go; the closing bracket lies there."""
        self._written_s = self._zero_s
        self._phases: dict[Choice, str] = {}
        """What each choice's open slice is called."""
        self._counts: tuple[Event, ...] = ()
        self._add(*_names(served_name))
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
        self._write()
        log.info("Each step is written to %s, at most %d MiB.", path, max_bytes // 2**20)

    def record(self, step: StepRecord) -> None:
        if self._file < 0:
            return
        self._add(self._device_event(step), *self._host_events(step))
        self._add_request_events(step)
        self._add_counters(step)
        is_idle = step.num_running == step.num_waiting == 0
        is_due = len(self._buffer) >= FLUSH_BYTES or step.emitted_s - self._written_s >= FLUSH_S
        if is_idle or is_due:
            self._flush(step.emitted_s)

    def _flush(self, now_s: float) -> None:
        if self._end + len(self._buffer) + len(END) > self._max_bytes:
            log.warning("The trace %s is full and ends here; serving goes on.", self.path)
            self._stop()
            return
        self._written_s = now_s
        try:
            self._write()
        except OSError as error:
            log.warning("The trace %s ends here (%s); serving goes on.", self.path, error.strerror)
            self._stop()

    def _write(self) -> None:
        """Put the buffer over the closing bracket, with a new bracket after it; all or nothing."""
        whole = bytes(self._buffer) + END
        num_written = 0
        try:
            while num_written < len(whole):
                num_written += os.pwrite(self._file, whole[num_written:], self._end + num_written)
        except OSError:
            if self._end:
                # A bracket lay here before, so there is room for it even on a full disk.
                os.pwrite(self._file, END, self._end)
                os.ftruncate(self._file, self._end + len(END))
            raise
        self._end += len(self._buffer)
        self._buffer.clear()

    def _stop(self) -> None:
        os.close(self._file)
        self._file = -1
        self._buffer.clear()
        self._phases.clear()

    def _add(self, *events: Event) -> None:
        for event in events:
            if self._end or len(self._buffer) > len(BEGIN):
                self._buffer += SEPARATOR
            self._buffer += self._encoder.encode({"pid": 1, **event})

    def _us(self, time_s: float) -> float:
        """Microseconds since the trace began, to the nanosecond."""
        return round(1e6 * (time_s - self._zero_s), 3)

    def _slice(
        self, thread: int, name: str, span: tuple[float, float], args: dict[str, Any]
    ) -> Event:
        begin, end = map(self._us, span)
        event = {"ph": "X", "tid": thread, "name": name, "ts": begin, "dur": round(end - begin, 3)}
        return {**event, "args": args}

    def _device_event(self, step: StepRecord) -> Event:
        args = {
            "step": step.number,
            "tokens": step.num_tokens,
            "padding": step.num_padded,
            "prefilling": sum(member.phase == "prefill" for member in step.members),
            "decoding": sum(member.phase == "decode" for member in step.members),
            "draw": step.draw,
            "compiles": step.num_compiles,
        }
        name = f"{step.bucket} failed" if step.is_failed else step.bucket
        return self._slice(DEVICE, name, (step.began_s, step.completed_s), args)

    def _host_events(self, step: StepRecord) -> list[Event]:
        args = {"step": step.number}
        spans = {
            "schedule": (step.scheduled_s, step.dispatched_s),
            "dispatch": (step.dispatched_s, step.launched_s),
            "collect": (step.collected_s, step.completed_s),
            "emit": (step.completed_s, step.emitted_s),
        }
        return [self._slice(HOST, name, span, args) for name, span in spans.items()]

    def _add_request_events(self, step: StepRecord) -> None:
        for member in step.members:
            self._enter(member, step)
        for end in step.ended:
            choice = (end.request_id, end.choice)
            phase = self._phases.pop(choice, None)
            if phase is not None:
                self._add(
                    self._async("e", choice, phase, end.ended_s),
                    self._async("e", choice, "", end.ended_s),
                )

    def _enter(self, member: StepMember, step: StepRecord) -> None:
        """Open the slice of the member's phase if another one is open."""
        choice = (member.request_id, member.choice)
        before = self._phases.get(choice)
        if before == member.phase:
            return
        if before is None:
            if member.samples and not member.is_kept:
                return  # it ended a step ago
            before = "queued"
            self._add(
                self._async("b", choice, "", member.arrived_s),
                self._async("b", choice, before, member.arrived_s),
            )
        self._add(
            self._async("e", choice, before, step.began_s),
            self._async("b", choice, member.phase, step.began_s),
        )
        self._phases[choice] = member.phase

    def _async(self, kind: str, choice: Choice, phase: str, time_s: float) -> Event:
        """Begin or end of a phase, or, without one, of the whole row."""
        row = "{}/{}".format(*choice)
        event = {"ph": kind, "cat": "request", "id": row, "name": phase or row}
        return {**event, "tid": COUNTERS, "ts": self._us(time_s)}

    def _add_counters(self, step: StepRecord) -> None:
        """Values, where one has changed."""
        counts = (
            {"name": "choices", "args": {"running": step.num_running, "waiting": step.num_waiting}},
            {"name": "KV cache", "args": {"% in use": round(100 * step.kv_usage, 2)}},
        )
        if counts != self._counts:
            self._counts = counts
            at = {"ph": "C", "tid": COUNTERS, "ts": self._us(step.emitted_s)}
            self._add(*({**at, **count} for count in counts))


def _names(served_name: str) -> list[Event]:
    """What the tracks are called, and when time 0 is."""
    began = datetime.now(UTC).isoformat(timespec="milliseconds")
    named: list[tuple[str, int, dict[str, Any]]] = [
        ("process_name", 0, {"name": f"tpugate {served_name}"}),
        ("process_labels", 0, {"labels": f"from {began}"}),
        ("thread_name", DEVICE, {"name": "device"}),
        ("thread_name", HOST, {"name": "host"}),
    ]
    return [{"ph": "M", "tid": tid, "name": name, "args": args} for name, tid, args in named]
