"""What a worker's steps cost while a load ran, from the gateway's /metrics."""

import asyncio
import re
from dataclasses import dataclass

from cli.load.http_client import Connection, RequestFailedError
from workers.protocol import HEARTBEAT_INTERVAL_S

SETTLE_S = 2 * HEARTBEAT_INTERVAL_S + 0.5
"""A worker tells once a heartbeat, and a gateway asks as often."""
_SAMPLE = re.compile(r"^(tpugate_step[a-z_]*|vllm:prefix_cache_[a-z]+)_total\{[^}]*\} (\S+)$")


@dataclass(frozen=True)
class EngineSteps:
    steps: int
    host_ms: float
    """Work of the engine's thread a step, mean; waiting for the device is not."""
    device_ms: float
    """How long a step had the device, mean."""
    padding_ratio: float
    """Padding over all tokens that the steps computed."""
    cached_ratio: float
    """Prompt tokens found in the prefix cache over all that were looked up."""


Counters = dict[str, float]


def counters(text: str) -> Counters:
    """Counters of all workers together, by name without `_total`."""
    found: Counters = {}
    for line in text.splitlines():
        if match := _SAMPLE.match(line):
            found[match[1]] = found.get(match[1], 0.0) + float(match[2])
    return found


def difference(before: Counters, after: Counters) -> EngineSteps | None:
    """None if there was no step."""
    spent = {name: value - before.get(name, 0.0) for name, value in after.items()}
    steps = spent.get("tpugate_steps", 0.0)
    if not steps:
        return None
    padded = spent.get("tpugate_step_padding", 0.0)
    computed = spent.get("tpugate_step_tokens", 0.0) + padded
    return EngineSteps(
        steps=int(steps),
        host_ms=round(spent.get("tpugate_step_host_seconds", 0.0) * 1e3 / steps, 2),
        device_ms=round(spent.get("tpugate_step_device_seconds", 0.0) * 1e3 / steps, 2),
        padding_ratio=round(padded / max(1.0, computed), 3),
        cached_ratio=round(
            spent.get("vllm:prefix_cache_hits", 0.0)
            / max(1.0, spent.get("vllm:prefix_cache_queries", 0.0)),
            3,
        ),
    )


async def read_counters(url: str) -> Counters:
    """Counters once they have settled; none of a server that tells nothing."""
    await asyncio.sleep(SETTLE_S)
    try:
        async with Connection(url) as connection:
            return counters((await connection.fetch("GET", "/metrics")).decode())
    except (RequestFailedError, OSError):
        return {}
