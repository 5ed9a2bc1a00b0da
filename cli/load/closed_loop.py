"""A fixed number of clients, each sending its next request when the last one is answered; what that shows."""

import asyncio
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from cli.load.http_client import Connection, RequestFailedError, Usage

REQUEST_TIMEOUT_S = 900.0
PAUSE_S = 0.05
"""After a failed request: a server that refuses is not to be hammered."""
HOPELESS = 20
"""Failed requests, without one that was answered, after which clients give up."""


@dataclass(frozen=True)
class Server:
    """Whom the load is for. `url` is without /v1."""

    url: str
    api_key: str = ""

    def connection(self) -> Connection:
        headers = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        return Connection(self.url, headers)


@dataclass
class Samples:
    """Seconds per request and per gap between two streamed pieces; counts over all."""

    ttft_s: list[float] = field(default_factory=list)
    gap_s: list[float] = field(default_factory=list)
    per_token_s: list[float] = field(default_factory=list)
    """From the first piece to the end, divided by the tokens after the first; of answers with some."""
    e2e_s: list[float] = field(default_factory=list)
    output_tokens: int = 0
    prompt_tokens: int = 0
    num_errors: int = 0
    first_error: str = ""

    @property
    def is_hopeless(self) -> bool:
        return not self.e2e_s and self.num_errors >= HOPELESS

    def failed(self, error: Exception) -> None:
        self.num_errors += 1
        self.first_error = self.first_error or str(error) or type(error).__name__


@dataclass(frozen=True)
class Figures:
    """What one measurement shows; times in milliseconds, NaN if there is none."""

    num_clients: int
    num_requests: int
    """Answered whole; the others are errors, or were cut off by the end."""
    num_errors: int
    first_error: str
    wall_s: float
    output_tokens: int
    output_tokens_per_s: float
    total_tokens_per_s: float
    """Prompts' and answers'."""
    requests_per_s: float
    prompt_tokens_mean: float
    ttft_p50_ms: float
    ttft_p99_ms: float
    inter_token_p50_ms: float
    inter_token_p99_ms: float
    per_token_p50_ms: float
    per_token_p99_ms: float
    e2e_p50_ms: float
    e2e_p99_ms: float


def quantile_ms(values_s: list[float], share: float) -> float:
    """The value below which `share` of `values_s` lie, in milliseconds; NaN of nothing."""
    if not values_s:
        return float("nan")
    ordered = sorted(values_s)
    return round(ordered[min(len(ordered) - 1, int(share * len(ordered)))] * 1e3, 2)


def figures(samples: Samples, num_clients: int, wall_s: float) -> Figures:
    done = len(samples.e2e_s)
    tokens = samples.prompt_tokens + samples.output_tokens
    return Figures(
        num_clients=num_clients,
        num_requests=done,
        num_errors=samples.num_errors,
        first_error=samples.first_error,
        wall_s=round(wall_s, 3),
        output_tokens=samples.output_tokens,
        output_tokens_per_s=round(samples.output_tokens / wall_s, 1),
        total_tokens_per_s=round(tokens / wall_s, 1),
        requests_per_s=round(done / wall_s, 2),
        prompt_tokens_mean=round(samples.prompt_tokens / max(1, done), 1),
        ttft_p50_ms=quantile_ms(samples.ttft_s, 0.50),
        ttft_p99_ms=quantile_ms(samples.ttft_s, 0.99),
        inter_token_p50_ms=quantile_ms(samples.gap_s, 0.50),
        inter_token_p99_ms=quantile_ms(samples.gap_s, 0.99),
        per_token_p50_ms=quantile_ms(samples.per_token_s, 0.50),
        per_token_p99_ms=quantile_ms(samples.per_token_s, 0.99),
        e2e_p50_ms=quantile_ms(samples.e2e_s, 0.50),
        e2e_p99_ms=quantile_ms(samples.e2e_s, 0.99),
    )


async def ask(connection: Connection, path: str, body: bytes, samples: Samples) -> Usage:
    """Send one streamed request; its times go into `samples` only once it has ended well.

    Raises `RequestFailedError` or an `OSError`.
    """
    started = time.perf_counter()
    arrivals: list[float] = []
    usage: Usage | None = None
    async with asyncio.timeout(REQUEST_TIMEOUT_S):
        async for event in connection.events(path, body):
            if event.has_text:
                arrivals.append(time.perf_counter())
            usage = event.usage or usage
    ended = time.perf_counter()
    if usage is None or usage.completion_tokens < 1:
        raise RequestFailedError("an answer without usage, or of no token")
    first = arrivals[0] if arrivals else ended  # tokens may be pieces of a letter, of no text
    samples.ttft_s.append(first - started)
    samples.gap_s.extend(b - a for a, b in zip(arrivals, arrivals[1:], strict=False))
    samples.e2e_s.append(ended - started)
    if usage.completion_tokens > 1:
        samples.per_token_s.append((ended - first) / (usage.completion_tokens - 1))
    samples.output_tokens += usage.completion_tokens
    samples.prompt_tokens += usage.prompt_tokens
    return usage


async def _client(server: Server, path: str, bodies: Iterator[bytes], samples: Samples) -> None:
    for body in bodies:  # shared with the other clients
        try:
            async with server.connection() as connection:
                await ask(connection, path, body, samples)
                for following in bodies:
                    await ask(connection, path, following, samples)
        except (RequestFailedError, OSError) as error:
            samples.failed(error)
            if samples.is_hopeless:
                return
            await asyncio.sleep(PAUSE_S)


async def run(
    server: Server, path: str, bodies: Iterator[bytes], num_clients: int, samples: Samples
) -> None:
    """Send all of `bodies`. Failed requests are counted, never raised."""
    await asyncio.gather(*(_client(server, path, bodies, samples) for _ in range(num_clients)))
