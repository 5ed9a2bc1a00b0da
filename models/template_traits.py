"""What a chat template makes of roles, orders and calls, found out by trying it once, when it is loaded.

Templates say nowhere what they take. They refuse, or leave out without a word, what they do not expect. So each
is given a few short conversations, and what comes out is looked at: are the words of all turns there, in order?
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from models.errors import ChatTemplateError, TemplateLimitError

Message = Mapping[str, Any]
Render = Callable[[Sequence[Message], Sequence[Mapping[str, Any]]], str]
"""Of messages and tools. Raises `ChatTemplateError`."""

_A, _B, _C, _D = "zqalpha", "zqbravo", "zqcharlie", "zqdelta"
_KEY, _VALUE = "zqkey", "zqvalue"
_NAMES = ("zqfirst", "zqsecond")
_LONG_IDS = ("call_zq0000000000000001", "call_zq0000000000000002")
_SHORT_IDS = ("zq0000001", "zq0000002")
_TOOLS = tuple(
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "",
            "parameters": {"type": "object", "properties": {_KEY: {"type": "string"}}},
        },
    }
    for name in _NAMES
)


@dataclass(frozen=True)
class TemplateTraits:
    """The defaults are those of a template that takes everything as it is."""

    parts: bool = False
    """Content must be a list of typed parts."""
    developer: bool = True
    """There is such a role; else its messages are the system's."""
    system: Literal["any", "first", "none"] = "any"
    """System messages may be anywhere, only one may be in front, or there is no such role."""
    system_needs_last_user: bool = False
    """A system message is left out unless a user's turn is the last."""
    alternates: bool = False
    """Turns of users and of the assistant must take turns, a user's first."""
    needs_user: bool = False
    """There must be a user's turn."""
    tools: bool = True
    """There are turns that call tools and that bring results."""
    arguments: Literal["object", "text"] = "object"
    """What the arguments of a call are: the object, or its JSON text."""
    short_ids: bool = False
    """Ids of calls must be nine letters and digits."""
    single_calls: bool = False
    """A turn can call one tool only."""


def probed(render: Render, source: str) -> TemplateTraits:
    """The traits of a template, whose text is `source`. Those of none that can be tried are the defaults."""
    try:
        return _probed(_Trial(render), source)
    except TemplateLimitError:
        return TemplateTraits()


def _probed(trial: "_Trial", source: str) -> TemplateTraits:
    user = _said("user", _A)
    if not trial.shows([user], _A):
        trial.parts = True
        if not trial.shows([user], _A):
            return TemplateTraits()
    system = _system(trial)
    traits = TemplateTraits(
        parts=trial.parts,
        developer="developer" in source
        and trial.shows([_said("developer", _B), user], _A)
        and trial.shows([_said("developer", _B), user], _B),
        system=system,
        system_needs_last_user=system != "none"
        and not trial.shows([_said("system", _B), user, _said("assistant", _C)], _B),
        alternates=not all(
            trial.shows(messages, *(message["content"] for message in messages))
            for messages in (
                [user, _said("user", _B)],
                [_said("assistant", _A), _said("user", _B)],
                [user, _said("assistant", _B), _said("assistant", _C), _said("user", _D)],
            )
        ),
        needs_user=system != "none" and not trial.shows([_said("system", _A)], _A),
        tools=False,
    )
    return _with_tools(trial, traits)


def _system(trial: "_Trial") -> Literal["any", "first", "none"]:
    first = [_said("system", _A), _said("user", _B)]
    if not (trial.shows(first, _A) and trial.shows(first, _B)):
        return "none"
    several = [_said("system", _A), _said("system", _B), _said("user", _C)]
    late = [_said("user", _A), _said("assistant", _B), _said("system", _C), _said("user", _D)]
    is_any = trial.shows(several, _A, _B, _C) and trial.shows(late, _A, _B, _C, _D)
    return "any" if is_any else "first"


def _with_tools(trial: "_Trial", traits: TemplateTraits) -> TemplateTraits:
    wanted = (_A, _NAMES[0], _KEY, _VALUE, _C)
    for ids in (_LONG_IDS, _SHORT_IDS):
        for arguments in ({_KEY: _VALUE}, f'{{"{_KEY}": "{_VALUE}"}}'):
            turns = _calling(ids[:1], arguments)
            if all(trial.shows(turns, *wanted, tools=tools) for tools in ((), _TOOLS)):
                both = _calling(ids, arguments)
                return TemplateTraits(
                    **{
                        **vars(traits),
                        "tools": True,
                        "arguments": "text" if isinstance(arguments, str) else "object",
                        "short_ids": ids is _SHORT_IDS,
                        "single_calls": not trial.shows(both, _A, *_NAMES, _C, _D, tools=_TOOLS),
                    }
                )
    return traits


def _calling(ids: Sequence[str], arguments: object) -> list[Message]:
    """A user's turn, one that calls tools, and their results."""
    calls = [
        {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
        for call_id, name in zip(ids, _NAMES, strict=False)
    ]
    results = [
        {"role": "tool", "tool_call_id": call_id, "name": name, "content": text}
        for call_id, name, text in zip(ids, _NAMES, (_C, _D), strict=False)
    ]
    return [_said("user", _A), {"role": "assistant", "content": "", "tool_calls": calls}, *results]


def _said(role: str, text: str) -> Message:
    return {"role": role, "content": text}


class _Trial:
    def __init__(self, render: Render) -> None:
        self._render = render
        self.parts = False
        """How content is given."""

    def shows(
        self,
        messages: Sequence[Message],
        *words: str,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> bool:
        """Whether the words are in the prompt, in this order, and none as Python's or twice quoted text."""
        given = [in_parts(message) for message in messages] if self.parts else messages
        try:
            prompt = self._render(given, tools)
        except TemplateLimitError:
            raise
        except ChatTemplateError:
            return False
        at = 0
        for word in words:
            at = prompt.find(word, at)
            if at < 0:
                return False
        return f"'{_KEY}'" not in prompt and f'\\"{_KEY}' not in prompt


def in_parts(message: Message) -> Message:
    """The message with its text as a list of one part."""
    text = message["content"]
    return {**message, "content": [{"type": "text", "text": text}] if text else []}
