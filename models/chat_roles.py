"""Conversations as a chat template takes them.

What a template does not take (`TemplateTraits`) is said in another way:

* a developer's message is the system's, where there is no such role;
* several or late system messages are one, in front; without such a role they begin the first user's turn, and
  also where the template would leave them out;
* turns of one role that follow each other are one, where turns must alternate; before an assistant's first turn
  comes an empty user's;
* calls and results of tools are text, where there are no such turns, and so are the tools themselves.

What a template refuses in spite of that is tried once more in each simpler way, and then the template's own
words are the error.
"""

import hashlib
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from models.chat_templates import ChatTemplate
from models.chat_tools import arguments_text, joined, tools_as_text, tools_told
from models.errors import ChatTemplateError, TemplateLimitError
from models.template_sandbox import Budget
from models.template_traits import Message, TemplateTraits, in_parts

Messages = Sequence[Message]


@dataclass
class Conversation:
    """What a prompt is made of."""

    messages: Messages
    """`content` is a string, arguments of calls are objects or text."""
    tools: Sequence[Mapping[str, Any]] = ()
    add_generation_prompt: bool = True
    continues: bool = False
    """The last message, an assistant's, is left open: the prompt ends where its text does."""
    variables: Mapping[str, Any] | None = None
    """Of the template, a client's own."""


def render_conversation(
    template: ChatTemplate,
    conversation: Conversation,
    *,
    tool_format: str = "hermes",
    budget: Budget | None = None,
) -> str:
    """The prompt text.

    Raises `ChatTemplateError` with the template's own words if it refuses the conversation, and
    `TemplateLimitError` if it takes more than `budget`.
    """
    messages, tools = conversation.messages, conversation.tools
    if tools and not template.knows_tools:
        messages, tools = tools_told(messages, tools, tool_format), ()
    mark = ""
    if conversation.continues:
        mark = f"zq{secrets.token_hex(8)}"
        messages = [*messages[:-1], {**messages[-1], "content": messages[-1]["content"] + mark}]
    is_prompt = conversation.add_generation_prompt and not mark
    budget = budget or Budget()
    refusal: ChatTemplateError | None = None
    for said in _ways(template.traits, messages):
        try:
            prompt = template.render(
                said,
                tools=tools,
                add_generation_prompt=is_prompt,
                extra=conversation.variables,
                budget=budget,
            )
            return _before(prompt, mark) if mark else prompt
        except TemplateLimitError:
            raise
        except ChatTemplateError as error:
            refusal = refusal or error
    raise refusal or ChatTemplateError("the chat template renders nothing")


def _before(prompt: str, mark: str) -> str:
    end = prompt.rfind(mark)
    if end < 0:
        raise ChatTemplateError("the model's chat template does not show the last message as it is")
    return prompt[:end]


def _ways(traits: TemplateTraits, messages: Messages) -> Iterator[Messages]:
    """The conversation as the template should take it, then simpler ones."""
    said = shaped(messages, traits)
    yield said
    tried = [said]
    for simpler in _simpler(traits):
        said = shaped(messages, simpler)
        if said not in tried:
            tried.append(said)
            yield said


def _simpler(traits: TemplateTraits) -> Iterator[TemplateTraits]:
    if traits.system == "any":
        traits = replace(traits, system="first")
    traits = replace(traits, alternates=True, needs_user=True)
    yield traits
    traits = replace(traits, tools=False)
    yield traits
    yield replace(traits, system="none")


def shaped(messages: Messages, traits: TemplateTraits) -> Messages:
    """The conversation said in the way that a template of these traits takes."""
    roles = {message["role"] for message in messages}
    has_calls = "assistant" in roles and any(message.get("tool_calls") for message in messages)
    if "developer" in roles and not traits.developer:
        messages = [_of_system(message) for message in messages]
    if not traits.tools and (has_calls or "tool" in roles):
        messages = tools_as_text(messages)
    elif has_calls:
        messages = _calls_for(messages, traits)
    if traits.system != "any":
        messages = _system_first(messages)
    if traits.system == "none" or traits.system_needs_last_user and messages[-1]["role"] != "user":
        messages = _system_in_turn(messages)
    if traits.needs_user and all(message["role"] != "user" for message in messages):
        messages = _with_user(messages)
    if traits.alternates:
        messages = _alternating(messages)
    if traits.parts:
        messages = [in_parts(message) for message in messages]
    return messages


