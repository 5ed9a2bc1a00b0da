"""What is measured and kept: one cell for each scenario, number of clients, round and server.

Finished cells lie in a JSON file, so that an interrupted run goes on where it was.
"""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.engine_metrics import EngineSteps
from cli.load.closed_loop import Figures


class ResultsError(Exception):
    """The file holds another plan's results, or none."""


@dataclass(frozen=True)
class Plan:
    """What to run, the same for each server."""

    model: str
    clients: Mapping[str, Sequence[int]]
    """By scenario."""
    rounds: int
    requests_per_client: int
    max_tokens: int
    seed: int

    @property
    def key(self) -> dict[str, object]:
        """What must be equal for results to belong together: not how many of them there are."""
        return {
            "model": self.model,
            "requests_per_client": self.requests_per_client,
            "max_tokens": self.max_tokens,
            "seed": self.seed,
        }


@dataclass(frozen=True)
class Spot:
    """Where a cell lies."""

    scenario: str
    clients: int
    turn: int
    server: str

    @property
    def key(self) -> str:
        return f"{self.scenario}/{self.clients}/{self.turn}/{self.server}"


@dataclass(frozen=True)
class Cell:
    figures: Figures
    steps: EngineSteps | None = None
    """Of a server that tells of its steps."""


@dataclass
class Results:
    """Cells, and what was seen once: start-ups and memory. Every change is written at once."""

    path: Path | None
    cells: dict[str, Cell] = field(default_factory=dict)
    starts: dict[str, float] = field(default_factory=dict)
    """Server and kind of start → seconds until it was ready."""
    memory: dict[str, int] = field(default_factory=dict)
    """Server and process → peak resident memory, MiB."""
    idle: dict[str, float] = field(default_factory=dict)
    """Server → CPU time while nobody asks, share of one core."""
    plan_key: dict[str, object] = field(default_factory=dict)

    @classmethod
    def open(cls, path: Path | None, plan: Plan) -> "Results":
        """Raises `ResultsError` if the file is another plan's."""
        if path is None or not path.exists():
            return cls(path, plan_key=plan.key)
        try:
            read: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            cells = {key: _cell(fields) for key, fields in read.pop("cells").items()}
            results = cls(path, cells, **read)
        except (ValueError, TypeError, KeyError) as error:
            raise ResultsError(f"{path} holds no results of this benchmark: {error}") from error
        if results.plan_key != plan.key:
            raise ResultsError(
                f"{path} holds results of {results.plan_key}, not of {plan.key}: name another file"
            )
        return results

    def add(self, spot: Spot, cell: Cell) -> None:
        self.cells[spot.key] = cell
        self.write()

    def of(self, scenario: str, clients: int, server: str) -> list[Cell]:
        """The rounds that are finished."""
        start, end = f"{scenario}/{clients}/", f"/{server}"
        return [c for key, c in self.cells.items() if key.startswith(start) and key.endswith(end)]

    @property
    def num_errors(self) -> int:
        return sum(cell.figures.num_errors for cell in self.cells.values())

    def write(self) -> None:
        """Whole or not at all."""
        if self.path is None:
            return
        document = {
            "plan_key": self.plan_key,
            "starts": self.starts,
            "memory": self.memory,
            "idle": self.idle,
            "cells": {key: asdict(cell) for key, cell in self.cells.items()},
        }
        partial = self.path.with_name(self.path.name + ".partial")
        partial.write_text(json.dumps(document, indent=1), encoding="utf-8")
        os.replace(partial, self.path)


def _cell(fields: dict[str, Any]) -> Cell:
    steps = fields["steps"]
    return Cell(Figures(**fields["figures"]), EngineSteps(**steps) if steps else None)


def spots(plan: Plan, servers: Sequence[str]) -> Iterator[Spot]:
    """Every server takes its turn at each number of clients, in each round.

    Whoever goes first meets the warmer or the colder machine: they change places.
    """
    for turn in range(plan.rounds):
        for scenario, levels in plan.clients.items():
            for clients in levels:
                for server in servers if turn % 2 == 0 else servers[::-1]:
                    yield Spot(scenario, clients, turn, server)
