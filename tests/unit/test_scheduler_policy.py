"""Protects who is served and at what price: keys take turns, deadlines hold, a step's budget is kept, tenants
share no blocks, equal prompts share them, and what could never run is refused."""

import pytest

from tests.fakes.toy_engine import (
    BLOCK_LEN,
    CONTEXT_LEN,
    FEWEST_BLOCKS,
    FEWEST_WINDOW_BLOCKS,
    LADDER,
    Driven,
    new_request,
    prompt_of,
)
from workers.engine.request import Status
from workers.engine.scheduler import SchedulerConfig
from workers.errors import RequestError
from workers.protocol import FinishReason


def cached_tokens(driven: Driven, request_id: str) -> int:
    return driven.collected.deltas[request_id][-1].usage.cached_tokens


def test_a_prompt_is_cached_within_an_organisation_and_not_across():
    driven, prompt = Driven(), prompt_of(13)
    cached = []
    for salt in ("one", "two", "one", "", "two"):
        request_id = driven.add(new_request(prompt, cache_salt=salt))
        driven.run()
        cached.append(cached_tokens(driven, request_id))
    assert cached == [0, 0, 12, 0, 12]
    driven.check_answers()


def test_organisations_share_nothing_within_a_step_either():
    driven, prompt = Driven(), prompt_of(9)
    ids = [driven.add(new_request(prompt, cache_salt=salt)) for salt in ("one", "two", "one")]
    driven.run()
    assert [cached_tokens(driven, i) for i in ids] == [0, 0, 8]
    driven.check_answers()


def test_a_salt_may_be_longer_than_a_hash_key():
    driven = Driven()
    driven.add(new_request(prompt_of(9), cache_salt="ö" * 500))
    driven.run()
    driven.check_answers()


@pytest.mark.parametrize("length", [9, 13, 30])
def test_choices_share_the_blocks_of_their_prompt_though_they_start_together(length: int):
    used = []
    for n in (1, LADDER.max_rows):
        driven = Driven(8 * FEWEST_BLOCKS)
        request_id = driven.add(new_request(prompt_of(length), n=n, max_tokens=2))
        sequences = driven.sequences[request_id]
        driven.step_until(lambda own=sequences: all(s.is_decoding for s in own))
        used.append(len({block for s in sequences for block in s.table.blocks[0]}))
        driven.run()
        driven.check_answers()
        computed = sum(s.length for plan in driven.runner.plans for s in plan.segments)
        # Beside the shared blocks, each choice computes the end of the prompt for itself.
        assert computed <= length + (n - 1) * BLOCK_LEN
    assert used[1] <= used[0] + (LADDER.max_rows - 1) * 2


def test_long_prompts_that_begin_alike_are_computed_once():
    driven = Driven(8 * FEWEST_BLOCKS)
    for last in (1, 2, 3):
        driven.add(new_request([*prompt_of(24), last], max_tokens=2))
    driven.run()
    driven.check_answers()
    assert sum(s.length for plan in driven.runner.plans for s in plan.segments) == 24 + 3