def _of_system(message: Message) -> Message:
    return {**message, "role": "system"} if message["role"] == "developer" else message


def _is_system(message: Message) -> bool:
    return message["role"] in ("system", "developer")


def _system_first(messages: Messages) -> Messages:
    said = [message for message in messages if _is_system(message)]
    if not said or said == [messages[0]]:
        return messages
    text = "\n\n".join(message["content"] for message in said)
    rest = [message for message in messages if not _is_system(message)]
    return [{"role": said[0]["role"], "content": text}, *rest]


def _system_in_turn(messages: Messages) -> Messages:
    """The system message at the beginning of the user's turn behind it."""
    if not _is_system(messages[0]):
        return messages
    text, rest = messages[0]["content"], list(messages[1:])
    if rest and rest[0]["role"] == "user":
        text = joined(text, rest.pop(0)["content"])
    return [{"role": "user", "content": text}, *rest]


def _with_user(messages: Messages) -> Messages:
    at = next((i for i, message in enumerate(messages) if not _is_system(message)), len(messages))
    return [*messages[:at], {"role": "user", "content": ""}, *messages[at:]]


def _alternating(messages: Messages) -> Messages:
    merged: list[Message] = []
    for message in messages:
        last = merged[-1] if merged else None
        if last is None or _is_system(last):
            if message["role"] == "assistant":
                merged.append({"role": "user", "content": ""})
        elif last["role"] == message["role"] and _is_plain(last) and _is_plain(message):
            merged[-1] = {**last, "content": joined(last["content"], message["content"])}
            continue
        merged.append(message)
    return merged


def _is_plain(message: Message) -> bool:
    return message["role"] in ("user", "assistant") and not message.get("tool_calls")


def _calls_for(messages: Messages, traits: TemplateTraits) -> Messages:
    if traits.single_calls:
        messages = _one_by_one(messages)
    if traits.arguments == "text":
        messages = [_arguments_as_text(message) for message in messages]
    if traits.short_ids:
        messages = [_short_ids(message) for message in messages]
    return messages


def _one_by_one(messages: Messages) -> Messages:
    """Each call in a turn of its own, and its result behind it."""
    changed: list[Message] = []
    at = 0
    while at < len(messages):
        message = messages[at]
        at += 1
        calls = message.get("tool_calls") or ()
        if len(calls) < 2:
            changed.append(message)
            continue
        results: list[Message] = []
        while at < len(messages) and messages[at]["role"] == "tool":
            results.append(messages[at])
            at += 1
        for number, call in enumerate(calls):
            content = message["content"] if number == 0 else ""
            changed.append({**message, "content": content, "tool_calls": [call]})
            own = [result for result in results if result.get("tool_call_id") == call["id"]]
            changed += own[:1]
            results = [result for result in results if result not in own[:1]]
        changed += results
    return changed


def _arguments_as_text(message: Message) -> Message:
    if not message.get("tool_calls"):
        return message
    calls = [
        {**call, "function": {**call["function"], "arguments": arguments_text(call)}}
        for call in message["tool_calls"]
    ]
    return {**message, "tool_calls": calls}


def _short_ids(message: Message) -> Message:
    """Ids as nine letters and digits; equal ones stay equal."""
    changed = dict(message)
    if message.get("tool_calls"):
        changed["tool_calls"] = [
            {**call, "id": _short(call["id"])} for call in message["tool_calls"]
        ]
    if message.get("tool_call_id") is not None:
        changed["tool_call_id"] = _short(message["tool_call_id"])
    return changed


def _short(call_id: str) -> str:
    if len(call_id) == 9 and call_id.isascii() and call_id.isalnum():
        return call_id
    return hashlib.sha256(call_id.encode()).hexdigest()[:9]
