"""Requests handed to an engine in process, a fixed number at once, and what its steps cost."""

import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from models.grammar_texts import schema_text
from workers.protocol import FinishReason, GenerateRequest, Grammar, SamplingParams

if TYPE_CHECKING:
    from workers.engine.engine import ModelEngine

PEOPLE = {
    "type": "array",
    "minItems": 1000,
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 12},
            "age": {"type": "integer", "minimum": 0, "maximum": 120},
            "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 3},
        },
        "required": ["name", "age", "tags"],
        "additionalProperties": False,
    },
}
"""What no answer of a benchmark is long enough to end."""
BOUND: dict[str, object] = {"grammar": Grammar("json_schema", schema_text(PEOPLE, strict=True))}
SAMPLING: dict[str, tuple[dict[str, object], ...]] = {
    "greedy": ({},),
    "temperature": ({"temperature": 0.8},),
    "truncated": ({"temperature": 0.8, "top_p": 0.9, "top_k": 40},),
    "penalties": ({"repetition_penalty": 1.1, "frequency_penalty": 0.2, "presence_penalty": 0.2},),
    "bias": ({"logit_bias": ((100, 2.0), (200, -2.0))},),
    "logprobs": ({"logprobs": 5},),
    "json": (BOUND,),
    "half-json": ({}, BOUND),
    "temperature-json": ({"temperature": 0.8, **BOUND},),
}
"""Kinds of requests by what they ask of the sampler; where there are several, requests take turns."""
FIRST_WORD = 1000
"""Lower token ids are control tokens and single bytes."""


@dataclass(frozen=True)
class EngineLoad:
    """One measurement. Prompts are random tokens; another seed, other prompts."""

    rows: int
    """Requests in the engine at once: the next one enters when one ends."""
    num_requests: int
    prompt_len: int
    prefix_len: int
    """How many of the prompt's tokens all requests share."""
    output_len: int
    sampling: str
    vocab_size: int
    seed: int


@dataclass(frozen=True)
class EngineFigures:
    """What one measurement shows."""

    rows: int
    sampling: str
    tokens_per_s: float
    steps: int
    step_ms: float
    """Wall time of a step, mean."""
    host_ms: float
    """Of it work on the host, mean: scheduling, packing, dispatch, text. The device runs meanwhile."""
    engine_cpu_ms: float
    """CPU time of the engine's own thread in a step: other load on the cores hardly moves it."""
    cpu_ms: float
    """CPU time of all threads in a step, the device's included where that is the CPU."""
    padding_ratio: float
    """Padding over all tokens that steps computed."""
    cached_ratio: float
    """Prompt tokens found in the prefix cache over all prompt tokens."""
    num_compiles: int
    """During the measurement: an alarm, stays 0."""


def requests(load: EngineLoad) -> Iterator[GenerateRequest]:
    """Requests of exactly `output_len` tokens each; the same for the same load."""
    rng = random.Random(f"{load.seed}/{load.rows}/{load.sampling}")
    shared = random.Random(0)

    def words(source: random.Random, length: int) -> list[int]:
        return [source.randrange(FIRST_WORD, load.vocab_size) for _ in range(length)]

    prefix = words(shared, load.prefix_len)
    for index in range(load.num_requests):
        kinds = SAMPLING[load.sampling]
        settings = {"temperature": 0.0, "seed": index, **kinds[index % len(kinds)]}
        yield GenerateRequest(
            request_id=f"{load.seed}-{load.rows}-{load.sampling}-{index}",
            model="benchmark",
            reply_to="nobody",
            prompt_token_ids=prefix + words(rng, load.prompt_len - load.prefix_len),
            sampling=SamplingParams(max_tokens=load.output_len, ignore_eos=True, **settings),  # type: ignore[arg-type]
        )


def measure(engine: "ModelEngine", load: EngineLoad) -> EngineFigures:
    """Run `load` to its end in an engine that is empty. Raises RuntimeError if a request fails."""
    todo = requests(load)
    before, cached = engine.stats(), 0
    wall, own, cpu = time.perf_counter(), time.thread_time(), time.process_time()
    for _, request in zip(range(load.rows), todo, strict=False):
        engine.add(request)
    while engine.has_work():
        for delta in engine.step():
            if delta.finish_reason is FinishReason.ERROR:
                raise RuntimeError(f"a request failed: {delta.error}")
            if delta.usage is not None:
                cached += delta.usage.cached_tokens
                for request in todo:
                    engine.add(request)
                    break
    wall, own, cpu = (
        time.perf_counter() - wall,
        time.thread_time() - own,
        time.process_time() - cpu,
    )
    after = engine.stats()
    padded, computed = (
        after.num_padded - before.num_padded,
        after.num_computed - before.num_computed,
    )
    steps = after.steps - before.steps
    return EngineFigures(
        rows=load.rows,
        sampling=load.sampling,
        tokens_per_s=round((after.generation_tokens - before.generation_tokens) / wall, 1),
        steps=steps,
        step_ms=round(wall * 1e3 / steps, 2),
        host_ms=round((after.host_seconds - before.host_seconds) * 1e3 / steps, 2),
        engine_cpu_ms=round(own * 1e3 / steps, 2),
        cpu_ms=round(cpu * 1e3 / steps, 1),
        padding_ratio=round(padded / max(1, padded + computed), 3),
        cached_ratio=round(cached / (load.num_requests * load.prompt_len), 3),
        num_compiles=after.num_compiles_after_warmup - before.num_compiles_after_warmup,
    )
