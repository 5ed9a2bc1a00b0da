"""What tools a request offers, and what the model may or must do with them."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from gateway.domain.openai.schemas import ChatCompletionRequest
from gateway.domain.openai.tool_schemas import (
    AllowedTools,
    FunctionDefinition,
    NamedTool,
    ToolChoice,
)
from gateway.errors import BadRequestError


@dataclass(frozen=True)
class ToolOffer:
    """Tools that the model is shown; without any there is no offer."""

    functions: tuple[FunctionDefinition, ...]
    callable: tuple[FunctionDefinition, ...]
    """Those of them that may be called: the one that was named, or all."""
    is_required: bool
    """The answer must be a call."""
    parallel: bool
    """Several calls may come."""

    @cached_property
    def names(self) -> frozenset[str]:
        """Of those that may be called."""
        return frozenset(function.name for function in self.callable)

    @cached_property
    def is_strict(self) -> bool:
        """Of some tool the arguments must match the schema, whether or not the model has to call it."""
        return any(function.strict for function in self.callable)

    @cached_property
    def template_tools(self) -> list[dict[str, Any]]:
        """As chat templates expect them."""
        return [
            {"type": "function", "function": _template_function(function)}
            for function in self.functions
        ]


def tool_offer(body: ChatCompletionRequest) -> ToolOffer | None:
    """None if the model is to know of no tools. Raises `BadRequestError`."""
    choice = body.tool_choice
    if not body.tools:
        if choice not in (None, "none", "auto"):
            raise _wrong("tool_choice", "no tools are given.")
        return None
    known: dict[str, FunctionDefinition] = {}
    for index, tool in enumerate(body.tools):
        if tool.function.name in known:
            raise _wrong(f"tools[{index}].function.name", "another tool has the same name.")
        known[tool.function.name] = tool.function
    return None if choice == "none" else _chosen(body, known, choice)


def shown_tools(body: ChatCompletionRequest) -> list[dict[str, Any]]:
    """What a chat's template is given. Raises `BadRequestError`."""
    offer = tool_offer(body)
    return [] if offer is None else offer.template_tools


def _chosen(
    body: ChatCompletionRequest, known: dict[str, FunctionDefinition], choice: ToolChoice | None
) -> ToolOffer:
    shown = allowed = tuple(known.values())
    is_required = choice == "required"
    if isinstance(choice, NamedTool):
        is_required, allowed = True, _named(known, [choice])
    elif isinstance(choice, AllowedTools):
        is_required = choice.allowed_tools.mode == "required"
        shown = allowed = _named(known, choice.allowed_tools.tools)
    return ToolOffer(
        functions=shown,
        callable=allowed,
        is_required=is_required,
        # A tool that is named is called once, as with OpenAI's own models.
        parallel=body.parallel_tool_calls is not False and not isinstance(choice, NamedTool),
    )


def _named(
    known: dict[str, FunctionDefinition], tools: list[NamedTool]
) -> tuple[FunctionDefinition, ...]:
    names = dict.fromkeys(tool.function.name for tool in tools)
    if not names.keys() <= known.keys():
        raise _wrong("tool_choice", "it names a function that is not among the tools.")
    return tuple(known[name] for name in names)


def _template_function(function: FunctionDefinition) -> dict[str, Any]:
    fields: dict[str, Any] = {"name": function.name}
    # Templates look at the description without asking whether there is one.
    fields["description"] = function.description or ""
    fields["parameters"] = function.parameters or {"type": "object", "properties": {}}
    return fields


def _wrong(name: str, sentence: str) -> BadRequestError:
    return BadRequestError(f"Invalid '{name}': {sentence}", param=name, code="invalid_value")