def test_a_prompt_takes_blocks_only_as_far_as_it_is_computed():
    driven = Driven()
    request_id = driven.add(new_request(prompt_of(28)))
    (sequence,) = driven.sequences[request_id]
    driven.step()
    assert len(sequence.table.blocks[0]) == -(-sequence.num_computed // BLOCK_LEN) < 7
    # The rest is reserved: nobody else gets it.
    assert driven.scheduler._unreserved() == [4 * FEWEST_BLOCKS - 7]
    driven.run()


def test_one_key_with_many_requests_does_not_starve_another_with_one():
    driven = Driven()
    for _ in range(200):
        driven.add(new_request(prompt_of(5), max_tokens=8, fair_key="many"))
    for _ in range(10):
        driven.step()
    one = driven.add(new_request(prompt_of(5), max_tokens=8, fair_key="one"))
    waiting = driven.sequences[one][0]
    num_started = driven.scheduler._num_started
    driven.step_until(lambda: waiting.has_started)
    assert waiting.turn == num_started + 1
    driven.run()
    driven.check_answers()


def test_rows_are_shared_fairly_while_all_keys_wait():
    driven = Driven()
    for key, length, count in (("a", 4, 60), ("b", 8, 60), ("c", 16, 60)):
        for _ in range(count):
            driven.add(new_request([1], max_tokens=length, fair_key=key))
    for _ in range(60):
        driven.step()
    served = [driven.scheduler.waiting._served[key] for key in "abc"]
    assert max(served) - min(served) <= LADDER.max_rows * 16
    driven.run()


def test_a_request_whose_deadline_passes_while_it_waits_is_not_started():
    driven = Driven()
    running = [
        driven.add(new_request(prompt_of(3), max_tokens=20, deadline_s=driven.now_s + 1))
        for _ in range(LADDER.max_rows)
    ]
    driven.step_until(lambda: len(driven.scheduler.running) == LADDER.max_rows)
    late = driven.add(new_request(prompt_of(3), n=2, deadline_s=driven.now_s + 1))
    timely = driven.add(new_request(prompt_of(3), deadline_s=driven.now_s + 100))
    driven.now_s += 2
    driven.step()
    assert driven.collected.ends(late) == dict.fromkeys(range(2), FinishReason.ERROR)
    assert driven.collected.is_over(late)
    driven.run()
    driven.check_answers()
    for request_id in (*running, timely):
        assert driven.collected.ends(request_id) == {0: FinishReason.LENGTH}


def test_a_request_of_which_a_choice_runs_has_begun():
    driven = Driven()
    driven.add(new_request(prompt_of(3), max_tokens=20, n=LADDER.max_rows - 1))
    half = driven.add(new_request(prompt_of(5), n=2, deadline_s=driven.now_s + 1))
    driven.step_until(lambda: len(driven.scheduler.running) == LADDER.max_rows)
    assert driven.sequences[half][1].status is Status.WAITING
    driven.now_s += 2
    driven.run()
    driven.check_answers()
    assert driven.collected.ends(half) == dict.fromkeys(range(2), FinishReason.LENGTH)


def test_a_request_that_waits_can_be_aborted():
    driven = Driven()
    for _ in range(LADDER.max_rows):
        driven.add(new_request(prompt_of(3), max_tokens=20))
    driven.step_until(lambda: len(driven.scheduler.running) == LADDER.max_rows)
    waiting = driven.add(new_request(prompt_of(3), n=2))
    driven.abort(waiting)
    assert driven.collected.ends(waiting) == dict.fromkeys(range(2), FinishReason.ABORT)
    assert not driven.scheduler.waiting
    driven.run()
    driven.check_answers()


@pytest.mark.parametrize("budget", [LADDER.max_rows + 1, LADDER.max_rows + 4])
def test_a_step_keeps_to_its_budget_and_all_come_to_an_end(budget: int):
    driven = Driven(max_step_tokens=budget)
    for first in (1, 2, 3, 4, 5):
        driven.add(new_request(prompt_of(20, first), max_tokens=12))
    driven.run()
    driven.check_answers()
    assert max(plan.num_tokens for plan in driven.runner.plans) == budget


def test_a_budget_without_room_for_a_prompt_is_refused():
    with pytest.raises(ValueError, match="no room"):
        SchedulerConfig(LADDER, max_step_tokens=LADDER.max_rows)


def test_a_request_that_the_whole_cache_cannot_hold_is_refused_and_one_that_just_fits_runs():
    driven = Driven(FEWEST_BLOCKS - 2)
    room = (FEWEST_BLOCKS - 2) * BLOCK_LEN
    with pytest.raises(RequestError, match=f"{room + 1} tokens together.*holds {room}"):
        driven.add(new_request(prompt_of(10), max_tokens=room - 9))
    # Without a limit of its own a request may grow to the whole context.
    with pytest.raises(RequestError, match=f"{CONTEXT_LEN} tokens together"):
        driven.add(new_request(prompt_of(10), max_tokens=10 * CONTEXT_LEN))
    driven.add(new_request(prompt_of(10), max_tokens=room - 10))
    driven.run()
    driven.check_answers()


def test_layers_that_see_a_window_need_few_blocks_however_long_the_texts_are():
    driven = Driven(4 * FEWEST_BLOCKS, window_blocks=LADDER.max_rows * FEWEST_WINDOW_BLOCKS)
    for first in range(1, 7):
        driven.add(new_request(prompt_of(20, first), max_tokens=12))
    most = 0
    while driven.engine.has_work():
        driven.step()
        pool = driven.scheduler._cache.groups[1].pool
        most = max(most, pool.num_blocks - 1 - pool.num_free)
    driven.check_answers()
    assert driven.scheduler.num_preemptions == 0
    assert most <= LADDER.max_rows * FEWEST_WINDOW_BLOCKS


def test_one_window_s_blocks_are_enough_for_many_requests_one_after_the_other():
    driven = Driven(4 * FEWEST_BLOCKS, window_blocks=FEWEST_WINDOW_BLOCKS)
    for first in range(1, 5):
        driven.add(new_request(prompt_of(20, first), max_tokens=12, n=2))
    driven.run()
    driven.check_answers()


def test_a_prefix_is_found_again_though_its_window_has_moved_on():
    driven, cached = Driven(window_blocks=4 * FEWEST_WINDOW_BLOCKS), []
    for last in (1, 2):
        request_id = driven.add(new_request([*prompt_of(20), last], max_tokens=2))
        driven.run()
        cached.append(cached_tokens(driven, request_id))
    assert cached == [0, 20]
    driven.check_answers()
