"""Chat templates: messages to the prompt text a model was trained on, rendered in a sandbox.

A template is Jinja source that comes with the model's files, so it is treated as untrusted code. The
environment is the one of `transformers` (`utils/chat_template_utils.py`): immutable sandbox,
`trim_blocks`, `lstrip_blocks`, loop controls, `tojson` without HTML escapes, `raise_exception`,
`strftime_now`, `{% generation %}` blocks, and `dict` and `namespace` without a way to Python's internals.
What a rendering may take is bounded: see `models.template_sandbox`.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.utils import Namespace

from models.errors import ChatTemplateError, TemplateLimitError
from models.template_sandbox import BoundedEnvironment, Budget, measure, rendered
from models.template_traits import probed

_RESERVED = frozenset({
    "messages", "tools", "documents", "add_generation_prompt", "continue_final_message",
    "chat_template", "tokenize", "tokenizer",
})  # fmt: skip
MOST_SOURCE = 256 * 1024
"""Characters of a template."""
_TRIAL = (2_000, 0.05)
"""Passes and seconds of each of some twenty short conversations that a new template is tried with."""
_MAX_REASON_LEN = 300
_MAX_INDENT = 16


class ChatTemplate:
    """One compiled template. Thread-safe: rendering keeps no state."""

    def __init__(self, source: str, special_tokens: Mapping[str, str] | None = None) -> None:
        """`special_tokens` become variables (`bos_token` …). Raises `ChatTemplateError` if `source` is no template."""
        self._special_tokens = dict(special_tokens or {})
        self.source = source
        if len(source) > MOST_SOURCE:
            raise ChatTemplateError(f"the chat template has more than {MOST_SOURCE} characters")
        try:
            self._template = _environment().from_string(source)
            self.variables = frozenset(_names(source))
            """Names that the template reads."""
            self.knows_tools = "tools" in self.variables
        except Exception as error:  # noqa: BLE001  some sources break Python's compiler
            raise ChatTemplateError(f"the chat template cannot be compiled: {error}") from error
        self.reserved = _RESERVED.union(self._special_tokens, _environment().globals)
        """Names that a caller's variables may not have."""
        self.traits = probed(self._try, source)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        extra: Mapping[str, Any] | None = None,
        budget: Budget | None = None,
    ) -> str:
        """The prompt text; `content` of each message is a string or None.

        Raises `ChatTemplateError` with the template's own words if it refuses the messages, or if `extra`
        names one of `reserved`, and `TemplateLimitError` if it takes more than `budget`.
        """
        if extra and not self.reserved.isdisjoint(extra):
            name = min(self.reserved.intersection(extra))
            raise ChatTemplateError(f"the chat template variable '{name}' cannot be set")
        variables: dict[str, Any] = {
            **self._special_tokens,
            **(extra or {}),
            "messages": list(messages),
            "tools": list(tools) if tools else None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            prompt = rendered(self._template, variables, budget or Budget())
            if not prompt.isascii():
                prompt.encode()  # raises for halves of characters, which no tokenizer takes
            return prompt
        except TemplateLimitError as error:
            raise TemplateLimitError(_reason(error)) from error
        except Exception as error:  # noqa: BLE001  it is the template's code that raises
            raise ChatTemplateError(_reason(error)) from error

    def _try(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
    ) -> str:
        return self.render(messages, tools=tools, budget=Budget(*_TRIAL))


def _reason(error: Exception) -> str:
    text = str(error)
    if len(text) > _MAX_REASON_LEN:
        text = text[:_MAX_REASON_LEN] + "…"
    return f"the model's chat template cannot render these messages: {text}"


class _GenerationBlocks(Extension):
    """`{% generation %} … {% endgeneration %}` marks what a model wrote, for training; here it is only its body."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(lineno)

    def _body(self, caller: Macro) -> str:
        return caller()


class _SafeDict:
    """`dict` of a template: makes dictionaries, but is not the type, whose attributes lead out of the sandbox."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:  # noqa: ANN401
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:  # noqa: ANN401
        return dict.fromkeys(*args)


class _SafeNamespace(Namespace):
    """Jinja's namespace that refuses underscored names, which would shadow Python's own attributes."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # noqa: ANN401, N805
        # The object is taken from args so that a template may have an attribute called `self`.
        values = dict(*args[1:], **kwargs)
        for name in values:
            _check_name(name)
        Namespace.__init__(args[0], values)

    def __setitem__(self, name: str, value: Any) -> None:  # noqa: ANN401
        _check_name(name)
        super().__setitem__(name, value)

    def __repr__(self) -> str:
        # Jinja's own shows all that it holds, however much.
        return "<Namespace>"


def _check_name(name: str) -> None:
    if name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace cannot hold the name '{name}'")


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().astimezone().strftime(pattern)


def _tojson(
    value: Any,  # noqa: ANN401
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    measure(value)
    spaces = indent if isinstance(indent, int) else len(indent or "")
    if spaces + sum(map(len, separators or ())) > _MAX_INDENT:
        raise TemplateLimitError("it sets JSON too wide")
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _names(source: str) -> set[str]:
    """Of all variables that a template reads."""
    return {name.name for name in _environment().parse(source).find_all(nodes.Name)}


@lru_cache(maxsize=1)
def _environment() -> BoundedEnvironment:
    environment = BoundedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlocks, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    environment.globals["dict"] = _SafeDict()
    environment.globals["namespace"] = _SafeNamespace
    return environment
