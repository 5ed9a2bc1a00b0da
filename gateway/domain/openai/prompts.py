"""From a checked body to the tokens and parameters of `GenerateRequest`."""

import asyncio
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from gateway.directory import ServedModel
from gateway.domain.openai.logprobs import Echo, echo_of
from gateway.domain.openai.messages import chat_len, template_messages
from gateway.domain.openai.sampling import sampling_params
from gateway.domain.openai.schemas import ChatCompletionRequest, CompletionRequest
from gateway.errors import BadRequestError, ContextLengthError
from models.chat_roles import Conversation, render_conversation
from models.chat_templates import ChatTemplate
from models.errors import ChatTemplateError, TemplateLimitError
from models.template_sandbox import Budget
from workers.protocol import Grammar, SamplingParams

Headers = Mapping[str, str]
Tools = Sequence[Mapping[str, Any]]
"""As chat templates expect them: `{"type": "function", "function": {"name", "description", "parameters"}}`."""
_INLINE_MESSAGES = 64
"""Chats of more are rendered in a thread, however short the messages are."""
_INLINE_PASSES, _INLINE_SECONDS, _INLINE_SIZE = 500, 0.01, 256 * 1024
"""What takes a template more is rendered in a thread too."""
_MOST_VARIABLES = 64
_WORD = re.compile(r"\s*\S+\s*")


@dataclass(frozen=True)
class Prompt:
    token_ids: list[int]
    sampling: SamplingParams
    script: tuple[bytes, ...] | None = None
    """For the scripted engine only."""
    echo: Echo | None = None
    """Only if the answer is to begin with the prompt."""

    def bound_to(self, grammar: Grammar | None) -> "Prompt":
        """The same with an answer that must match `grammar`."""
        if grammar is None:
            return self
        return replace(self, sampling=msgspec.structs.replace(self.sampling, grammar=grammar))


async def chat_prompt(
    served: ServedModel,
    body: ChatCompletionRequest,
    headers: Headers,
    inline_bytes: int,
    tools: Tools = (),
    said: str | None = None,
) -> Prompt:
    """Render and tokenise the messages and the tools that the model is shown.

    `said` is what the scripted model says unless a header tells it; without it, the last user's words.
    Raises `BadRequestError` or `ContextLengthError`.
    """
    text_len = chat_len(body.messages) + (len(msgspec.json.encode(tools)) if tools else 0)
    token_ids = None
    if text_len <= inline_bytes and len(body.messages) <= _INLINE_MESSAGES:
        token_ids = _encode_inline(served, body, tools)
    if token_ids is None:
        token_ids = await asyncio.to_thread(_encode_chat, served, body, tools)
    sampling = sampling_params(served, body, len(token_ids), "messages")
    script = None
    if served.card.engine == "scripted":
        users = (message for message in reversed(body.messages) if message.role == "user")
        if said is None:
            said = next((message.text() for message in users), "")
        script = _script(headers, said)
    return Prompt(token_ids=token_ids, sampling=sampling, script=script)


async def completion_prompts(
    served: ServedModel, body: CompletionRequest, headers: Headers, inline_bytes: int
) -> list[Prompt]:
    """Tokenise each prompt. Raises `BadRequestError` or `ContextLengthError`."""
    given = body.prompts()
    text_len = sum(len(prompt) for prompt in given if isinstance(prompt, str))
    if text_len > inline_bytes:
        encoded = await asyncio.to_thread(_encode_plain, served, given)
    else:
        encoded = _encode_plain(served, given)
    prompts: list[Prompt] = []
    for prompt, token_ids in zip(given, encoded, strict=True):
        sampling = sampling_params(served, body, len(token_ids), "prompt")
        script = None
        if served.card.engine == "scripted":
            text = prompt if isinstance(prompt, str) else served.tokenizer.decode(prompt)
            script = _script(headers, text)
        echo = None
        if body.echoes:
            skips_special = sampling.skip_special_tokens
            echo = echo_of(served.tokenizer, prompt, token_ids, skips_special=skips_special)
        prompts.append(Prompt(token_ids=token_ids, sampling=sampling, script=script, echo=echo))
    return prompts


def new_request_id() -> str:
    return secrets.token_hex(16)


def render_chat(
    served: ServedModel,
    body: ChatCompletionRequest,
    tools: Tools = (),
    budget: Budget | None = None,
) -> str:
    """The text of the messages as the model reads it, however long.

    Raises `BadRequestError`, and `TemplateLimitError` if it takes more than a given `budget`.
    """
    template = served.template
    if template is None:
        raise BadRequestError(
            "This model has no chat template; use /v1/completions.", param="model"
        )
    conversation = Conversation(
        template_messages(body.messages),
        tools,
        add_generation_prompt=body.add_generation_prompt is not False,
        continues=_continues(body),
        variables=_variables(served, template, body),
    )
    try:
        return render_conversation(
            template, conversation, tool_format=served.format.tools, budget=budget
        )
    except TemplateLimitError as error:
        if budget is not None:
            raise
        raise _wrong("messages", f"{error}.") from error
    except ChatTemplateError as error:
        raise _wrong(_fault(template, conversation), str(error)) from error


