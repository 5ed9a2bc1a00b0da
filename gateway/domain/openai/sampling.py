"""From a checked body to the engine's parameters: what depends on the model, and the defaults."""

from gateway.directory import ServedModel
from gateway.domain.openai.schemas import CompletionRequest, GenerationBody
from gateway.errors import BadRequestError, ContextLengthError
from workers.protocol import SamplingParams

_COMPLETION_MAX_TOKENS = 16
"""OpenAI's default of /v1/completions; chat goes on to the end of the context."""
_LEAST_TEMPERATURE = 1e-5
"""Below it logits divided by the temperature overflow, and the likeliest token is certain anyway."""


def sampling_params(
    served: ServedModel, body: GenerationBody, prompt_len: int, where: str
) -> SamplingParams:
    """Raises `ContextLengthError` or `BadRequestError`; `where` is the field that holds the prompt."""
    max_tokens = _max_tokens(served.card.context_len, body, prompt_len, where)
    min_tokens = body.min_tokens or 0
    if min_tokens > max_tokens:
        raise _wrong(
            "min_tokens", f"it is more than the {max_tokens} tokens that may be generated."
        )
    vocab_size = served.card.vocab_size
    temperature = 1.0 if body.temperature is None else body.temperature
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature if temperature >= _LEAST_TEMPERATURE else 0.0,
        top_p=1.0 if body.top_p is None else body.top_p,
        top_k=min(max(0, body.top_k or 0), vocab_size),
        min_p=body.min_p or 0.0,
        seed=body.seed,
        stop=body.stop_strings,
        stop_token_ids=_stop_token_ids(body, vocab_size),
        ignore_eos=bool(body.ignore_eos),
        min_tokens=min_tokens,
        skip_special_tokens=body.skip_special_tokens is not False,
        repetition_penalty=1.0 if body.repetition_penalty is None else body.repetition_penalty,
        frequency_penalty=body.frequency_penalty or 0.0,
        presence_penalty=body.presence_penalty or 0.0,
        logit_bias=_logit_bias(body, vocab_size),
        logprobs=_num_logprobs(body),
        prompt_logprobs=_num_prompt_logprobs(body),
    )


def _max_tokens(context_len: int, body: GenerationBody, prompt_len: int, where: str) -> int:
    left = context_len - prompt_len
    asked = body.asked_tokens
    if asked is None and isinstance(body, CompletionRequest):
        asked = max(1, min(_COMPLETION_MAX_TOKENS, left))
    # A step gives each row a token, also where only the prompt is scored.
    wanted = max(1, asked or 1)
    if wanted > left:
        raise ContextLengthError(
            f"This model's maximum context length is {context_len} tokens. However, you requested "
            f"{prompt_len + wanted} tokens ({prompt_len} in the {where}, {wanted} in the completion).",
            param=where if left < 1 or body.asked_tokens is None else body.limit_field,
        )
    return left if asked is None else wanted


def _stop_token_ids(body: GenerationBody, vocab_size: int) -> tuple[int, ...]:
    token_ids = tuple(dict.fromkeys(body.stop_token_ids or ()))
    if any(token_id >= vocab_size for token_id in token_ids):
        raise _wrong("stop_token_ids", f"ids of this model are 0 to {vocab_size - 1}.")
    return token_ids


def _logit_bias(body: GenerationBody, vocab_size: int) -> tuple[tuple[int, float], ...]:
    """Biases of 0 are left out."""
    biases: list[tuple[int, float]] = []
    for key, bias in (body.logit_bias or {}).items():
        # Only the plain spelling, so that no token is named twice.
        is_id = key.isascii() and key.isdigit() and len(key) < 20 and key == str(int(key))
        if not is_id or int(key) >= vocab_size:
            raise _wrong(
                "logit_bias", f'its keys are token ids of this model, "0" to "{vocab_size - 1}".'
            )
        if bias:
            biases.append((int(key), bias))
    return tuple(biases)


def _num_logprobs(body: GenerationBody) -> int | None:
    if body.num_candidates > body.num_choices:
        # The best are told by their tokens' probabilities.
        return body.num_logprobs or 0
    return body.num_logprobs


def _num_prompt_logprobs(body: GenerationBody) -> int | None:
    asked = [body.prompt_logprobs, body.num_logprobs if body.echoes else None]
    return max((number for number in asked if number is not None), default=None)


def _wrong(name: str, sentence: str) -> BadRequestError:
    return BadRequestError(f"Invalid '{name}': {sentence}", param=name, code="invalid_value")
