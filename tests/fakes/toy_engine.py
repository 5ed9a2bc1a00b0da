"""The real engine over the toy device, each step of it checked."""

import itertools
import time
from collections.abc import Callable
from functools import cache

from models.grammars import compiled
from tests.contract.test_worker_engine import Collected
from tests.fakes.toy_device import (
    EOS,
    NUM_TOKENS,
    ToyRunner,
    bound_continuation,
    continuation,
    toy_logprobs,
    toy_vocabulary,
)
from torchtpu.buckets import NO_PREFILL, BucketLadder, PrefillShape
from workers.engine.engine import EngineParts, ModelEngine
from workers.engine.grammars import Grammars
from workers.engine.interface import EXPIRED
from workers.engine.kv_cache import TRASH, BlockPool, CacheGroup, KVCache, most_held
from workers.engine.outputs import StepPlan
from workers.engine.request import Sequence, Status
from workers.engine.scheduler import Scheduler, SchedulerConfig
from workers.engine.scripted import scripted_tokenizer
from workers.protocol import (
    FinishReason,
    GenerateRequest,
    Grammar,
    SamplingParams,
    TokenLogprobs,
)

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
GRAMMARS = tuple(
    Grammar("regex", text) for text in ("[a-f]*", "(ab|ba)+c", "a{0,9}", "abc", "([a-c]{2}d?){3,}")
)
WINDOW = 6
MAX_CHUNK = max(shape.segment_len for shape in LADDER.prefill)
FEWEST_WINDOW_BLOCKS = most_held(WINDOW, BLOCK_LEN, MAX_CHUNK)
ids = itertools.count()


@cache
def toy_grammars() -> Grammars:
    """Shared, as threads are dear: an empty engine leaves nothing in it but what is compiled.

    `GRAMMARS` are compiled already, so that requests with them begin at once.
    """
    grammars = Grammars(toy_vocabulary, NUM_TOKENS)
    for index, grammar in enumerate(GRAMMARS):
        grammars.start(str(index), grammar)
    while grammars.waiting:
        grammars.wait(1.0)
        grammars.take_ready()
    return grammars


def toy_engine(
    num_blocks: int = 4 * FEWEST_BLOCKS,
    max_step_tokens: int | None = None,
    clock: Callable[[], float] = time.time,
    window_blocks: int | None = None,
) -> ModelEngine:
    """With `window_blocks` it has layers too that see a window, and so many blocks for them."""
    pools = {None: BlockPool(num_blocks + 1)}
    if window_blocks is not None:
        pools[WINDOW] = BlockPool(window_blocks + 1)
    groups = [CacheGroup(pool, window) for window, pool in pools.items()]
    cache = KVCache(groups, BLOCK_LEN, MAX_CHUNK)
    config = SchedulerConfig(LADDER, 4, max_step_tokens)
    sizes = [pool.num_blocks for pool in pools.values()]
    return ModelEngine(
        EngineParts(
            runner=ToyRunner(LADDER, BLOCK_LEN, sizes, list(pools)),
            scheduler=Scheduler(config, cache),
            cache=cache,
            tokenizer=scripted_tokenizer(),
            context_len=CONTEXT_LEN,
            eos_token_ids=frozenset({EOS}),
            vocab_size=NUM_TOKENS,
            grammars=toy_grammars(),
            clock=clock,
        )
    )


def new_request(
    prompt: list[int],
    max_tokens: int = 6,
    n: int = 1,
    priority: int = 0,
    *,
    ignore_eos: bool = True,
    **fields: object,
) -> GenerateRequest:
    return GenerateRequest(
        request_id=f"r{next(ids)}",
        model="toy",
        reply_to="replies",
        prompt_token_ids=prompt,
        sampling=SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=ignore_eos),
        n=n,
        priority=priority,
        **fields,
    )


def new_sequence(request: GenerateRequest) -> Sequence:
    """The only choice of a request that has just come to an engine of its own."""
    return toy_engine()._new_sequence(request, 0, 0, CONTEXT_LEN)


