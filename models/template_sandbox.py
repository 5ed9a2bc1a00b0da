"""The sandbox that chat templates render in: jinja2's immutable one, with bounds on time and size.

A thread cannot be ended from outside, so a template has to stop by itself: every pass of a loop and every
call of a macro is counted, and what builds texts and lists says how much before it does. Between two checks
lies one operation on a few megabytes. Filters and functions of jinja2 that only pad or fill are left out; no
chat template uses them.
"""

import re
import threading
import time
from collections.abc import Callable, Iterable, MutableMapping
from functools import wraps
from itertools import islice
from types import BuiltinMethodType, MethodType
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from models.errors import TemplateLimitError

MOST_TEXT = 8 * 2**20
"""Characters of one string, the prompt among them."""
MOST_PASSES = 10_000_000
MOST_SECONDS = 1.0
_MOST_BUILT = 64 * 2**20
"""Characters of all that one rendering makes."""
_MOST_ITEMS = 100_000
_MOST_WIDTH = 1_000
_MOST_BITS = 4_096
_SMALL = 1_024
"""What is not larger costs less than a pass of a loop, and is not counted."""
_PER_VALUE = 16
"""What a value counts beside its characters."""
_PASSES_BETWEEN_CLOCKS = 32
_PIECES = 1_024
"""So many pieces of text are put together without a look at their length."""
_TICK, _CONCAT = "<tick>", "<concat>"
"""Names of filters that no template can spell."""
_WIDE = re.compile(r"%[^a-zA-Z%]*(\*|\d{4})|:[^{}]*(\{|\d{4})")
"""A width in a format that is large, or given as an argument."""
_SIZED = (str, bytes, list, tuple)
_NESTED: Any = (
    list, tuple, set, frozenset, type({}.keys()), type({}.values()), type({}.items()),
)  # fmt: skip


class Budget:
    """What one rendering may spend."""

    __slots__ = ("_built", "_passes", "_seconds", "_until_s")

    def __init__(
        self,
        passes: int = MOST_PASSES,
        seconds: float = MOST_SECONDS,
        size: int = _MOST_BUILT,
    ) -> None:
        """Passes of loops and calls of macros; processor time of the thread that renders; all that it makes."""
        self._passes = passes
        self._built = size
        self._seconds = seconds
        self._until_s: float | None = None

    def tick(self) -> None:
        self._passes -= 1
        if self._passes < 0 or self._passes % _PASSES_BETWEEN_CLOCKS == 0:
            self._check()

    def _check(self) -> None:
        now_s = time.thread_time()
        # Counted from the first look at the clock: most renderings end before.
        self._until_s = self._until_s or now_s + self._seconds
        if self._passes < 0 or now_s > self._until_s:
            raise TemplateLimitError("it takes too long")

    def build(self, size: int) -> None:
        self._built -= size
        if size > MOST_TEXT or self._built < 0:
            raise TemplateLimitError("it makes too much text")


class _Running(threading.local):
    """The budget of what this thread renders; there is none while a template is compiled."""

    budget: Budget | None = None


_running = _Running()


