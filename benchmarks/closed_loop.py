"""Chats of several kinds, sent in a closed loop: what benchmarks compare servers with."""

import json
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from cli.load.closed_loop import Figures, Samples, Server, figures, run

PATH = "/v1/chat/completions"

TOPICS = [
    "rivers",
    "stars",
    "bread",
    "chess",
    "trains",
    "bees",
    "glass",
    "volcanoes",
    "paper",
    "maps",
    "salt",
    "bridges",
    "clocks",
    "kites",
    "coral",
    "deserts",
]
LOG = " ".join(
    f"Item {i}: the harbour master of town {i * 7 % 31} wrote down {i * 13 % 97} ships "
    f"and {i % 9} storms."
    for i in range(40)
)
"""About 950 tokens."""
SHARED_CHARACTERS = 1280
"""Of it, as a system prompt: about 400 tokens."""


@dataclass(frozen=True)
class Load:
    """One measurement at one number of clients."""

    url: str
    model: str
    num_clients: int
    num_requests: int
    max_tokens: int
    api_key: str = ""
    scenario: str = "short"
    seed: int = 0
    """Another seed, other prompts: a prefix cache must not answer a repeated run."""


def _short(number: int) -> list[dict[str, str]]:
    topic = TOPICS[number % len(TOPICS)]
    ask = f"Write a long detailed essay about {topic}, part {number}."
    return [{"role": "user", "content": ask}]


def _shared_prefix(number: int) -> list[dict[str, str]]:
    rules = "You keep the log of a harbour. " + LOG[:SHARED_CHARACTERS]
    return [{"role": "system", "content": rules}, *_short(number)]


def _long_prompt(number: int) -> list[dict[str, str]]:
    text = f"Log number {number}. {LOG} Summarise log {number}."
    return [{"role": "user", "content": text}]


SCENARIOS: dict[str, Callable[[int], list[dict[str, str]]]] = {
    "short": _short,
    "shared-prefix": _shared_prefix,
    "long-prompt": _long_prompt,
}
"""What a prompt is made of, by its number: a new number, a fresh prompt."""


def request_bodies(load: Load) -> Iterator[bytes]:
    """Streamed greedy requests of exactly `max_tokens` tokens each; the same for the same load."""
    rng = random.Random(f"{load.seed}/{load.scenario}/{load.num_clients}")
    for number in rng.sample(range(10_000), load.num_requests):
        body = {
            "model": load.model,
            "messages": SCENARIOS[load.scenario](number),
            "max_tokens": load.max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        yield json.dumps(body).encode()


async def measure(load: Load) -> Figures:
    """Run `load` to its end. Failed requests are counted, never raised."""
    samples = Samples()
    bodies = iter(list(request_bodies(load)))
    started = time.perf_counter()
    await run(Server(load.url, load.api_key), PATH, bodies, load.num_clients, samples)
    return figures(samples, load.num_clients, time.perf_counter() - started)
