"""From a body's bytes to a checked request, or to the 400 that names the field."""

from collections.abc import Callable
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from gateway.domain.openai.bodies import check_numbers
from gateway.domain.openai.schemas import ChatCompletionRequest, CompletionRequest, GenerationBody
from gateway.errors import BadRequestError

Harmless = Callable[[Any], bool]


def _is_falsy(value: object) -> bool:
    return not value


def _one_of(*values: object) -> Harmless:
    return lambda value: any(value is item or value == item for item in values)


_UNSUPPORTED: dict[str, Harmless] = {
    # Field: the values that ask for nothing we cannot do. null is always one.
    "functions": _is_falsy,
    "function_call": _one_of("none", "auto"),
    "modalities": _one_of(["text"], []),
    "audio": _is_falsy,
    "service_tier": _one_of("auto", "default"),
    "store": _is_falsy,
    "verbosity": _one_of("medium"),
    "documents": _is_falsy,
    "bad_words": _is_falsy,
    "use_beam_search": _is_falsy,
    "length_penalty": _one_of(1),
    "include_stop_str_in_output": _is_falsy,
    "return_token_ids": _is_falsy,
    "suffix": _is_falsy,
    **dict.fromkeys(
        (
            "prediction",
            "web_search_options",
            "moderation",
            "chat_template",
            "mm_processor_kwargs",
            "logits_processors",
            "allowed_token_ids",
            "truncate_prompt_tokens",
        ),
        _one_of(),
    ),
}

_INSTEAD = {"functions": "tools", "function_call": "tool_choice"}
"""Older names of what there is by another."""

B = TypeVar("B", bound=GenerationBody)
M = TypeVar("M", bound=BaseModel)


def validated(kind: type[M], body: bytes) -> M:
    """The JSON object in `body`. Raises `BadRequestError` naming the field that is wrong."""
    try:
        request = kind.model_validate_json(body)
    except ValidationError as error:
        raise _bad_request(error.errors(include_input=False, include_url=False)[0]) from error
    check_numbers(body)
    return request


def parse(kind: type[B], body: bytes) -> B:
    """The request in `body`. Raises `BadRequestError` naming the field that is wrong or not supported."""
    request = validated(kind, body)
    for name in sorted(request.model_fields_set & _UNSUPPORTED.keys()):
        value = getattr(request, name)
        if value is not None and not _UNSUPPORTED[name](value):
            raise unsupported(name)
    _check_together(request)
    return request


def unsupported(name: str) -> BadRequestError:
    instead = f" Use '{_INSTEAD[name]}'." if name in _INSTEAD else ""
    return BadRequestError(
        f"This server does not support the given value of '{name}'.{instead}",
        param=name,
        code="unsupported_parameter",
    )


def _check_together(request: GenerationBody) -> None:
    if request.stream_options is not None and not request.stream:
        raise _wrong("stream_options", "is only allowed when 'stream' is true.")
    if request.prompt_logprobs is not None and request.stream:
        raise _wrong("prompt_logprobs", "is not available when 'stream' is true.")
    if isinstance(request, ChatCompletionRequest):
        _check_chat(request)
    if isinstance(request, CompletionRequest):
        _check_completion(request)


def _check_chat(request: ChatCompletionRequest) -> None:
    if request.top_logprobs and not request.logprobs:
        raise _wrong("top_logprobs", "is only allowed when 'logprobs' is true.")
    if request.echo:
        raise unsupported("echo")
    if request.best_of is not None and request.best_of != request.num_choices:
        raise unsupported("best_of")


def _check_completion(request: CompletionRequest) -> None:
    if request.max_tokens == 0 and not request.echo:
        raise _wrong("max_tokens", "must be at least 1 unless 'echo' is true.")
    if request.num_candidates < request.num_choices:
        raise _wrong("best_of", "must be at least 'n'.")
    if request.num_candidates > request.num_choices and request.stream:
        raise _wrong("best_of", "cannot be more than 'n' when 'stream' is true.")


def _wrong(name: str, sentence: str) -> BadRequestError:
    return BadRequestError(f"'{name}' {sentence}", param=name, code="invalid_value")


_CODES = {
    "missing": "missing_required_parameter",
    "unsupported_modality": "unsupported_value",
    "unsupported_value": "unsupported_value",
}


def _bad_request(details: ErrorDetails) -> BadRequestError:
    kind = details["type"]
    if kind == "json_invalid" or not details["loc"] and kind == "model_type":
        return BadRequestError(f"The body must be a JSON object: {details['msg']}"[:300])
    place = _place(details)
    # The keys of a map are the client's own words: the field is named, the key only told.
    param = "logit_bias" if place.startswith("logit_bias.") else place
    if kind == "missing" and "input" not in details and details["msg"] == "Field required":
        message = f"Missing required parameter: '{place}'."
    else:
        message = f"Invalid '{place}': {_sentence(details)}"
    fallback = "invalid_type" if kind.endswith("_type") or "tag" in kind else "invalid_value"
    return BadRequestError(message[:500], param=param, code=_CODES.get(kind, fallback))


def _sentence(details: ErrorDetails) -> str:
    if details["type"] == "union_tag_not_found":
        return "Input should be a string or a list."
    return details["msg"]


def _place(details: ErrorDetails) -> str:
    """`messages[0].content[0].type` of `("messages", 0, "content", "|list", 0, "type")`."""
    place = [part for part in details["loc"] if not str(part).startswith("|")]
    field = details.get("ctx", {}).get("field")
    if field is not None and details["type"] == "missing":
        place.append(field)
    text = ""
    for part in place:
        text += f"[{part}]" if isinstance(part, int) else f".{part}"
    return text.lstrip(".")[:200]
