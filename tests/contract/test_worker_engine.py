"""What the service relies on in every engine: one terminal delta for each choice and one usage for each
request, unbroken sequence numbers, slots that are free after an end, whatever that end is.

An engine is tested by a subclass of `EngineContract` that says how to build it and what to ask of it.
"""

import itertools
from collections import defaultdict

import msgspec
import pytest

from workers.engine.interface import EXPIRED, Engine
from workers.engine.scripted import FAIL, HANG, ScriptedEngine, scripted_tokenizer
from workers.errors import RequestError
from workers.protocol import (
    FinishReason,
    GenerateRequest,
    OutputDelta,
    SamplingParams,
    TokenLogprobs,
)

MAX_STEPS = 1000


class Collected:
    """Deltas by request, checked as they come."""

    def __init__(self) -> None:
        self.deltas: dict[str, list[OutputDelta]] = defaultdict(list)

    def take(self, deltas: list[OutputDelta]) -> None:
        for delta in deltas:
            before = self.deltas[delta.request_id]
            assert delta.seq == len(before)
            assert not before or before[-1].usage is None, "a delta after the end"
            assert not any(
                old.choice == delta.choice and old.finish_reason is not None for old in before
            ), "a delta after the choice's end"
            before.append(delta)

    def ends(self, request_id: str) -> dict[int, FinishReason]:
        return {
            delta.choice: delta.finish_reason
            for delta in self.deltas[request_id]
            if delta.finish_reason is not None
        }

    def is_over(self, request_id: str) -> bool:
        return bool(self.deltas[request_id]) and self.deltas[request_id][-1].usage is not None

    def text(self, request_id: str, choice: int = 0) -> str:
        return "".join(d.text for d in self.deltas[request_id] if d.choice == choice)


def run(engine: Engine, collected: Collected | None = None) -> Collected:
    """Step until there is nothing to do."""
    collected = collected or Collected()
    for _ in range(MAX_STEPS):
        if not engine.has_work():
            return collected
        collected.take(engine.step())
    raise AssertionError("the engine does not come to an end")