def _continues(body: ChatCompletionRequest) -> bool:
    """Whether the answer goes on with the last message. Raises `BadRequestError`."""
    if not body.continue_final_message:
        return False
    if body.add_generation_prompt:
        raise _wrong(
            "continue_final_message", "it cannot be true together with 'add_generation_prompt'."
        )
    last = body.messages[-1]
    if last.role != "assistant" or last.tool_calls or last.function_call:
        raise _wrong(
            "continue_final_message",
            "the last message must be the assistant's, and call no tools.",
        )
    return True


def _variables(
    served: ServedModel, template: ChatTemplate, body: ChatCompletionRequest
) -> dict[str, Any]:
    """A client's own. Raises `BadRequestError`."""
    variables = dict(body.chat_template_kwargs or {})
    if not template.reserved.isdisjoint(variables):
        reserved = min(template.reserved.intersection(variables))
        raise _wrong("chat_template_kwargs", f"the variable '{reserved}' cannot be set.")
    if len(variables) > _MOST_VARIABLES:
        raise _wrong("chat_template_kwargs", f"there are more than {_MOST_VARIABLES} variables.")
    if body.reasoning_effort is not None:
        effort = _effort(
            template, body.reasoning_effort, reasons=served.format.reasoning is not None
        )
        variables = effort | variables
    return variables


def _effort(template: ChatTemplate, effort: str, *, reasons: bool) -> dict[str, Any]:
    """The variable by which a template knows it. Raises `BadRequestError` if there is none."""
    if "reasoning_effort" in template.variables:
        return {"reasoning_effort": effort}
    for switch in ("enable_thinking", "thinking"):
        if switch in template.variables:
            return {switch: effort != "none"}
    if effort == "none" and not reasons:
        return {}
    raise BadRequestError(
        "Invalid 'reasoning_effort': how much this model reasons cannot be set.",
        param="reasoning_effort",
        code="unsupported_parameter",
    )


def _encode_inline(
    served: ServedModel, body: ChatCompletionRequest, tools: Tools
) -> list[int] | None:
    """None if that takes the template longer than others should wait."""
    try:
        return _encode_chat(
            served, body, tools, Budget(_INLINE_PASSES, _INLINE_SECONDS, _INLINE_SIZE)
        )
    except TemplateLimitError:
        return None


def _encode_chat(
    served: ServedModel, body: ChatCompletionRequest, tools: Tools, budget: Budget | None = None
) -> list[int]:
    text = render_chat(served, body, tools, budget)
    _check_length(served, text, "messages")
    return served.tokenizer.encode(text)


def _fault(template: ChatTemplate, conversation: Conversation) -> str:
    """The field without which a template takes a conversation that it has refused."""
    for name, changed in (
        ("chat_template_kwargs", replace(conversation, variables=None)),
        ("tools", replace(conversation, tools=())),
    ):
        try:
            if changed != conversation:
                render_conversation(template, changed)
                return name
        except ChatTemplateError:
            pass
    return "messages"


def _wrong(name: str, sentence: str) -> BadRequestError:
    return BadRequestError(f"Invalid '{name}': {sentence}"[:500], param=name, code="invalid_value")


def _encode_plain(served: ServedModel, prompts: list[str | list[int]]) -> list[list[int]]:
    card = served.card
    encoded: list[list[int]] = []
    for prompt in prompts:
        if isinstance(prompt, str):
            _check_length(served, prompt, "prompt")
            token_ids = served.tokenizer.encode(prompt, add_bos=card.add_bos)
        elif max(prompt) < card.vocab_size:
            token_ids = prompt
        else:
            raise BadRequestError(
                f"Invalid 'prompt': token ids of this model are 0 to {card.vocab_size - 1}.",
                param="prompt",
                code="invalid_value",
            )
        if not token_ids:
            raise BadRequestError("Invalid 'prompt': it is empty.", param="prompt")
        encoded.append(token_ids)
    return encoded


def _check_length(served: ServedModel, text: str, where: str) -> None:
    """Refuse what is far too long before time is spent on tokenising it. Raises `ContextLengthError`."""
    context_len = served.card.context_len
    if not served.tokenizer.may_fit(text, context_len):
        raise ContextLengthError(
            f"This model's maximum context length is {context_len} tokens. However, you sent "
            f"{len(text)} characters in the {where}, which is more.",
            param=where,
        )


def _script(headers: Headers, text: str) -> tuple[bytes, ...]:
    """What the scripted engine is to emit: the client's list, else the prompt's words with their spaces."""
    name = "x-model-script"
    given = headers.get(name)
    try:
        if given is not None:
            # Header text is Latin-1 by the standard; clients put UTF-8 into it.
            words = msgspec.json.decode(given.encode("latin-1"), type=list[str])
            return tuple(word.encode() for word in words)
        name = "x-model-script-hex"
        given = headers.get(name)
        if given is not None:
            return tuple(bytes.fromhex(item) for item in _hex_items(given))
    except ValueError as error:
        raise BadRequestError(
            f"Invalid header '{name}': a JSON list of strings is wanted.", param=name
        ) from error
    return tuple(word.encode() for word in _WORD.findall(text))


def _hex_items(given: str) -> list[str]:
    if given.lstrip().startswith("["):
        return msgspec.json.decode(given.encode("latin-1"), type=list[str])
    return given.split(",")
