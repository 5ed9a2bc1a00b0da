"""A fixed number of clients, each sending its next chat request when the last one is answered."""

import asyncio
import json
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from benchmarks.http_client import Connection, RequestFailedError, Usage

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


@dataclass
class Samples:
    """Seconds per request (ttft, e2e) and per gap between two streamed pieces; counts over all."""

    ttft_s: list[float] = field(default_factory=list)
    gap_s: list[float] = field(default_factory=list)
    e2e_s: list[float] = field(default_factory=list)
    output_tokens: int = 0
    prompt_tokens: int = 0
    errors: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Figures:
    """What one measurement shows; times in milliseconds."""

    num_clients: int
    num_requests: int
    num_errors: int
    first_error: str
    wall_s: float
    output_tokens: int
    output_tokens_per_s: float
    requests_per_s: float
    prompt_tokens_mean: float
    ttft_p50_ms: float
    ttft_p99_ms: float
    inter_token_p50_ms: float
    inter_token_p99_ms: float
    e2e_p50_ms: float
    e2e_p99_ms: float


def quantile_ms(values_s: list[float], share: float) -> float:
    """The value below which `share` of `values_s` lie, in milliseconds; NaN of nothing."""
    if not values_s:
        return float("nan")
    ordered = sorted(values_s)
    return round(ordered[min(len(ordered) - 1, int(share * len(ordered)))] * 1e3, 2)


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


async def _one(connection: Connection, body: bytes, samples: Samples) -> None:
    """Send one request; its times go into `samples` only once it has ended well."""
    started = time.perf_counter()
    arrivals: list[float] = []
    usage: Usage | None = None
    async for event in connection.events("/v1/chat/completions", body):
        if event.choices and event.choices[0].delta.content:
            arrivals.append(time.perf_counter())
        usage = event.usage or usage
    if not arrivals or usage is None:
        raise RequestFailedError("an answer without text or usage")
    samples.ttft_s.append(arrivals[0] - started)
    samples.gap_s.extend(b - a for a, b in zip(arrivals, arrivals[1:], strict=False))
    samples.e2e_s.append(time.perf_counter() - started)
    samples.output_tokens += usage.completion_tokens
    samples.prompt_tokens += usage.prompt_tokens


async def _client(load: Load, bodies: Iterator[bytes], samples: Samples) -> None:
    headers = {"Authorization": f"Bearer {load.api_key}"} if load.api_key else {}
    for body in bodies:  # shared with the other clients
        try:
            async with Connection(load.url, headers) as connection:
                await _one(connection, body, samples)
                for following in bodies:
                    await _one(connection, following, samples)
        except (RequestFailedError, OSError) as error:
            samples.errors.append(str(error))


async def measure(load: Load) -> Figures:
    """Run `load` to its end. Failed requests are counted, never raised."""
    samples = Samples()
    bodies = iter(list(request_bodies(load)))
    started = time.perf_counter()
    await asyncio.gather(*(_client(load, bodies, samples) for _ in range(load.num_clients)))
    wall_s = time.perf_counter() - started
    done = len(samples.e2e_s)
    return Figures(
        num_clients=load.num_clients,
        num_requests=done,
        num_errors=len(samples.errors),
        first_error=samples.errors[0] if samples.errors else "",
        wall_s=round(wall_s, 3),
        output_tokens=samples.output_tokens,
        output_tokens_per_s=round(samples.output_tokens / wall_s, 1),
        requests_per_s=round(done / wall_s, 2),
        prompt_tokens_mean=round(samples.prompt_tokens / max(1, done), 1),
        ttft_p50_ms=quantile_ms(samples.ttft_s, 0.50),
        ttft_p99_ms=quantile_ms(samples.ttft_s, 0.99),
        inter_token_p50_ms=quantile_ms(samples.gap_s, 0.50),
        inter_token_p99_ms=quantile_ms(samples.gap_s, 0.99),
        e2e_p50_ms=quantile_ms(samples.e2e_s, 0.50),
        e2e_p99_ms=quantile_ms(samples.e2e_s, 0.99),
    )
