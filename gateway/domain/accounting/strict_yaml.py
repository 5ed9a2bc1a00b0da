"""YAML of strangers as plain values: bounded, exact, and without YAML's surprises.

Numbers with a point become `Decimal`, dates stay text. Refused are: anchors and aliases (a few lines of them
expand to gigabytes), a key that occurs twice (the last one would win), NaN and infinity, octal and
sexagesimal numbers (`010`, `1:30`), tags (`!!float .`), and more than one document.
"""

import re
from decimal import Decimal
from pathlib import Path
from typing import Any

import yaml

MAX_BYTES = 4 * 1024 * 1024
_MAX_DEPTH = 16
_MAX_NODES = 200_000
_INTEGER = re.compile(r"[-+]?(?:0|[1-9][0-9]{0,29})")
_NUMBER = re.compile(r"[-+]?(?:0|[1-9][0-9]{0,29})?\.?[0-9]{0,40}(?:[eE][-+]?[0-9]{1,2})?")
_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class YamlError(ValueError):
    """The file is not what it should be; the message is a sentence that names the place."""


def read_yaml(path: Path) -> object:
    """The file's only document. Raises `YamlError`, also if it cannot be read."""
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise YamlError(f"{path} cannot be read: {error.strerror}") from error
    if len(content) > MAX_BYTES:
        raise YamlError(f"{path} is larger than {MAX_BYTES >> 20} MiB")
    try:
        return parse_yaml(content.decode())
    except UnicodeDecodeError as error:
        raise YamlError(f"{path} is not UTF-8") from error
    except YamlError as error:
        raise YamlError(f"{path}: {error}") from error


def parse_yaml(text: str) -> object:
    """The only document of `text`. Raises `YamlError`."""
    try:
        _check_events(text)
        return yaml.load(text, Loader=_Strict)  # noqa: S506 - a SafeLoader
    except yaml.MarkedYAMLError as error:
        raise YamlError(f"{_place(error.problem_mark)}{error.problem}") from error
    except (yaml.YAMLError, UnicodeError) as error:
        raise YamlError("a character that YAML does not allow") from error


def _check_events(text: str) -> None:
    """Bounds are checked before anything is built: nothing nests deeply and nothing is repeated."""
    depth = nodes = 0
    for event in yaml.parse(text, Loader=_Loader):
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None):
            raise YamlError(f"{_place(event.start_mark)}anchors and aliases are not allowed")
        if getattr(event, "tag", None):
            raise YamlError(f"{_place(event.start_mark)}tags are not allowed")
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        nodes += isinstance(event, yaml.NodeEvent)
        if depth > _MAX_DEPTH or nodes > _MAX_NODES:
            raise YamlError(f"{_place(event.start_mark)}too much, or too deeply nested")


def _place(mark: Any) -> str:  # noqa: ANN401  of either parser
    return "" if mark is None else f"line {mark.line + 1}, column {mark.column + 1}: "


class _Strict(_Loader):  # type: ignore[misc]
    """See the module."""


def _integer(loader: Any, node: yaml.ScalarNode) -> int:  # noqa: ANN401
    if not _INTEGER.fullmatch(node.value):
        raise _problem(node, f"{node.value[:40]!r} is no decimal integer of at most 30 digits")
    return int(node.value)


def _decimal(loader: Any, node: yaml.ScalarNode) -> Decimal:  # noqa: ANN401
    if not _NUMBER.fullmatch(node.value):
        raise _problem(node, f"{node.value[:40]!r} is no finite decimal number")
    return Decimal(node.value)


def _text(loader: Any, node: yaml.ScalarNode) -> str:  # noqa: ANN401
    return str(node.value)


def _mapping(loader: Any, node: yaml.MappingNode) -> dict[str, object]:  # noqa: ANN401
    made: dict[str, object] = {}
    for key_node, value_node in node.value:
        key = loader.construct_object(key_node, deep=True)
        if not isinstance(key, str):
            raise _problem(key_node, "a key is not text")
        if key in made:
            raise _problem(key_node, f"the key {key[:40]!r} is there twice")
        made[key] = loader.construct_object(value_node, deep=True)
    return made


def _problem(node: yaml.Node, problem: str) -> yaml.constructor.ConstructorError:
    return yaml.constructor.ConstructorError(None, None, problem, node.start_mark)


for _name, _constructor in {
    "int": _integer,
    "float": _decimal,
    "timestamp": _text,
    "map": _mapping,
}.items():
    _Strict.add_constructor(f"tag:yaml.org,2002:{_name}", _constructor)
