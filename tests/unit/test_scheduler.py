"""Protects continuous batching: whatever arrives, leaves, is preempted or lost on the device, every
request ends with the tokens that its text alone decides, and no block or row is lost on the way."""

import itertools

import pytest

from tests.fakes.toy_device import NUM_TOKENS, continuation
from tests.fakes.toy_engine import (
    CONTEXT_LEN,
    FEWEST_BLOCKS,
    LADDER,
    Driven,
    new_request,
    prompt_of,
)
from workers.engine.request import Status
from workers.protocol import FinishReason


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
    assert len(driven.sequences[first][0].table.blocks[0]) == 5
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
