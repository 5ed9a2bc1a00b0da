"""Protects what a benchmark computes and sends: quantiles, ratios, fresh but repeatable prompts."""

import json
import math
from dataclasses import replace

import pytest

from benchmarks.closed_loop import SCENARIOS, Figures, Load, quantile_ms, request_bodies
from benchmarks.report import ratios, throughput_table
from benchmarks.serve import num_errors

LOAD = Load(url="http://x", model="m", num_clients=4, num_requests=6, max_tokens=64)
FIGURES = Figures(
    num_clients=4,
    num_requests=6,
    num_errors=1,
    first_error="503",
    wall_s=2.0,
    output_tokens=384,
    output_tokens_per_s=192.0,
    requests_per_s=3.0,
    prompt_tokens_mean=40.0,
    ttft_p50_ms=100.0,
    ttft_p99_ms=200.0,
    inter_token_p50_ms=10.0,
    inter_token_p99_ms=20.0,
    e2e_p50_ms=700.0,
    e2e_p99_ms=900.0,
)


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


def test_ratios_divide_medians_over_the_rounds() -> None:
    slow = [replace(FIGURES, output_tokens_per_s=value) for value in (90.0, 96.0, 400.0)]
    runs = {"ours": {4: [FIGURES]}, "peer": {4: slow}}
    assert ratios(runs, "ours", "peer")[4]["output_tokens_per_s"] == 2.0
    assert ratios(runs, "ours", "peer")[4]["ttft_p50_ms"] == 1.0


def test_failed_requests_are_shown_and_counted_over_all_servers() -> None:
    runs = {"a": {1: [FIGURES, FIGURES]}, "b": {1: [FIGURES]}}
    assert throughput_table(runs).splitlines()[2].endswith("| 2 |")
    assert num_errors({"a": {"1": [{"num_errors": 2}]}, "b": {"1": [{"num_errors": 1}]}}) == 3
