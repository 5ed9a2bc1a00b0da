"""Protects continuous batching: whatever arrives, leaves, is preempted or lost on the device, every
request ends with the tokens that its text alone decides, and no block or row is lost on the way."""

import itertools

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.contract.test_worker_engine import Collected
from tests.fakes.toy_device import EOS, NUM_TOKENS, ToyRunner, continuation
from torchtpu.buckets import NO_PREFILL, BucketLadder, PrefillShape
from workers.engine.engine import EngineParts, ModelEngine
from workers.engine.kv_cache import BlockPool
from workers.engine.outputs import StepPlan
from workers.engine.request import Sequence, Status
from workers.engine.scheduler import Scheduler, SchedulerConfig
from workers.engine.scripted import scripted_tokenizer
from workers.protocol import FinishReason, GenerateRequest, SamplingParams

BLOCK_LEN = 4
CONTEXT_LEN = 32
FEWEST_BLOCKS = CONTEXT_LEN // BLOCK_LEN
LADDER = BucketLadder(
    rows=(2, 4),
    mixed_rows=(4,),
    prefill=(PrefillShape(6, 2, 4), PrefillShape(12, 3, 8)),
    contexts=(16, CONTEXT_LEN),
    mixed_contexts=(16, CONTEXT_LEN),
)
ids = itertools.count()


def toy_engine(num_blocks: int = 4 * FEWEST_BLOCKS) -> ModelEngine:
    pool = BlockPool(num_blocks + 1)
    return ModelEngine(
        EngineParts(
            runner=ToyRunner(LADDER, num_blocks + 1, BLOCK_LEN),
            scheduler=Scheduler(SchedulerConfig(LADDER, prefill_overhead_tokens=4), pool),
            pool=pool,
            tokenizer=scripted_tokenizer(),
            block_len=BLOCK_LEN,
            context_len=CONTEXT_LEN,
            eos_token_ids=frozenset({EOS}),
        )
    )


def new_request(
    prompt: list[int],
    max_tokens: int = 6,
    n: int = 1,
    priority: int = 0,
    *,
    ignore_eos: bool = True,
) -> GenerateRequest:
    return GenerateRequest(
        request_id=f"r{next(ids)}",
        model="toy",
        reply_to="replies",
        prompt_token_ids=prompt,
        sampling=SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=ignore_eos),
        n=n,
        priority=priority,
    )


class Driven:
    """A toy engine whose every step is checked."""

    def __init__(self, num_blocks: int) -> None:
        self.engine = toy_engine(num_blocks)
        self.scheduler, self.runner = self.engine._scheduler, self.engine._runner
        self.collected = Collected()
        self.sequences: dict[str, list[Sequence]] = {}
        self.aborted: set[str] = set()

    @property
    def live(self) -> list[str]:
        return [i for i in self.sequences if not self.collected.is_over(i)]

    def add(self, request: GenerateRequest) -> str:
        self.engine.add(request)
        resident = self.engine._residents[request.request_id]
        self.sequences[request.request_id] = resident.sequences
        return request.request_id

    def abort(self, request_id: str) -> None:
        self.aborted.add(request_id)
        self.collected.take(self.engine.abort(request_id))

    def step(self, lose: str | None = None) -> None:
        self.runner.lose_next = lose
        first = min(self.scheduler.running, key=lambda s: s.order, default=None)
        num_plans, failures = len(self.runner.plans), self.engine._num_failed_steps
        self.collected.take(self.engine.step())
        failed = self.engine._num_failed_steps > failures
        for plan in self.runner.plans[num_plans:]:
            check_plan(plan)
        self.scheduler.check_integrity()
        self.check_shared_blocks()
        for sequence in self.scheduler.running:
            check_counts(sequence)
        if first is not None and not failed and not self.overtaken(first):
            assert first.status is not Status.PREEMPTED, "the first in order was preempted"

    def overtaken(self, sequence: Sequence) -> bool:
        """Somebody more urgent came."""
        others = (*self.scheduler.running, *self.scheduler.waiting)
        return min(others, key=lambda s: s.order, default=sequence) is not sequence

    def check_shared_blocks(self) -> None:
        content: dict[int, tuple[int, ...]] = {}
        for sequence in self.scheduler.running:
            for index, block in enumerate(sequence.table.blocks):
                text = tuple(sequence.token_ids[: (index + 1) * BLOCK_LEN])
                if block in content:
                    assert text == content[block], f"block {block} has two contents"
                    assert len(text) == (index + 1) * BLOCK_LEN, f"{block} is shared half filled"
                content[block] = text

    def run(self) -> None:
        sequences = [s for i in self.live for s in self.sequences[i]]
        # Even one after the other, each preempted once for each of its tokens, they would take this long.
        bound = 20 + sum(CONTEXT_LEN * (2 + len(s.request.prompt_token_ids)) for s in sequences)
        for _ in range(bound):
            if not self.engine.has_work():
                break
            self.step()
        assert not self.engine.has_work(), "the engine does not come to an end"

    def check_answers(self) -> None:
        for request_id, sequences in self.sequences.items():
            assert self.collected.is_over(request_id)
            for sequence in sequences:
                check_answer(sequence, self.collected, is_aborted=request_id in self.aborted)
        assert self.scheduler._pool.usage == 0


