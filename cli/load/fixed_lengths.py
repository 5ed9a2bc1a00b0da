"""Requests of fixed lengths: prompts of so many tokens, answers of so many, for any server that takes token ids.

Prompts are random tokens, so that nobody needs the model's tokenizer and no prefix is found in a cache.
"""

import json
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass

PATH = "/v1/completions"


@dataclass(frozen=True)
class Lengths:
    """Tokens of each request."""

    input_tokens: int
    output_tokens: int


def bodies(model: str, lengths: Lengths, vocab_size: int, seed: int) -> Iterator[bytes]:
    """Streamed greedy requests without end; the same for the same arguments.

    Tokens are of the upper half of `vocab_size`: among the lower ones are control tokens.
    """
    rng = random.Random(seed)
    ids = range(vocab_size // 2, vocab_size)
    while True:
        body = {
            "model": model,
            "prompt": rng.choices(ids, k=lengths.input_tokens),
            "max_tokens": lengths.output_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        yield json.dumps(body, separators=(",", ":")).encode()


def until(requests: Iterator[bytes], seconds: float) -> Iterator[bytes]:
    """As many of `requests` as are asked for in `seconds` from the first on."""
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        yield next(requests)
