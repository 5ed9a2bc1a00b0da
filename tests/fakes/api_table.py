"""docs/api.md as data: what it says of each parameter of each route."""

import json
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "api.md"
_CODE = re.compile(r"`([^`]+)`")


@dataclass(frozen=True)
class Row:
    route: str
    """`POST /v1/chat/completions`"""
    name: str
    is_extension: bool
    verdict: str
    taken: tuple[dict[str, Any], ...]
    """Fields that make up a request together with what is required."""
    refused: tuple[dict[str, Any], ...]
    tests: tuple[str, ...]


@cache
def rows() -> tuple[Row, ...]:
    found: list[Row] = []
    route = ""
    for line in DOCUMENT.read_text().splitlines():
        if line.startswith("## "):
            route = line.removeprefix("## ")
        if line.startswith("| `"):
            found.append(_row(route, [cell.strip() for cell in line.strip("| \n").split(" |")]))
    return tuple(found)


def _row(route: str, cells: list[str]) -> Row:
    first, verdict, taken, refused, tests = cells
    (name,) = _CODE.findall(first)
    return Row(
        route=route,
        name=name,
        is_extension=first.endswith("+"),
        verdict=verdict,
        taken=_requests(name, taken),
        refused=_requests(name, refused),
        tests=tuple(_CODE.findall(tests)),
    )


def _requests(name: str, cell: str) -> tuple[dict[str, Any], ...]:
    """A value of the parameter, or a piece of an object that begins with it."""
    return tuple(
        json.loads(f"{{{text}}}" if text.startswith(f'"{name}": ') else f'{{"{name}": {text}}}')
        for text in _CODE.findall(cell)
    )
