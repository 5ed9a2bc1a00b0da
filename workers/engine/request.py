"""One choice of a request on its way through the engine."""

import sys
from dataclasses import dataclass, field
from enum import Enum, auto

from workers.engine.binding import Binding
from workers.engine.kv_cache import BlockTable
from workers.engine.logprobs import ChoiceLogprobs
from workers.engine.output_processor import ChoiceOutput
from workers.protocol import GenerateRequest

NOT_STARTED = sys.maxsize
"""The turn of a sequence that has never run."""
_HIGH_BITS = 0x9E3779B1
"""Odd, so that every change of a seed's high half changes the folded one."""


class Status(Enum):
    PREPARING = auto()
    """Its grammar is being compiled; the scheduler does not know it yet."""
    WAITING = auto()
    """Not started; holds no blocks."""
    RUNNING = auto()
    """Holds a row and blocks."""
    PREEMPTED = auto()
    """Gave its blocks back; starts again from its tokens."""
    FINISHED = auto()


@dataclass(eq=False)
class Sequence:
    """The tokens of one choice, and how far the device is with them.

    Results are read one step late, so up to two sampled tokens are known to the device alone:

        token_ids      p p p p p p t t        prompt and collected tokens; start_len of them were
                                              known when the sequence last started
        in flight                      ? ?    sampled by dispatched steps, not yet collected
        num_computed   k k k k k k k k k      tokens whose keys and values are in the cache, or will
                                              be when the dispatched steps have run
    """

    request: GenerateRequest
    choice: int
    seed: int
    """Of this choice's random draws, 32 bits."""
    output: ChoiceOutput
    table: BlockTable
    token_ids: list[int]
    arrival: int
    """Order of arrival in this engine."""
    turn: int = NOT_STARTED
    """Order of the first start in this engine; it breaks ties of priority."""
    status: Status = Status.WAITING
    row: int = -1
    """Index of its newest token on the device while RUNNING."""
    start_len: int = 0
    num_computed: int = 0
    num_in_flight: int = 0
    num_cached: int = 0
    """Prompt tokens found in the prefix cache when it first started."""
    epoch: int = 0
    """Counts preemptions: results of an earlier epoch are dropped."""
    arrived_s: float = 0.0
    """When the engine got it, on the clock of its step log."""
    binding: Binding | None = None
    """To the grammar that its answer must match, with exactly the tokens of the answer behind it."""

    logprobs: ChoiceLogprobs = field(init=False)

    def __post_init__(self) -> None:
        assert self.token_ids, "a sequence has at least one token"
        prompt = self.request.prompt_token_ids
        self.logprobs = ChoiceLogprobs(self.request.sampling, prompt, self.choice == 0)

    @property
    def has_started(self) -> bool:
        """Whether it runs or was preempted."""
        return self.turn != NOT_STARTED

    @property
    def order(self) -> tuple[int, int]:
        """Who is served first, and preempted last: low priority numbers, then early starts."""
        return self.request.priority, self.turn

    @property
    def total_len(self) -> int:
        """Tokens including those in flight."""
        return len(self.token_ids) + self.num_in_flight

    @property
    def num_to_prefill(self) -> int:
        return max(0, self.start_len - self.num_computed)

    @property
    def is_decoding(self) -> bool:
        """The prefill is dispatched: the next input token is the newest one, in its row on the device."""
        return self.status is Status.RUNNING and self.num_computed >= self.start_len

    @property
    def may_generate(self) -> bool:
        """Whether another token may be sampled, those in flight counted."""
        return self.total_len - len(self.request.prompt_token_ids) < self.output.max_tokens


def fold_seed(seed: int) -> int:
    """A signed 64-bit seed in the 32 bits that the device takes; 0 to 2**32 - 1 stay as they are."""
    low, high = seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF
    return (low ^ (high * _HIGH_BITS)) & 0xFFFFFFFF
