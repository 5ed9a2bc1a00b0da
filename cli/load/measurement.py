"""One measurement of a server under a load of fixed lengths, from a first trial to its figures."""

import asyncio
import itertools
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import msgspec

from cli.errors import CommandError, SettingError
from cli.load.closed_loop import Figures, Samples, Server, ask, figures, run
from cli.load.fixed_lengths import PATH, Lengths, bodies, until
from cli.load.http_client import RequestFailedError

PROGRESS_S = 5.0
TRIAL_TOKENS = 4
_TRIAL_SEED = -1


@dataclass(frozen=True)
class Load:
    """What is sent. Either `num_requests` or `seconds` ends it."""

    lengths: Lengths
    concurrency: int
    num_requests: int | None
    seconds: float | None
    vocab_size: int
    seed: int

    def requests(self, model: str) -> Iterator[bytes]:
        endless = bodies(model, self.lengths, self.vocab_size, self.seed)
        if self.seconds is not None:
            return until(endless, self.seconds)
        return itertools.islice(endless, self.num_requests)


@dataclass(frozen=True)
class Measured:
    model: str
    figures: Figures
    is_interrupted: bool

    @property
    def output_tokens_mean(self) -> float:
        return round(self.figures.output_tokens / max(1, self.figures.num_requests), 1)

    def facts(self, num_chips: int) -> dict[str, Any]:
        """As JSON has them: what was not measured is null."""
        told = {"model": self.model, "interrupted": self.is_interrupted, "num_chips": num_chips}
        told |= asdict(self.figures) | {"output_tokens_mean": self.output_tokens_mean}
        told["output_tokens_per_s_per_chip"] = self.figures.output_tokens_per_s / num_chips
        told["total_tokens_per_s_per_chip"] = self.figures.total_tokens_per_s / num_chips
        return {name: None if _is_nan(value) else value for name, value in told.items()}


def _is_nan(value: object) -> bool:
    return isinstance(value, float) and math.isnan(value)


async def only_model(server: Server) -> str:
    """The model of a server that has one. Raises `SettingError` or `CommandError`."""

    class Model(msgspec.Struct):
        id: str

    class Models(msgspec.Struct):
        data: list[Model]

    try:
        async with server.connection() as connection:
            found = msgspec.json.decode(await connection.fetch("GET", "/v1/models"), type=Models)
    except (RequestFailedError, OSError, msgspec.MsgspecError) as error:
        raise CommandError(f"{server.url} does not tell its models: {error}") from error
    if len(found.data) != 1:
        names = ", ".join(model.id for model in found.data) or "none"
        raise SettingError(f"The server has these models: {names}; name one with --model")
    return found.data[0].id


async def measure(server: Server, model: str, load: Load, say: Callable[[str], None]) -> Measured:
    """Try one request, then run `load`; cancelled while it runs, tell what was measured until then.

    Raises `CommandError` if the trial fails.
    """
    await _try(server, model, load)
    samples = Samples()
    started = time.perf_counter()
    teller = asyncio.create_task(_tell_progress(samples, load, say))
    is_interrupted = False
    try:
        await run(server, PATH, load.requests(model), load.concurrency, samples)
    except asyncio.CancelledError:
        is_interrupted = True
    finally:
        teller.cancel()
    taken = figures(samples, load.concurrency, time.perf_counter() - started)
    return Measured(model, taken, is_interrupted)


async def _try(server: Server, model: str, load: Load) -> None:
    """First-use costs, and everything that is wrong with all requests alike."""
    short = Lengths(load.lengths.input_tokens, min(TRIAL_TOKENS, load.lengths.output_tokens))
    body = next(bodies(model, short, load.vocab_size, load.seed + _TRIAL_SEED))
    try:
        async with server.connection() as connection:
            await ask(connection, PATH, body, Samples())
    except (RequestFailedError, OSError) as error:
        reason = str(error) or type(error).__name__
        raise CommandError(f"{server.url}{PATH} does not answer as it should: {reason}") from error


async def _tell_progress(samples: Samples, load: Load, say: Callable[[str], None]) -> None:
    goal = f" of {load.num_requests}" if load.num_requests is not None else ""
    started = time.perf_counter()
    while True:
        await asyncio.sleep(PROGRESS_S)
        spent_s = time.perf_counter() - started
        rate = samples.output_tokens / spent_s
        say(
            f"{spent_s:.0f} s: {len(samples.e2e_s)}{goal} requests, {rate:.1f} tokens/s, "
            f"{samples.num_errors} errors"
        )