def rendered(template: jinja2.Template, variables: dict[str, Any], budget: Budget) -> str:
    """Raises `TemplateLimitError`, or whatever the template's code raises."""
    _running.budget = budget
    try:
        return template.render(variables)
    finally:
        _running.budget = None


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """Its templates are rendered by `rendered`."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self, **options: Any) -> None:  # noqa: ANN401
        super().__init__(**options, finalize=_finalize)
        for name in ("lipsum", "cycler", "joiner"):
            del self.globals[name]
        for name in _LEFT_OUT:
            del self.filters[name]
        for name, check in _CHECKS.items():
            self.filters[name] = _guarded(self.filters[name], check)
        self.filters[_TICK] = _tick
        self.filters[_CONCAT] = _joined

    def make_globals(self, d: MutableMapping[str, Any] | None) -> MutableMapping[str, Any]:
        """One dictionary: jinja2's chain of them is copied entry by entry with every rendering."""
        return {**self.globals, **(d or {})}

    @staticmethod
    def concat(pieces: Iterable[str]) -> str:  # type: ignore[override, unused-ignore]
        """The text of a template, a macro or a block."""
        left, parts, size = iter(pieces), [""], 0
        while size <= MOST_TEXT and (some := list(islice(left, _PIECES))):
            size += sum(map(len, some))
            parts += some
        _build(size)
        return "".join(parts)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree: nodes.Template = _Counted().visit(super()._parse(source, name, filename))
        tree.set_environment(self)
        return tree

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:  # noqa: ANN401
        if operator == "+":
            if type(left) is str and type(right) is str:
                if len(left) + len(right) > _SMALL:
                    _build(len(left) + len(right))
            elif isinstance(left, _SIZED) and isinstance(right, _SIZED):
                _grow(left, len(left) + len(right))
        elif operator == "*":
            _check_product(left, right)
        elif isinstance(left, str):
            _check_format(left, right)
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            _check_bits(left.bit_length() * max(right, 1))
        return self.binop_table[operator](left, right)

    def call(
        __self,  # noqa: N805
        __context: Context,
        __obj: Any,  # noqa: ANN401
        *args: Any,  # noqa: ANN401
        **kwargs: Any,  # noqa: ANN401
    ) -> Any:  # noqa: ANN401
        if isinstance(__obj, (BuiltinMethodType, MethodType)):
            owner = __obj.__self__
            if isinstance(owner, _SIZED):
                args = _checked_call(owner, __obj.__name__, args)
        return super().call(__context, __obj, *args, **kwargs)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:  # noqa: ANN401
        formatted = super().wrap_str_format(value)
        if formatted is None:
            return None

        def bounded(*args: Any, **kwargs: Any) -> str:  # noqa: ANN401
            _check_format(value.__self__, (args, kwargs))
            return formatted(*args, **kwargs)

        return bounded


class _Counted(NodeTransformer):
    """Has loops and macros tick, and `~` measured."""

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802
        return self._ticking(node)

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:  # noqa: N802
        return self._ticking(node)

    def visit_CallBlock(self, node: nodes.CallBlock) -> nodes.Node:  # noqa: N802
        return self._ticking(node)

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        values = nodes.List(node.nodes, lineno=node.lineno)
        return nodes.Filter(values, _CONCAT, [], [], None, None, lineno=node.lineno)

    def _ticking(self, node: nodes.For | nodes.Macro | nodes.CallBlock) -> nodes.Node:
        self.generic_visit(node)
        nothing = nodes.Const(None, lineno=node.lineno)
        tick = nodes.Filter(nothing, _TICK, [], [], None, None, lineno=node.lineno)
        node.body.insert(0, nodes.ExprStmt(tick, lineno=node.lineno))
        return node


def _tick(_: None) -> None:
    (_running.budget or _budget()).tick()


def _joined(values: list[Any]) -> str:
    """What `~` makes."""
    measure(*values)
    return "".join(value if isinstance(value, str) else str(value) for value in values)


def _finalize(value: object) -> object:
    """What `{{ }}` puts out."""
    if not isinstance(value, str):
        measure(value)
    return value


def _budget() -> Budget:
    if _running.budget is None:
        # jinja2 computes constants while it compiles, and leaves those that raise.
        raise TemplateLimitError("it is not rendered yet")
    return _running.budget


def _build(size: int) -> None:
    if size > _SMALL:
        _budget().build(size)


def _grow(kind: object, size: int) -> None:
    if isinstance(kind, str):
        _build(size)
    elif size > _MOST_ITEMS:
        raise TemplateLimitError("it makes too long a list")
    else:
        _build(size * _PER_VALUE)


def measure(*values: object) -> None:
    """Count what is in `values`, as often as it is in there, before it becomes text."""
    stack: list[Any] = list(values)
    size = 0
    while stack:
        value = stack.pop()
        if isinstance(value, str):
            size += len(value)
        elif isinstance(value, dict):
            stack.extend(value)
            stack.extend(value.values())
        elif isinstance(value, _NESTED):
            stack.extend(value)
        size += _PER_VALUE
        if size > MOST_TEXT:
            break
    _build(size)