class EngineContract:
    """Subclass it, and give `engine` (room for 4 choices) and `request`."""

    ids = itertools.count()

    @pytest.fixture
    def engine(self) -> Engine:
        raise NotImplementedError

    def request(self, *, max_tokens: int = 5, n: int = 1, num_prompt: int = 3) -> GenerateRequest:
        raise NotImplementedError

    def test_a_new_engine_is_idle(self, engine: Engine):
        assert not engine.has_work()
        assert engine.capacity >= 4
        assert engine.stats().num_running == 0

    def test_a_request_ends_once_and_counts_its_tokens(self, engine: Engine):
        request = self.request(max_tokens=5)
        engine.add(request)
        collected = run(engine)
        deltas = collected.deltas[request.request_id]
        assert collected.is_over(request.request_id)
        assert collected.ends(request.request_id) == {0: FinishReason.LENGTH}
        assert deltas[-1].usage is not None
        assert deltas[-1].usage.completion_tokens == sum(d.num_tokens for d in deltas) == 5
        assert deltas[-1].usage.prompt_tokens == 3

    def test_each_choice_ends_once_and_usage_comes_last(self, engine: Engine):
        request = self.request(n=3, max_tokens=4)
        engine.add(request)
        collected = run(engine)
        assert collected.ends(request.request_id) == dict.fromkeys(range(3), FinishReason.LENGTH)
        with_usage = [d for d in collected.deltas[request.request_id] if d.usage is not None]
        assert len(with_usage) == 1
        assert with_usage[0].usage is not None
        assert with_usage[0].usage.completion_tokens == 12

    def test_more_requests_than_slots_all_end(self, engine: Engine):
        requests = [self.request(max_tokens=1 + i % 7) for i in range(20)]
        for request in requests:
            engine.add(request)
        collected = run(engine)
        assert all(collected.is_over(request.request_id) for request in requests)
        assert engine.stats().num_running == engine.stats().num_waiting == 0

    def test_requests_join_while_others_run(self, engine: Engine):
        first, second = self.request(max_tokens=8), self.request(max_tokens=2)
        collected = Collected()
        engine.add(first)
        collected.take(engine.step())
        engine.add(second)
        run(engine, collected)
        assert collected.is_over(first.request_id)
        assert collected.is_over(second.request_id)

    def test_an_abort_ends_a_running_request_and_frees_its_slot(self, engine: Engine):
        running = [self.request(max_tokens=500) for _ in range(engine.capacity)]
        waiting = self.request(max_tokens=2)
        collected = Collected()
        for request in (*running, waiting):
            engine.add(request)
        collected.take(engine.step())
        aborted = running[0].request_id
        collected.take(engine.abort(aborted))
        assert collected.ends(aborted) == {0: FinishReason.ABORT}
        assert collected.is_over(aborted)
        while not collected.is_over(waiting.request_id):
            collected.take(engine.step())
        for request in running[1:]:
            collected.take(engine.abort(request.request_id))
        run(engine, collected)
        assert engine.stats().num_running == 0

    def test_an_abort_before_the_first_step_ends_the_request(self, engine: Engine):
        request = self.request(n=2)
        engine.add(request)
        collected = Collected()
        collected.take(engine.abort(request.request_id))
        run(engine, collected)
        assert collected.ends(request.request_id) == dict.fromkeys(range(2), FinishReason.ABORT)
        assert collected.is_over(request.request_id)

    def test_a_request_past_its_deadline_is_not_started(self, engine: Engine):
        late = msgspec.structs.replace(self.request(n=2), deadline_s=1.0)
        timely = msgspec.structs.replace(self.request(), deadline_s=2.0**40)
        for request in (late, timely):
            engine.add(request)
        collected = run(engine)
        assert collected.ends(late.request_id) == dict.fromkeys(range(2), FinishReason.ERROR)
        assert {delta.error for delta in collected.deltas[late.request_id]} == {EXPIRED}
        assert collected.ends(timely.request_id) == {0: FinishReason.LENGTH}

    def test_an_abort_of_what_is_not_there_does_nothing(self, engine: Engine):
        request = self.request(max_tokens=1)
        engine.add(request)
        run(engine)
        assert engine.abort(request.request_id) == []
        assert engine.abort("never seen") == []

    def test_fail_all_ends_everything_and_empties_the_engine(self, engine: Engine):
        requests = [self.request(max_tokens=50) for _ in range(engine.capacity + 2)]
        collected = Collected()
        for request in requests:
            engine.add(request)
        collected.take(engine.step())
        collected.take(engine.fail_all("It broke."))
        for request in requests:
            assert collected.ends(request.request_id) == {0: FinishReason.ERROR}
            assert collected.is_over(request.request_id)
            assert collected.deltas[request.request_id][-1].error == "It broke."
        assert not engine.has_work()
        after = self.request(max_tokens=2)
        engine.add(after)
        assert run(engine).is_over(after.request_id)

    @pytest.mark.parametrize("fields", [{"num_prompt": 100_000}, {"n": 0}, {"n": 10_000}])
    def test_what_can_never_run_is_refused_at_once(self, engine: Engine, fields: dict[str, int]):
        with pytest.raises(RequestError) as caught:
            engine.add(self.request(**fields))
        assert str(caught.value).endswith(".")
        assert not engine.has_work()

    def test_the_counters_grow_with_the_work(self, engine: Engine):
        engine.add(self.request(max_tokens=5))
        run(engine)
        stats = engine.stats()
        assert stats.steps > 0
        assert (stats.prompt_tokens, stats.generation_tokens) == (3, 5)


