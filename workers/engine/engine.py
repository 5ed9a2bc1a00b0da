"""The loop body of a worker: schedule -> dispatch -> collect the step before -> emit.

While the device runs step k the host collects step k-1 and schedules step k+1; sampled tokens are fed
back on the device, so no step waits for the host. A sequence whose end is discovered one step late has
run one row too many; that row's result is dropped.

Where a grammar binds a row, what it has said must be known before the next token is drawn. The order is then:
dispatch the model of step k -> collect and emit step k-1 -> find out what may be drawn -> dispatch the drawing
of step k. The device runs the model meanwhile.
"""

import logging
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from workers.engine.binding import Binding
from workers.engine.checks import check_sampling
from workers.engine.grammars import Grammars
from workers.engine.interface import EXPIRED, EngineStats
from workers.engine.kv_cache import BlockTable, KVCache, salt_of
from workers.engine.model_runner import ModelRunner, StepHandle
from workers.engine.output_processor import ChoiceOutput, Emission, TokenizerDetokenizer
from workers.engine.outputs import (
    PrefillSegment,
    StepPlan,
    StepResults,
    is_current,
    score_prompts,
)
from workers.engine.request import Sequence, Status, fold_seed
from workers.engine.resident import Resident
from workers.engine.scheduler import Scheduler
from workers.engine.step_log import EngineLoad, StepLog, StepSink, describe
from workers.errors import RequestError
from workers.protocol import FinishReason, GenerateRequest, OutputDelta

log = logging.getLogger(__name__)

MAX_FAILED_STEPS = 3
"""After so many failed steps in a row the fault is the engine's, not a passing one."""
IDLE_S = 0.01
"""The longest that a step waits for a grammar to be ready if there is nothing else to do."""
DETOKENIZER_CONTEXT = 6
"""Prompt tokens a detokenizer sees, so that it knows it does not stand at the start of a text."""
_SEED_STEP = 0x9E3779B9


@dataclass(frozen=True)
class EngineParts:
    """What an engine is made of; built by `workers.engine.build`."""

    runner: ModelRunner
    scheduler: Scheduler
    cache: KVCache
    tokenizer: Tokenizer
    context_len: int
    eos_token_ids: frozenset[int]
    vocab_size: int
    grammars: Grammars | None = None
    """None if answers of this model cannot be bound."""
    step_sink: StepSink | None = None
    """Takes a record of each step."""
    clock: Callable[[], float] = time.time
    """Unix time, by which deadlines pass."""

    @property
    def block_len(self) -> int:
        return self.cache.block_len