def _check_product(left: object, right: object) -> None:
    for value, times in ((left, right), (right, left)):
        if isinstance(value, _SIZED) and isinstance(times, int):
            _grow(value, len(value) * times)
    if isinstance(left, int) and isinstance(right, int):
        _check_bits(left.bit_length() + right.bit_length())


def _check_bits(bits: int) -> None:
    if bits > _MOST_BITS:
        raise TemplateLimitError("it computes too large a number")


def _check_format(pattern: str, values: object) -> None:
    if _WIDE.search(pattern):
        raise SecurityError("a format has too large a width")
    measure(pattern, values)


def _checked_call(owner: Any, name: str, args: tuple[Any, ...]) -> tuple[Any, ...]:  # noqa: ANN401
    """The arguments of a method of a text or list, once it is known that what it makes is small enough."""
    _build(len(owner))
    if not isinstance(owner, str):
        return args
    if name == "translate" or any(_width(arg) > _MOST_ITEMS for arg in args):
        raise TemplateLimitError(f"it calls {name} with something too large")
    if name == "join" and args:
        return (_for_join(args[0], (owner,)), *args[1:])
    if name == "replace":
        _for_replace(owner, args)
    return args


def _width(value: object) -> int:
    """Of what is padded with, a number or a text."""
    if isinstance(value, str):
        return len(value)
    return value if isinstance(value, int) else 0


Check = Callable[[Any, tuple[Any, ...]], Any]
"""Takes what a filter is applied to and the other arguments; returns what to apply it to."""


def _guarded(function: Callable[..., Any], check: Check) -> Callable[..., Any]:
    at = 1 if hasattr(function, "jinja_pass_arg") else 0

    @wraps(function)
    def guarded(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        value = check(args[at], (*args[at + 1 :], *kwargs.values()))
        return function(*args[:at], value, *args[at + 1 :], **kwargs)

    return guarded


def _for_text(value: Any, _: tuple[Any, ...]) -> Any:  # noqa: ANN401
    if isinstance(value, str):
        _build(len(value))
    else:
        measure(value)
    return value


def _for_list(value: Any, rest: tuple[Any, ...]) -> Any:  # noqa: ANN401
    if isinstance(value, _SIZED):
        _grow(value, len(value))
    if any(_width(width) > _MOST_WIDTH for width in rest):
        raise TemplateLimitError("it calls a filter with too large a number")
    return value


def _for_join(value: Any, rest: tuple[Any, ...]) -> Any:  # noqa: ANN401
    items = list(value)
    measure(items)
    _build(len(items) * sum(len(text) for text in rest if isinstance(text, str)))
    return items


def _for_replace(value: Any, rest: tuple[Any, ...]) -> Any:  # noqa: ANN401
    _for_text(value, rest)
    if len(rest) > 1 and isinstance(rest[0], str) and isinstance(rest[1], str):
        _build(str(value).count(rest[0]) * len(rest[1]))
    return value


def _for_indent(value: Any, rest: tuple[Any, ...]) -> Any:  # noqa: ANN401
    _for_text(value, rest)
    _build((str(value).count("\n") + 1) * max(map(_width, rest), default=4))
    return value


def _for_format(value: Any, rest: tuple[Any, ...]) -> Any:  # noqa: ANN401
    _check_format(str(value), rest)
    return value


def _for_sum(value: Any, rest: tuple[Any, ...]) -> Any:  # noqa: ANN401
    if any(isinstance(start, (list, tuple)) for start in rest):
        raise SecurityError("sum adds numbers")
    return value


_CHECKS: dict[str, Check] = {
    **dict.fromkeys(("string", "escape", "e", "forceescape", "trim", "upper", "lower"), _for_text),
    **dict.fromkeys(("capitalize", "title", "truncate"), _for_text),
    **dict.fromkeys(("list", "sort", "reverse", "unique", "batch", "groupby"), _for_list),
    "join": _for_join,
    "replace": _for_replace,
    "indent": _for_indent,
    "format": _for_format,
    "sum": _for_sum,
}
_LEFT_OUT = (
    "center", "filesizeformat", "pprint", "random", "slice", "striptags", "urlize", "wordcount",
    "wordwrap", "xmlattr",
)  # fmt: skip
