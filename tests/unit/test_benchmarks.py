"""Protects what a benchmark computes, sends and keeps: quantiles, ratios, fresh prompts, resumed runs."""

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import engine_load
from benchmarks.cells import Cell, Plan, Results, ResultsError, Spot, spots
from benchmarks.closed_loop import SCENARIOS, Load, request_bodies
from benchmarks.engine_metrics import EngineSteps, counters, difference
from benchmarks.report import ratio, throughput_table, whole
from benchmarks.servers import CpuTime
from benchmarks.stack import rows
from cli.load.closed_loop import Figures, quantile_ms

LOAD = Load(url="http://x", model="m", num_clients=4, num_requests=6, max_tokens=64)
PLAN = Plan(
    model="m",
    clients={"short": [1, 8], "long-prompt": [8]},
    rounds=2,
    requests_per_client=3,
    max_tokens=64,
    seed=1,
)
FIGURES = Figures(
    num_clients=4,
    num_requests=6,
    num_errors=1,
    first_error="503",
    wall_s=2.0,
    output_tokens=384,
    output_tokens_per_s=192.0,
    total_tokens_per_s=312.0,
    requests_per_s=3.0,
    prompt_tokens_mean=40.0,
    ttft_p50_ms=100.0,
    ttft_p99_ms=200.0,
    inter_token_p50_ms=10.0,
    inter_token_p99_ms=20.0,
    per_token_p50_ms=10.0,
    per_token_p99_ms=20.0,
    e2e_p50_ms=700.0,
    e2e_p99_ms=900.0,
)
STEPS = EngineSteps(steps=100, host_ms=0.8, device_ms=30.0, padding_ratio=0.1, cached_ratio=0.5)
METRICS = """
# TYPE tpugate_steps counter
tpugate_steps_total{model_name="m",worker="a"} 10.0
tpugate_steps_total{model_name="m",worker="b"} 30.0
tpugate_step_host_seconds_total{model_name="m",worker="a"} 0.05
tpugate_step_device_seconds_total{model_name="m",worker="a"} 1.2
tpugate_step_tokens_total{model_name="m",worker="a"} 900.0
tpugate_step_padding_total{model_name="m",worker="a"} 300.0
vllm:prefix_cache_queries_total{model_name="m",worker="a"} 80.0
vllm:prefix_cache_hits_total{model_name="m",worker="a"} 20.0
"""


def _rates(*values: float) -> list[Cell]:
    return [Cell(replace(FIGURES, output_tokens_per_s=value)) for value in values]


def test_quantiles_are_values_that_were_measured() -> None:
    values_s = [0.004, 0.001, 0.003, 0.002]
    assert quantile_ms(values_s, 0.5) == 3.0
    assert quantile_ms(values_s, 0.99) == 4.0
    assert math.isnan(quantile_ms([], 0.5))


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_prompts_repeat_for_a_seed_and_differ_otherwise(scenario: str) -> None:
    load = replace(LOAD, scenario=scenario)
    bodies = list(request_bodies(load))
    assert bodies == list(request_bodies(load))
    assert len(set(bodies)) == load.num_requests
    assert not set(bodies) & set(request_bodies(replace(load, seed=1)))
    assert not set(bodies) & set(request_bodies(replace(load, num_clients=5)))


def test_every_request_asks_for_exactly_the_tokens_of_the_load() -> None:
    for body in map(json.loads, request_bodies(LOAD)):
        assert (body["max_tokens"], body["ignore_eos"], body["temperature"]) == (64, True, 0)


def test_requests_of_the_engine_alone_share_their_prefix_and_nothing_else() -> None:
    load = engine_load.EngineLoad(
        rows=2,
        num_requests=3,
        prompt_len=20,
        prefix_len=12,
        output_len=5,
        sampling="truncated",
        vocab_size=5000,
        seed=0,
    )
    prompts = [request.prompt_token_ids for request in engine_load.requests(load)]
    assert [len(prompt) for prompt in prompts] == [20, 20, 20]
    assert len({tuple(prompt[:12]) for prompt in prompts}) == 1
    assert len({tuple(prompt[12:]) for prompt in prompts}) == 3


def test_servers_change_places_from_round_to_round() -> None:
    order = [(spot.turn, spot.scenario, spot.clients, spot.server) for spot in spots(PLAN, "ab")]
    assert order[:4] == [(0, "short", 1, s) for s in "ab"] + [(0, "short", 8, s) for s in "ab"]
    assert order[6:8] == [(1, "short", 1, s) for s in "ba"]
    assert len(order) == len(set(order)) == 12


def test_ratios_divide_medians_over_the_rounds() -> None:
    cells = {"tpugate": _rates(192.0), "vllm": _rates(90.0, 96.0, 400.0)}
    assert ratio(cells) == 2.0


def test_results_are_kept_and_go_on(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    results = Results.open(path, PLAN)
    results.add(Spot("short", 8, 0, "tpugate"), Cell(FIGURES, STEPS))
    results.starts["tpugate: warm"] = 20.0
    results.write()
    again = Results.open(path, PLAN)
    assert again == results
    assert again.of("short", 8, "tpugate") == [Cell(FIGURES, STEPS)]
    # More rounds or scenarios are the same run, longer.
    assert Results.open(path, replace(PLAN, rounds=5)) == results


@pytest.mark.parametrize("text", ["{", "[]", '{"cells": {"a": {}}}'])
def test_a_file_with_something_else_is_not_overwritten(tmp_path: Path, text: str) -> None:
    path = tmp_path / "results.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ResultsError):
        Results.open(path, PLAN)
    assert path.read_text(encoding="utf-8") == text


def test_results_of_another_plan_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    Results.open(path, PLAN).write()
    with pytest.raises(ResultsError, match="name another file"):
        Results.open(path, replace(PLAN, max_tokens=8))


def _both_servers() -> Iterator[tuple[Spot, Cell]]:
    for spot in spots(PLAN, ["tpugate", "vllm"]):
        yield spot, Cell(FIGURES, STEPS if spot.server == "tpugate" else None)


def test_tables_show_what_is_finished_with_its_failed_requests() -> None:
    results = Results(None)
    for spot, cell in _both_servers():
        if spot.clients == 8 and spot.scenario == "short":
            results.add(spot, cell)
    lines = throughput_table(PLAN, results, "short").splitlines()
    assert len(lines) == 3
    assert lines[2].startswith("| 8 | 192.0 | 192.0 | 1.00 | 100 / 100 |")
    assert lines[2].endswith("| 4 |")
    assert results.num_errors == 4
    assert "| short | 8 | 100 | 30.0 | 0.8 | 0.1 | 0.5 |" in whole(PLAN, results)


def test_steps_are_what_the_counters_grew_by() -> None:
    before = counters(METRICS)
    assert before["tpugate_steps"] == 40.0
    after = {name: 3 * value for name, value in before.items()}
    steps = difference(before, after)
    assert steps == EngineSteps(
        steps=80, host_ms=1.25, device_ms=30.0, padding_ratio=0.25, cached_ratio=0.25
    )
    assert difference(after, after) is None


def test_cpu_time_a_step_is_that_of_processes_that_lived_all_the_while() -> None:
    before = {"gateway": CpuTime(1.0, 0.5), "gone": CpuTime(1.0, 1.0)}
    after = {"gateway": CpuTime(1.2, 0.6), "new": CpuTime(9.0, 9.0)}
    assert rows(before, after, num_steps=100) == [
        ["gateway", "2.00", "1.00", "3.00"],
        ["all", "2.00", "1.00", "3.00"],
    ]
