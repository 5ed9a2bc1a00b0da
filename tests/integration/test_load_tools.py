"""Protects loadtests/ and benchmarks/: they drive a real gateway, end by themselves and notice failures."""

import csv
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.closed_loop import Load, measure
from benchmarks.gateway import Endpoint, kinds
from benchmarks.gateway import measure as measure_gateway
from tests.fakes.gateway import ADMIN_KEY, GatewayUnderTest

ROOT = Path(__file__).resolve().parents[2]
MODEL = "m-small"
TIMEOUT_S = 90


def run_locust(gateway: GatewayUnderTest, folder: Path, *options: str) -> int:
    command = [sys.executable, "-m", "locust", "-f", str(ROOT / "loadtests" / "locustfile.py")]
    command += ["--headless", "--host", gateway.url, "--model", MODEL, "--max-tokens", "8"]
    command += ["--users", "2", "--run-time", "2s", "--csv", str(folder / "load"), *options]
    return subprocess.run(command, cwd=folder, timeout=TIMEOUT_S, capture_output=True).returncode


def rows(folder: Path) -> dict[tuple[str, str], dict[str, str]]:
    with (folder / "load_stats.csv").open(newline="") as file:
        return {(row["Type"], row["Name"]): row for row in csv.DictReader(file)}


def test_locust_reports_first_token_and_inter_token_times(
    shared_gateway: GatewayUnderTest, tmp_path: Path
) -> None:
    assert run_locust(shared_gateway, tmp_path, "--api-key", ADMIN_KEY) == 0
    found = rows(tmp_path)
    streamed = int(found["POST", "chat, streamed"]["Request Count"])
    assert int(found["POST", "chat"]["Request Count"]) > 0
    assert int(found["TTFT", "chat, streamed"]["Request Count"]) == streamed > 0
    assert int(found["inter-token", "chat, streamed"]["Request Count"]) > streamed
    assert int(found["", "Aggregated"]["Failure Count"]) == 0


def test_locust_ends_with_an_error_when_requests_fail(
    shared_gateway: GatewayUnderTest, tmp_path: Path
) -> None:
    assert run_locust(shared_gateway, tmp_path, "--api-key", "wrong") == 1


async def test_the_closed_loop_counts_tokens_and_times(shared_gateway: GatewayUnderTest) -> None:
    load = Load(
        url=shared_gateway.url,
        model=MODEL,
        num_clients=3,
        num_requests=7,
        max_tokens=4,
        api_key=ADMIN_KEY,
    )
    figures = await measure(load)
    assert (figures.num_requests, figures.num_errors) == (7, 0)
    assert figures.output_tokens == 7 * 4
    assert 0 < figures.ttft_p50_ms <= figures.e2e_p99_ms


async def test_the_closed_loop_counts_refused_requests(shared_gateway: GatewayUnderTest) -> None:
    load = Load(url=shared_gateway.url, model="nobody", num_clients=2, num_requests=5, max_tokens=4)
    figures = await measure(load)
    assert (figures.num_requests, figures.num_errors) == (0, 5)
    assert "401" in figures.first_error


@pytest.mark.parametrize("kind", kinds(Endpoint("", "", "")))
async def test_the_gateway_benchmark_gets_answers(
    shared_gateway: GatewayUnderTest, kind: str
) -> None:
    endpoint = Endpoint(shared_gateway.url, ADMIN_KEY, MODEL)
    row = await measure_gateway(endpoint, kind, connections=2, seconds=0.2)
    assert row.requests_per_s > 0
    assert row.num_errors == 0
