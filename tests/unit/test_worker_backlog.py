"""Protects that rows are shared between keys: whoever has the fewest goes next, however many requests others
have and whenever they came."""

import pytest

from tests.fakes.toy_engine import new_request
from workers.backlog import Head, choose
from workers.protocol import GenerateRequest, encode


def head(request: GenerateRequest, number: int) -> Head:
    return Head.of(b"%05d-0" % number, encode(request))


def chosen(
    waiting: list[GenerateRequest], room: int, running: tuple[GenerateRequest, ...] = ()
) -> list[str]:
    heads = [head(request, number) for number, request in enumerate(waiting)]
    by_id = {request.request_id: request.fair_key for request in waiting}
    return [by_id[h.request_id] for h in choose(heads, running, room)]


def of(key: str, n: int = 1, **fields: object) -> GenerateRequest:
    return new_request([1], n=n, fair_key=key, **fields)


def test_one_key_alone_gets_all_room_in_the_order_of_its_requests():
    waiting = [of("k") for _ in range(5)]
    heads = [head(request, number) for number, request in enumerate(waiting)]
    assert choose(heads, (), 3) == heads[:3]
    assert choose(heads, (), 10) == heads


def test_keys_take_turns():
    waiting = [*(of("many") for _ in range(10)), of("one"), of("two"), of("two")]
    assert chosen(waiting, 5) == ["many", "one", "two", "many", "two"]


def test_a_key_that_has_rows_already_waits_for_those_that_have_none():
    waiting = [*(of("many") for _ in range(10)), *(of("few") for _ in range(3))]
    running = tuple(of("many") for _ in range(4))
    assert chosen(waiting, 3, running) == ["few", "few", "few"]


def test_each_choice_counts():
    waiting = [of("wide", n=4), of("wide", n=4), *(of("narrow") for _ in range(6))]
    assert chosen(waiting, 9) == ["wide", *["narrow"] * 4, "wide"]


def test_a_request_that_needs_more_than_is_left_is_taken_and_nothing_after_it():
    assert chosen([of("a", n=8), of("b")], 1) == ["a"]


def test_priority_comes_first():
    waiting = [of("a", priority=1), of("b", priority=1), of("a", priority=-1)]
    running = tuple(of("a") for _ in range(4))
    assert chosen(waiting, 2, running) == ["a", "b"]


@pytest.mark.parametrize("room", [0, 1])
def test_what_is_over_is_taken_whether_there_is_room_or_not(room: int):
    expired, aborted, alive = of("k", deadline_s=1.0), of("k"), of("k", deadline_s=2.0**40)
    heads = [head(r, number) for number, r in enumerate((expired, aborted, alive))]
    heads.append(Head.of(b"9-0", b"no request"))
    heads.append(Head.of(b"9-1", None))
    taken = choose(heads, (), room, aborted={aborted.request_id})
    assert taken == [heads[0], heads[1], *heads[3:], *heads[2 : 2 + room]]
