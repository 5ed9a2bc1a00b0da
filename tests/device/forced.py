"""Runs requests with prefix hits, chunked prefill and preemption forced on, and proves that they happened."""

from collections.abc import Sequence

from tests.device.driving import Answer, ask, ask_one, fresh_engine, new_request
from workers.engine.engine import EngineParts


def ask_forced(
    parts: EngineParts, prompts: Sequence[list[int]], max_tokens: Sequence[int], num_blocks: int
) -> list[Answer]:
    """The answers to all prompts, sent at once to an engine of `num_blocks` that has seen the last one.

    One prompt is to be longer than any chunk, and one to begin like the last one; the blocks are to hold
    the longest request, but not all of them.
    """
    engine = fresh_engine(parts, num_blocks)
    ask_one(engine, prompts[-1], max_tokens=1)
    requests = [
        new_request(prompt, max_tokens=limit)
        for prompt, limit in zip(prompts, max_tokens, strict=True)
    ]
    answers = ask(engine, requests)
    assert max(len(prompt) for prompt in prompts) > _longest_chunk(parts)
    assert any(answer.usage.cached_tokens > 0 for answer in answers)
    assert engine._scheduler.num_preemptions > 0
    return answers


def _longest_chunk(parts: EngineParts) -> int:
    """The most tokens of one prompt that a step computes."""
    return max(shape.segment_len for shape in parts.scheduler._config.ladder.prefill)