class Driven:
    """A toy engine whose every step is checked."""

    def __init__(
        self,
        num_blocks: int = 4 * FEWEST_BLOCKS,
        max_step_tokens: int | None = None,
        window_blocks: int | None = None,
    ) -> None:
        self.now_s = 1.0
        self.engine = toy_engine(num_blocks, max_step_tokens, lambda: self.now_s, window_blocks)
        self.scheduler, self.runner = self.engine._scheduler, self.engine._runner
        self.runner.watch = self.check_plan
        self.collected = Collected()
        self.sequences: dict[str, list[Sequence]] = {}
        self.aborted: set[str] = set()
        self.max_step_tokens = max_step_tokens
        self.tenants: dict[tuple[int, int], str] = {}
        """Whose tokens each block holds."""

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
        resets = self.runner.num_resets
        self.collected.take(self.engine.step())
        failed = self.runner.num_resets > resets
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

    def step_until(self, reached: Callable[[], bool]) -> None:
        while not reached():
            assert self.engine.has_work()
            self.step()

    def check_plan(self, plan: StepPlan) -> None:
        check_plan(plan)
        assert plan.num_tokens <= (self.max_step_tokens or plan.num_tokens)
        spans = [(row.sequence, row.position, 1) for row in plan.rows]
        spans += [(segment.sequence, segment.start, segment.length) for segment in plan.segments]
        for sequence, start, length in spans:
            tenant = sequence.request.cache_salt
            for group, blocks in enumerate(sequence.table.blocks):
                for block in blocks[start // BLOCK_LEN : -(-(start + length) // BLOCK_LEN)]:
                    self.tenants[group, block] = tenant
                owners = {self.tenants[group, block] for block in blocks if block != TRASH}
                assert owners == {tenant}, "tenants share a block"

    def check_shared_blocks(self) -> None:
        content: dict[tuple[int, int], tuple[int, ...]] = {}
        for sequence in self.scheduler.running:
            for group, blocks in enumerate(sequence.table.blocks):
                for index, block in enumerate(blocks):
                    if block == TRASH:
                        continue
                    text = tuple(sequence.token_ids[: (index + 1) * BLOCK_LEN])
                    if (group, block) in content:
                        assert text == content[group, block], f"block {block} has two contents"
                        assert len(text) == (index + 1) * BLOCK_LEN, f"{block} is half filled"
                    content[group, block] = text

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
        assert self.scheduler._cache.usage == 0


def check_counts(sequence: Sequence) -> None:
    """A result is at most two steps away, and only the newest token is not in the cache yet."""
    assert 0 <= sequence.num_in_flight <= 2
    assert 0 <= sequence.num_computed <= len(sequence.table.blocks[0]) * BLOCK_LEN
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
    expected, stopped = expected_answer(request)
    check_logprobs(sequence, collected, tokens)
    reason = collected.ends(request.request_id)[sequence.choice]
    if reason is FinishReason.ERROR:
        last = collected.deltas[request.request_id][-1]
        assert (tokens, last.error) == ([], EXPIRED)
        assert request.deadline_s
        return
    if reason is FinishReason.ABORT:
        assert is_aborted
        assert tokens == expected[: len(tokens)]
        return
    assert tokens == expected
    assert reason is (FinishReason.STOP if stopped else FinishReason.LENGTH)
    counted = sum(
        d.num_tokens for d in collected.deltas[request.request_id] if d.choice == sequence.choice
    )
    assert counted == len(tokens)


def expected_answer(request: GenerateRequest) -> tuple[list[int], bool]:
    """Its tokens, and whether they end by themselves."""
    prompt, sampling = request.prompt_token_ids, request.sampling
    most = min(sampling.max_tokens, CONTEXT_LEN - len(prompt))
    if sampling.grammar is None:
        expected = continuation(prompt, most, ignore_eos=sampling.ignore_eos)
        return expected, expected[-1] == EOS and not sampling.ignore_eos
    matcher = compiled(sampling.grammar.kind, sampling.grammar.text, toy_vocabulary())
    expected = bound_continuation(prompt, most, matcher, ignore_eos=sampling.ignore_eos)
    return expected, matcher.is_stopped()


def check_logprobs(sequence: Sequence, collected: Collected, tokens: list[int]) -> None:
    """Each counted token has its own, and the prompt has them once, with the first delta."""
    request, sampling = sequence.request, sequence.request.sampling
    deltas = [d for d in collected.deltas[request.request_id] if d.choice == sequence.choice]
    if sampling.logprobs is None:
        assert all(delta.logprobs is None for delta in deltas)
    else:
        assert [len(d.logprobs or ()) for d in deltas] == [d.num_tokens for d in deltas]
        own = [one for delta in deltas for one in delta.logprobs or ()]
        assert own == following(request.prompt_token_ids, tokens, sampling.logprobs)
    assert all(delta.prompt_logprobs is None for delta in deltas[1:])
    reported = deltas[0].prompt_logprobs
    if sampling.prompt_logprobs is None or sequence.choice:
        assert reported is None
    elif tokens or reported is not None:  # an abort may come before
        first, *rest = request.prompt_token_ids
        assert reported == (None, *following([first], rest, sampling.prompt_logprobs))


def following(text: list[int], tokens: list[int], num_top: int) -> list[TokenLogprobs]:
    return [toy_logprobs([*text, *tokens[:i]], token, num_top) for i, token in enumerate(tokens)]


def prompt_of(length: int, first: int = 1) -> list[int]:
    return [first, *(1 + i % (NUM_TOKENS - 1) for i in range(length - 1))]