class ModelEngine:
    """Continuous batching of one model; see `workers.engine.interface.Engine` for the contract."""

    def __init__(self, parts: EngineParts) -> None:
        self._parts = parts
        self._runner = parts.runner
        self._scheduler = parts.scheduler
        self._grammars = parts.grammars
        self._residents: dict[str, Resident] = {}
        self._in_flight: StepHandle | None = None
        self._num_failed_steps = 0
        self._num_arrivals = 0
        self._num_steps = 0
        self._num_prompt_tokens = 0
        self._num_generated = 0
        self._num_padded = 0
        self._num_computed = 0
        self._num_prefix_queries = 0
        self._num_prefix_hits = 0
        self._log = StepLog(parts.step_sink)
        self._compiles_at_start = parts.runner.num_compilations()

    @property
    def capacity(self) -> int:
        return self._runner.max_rows

    def add(self, request: GenerateRequest) -> None:
        prompt_len = len(request.prompt_token_ids)
        room = self._parts.context_len - prompt_len
        if prompt_len == 0:
            raise RequestError("The prompt is empty.")
        if not 1 <= request.n <= self.capacity:
            raise RequestError(f"This model runs 1 to {self.capacity} choices of a request.")
        if room < 1:
            raise RequestError(
                f"The prompt has {prompt_len} tokens, the model's context {self._parts.context_len}."
            )
        num_tokens = prompt_len + min(request.sampling.max_tokens, room)
        if num_tokens > self._parts.cache.num_tokens:
            raise RequestError(
                f"The prompt and max_tokens are {num_tokens} tokens together, the model's KV cache "
                f"holds {self._parts.cache.num_tokens}."
            )
        check_sampling(request, self._parts.vocab_size)
        grammar = request.sampling.grammar
        if grammar is not None and self._grammars is None:
            raise RequestError("it is not supported by this model.", grammar.param)
        given = request.sampling.seed
        base = secrets.randbits(32) if given is None else fold_seed(given)
        sequences = [
            self._new_sequence(request, choice, (base + choice * _SEED_STEP) & 0xFFFFFFFF, room)
            for choice in range(request.n)
        ]
        if not self._residents:
            self._log.resident()
        self._residents[request.request_id] = Resident(request, sequences)
        for sequence in sequences:
            if grammar is None:
                self._scheduler.add(sequence)
            else:
                sequence.status = Status.PREPARING
        if grammar is not None and self._grammars is not None:
            self._grammars.start(request.request_id, grammar)

    def abort(self, request_id: str) -> list[OutputDelta]:
        return self._end(request_id, Emission("", FinishReason.ABORT))

    def fail_all(self, error: str) -> list[OutputDelta]:
        self._in_flight = None
        self._num_failed_steps = 0
        deltas: list[OutputDelta] = []
        for request_id in list(self._residents):
            deltas += self._end(request_id, Emission("", FinishReason.ERROR), error)
        self._log.lost(self._load)
        return deltas

    def has_work(self) -> bool:
        return self._has_steps() or bool(self._preparing)

    def step(self) -> list[OutputDelta]:
        deltas = self._admit_prepared()
        self._log.begin()
        deltas += self._expire()
        plan = self._scheduler.schedule()
        try:
            dispatched = self._dispatch(plan, deltas) if plan else None
            self._collect(deltas)
        except RuntimeError:
            self._recover()
            return deltas
        self._in_flight = dispatched
        if not self.has_work():
            self._scheduler.check_integrity()
        return deltas

    def stats(self) -> EngineStats:
        running, waiting = self._scheduler.running, self._scheduler.waiting
        total = self._num_computed + self._num_padded
        return EngineStats(
            num_running=len(running),
            num_waiting=len(waiting) + len(self._preparing),
            kv_usage=self._parts.cache.usage,
            steps=self._num_steps,
            prompt_tokens=self._num_prompt_tokens,
            generation_tokens=self._num_generated,
            num_compiles_after_warmup=self._runner.num_compilations() - self._compiles_at_start,
            num_ready_buckets=self._runner.num_programs,
            padding_ratio=self._num_padded / total if total else 0.0,
            host_seconds=self._log.host_s,
            device_seconds=self._log.device_s,
            num_prefix_queries=self._num_prefix_queries,
            num_prefix_hits=self._num_prefix_hits,
            num_preemptions=self._scheduler.num_preemptions,
            block_len=self._parts.block_len,
            num_blocks=self._parts.cache.num_blocks,
            num_computed=self._num_computed,
            num_padded=self._num_padded,
        )

    def _expire(self) -> list[OutputDelta]:
        """End requests whose deadline has passed before any choice of them has started."""
        now_s = self._parts.clock()
        waiting = (*self._scheduler.waiting, *self._preparing)
        late = [s for s in waiting if 0 < s.request.deadline_s < now_s]
        deltas: list[OutputDelta] = []
        for request_id in dict.fromkeys(s.request.request_id for s in late):
            if not any(s.has_started for s in self._residents[request_id].sequences):
                deltas += self._end(request_id, Emission("", FinishReason.ERROR), EXPIRED)
        return deltas

    def _dispatch(self, plan: StepPlan, deltas: list[OutputDelta]) -> StepHandle:
        self._log.scheduled(partial(describe, plan))
        if not plan.bound:
            handle = self._runner.dispatch(plan)
            self._log.launched()
        else:
            handle = self._runner.dispatch(plan, partial(self._allowed, plan, deltas))
            self._log.drawn()
        return handle

    def _allowed(self, plan: StepPlan, deltas: list[OutputDelta]) -> NDArray[np.int32]:
        """What each sample of a step may draw. The tokens before it are read, unless none was drawn yet."""
        assert self._grammars is not None
        self._log.launched()
        if not all(sample.is_start for sample in plan.bound):
            self._collect(deltas)
        return self._grammars.allowed(plan)

    def _collect(self, deltas: list[OutputDelta]) -> None:
        """Wait for the step in flight, if there is one, and add what comes out of it."""
        if self._in_flight is None:
            return
        results = self._in_flight.collect()
        # Only a collected step is known to be good: a dispatch may fail later, on the device.
        self._num_failed_steps = 0
        self._log.collected()
        plan, self._in_flight = self._in_flight.plan, None
        deltas += self._emit(plan, results)
        self._log.emitted(self._load)

    def _has_steps(self) -> bool:
        return self._in_flight is not None or self._scheduler.has_work()

    @property
    def _preparing(self) -> list[Sequence]:
        """Choices of requests whose grammars are not ready."""
        if self._grammars is None:
            return []
        return [s for i in self._grammars.waiting for s in self._residents[i].sequences]

    def _admit_prepared(self) -> list[OutputDelta]:
        """Let those begin whose grammars are ready, and end those whose grammars are none."""
        deltas: list[OutputDelta] = []
        if self._grammars is None or not self._grammars.waiting:
            return deltas
        if not self._has_steps():
            self._grammars.wait(IDLE_S)
        for request_id, ready in self._grammars.take_ready():
            if isinstance(ready, str):
                deltas += self._refuse(request_id, ready)
                continue
            for sequence in self._residents[request_id].sequences:
                sequence.binding = Binding(ready.deep_copy())
                self._scheduler.add(sequence)
        return deltas

    def _refuse(self, request_id: str, error: str) -> list[OutputDelta]:
        """End a request whose grammar cannot be matched."""
        grammar = self._residents[request_id].request.sampling.grammar
        param = None if grammar is None else grammar.param
        return self._end(request_id, Emission("", FinishReason.ERROR), error, param)

    def _load(self) -> EngineLoad:
        return EngineLoad(
            num_running=len(self._scheduler.running),
            num_waiting=len(self._scheduler.waiting),
            kv_usage=self._parts.cache.usage,
            num_compiles=self._runner.num_compilations() - self._compiles_at_start,
        )

    def _new_sequence(
        self, request: GenerateRequest, choice: int, seed: int, room: int
    ) -> Sequence:
        parts, self._num_arrivals = self._parts, self._num_arrivals + 1
        detokenizer = TokenizerDetokenizer(
            parts.tokenizer,
            request.prompt_token_ids[-DETOKENIZER_CONTEXT:],
            skip_special_tokens=request.sampling.skip_special_tokens,
        )
        max_tokens = min(request.sampling.max_tokens, room)
        return Sequence(
            request=request,
            choice=choice,
            seed=seed,
            output=ChoiceOutput(request.sampling, detokenizer, parts.eos_token_ids, max_tokens),
            table=BlockTable(parts.cache, salt_of(request.cache_salt)),
            token_ids=list(request.prompt_token_ids),
            arrival=self._num_arrivals,
            arrived_s=self._log.now(),
        )

    def _emit(self, plan: StepPlan, results: StepResults) -> list[OutputDelta]:
        """Hand each sampled token to its sequence; gives what clients get to see."""
        self._count(plan)
        score_prompts(plan, results)
        deltas: list[OutputDelta] = []
        for sample in plan.samples:
            sequence, token = sample.sequence, results.tokens[sample.place]
            if not is_current(sample.entry):
                continue
            sequence.num_in_flight -= 1
            sequence.token_ids.append(token)
            sequence.table.publish(sequence.token_ids, sequence.num_computed)
            self._num_generated += 1
            binding = sequence.binding
            if binding is not None:
                binding.advance(token)
                if binding.error is not None:
                    deltas += self._refuse(sequence.request.request_id, binding.error)
                    continue
            if results.logprobs is not None:
                sequence.logprobs.add(results.logprobs, sample.place, token)
            is_last = binding is not None and binding.is_over
            deltas += self._advance(sequence, sequence.output.push(token, is_last=is_last))
        return deltas

    def _advance(self, sequence: Sequence, emission: Emission) -> list[OutputDelta]:
        resident = self._residents[sequence.request.request_id]
        resident.unsent_tokens[sequence.choice] += 1
        resident.first_token_s = resident.first_token_s or self._log.completed_s
        if emission.finish_reason is None and not emission.text:
            return []
        return [self._delta(resident, sequence, emission)]

    def _delta(
        self,
        resident: Resident,
        sequence: Sequence,
        emission: Emission,
        error: str | None = None,
        param: str | None = None,
    ) -> OutputDelta:
        """One delta; if it is the request's last one, the request leaves the engine."""
        if emission.finish_reason is not None:
            self._scheduler.remove(sequence)
            resident.num_finished += 1
            self._log.ended(resident.request.request_id, sequence.choice, emission.finish_reason)
        is_last = resident.num_finished == len(resident.sequences)
        if is_last:
            del self._residents[resident.request.request_id]
            if self._grammars is not None:
                self._grammars.forget(resident.request.request_id)
        num_tokens, resident.unsent_tokens[sequence.choice] = (
            resident.unsent_tokens[sequence.choice],
            0,
        )
        resident.next_seq += 1
        return OutputDelta(
            request_id=resident.request.request_id,
            seq=resident.next_seq - 1,
            choice=sequence.choice,
            text=emission.text,
            num_tokens=num_tokens,
            finish_reason=emission.finish_reason,
            stop_reason=emission.stop_reason,
            error=error,
            usage=resident.usage(self._log.now()) if is_last else None,
            logprobs=sequence.logprobs.take(),
            prompt_logprobs=sequence.logprobs.take_prompt(),
            param=param,
        )

    def _end(
        self,
        request_id: str,
        emission: Emission,
        error: str | None = None,
        param: str | None = None,
    ) -> list[OutputDelta]:
        """Terminal deltas for all unfinished choices of a request."""
        resident = self._residents.get(request_id)
        if resident is None:
            return []
        unfinished = [s for s in resident.sequences if s.status is not Status.FINISHED]
        return [self._delta(resident, sequence, emission, error, param) for sequence in unfinished]

    def _count(self, plan: StepPlan) -> None:
        self._num_steps += 1
        self._num_computed += plan.num_tokens
        self._num_padded += plan.bucket.num_tokens - plan.num_tokens
        for segment in plan.segments:
            self._num_prompt_tokens += segment.length
            self._count_start(segment)

    def _count_start(self, segment: PrefillSegment) -> None:
        sequence = segment.sequence
        if segment.is_first:
            self._num_prefix_queries += len(sequence.request.prompt_token_ids)
            self._num_prefix_hits += sequence.num_cached
        resident = self._residents.get(sequence.request.request_id)
        if resident is not None and not resident.started_s:
            resident.started_s = self._log.dispatched_s

    def _recover(self) -> None:
        """A step failed on the device: the cache is lost, the requests are not."""
        self._num_failed_steps += 1
        self._in_flight = None
        self._scheduler.preempt_all()
        self._log.lost(self._load)
        self._runner.reset_cache()
        if self._num_failed_steps >= MAX_FAILED_STEPS:
            raise
        log.exception("a step failed on the device; running requests start again from their tokens")