def check_counts(sequence: Sequence) -> None:
    """A result is at most two steps away, and only the newest token is not in the cache yet."""
    assert 0 <= sequence.num_in_flight <= 2
    assert 0 <= sequence.num_computed <= len(sequence.table.blocks) * BLOCK_LEN
    if sequence.is_decoding:
        assert sequence.num_computed == sequence.total_len - 1


def check_plan(plan: StepPlan) -> None:
    """It fits a bucket that was compiled, and gives every sequence one thing to do."""
    bucket = plan.bucket
    assert bucket in LADDER.buckets
    assert len(plan.rows) <= bucket.rows
    assert len(plan.segments) <= bucket.prefill.segments
    assert bool(plan.segments) == (bucket.prefill != NO_PREFILL)
    assert 0 < plan.num_tokens <= bucket.num_tokens
    assert sum(segment.length for segment in plan.segments) <= bucket.prefill.tokens
    for row in plan.rows:
        assert row.position < bucket.context
    for segment in plan.segments:
        assert 1 <= segment.length <= bucket.prefill.segment_len
        assert segment.start + segment.length <= bucket.context
    entries = [*plan.rows, *plan.segments]
    assert len({id(entry.sequence) for entry in entries}) == len(entries)


def check_answer(sequence: Sequence, collected: Collected, *, is_aborted: bool) -> None:
    request, prompt_len = sequence.request, len(sequence.request.prompt_token_ids)
    tokens = sequence.token_ids[prompt_len:]
    expected = continuation(
        request.prompt_token_ids,
        min(request.sampling.max_tokens, CONTEXT_LEN - prompt_len),
        ignore_eos=request.sampling.ignore_eos,
    )
    reason = collected.ends(request.request_id)[sequence.choice]
    if reason is FinishReason.ABORT:
        assert is_aborted
        assert tokens == expected[: len(tokens)]
        return
    stopped = expected[-1] == EOS and not request.sampling.ignore_eos
    assert tokens == expected
    assert reason is (FinishReason.STOP if stopped else FinishReason.LENGTH)
    counted = sum(
        d.num_tokens for d in collected.deltas[request.request_id] if d.choice == sequence.choice
    )
    assert counted == len(tokens)


def prompt_of(length: int, first: int = 1) -> list[int]:
    return [first, *(1 + i % (NUM_TOKENS - 1) for i in range(length - 1))]


@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 9, 20, CONTEXT_LEN - 1])
def test_one_request_of_any_length(length: int):
    driven = Driven(FEWEST_BLOCKS)
    driven.add(new_request(prompt_of(length), max_tokens=CONTEXT_LEN))
    driven.run()
    driven.check_answers()


def test_more_requests_than_rows_and_blocks():
    driven = Driven(FEWEST_BLOCKS + 2)
    for first in range(1, NUM_TOKENS):
        driven.add(new_request(prompt_of(10, first), max_tokens=15))
        driven.add(new_request(prompt_of(10, first), max_tokens=9, n=2))
    driven.run()
    driven.check_answers()
    assert driven.scheduler.num_preemptions > 0


def test_each_decoding_sequence_gets_a_token_a_step_while_others_prefill():
    driven = Driven(4 * FEWEST_BLOCKS)
    driven.add(new_request(prompt_of(3), max_tokens=20))
    while not any(s.is_decoding for s in driven.scheduler.running):
        driven.step()
    driven.add(new_request(prompt_of(20, 2)))
    for _ in range(3):
        driven.step()
        (plan,) = driven.runner.plans[-1:]
        assert len(plan.rows) == 1
        assert len(plan.segments) == 1
    driven.run()
    driven.check_answers()


def test_the_last_in_order_is_preempted():
    driven = Driven(FEWEST_BLOCKS)
    early = driven.add(new_request(prompt_of(12), max_tokens=12))
    late = driven.add(new_request(prompt_of(12, 2), max_tokens=12))
    driven.run()
    assert [driven.sequences[i][0].epoch > 0 for i in (early, late)] == [False, True]
    driven.check_answers()


def test_an_urgent_request_overtakes_those_that_wait_but_stops_none_that_runs():
    driven = Driven(4 * FEWEST_BLOCKS)
    for first in (1, 2, 3, 4):
        driven.add(new_request(prompt_of(5, first), max_tokens=8, priority=1))
    while len(driven.scheduler.running) < LADDER.max_rows:
        driven.step()
    patient = driven.add(new_request(prompt_of(5, 5), max_tokens=8, priority=1))
    urgent = driven.add(new_request(prompt_of(5, 6), max_tokens=8, priority=0))
    while driven.sequences[urgent][0].status is Status.WAITING:
        assert driven.sequences[patient][0].status is Status.WAITING
        driven.step()
    driven.run()
    assert driven.scheduler.num_preemptions == 0
    driven.check_answers()