class TestScriptedEngine(EngineContract):
    @pytest.fixture
    def engine(self) -> Engine:
        return ScriptedEngine(capacity=4)

    def request(
        self,
        *,
        max_tokens: int = 5,
        n: int = 1,
        num_prompt: int = 3,
        script: tuple[bytes, ...] = (b"word ",) * 1000,
        stop: tuple[str, ...] = (),
    ) -> GenerateRequest:
        return GenerateRequest(
            request_id=f"r{next(self.ids)}",
            model="m-small",
            reply_to="replies",
            prompt_token_ids=[1] * num_prompt,
            sampling=SamplingParams(max_tokens=max_tokens, stop=stop, stop_token_ids=(0, 1)),
            n=n,
            script=script,
        )

    def played(
        self, engine: Engine, *script: bytes, stop: tuple[str, ...] = ()
    ) -> list[OutputDelta]:
        request = self.request(script=script, max_tokens=100, stop=stop)
        engine.add(request)
        return run(engine).deltas[request.request_id]

    def test_it_emits_one_token_a_step(self, engine: Engine):
        request = self.request(script=(b"a", b"b", b"c"), n=2)
        engine.add(request)
        steps = [[d.text for d in engine.step()] for _ in range(3)]
        assert steps == [["a", "a"], ["b", "b"], ["c", "c"]]
        assert not engine.has_work()

    def test_a_script_that_runs_out_ends_with_stop(self, engine: Engine):
        deltas = self.played(engine, b"a", b"b")
        assert [(d.text, d.finish_reason) for d in deltas] == [
            ("a", None),
            ("b", FinishReason.STOP),
        ]

    def test_an_empty_script_ends_at_once(self, engine: Engine):
        (only,) = self.played(engine)
        assert (only.text, only.finish_reason) == ("", FinishReason.STOP)
        assert only.usage is not None
        assert only.usage.completion_tokens == 0

    def test_a_character_comes_whole(self, engine: Engine):
        crab = "🦀".encode()
        deltas = self.played(engine, b"Crab ", crab[:2], crab[2:3], crab[3:])
        assert [d.text for d in deltas] == ["Crab ", "", "", "🦀"]
        assert sum(d.num_tokens for d in deltas) == 4

    def test_half_a_character_at_the_end_is_dropped(self, engine: Engine):
        deltas = self.played(engine, b"Crab ", "🦀".encode()[:3])
        assert "".join(d.text for d in deltas) == "Crab "
        assert deltas[-1].finish_reason is FinishReason.STOP

    def test_nothing_of_a_stop_string_is_sent_nor_anything_after_it(self, engine: Engine):
        deltas = self.played(
            engine, b"first ", b"<<", b"EN", b"D>", b">", b" second", stop=("<<END>>",)
        )
        assert [d.text for d in deltas] == ["first ", "", "", "", ""]
        assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == (FinishReason.STOP, "<<END>>")

    def test_what_was_held_back_comes_at_the_end(self, engine: Engine):
        deltas = self.played(engine, b"first ", b"<<EN", stop=("<<END>>",))
        assert "".join(d.text for d in deltas) == "first <<EN"

    def test_a_scripted_failure_ends_its_request_only(self, engine: Engine):
        failing = self.request(script=(b"a", FAIL, b"b"))
        beside = self.request(script=(b"x", b"y", b"z"))
        engine.add(failing)
        engine.add(beside)
        collected = run(engine)
        assert collected.ends(failing.request_id) == {0: FinishReason.ERROR}
        assert collected.deltas[failing.request_id][-1].error
        assert collected.text(beside.request_id) == "xyz"

    def test_logprobs_are_invented_but_one_for_each_token(self, engine: Engine):
        request = self.request(script=(b"a", b"<", b"<END", b"b"), stop=("<<END>>",))
        sampling = msgspec.structs.replace(request.sampling, logprobs=2, prompt_logprobs=0)
        engine.add(msgspec.structs.replace(request, sampling=sampling))
        deltas = run(engine).deltas[request.request_id]
        assert [len(delta.logprobs or ()) for delta in deltas] == [d.num_tokens for d in deltas]
        tokens = [one.token_id for delta in deltas for one in delta.logprobs or ()]
        tokenizer = scripted_tokenizer()
        assert [tokenizer.decode([token]) for token in tokens] == ["a", "<", "<", "b"]
        first = deltas[0].logprobs[0]
        assert first.top == ((tokens[0], -0.5), (tokens[0] + 1, -2.0))
        assert deltas[0].prompt_logprobs == (None, *[TokenLogprobs(1, -0.5)] * 2)
        assert all(delta.prompt_logprobs is None for delta in deltas[1:])

    def test_a_held_request_rests_until_it_is_aborted(self, engine: Engine):
        request = self.request(script=(b"a", HANG, b"b"))
        engine.add(request)
        collected = run(engine)
        assert not collected.is_over(request.request_id)
        assert engine.stats().num_running == 1
        collected.take(engine.abort(request.request_id))
        assert collected.text(request.request_id) == "a"
        assert engine.stats().num_running == 0

    def test_a_full_context_ends_with_length(self):
        engine = ScriptedEngine(capacity=1, context_len=8)
        request = self.request(num_prompt=5, max_tokens=100)
        engine.add(request)
        collected = run(engine)
        assert collected.ends(request.request_id) == {0: FinishReason.LENGTH}
        assert len(collected.deltas[request.request_id]) == 3
