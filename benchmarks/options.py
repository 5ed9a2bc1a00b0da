"""Option types that the benchmarks share."""

from collections.abc import Sequence

import click


class Counts(click.ParamType[list[int]]):
    """Positive whole numbers with commas between them, as in 1,8,16."""

    name = "counts"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> list[int]:
        if isinstance(value, list):
            return value
        try:
            counts = [int(part) for part in str(value).split(",")]
        except ValueError:
            counts = []
        if not counts or min(counts) < 1:
            self.fail(f"{value} is not a list of positive numbers such as 1,8,16", param, ctx)
        return counts


class Names(click.ParamType[list[str]]):
    """Some of `choices` with commas between them."""

    name = "names"

    def __init__(self, choices: Sequence[str]) -> None:
        self._choices = choices

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> list[str]:
        if isinstance(value, list):
            return value
        names = str(value).split(",")
        if unknown := [name for name in names if name not in self._choices]:
            self.fail(f"{unknown[0]} is none of {', '.join(self._choices)}", param, ctx)
        return names