def test_an_urgent_request_takes_the_blocks_of_one_that_came_before():
    driven = Driven(FEWEST_BLOCKS)
    patient = driven.add(new_request(prompt_of(12), max_tokens=16, priority=1))
    driven.step()
    urgent = driven.add(new_request(prompt_of(12, 2), max_tokens=16, priority=0))
    driven.run()
    assert [driven.sequences[i][0].epoch > 0 for i in (patient, urgent)] == [True, False]
    driven.check_answers()


def test_a_request_starts_only_if_its_first_token_has_room_too():
    driven = Driven(FEWEST_BLOCKS)
    first = driven.add(new_request(prompt_of(16), max_tokens=4))
    driven.step()
    driven.step()
    second = driven.add(new_request(prompt_of(12, 2), max_tokens=4))
    driven.step()
    # Five blocks are held, three are free: enough for the prompt, too few for the prompt and a token.
    assert len(driven.sequences[first][0].table.blocks) == 5
    assert driven.sequences[second][0].status is Status.WAITING
    driven.run()
    assert driven.scheduler.num_preemptions == 0
    driven.check_answers()


def test_what_a_preempted_sequence_finds_of_itself_counts_as_computed():
    driven = Driven(FEWEST_BLOCKS)
    driven.add(new_request(prompt_of(12), max_tokens=16))
    late = driven.add(new_request(prompt_of(12, 2), max_tokens=16))
    driven.run()
    assert driven.sequences[late][0].epoch > 0
    assert driven.sequences[late][0].num_cached == 0


def test_results_of_a_sequence_that_ended_a_step_earlier_are_dropped():
    driven = Driven(FEWEST_BLOCKS)
    prompt = next(
        p
        for p in itertools.product(range(1, NUM_TOKENS), repeat=3)
        if len(continuation(p, 9, ignore_eos=False)) == 2
    )
    driven.add(new_request(list(prompt), max_tokens=9, ignore_eos=False))
    driven.run()
    driven.check_answers()


@pytest.mark.parametrize("when", ["dispatch", "collect"])
@pytest.mark.parametrize("step", range(6))
def test_a_lost_step_costs_no_request_its_answer(when: str, step: int):
    driven = Driven(4 * FEWEST_BLOCKS)
    for first in (1, 2, 3):
        driven.add(new_request(prompt_of(4 * first, first), max_tokens=5, n=2))
    for _ in range(step):
        driven.step()
    driven.step(lose=when)
    driven.run()
    driven.check_answers()


@pytest.mark.parametrize("when", ["dispatch", "collect"])
def test_a_device_that_fails_every_time_ends_the_engine(when: str):
    driven = Driven(FEWEST_BLOCKS)
    request_id = driven.add(new_request(prompt_of(5)))
    driven.step()
    with pytest.raises(RuntimeError, match="deleted or donated"):
        for _ in range(10):
            driven.step(lose=when)
    driven.collected.take(driven.engine.fail_all("It broke."))
    assert driven.collected.ends(request_id) == {0: FinishReason.ERROR}
    driven.scheduler.check_integrity()
    assert not driven.engine.has_work()


class Workload(RuleBasedStateMachine):
    """Anything a gateway can do, in any order, on a device with few blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.driven = Driven(FEWEST_BLOCKS + 3)

    @rule(
        # Two letters make equal beginnings likely.
        prompt=st.lists(st.integers(1, 2), min_size=1, max_size=CONTEXT_LEN - 1),
        max_tokens=st.integers(1, CONTEXT_LEN),
        n=st.integers(1, 2),
        priority=st.integers(0, 1),
        ignore_eos=st.booleans(),
    )
    def add(
        self, prompt: list[int], max_tokens: int, n: int, priority: int, ignore_eos: bool
    ) -> None:
        self.driven.add(new_request(prompt, max_tokens, n, priority, ignore_eos=ignore_eos))

    @precondition(lambda self: self.driven.engine.has_work())
    @rule(num_steps=st.integers(1, 6))
    def step(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.driven.step()

    @precondition(lambda self: self.driven.live)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.driven.abort(data.draw(st.sampled_from(self.driven.live)))

    @precondition(lambda self: self.driven.engine.has_work())
    @rule(when=st.sampled_from(["dispatch", "collect"]))
    def lose_a_step(self, when: str) -> None:
        self.driven.step(lose=when)
        for _ in range(2):
            self.driven.step()

    @invariant()
    def rows_and_blocks_are_accounted_for(self) -> None:
        self.driven.scheduler.check_integrity()
        assert len(self.driven.scheduler.running) <= LADDER.max_rows

    def teardown(self) -> None:
        self.driven.run()
        self.driven.check_answers()


TestWorkload = Workload.TestCase
TestWorkload.settings = settings(max_examples=80, stateful_step_count=25, deadline=None)
