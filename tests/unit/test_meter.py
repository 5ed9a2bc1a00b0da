"""Protects the tiling of chip-time: whatever an engine does, a worker's entries follow each other without gap or
overlap, from the grant to the release, and what a request is told of its steps is what the ledger will book."""

from collections import defaultdict

from hypothesis import given, settings
from hypothesis import strategies as st

from workers.attribution import shares
from workers.chip_time import (
    AnyEntry,
    Coefficients,
    Fits,
    Opened,
    Released,
    Span,
    Spent,
    Step,
    decode_entry,
    encode,
)
from workers.config import Chips
from workers.engine.step_log import EngineLoad, StepLog, StepMember, StepWork
from workers.meter import Meter
from workers.protocol import FinishReason, GenerateRequest, OutputDelta, SamplingParams, Usage

FITS = Fits("fit-1", {"b": Coefficients(5_000_000, 40_000, 7, 60_000, 11)})
SECOND = 1_000_000_000


class Clock:
    """Monotonic, of the test's own making."""

    def __init__(self) -> None:
        self.now_s = 12_345.678

    def __call__(self) -> float:
        return self.now_s


class Bench:
    """A meter and the step log that feeds it, on a clock that the test moves."""

    def __init__(self, num_chips: int = 1) -> None:
        self.clock = Clock()
        self.num_chips = num_chips
        self.meter = Meter(Chips("v6e", num_chips, "here"), self._opened, self.clock)
        self.log = StepLog(self.meter, self.clock, self.clock)
        self.num_compiles = 0
        self.entries: list[AnyEntry] = []

    def _opened(self, unix_ns: int) -> Opened:
        return Opened(
            number=0, begin_ns=0, end_ns=0, model="m", worker_id="w", engine="model", sku="v6e",
            num_chips=self.num_chips, granted_unix_ns=unix_ns,
        )  # fmt: skip

    def wait(self, seconds: float) -> None:
        self.clock.now_s += seconds

    def load(self) -> EngineLoad:
        return EngineLoad(1, 0, 0.5, self.num_compiles)

    def serve(self) -> None:
        self.meter.loaded()

    def join(self, request_id: str) -> None:
        sampling = SamplingParams(max_tokens=9)
        self.log.resident()
        self.meter.joined(
            GenerateRequest(
                request_id=request_id, model="m", reply_to="r", prompt_token_ids=[1, 2],
                sampling=sampling, fair_key="key", tag="tag",
            )
        )  # fmt: skip

    def end(self, request_id: str, num_tokens: int = 3) -> Usage:
        delta = OutputDelta(
            request_id=request_id, seq=0, finish_reason=FinishReason.STOP,
            usage=Usage(prompt_tokens=2, completion_tokens=num_tokens),
        )  # fmt: skip
        usage = self.meter.ended(delta).usage
        assert usage is not None
        return usage

    def step(self, members: tuple[StepMember, ...], host_s: float, device_s: float) -> None:
        self.log.begin()
        self.wait(host_s)
        self.log.scheduled(lambda: StepWork("b", 8, 1, "greedy", members))
        self.wait(host_s / 2)
        self.log.launched()
        self.wait(device_s)
        self.log.collected()
        self.log.emitted(self.load)

    def told(self) -> list[AnyEntry]:
        self.entries += self.meter.take()
        return self.entries


def member(request_id: str, num_tokens: int = 1, context_len: int = 4) -> StepMember:
    phase = "prefill" if num_tokens > 1 else "decode"
    return StepMember(
        request_id=request_id, choice=0, phase=phase, num_tokens=num_tokens, context_len=context_len
    )  # fmt: skip


def assert_tiled(entries: list[AnyEntry]) -> None:
    assert [entry.number for entry in entries] == list(range(len(entries)))
    assert entries[0].begin_ns == 0
    for before, after in zip(entries, entries[1:], strict=False):
        assert after.begin_ns == before.end_ns
    for entry in entries:
        assert entry.begin_ns <= entry.end_ns
        if isinstance(entry, Step):
            assert min(entry.idle_ns, entry.bubble_ns, entry.compile_ns, entry.length_ns) >= 0


MOVES = st.lists(
    st.tuples(
        st.sampled_from(["step", "rest", "join", "end", "compile", "fail", "wait"]),
        st.floats(0, 20, allow_nan=False),
        st.integers(0, 3),
    ),
    max_size=40,
)


