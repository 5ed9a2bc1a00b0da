"""Protects that no key starves another: whoever was served least goes next, and nobody saves up turns."""

from tests.fakes.toy_engine import new_request, new_sequence
from workers.engine.fair_queue import MAX_KEYS, FairQueue
from workers.engine.request import Sequence


def waiting(queue: FairQueue, key: str, priority: int = 0) -> Sequence:
    sequence = new_sequence(new_request([1], priority=priority, fair_key=key))
    queue.add(sequence)
    return sequence


def started(queue: FairQueue, num_tokens: int) -> str:
    """Start the next one and serve it."""
    sequence = queue.first()
    assert sequence is not None
    queue.remove(sequence)
    queue.charge(sequence.request.fair_key, num_tokens)
    return sequence.request.fair_key


def test_an_empty_queue_has_no_first():
    queue = FairQueue()
    assert (queue.first(), len(queue), list(queue)) == (None, 0, [])


def test_one_request_of_another_key_passes_a_thousand():
    queue = FairQueue()
    for _ in range(1000):
        waiting(queue, "many")
    assert started(queue, 100) == "many"
    waiting(queue, "one")
    assert "one" in [started(queue, 100) for _ in range(2)]


def test_keys_are_served_alike_in_tokens_and_not_in_requests():
    queue = FairQueue()
    for _ in range(100):
        waiting(queue, "long")
        waiting(queue, "short")
    turns = [
        started(queue, {"long": 30, "short": 10}[queue.first().request.fair_key]) for _ in range(40)
    ]
    assert (turns.count("long"), turns.count("short")) == (10, 30)


def test_a_key_is_served_in_the_order_its_requests_came():
    queue = FairQueue()
    sequences = [waiting(queue, "k") for _ in range(5)]
    for sequence in sequences:
        assert queue.first() is sequence
        queue.remove(sequence)


def test_an_idle_key_saves_up_no_turns():
    queue = FairQueue()
    for _ in range(20):
        waiting(queue, "busy")
    for _ in range(5):
        started(queue, 100)
    for _ in range(10):
        waiting(queue, "back")
    turns = [started(queue, 100) for _ in range(6)]
    assert turns.count("back") == 3


def test_a_key_that_waits_alone_is_not_punished_for_what_it_got_then():
    queue = FairQueue()
    for _ in range(5):
        waiting(queue, "alone")
        started(queue, 100)
    waiting(queue, "new")
    waiting(queue, "alone")
    waiting(queue, "new")
    assert [started(queue, 10) for _ in range(3)] == ["new", "alone", "new"]


def test_priority_comes_before_fairness():
    queue = FairQueue()
    waiting(queue, "patient", priority=1)
    queue.charge("urgent", 10_000)
    waiting(queue, "urgent", priority=0)
    assert [started(queue, 1) for _ in range(2)] == ["urgent", "patient"]


def test_the_preempted_come_back_first_in_the_order_of_their_start_unless_somebody_is_more_urgent():
    queue = FairQueue()
    fresh, urgent = waiting(queue, "a"), waiting(queue, "a", priority=-1)
    second, first = (new_sequence(new_request([1], fair_key="b")) for _ in range(2))
    first.turn, second.turn = 1, 2
    queue.charge("b", 10_000)
    queue.add(second)
    queue.add(first)
    assert (len(queue), set(queue)) == (4, {fresh, urgent, first, second})
    for expected in (urgent, first, second, fresh):
        assert queue.first() is expected
        queue.remove(expected)


def test_counters_do_not_pile_up():
    queue = FairQueue()
    for index in range(3 * MAX_KEYS):
        waiting(queue, f"key {index}")
        started(queue, 1)
    assert len(queue._served) <= MAX_KEYS + 1
