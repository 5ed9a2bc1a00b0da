"""What the log says of a start: every twentieth, and something at least every ten seconds."""

import time
from collections.abc import Callable

INTERVAL_S = 10.0
STEP = 0.05
MIN_DONE = 0.1
"""Share of a phase before which its speed tells nothing."""


class StartLog:
    """Remembers what is being done, and decides when that is worth a line.

    A phrase's first word is the phase, the rest is what of it is under way. Steps of a phase are taken
    to last equally long, so the time left is rough.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.what, self.share = "starting", 0.0
        self._phase_began = self._last_line = (clock(), 0.0)

    def update(self, what: str, share: float) -> tuple[bool, str | None]:
        """Whether another phase begins, and the line to log, if any."""
        now_s = self._clock()
        is_new = what.partition(" ")[0] != self.what.partition(" ")[0]
        self.what, self.share = what, share
        if is_new:
            self._phase_began = (now_s, share)
        is_step = int(share / STEP) != int(self._last_line[1] / STEP)
        return is_new, self._line(now_s) if is_new or is_step else self.remind()

    def remind(self) -> str | None:
        """The line again if the last one is long ago."""
        now_s = self._clock()
        return self._line(now_s) if now_s - self._last_line[0] >= INTERVAL_S else None

    def _line(self, now_s: float) -> str:
        self._last_line = (now_s, self.share)
        return f"{100 * self.share:3.0f} % {self.what}{self._time_left(now_s)}"

    def _time_left(self, now_s: float) -> str:
        began_s, first_share = self._phase_began
        done = (self.share - first_share) / (1.0 - first_share) if first_share < 1.0 else 0.0
        if not MIN_DONE <= done < 1.0:
            return ""
        left_s = (now_s - began_s) * (1.0 - done) / done
        if left_s < INTERVAL_S:
            return ""
        return f", about {_rough(left_s)} left"


def _rough(seconds: float) -> str:
    return f"{10 * round(seconds / 10)} s" if seconds < 90 else f"{round(seconds / 60)} min"
