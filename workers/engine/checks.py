"""What a model cannot run, found when a request arrives: one bad row must not reach the device."""

import math
from collections.abc import Iterable

from workers.errors import RequestError
from workers.protocol import GenerateRequest, SamplingParams

_INT32 = 1 << 31
_FLOATS = (
    "temperature",
    "top_p",
    "min_p",
    "repetition_penalty",
    "frequency_penalty",
    "presence_penalty",
)


def check_sampling(request: GenerateRequest, vocab_size: int) -> None:
    """Raise `RequestError` for token ids outside the vocabulary, and for numbers that are none."""
    sampling = request.sampling
    biased = [token for token, _ in sampling.logit_bias]
    _check_tokens("The prompt", request.prompt_token_ids, vocab_size)
    _check_tokens("logit_bias", biased, vocab_size)
    _check_tokens("stop_token_ids", sampling.stop_token_ids, vocab_size)
    _check_numbers(sampling)


def _check_tokens(name: str, tokens: Iterable[int], vocab_size: int) -> None:
    for token in tokens:
        if not 0 <= token < vocab_size:
            raise RequestError(
                f"{name} has the token {token}, but this model's tokens are 0 to {vocab_size - 1}."
            )


def _check_numbers(sampling: SamplingParams) -> None:
    for name in _FLOATS:
        if not math.isfinite(getattr(sampling, name)):
            raise RequestError(f"{name} is not a finite number.")
    if sampling.repetition_penalty <= 0:
        raise RequestError("repetition_penalty must be above 0.")
    if not all(math.isfinite(bias) for _, bias in sampling.logit_bias):
        raise RequestError("logit_bias has a value that is not a finite number.")
    if not 0 <= sampling.top_k < _INT32:
        raise RequestError(f"top_k must be 0 to {_INT32 - 1}.")
