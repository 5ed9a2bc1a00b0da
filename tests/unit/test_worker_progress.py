"""What the log says of a long start: often enough, not too often, and how long it may still take."""

import pytest

from workers.progress import StartLog


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


def lines_of(log: StartLog, clock: Clock, num_programs: int, seconds_each: float) -> list[str]:
    lines = []
    for done in range(num_programs):
        clock.now_s += seconds_each
        what = f"warming up: program {done + 1} of {num_programs}"
        lines.append(log.update(what, 0.2 + 0.8 * done / num_programs)[1])
    return [line for line in lines if line]


def test_a_quick_start_says_each_twentieth_and_no_time(clock: Clock):
    lines = lines_of(StartLog(clock), clock, 400, 0.01)
    assert len(lines) == 16
    assert lines[0] == " 20 % warming up: program 1 of 400"
    assert not any("left" in line for line in lines)


def test_a_slow_start_says_something_every_ten_seconds_and_how_long_it_takes(clock: Clock):
    lines = lines_of(StartLog(clock), clock, 40, 6.0)
    assert len(lines) >= 20
    assert "left" not in lines[0]
    (half,) = [line for line in lines if "program 21 of" in line]
    assert half == " 60 % warming up: program 21 of 40, about 2 min left"
    assert lines[-2].endswith("about 20 s left")


def test_silence_is_broken_after_ten_seconds(clock: Clock):
    log = StartLog(clock)
    assert log.update("read the weights", 0.1) == (True, " 10 % read the weights")
    clock.now_s = 9.0
    assert log.remind() is None
    clock.now_s = 10.0
    assert log.remind() == " 10 % read the weights"
    assert log.remind() is None


def test_only_another_first_word_is_another_phase(clock: Clock):
    log = StartLog(clock)
    assert log.update("warming up: program 1 of 9", 0.2)[0]
    assert not log.update("warming up: program 2 of 9", 0.3)[0]
    assert log.update("ready", 1.0)[0]
