"""Protects the engine against any order of events: requests of several keys, tenants and priorities come,
expire, are aborted and preempted, and steps are lost, on a device with few blocks. Whatever happens, each
request ends once, with the tokens that its text and grammar alone decide, within a bounded number of steps, and no
block or row is lost."""

from typing import Any

import msgspec
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.fakes.toy_engine import (
    CONTEXT_LEN,
    FEWEST_BLOCKS,
    FEWEST_WINDOW_BLOCKS,
    GRAMMARS,
    LADDER,
    Driven,
    new_request,
)

REQUESTS = st.fixed_dictionaries(
    {
        # Two letters make equal beginnings likely.
        "prompt": st.lists(st.integers(1, 2), min_size=1, max_size=CONTEXT_LEN - 1),
        "max_tokens": st.integers(1, CONTEXT_LEN),
        "n": st.integers(1, LADDER.max_rows),
        "priority": st.integers(0, 1),
        "ignore_eos": st.booleans(),
        "cache_salt": st.sampled_from("xy"),
        "fair_key": st.sampled_from("abc"),
    }
)
REPORTS = st.fixed_dictionaries(
    {
        "logprobs": st.sampled_from([None, None, 0, 2]),
        "prompt_logprobs": st.sampled_from([None, None, 0, 3]),
        "grammar": st.sampled_from([None, None, *GRAMMARS]),
    }
)


class Workload(RuleBasedStateMachine):
    """Anything a gateway can do, in any order, on a device with few blocks."""

    @initialize(
        num_blocks=st.sampled_from([FEWEST_BLOCKS, FEWEST_BLOCKS + 3, 4 * FEWEST_BLOCKS]),
        max_step_tokens=st.sampled_from([None, LADDER.max_rows + 1, LADDER.max_rows + 5]),
        window_blocks=st.sampled_from([None, FEWEST_WINDOW_BLOCKS, 2 * FEWEST_WINDOW_BLOCKS]),
    )
    def begin(
        self, num_blocks: int, max_step_tokens: int | None, window_blocks: int | None
    ) -> None:
        self.driven = Driven(num_blocks, max_step_tokens, window_blocks)

    @rule(fields=REQUESTS, reports=REPORTS, patience_s=st.sampled_from([0, 0, 3]))
    def add(self, fields: dict[str, Any], reports: dict[str, Any], patience_s: int) -> None:
        deadline_s = self.driven.now_s + patience_s if patience_s else 0.0
        request = new_request(**fields, deadline_s=deadline_s)
        sampling = msgspec.structs.replace(request.sampling, **reports)
        self.driven.add(msgspec.structs.replace(request, sampling=sampling))

    @rule()
    def time_passes(self) -> None:
        self.driven.now_s += 2

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
    @rule(when=st.sampled_from(["dispatch", "draw", "collect"]))
    def lose_a_step(self, when: str) -> None:
        self.driven.step(lose=when)
        for _ in range(2):
            self.driven.step()

    @invariant()
    def rows_and_blocks_are_accounted_for(self) -> None:
        self.driven.scheduler.check_integrity()
        assert self.driven.scheduler._unreserved()[0] >= 0
        assert len(self.driven.scheduler.running) <= LADDER.max_rows

    def teardown(self) -> None:
        if hasattr(self, "driven"):
            self.driven.run()
            self.driven.check_answers()


TestWorkload = Workload.TestCase
TestWorkload.settings = settings(max_examples=80, stateful_step_count=25, deadline=None)