@settings(max_examples=150, deadline=None)
@given(moves=MOVES, num_chips=st.integers(1, 8), fitted=st.booleans())
def test_entries_tile_the_groups_life_and_usage_is_what_they_say(
    moves: list[tuple[str, float, int]], num_chips: int, fitted: bool
):
    bench = Bench(num_chips)
    bench.meter.progress("starting the device")
    bench.wait(1.5)
    bench.serve()
    bench.meter.fits = FITS if fitted else None
    resident: list[str] = []
    told: dict[str, Usage] = {}
    for number, (move, seconds, place) in enumerate(moves):
        if move == "join":
            resident.append(f"r{number}")
            bench.join(resident[-1])
        elif move == "end" and resident:
            request_id = resident.pop(place % len(resident))
            told[request_id] = bench.end(request_id)
        elif move == "rest" and not resident:
            bench.meter.rest()
        elif move == "wait":
            bench.wait(seconds)
        elif move == "compile":
            bench.num_compiles += 1
        elif move == "step" and resident:
            bench.step(tuple(member(r, 1 + place) for r in resident), seconds / 100, seconds)
        elif move == "fail" and resident:
            bench.log.begin()
            bench.log.scheduled(lambda: StepWork("b", 8, 1, "greedy", (member("x"),)))
            bench.wait(seconds)
            bench.log.lost(bench.load)
    bench.wait(0.25)
    bench.meter.release()
    entries = bench.told()
    assert_tiled(entries)
    assert isinstance(entries[0], Opened)
    assert isinstance(entries[-1], Released)
    assert entries[-1].end_ns == round(1e9 * (bench.clock.now_s - 12_345.678))
    assert [decode_entry(encode(entry)) for entry in entries] == entries
    booked = booked_by(entries, num_chips)
    for request_id, usage in told.items():
        assert (usage.prefill_chip_ns, usage.decode_chip_ns) == tuple(booked[request_id])
        assert usage.sku == "v6e"


def booked_by(entries: list[AnyEntry], num_chips: int) -> dict[str, list[int]]:
    """What an accountant makes of them, prefill and decode."""
    booked: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for entry in entries:
        if not isinstance(entry, Step) or entry.is_failed:
            continue
        fit = FITS.buckets[entry.bucket] if entry.fit else None
        parts = shares(num_chips * entry.length_ns, entry.members, fit)
        for part, each in zip(parts, entry.members, strict=True):
            booked[each.request_id][0 if each.is_prefill else 1] += part
    return booked


def test_loading_is_told_by_phase_in_pieces():
    bench = Bench()
    for what, seconds in [("starting the device", 2), ("read the weights", 12), ("warming up", 1)]:
        bench.meter.progress(what)
        bench.wait(seconds)
    bench.serve()
    spans = [entry for entry in bench.told() if isinstance(entry, Span)]
    lengths = [(span.spent, (span.end_ns - span.begin_ns) // SECOND) for span in spans]
    assert lengths == [
        (Spent.PROVISION, 2),
        (Spent.WEIGHTS, 5), (Spent.WEIGHTS, 5), (Spent.WEIGHTS, 2),
        (Spent.COMPILE, 1),
    ]  # fmt: skip


def test_the_gap_before_a_step_is_idle_until_a_request_came_and_a_bubble_after():
    bench = Bench()
    bench.serve()
    bench.wait(2)
    bench.join("a")
    bench.wait(0.5)
    bench.step((member("a"),), 0, 1)
    step = bench.told()[-1]
    assert isinstance(step, Step)
    assert (step.idle_ns, step.bubble_ns, step.length_ns) == (2 * SECOND, SECOND // 2, SECOND)
    assert [joined.request_id for joined in step.joined] == ["a"]


def test_a_compilation_on_the_hot_path_is_overhead():
    bench = Bench()
    bench.serve()
    bench.join("a")
    bench.log.begin()
    bench.log.scheduled(lambda: StepWork("b", 8, 0, "greedy", (member("a"),)))
    bench.wait(3)
    bench.num_compiles += 1
    bench.log.launched()
    bench.wait(1)
    bench.log.collected()
    bench.log.emitted(bench.load)
    step = bench.told()[-1]
    assert isinstance(step, Step)
    assert (step.compile_ns, step.length_ns) == (3 * SECOND, SECOND)


def test_the_end_of_a_request_is_told_with_the_step_that_may_still_compute_for_it():
    bench = Bench()
    bench.serve()
    bench.join("a")
    bench.step((member("a"),), 0, 1)
    usage = bench.end("a")
    bench.step((member("a"),), 0, 1)
    last = bench.told()[-1]
    assert usage.decode_chip_ns == SECOND
    assert [ended.request_id for ended in last.ended] == ["a"]
    assert last.ended[0].num_output_tokens == 3


def test_what_cannot_be_kept_is_told_as_a_fault_at_full_length():
    bench = Bench()
    bench.serve()
    bench.join("a")
    bench.meter.is_overfull = True
    bench.step((member("a"),), 0, 1)
    bench.meter.is_overfull = False
    bench.step((member("a"),), 0, 2)
    fault, step = bench.told()[-2:]
    assert isinstance(fault, Span)
    assert fault.spent is Spent.FAULT
    assert (fault.end_ns - fault.begin_ns, step.end_ns - step.begin_ns) == (SECOND, 2 * SECOND)


def test_gaps_while_it_drains_are_no_idle_time():
    bench = Bench()
    bench.serve()
    bench.meter.is_draining = True
    bench.wait(2)
    bench.meter.release()
    span = bench.told()[-2]
    assert isinstance(span, Span)
    assert span.spent is Spent.DRAIN


def test_nothing_is_told_after_the_release():
    bench = Bench()
    bench.serve()
    bench.meter.release()
    number = len(bench.told())
    bench.join("a")
    bench.step((member("a"),), 0, 1)
    bench.meter.rest()
    bench.meter.release()
    assert len(bench.told()) == number
