"""Protects `tpugate bench`: it measures what is there, counts what fails, keeps what was measured before an
interruption, and says in one sentence what is wrong with its input."""

import json
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from cli.main import main
from tests.fakes.gateway import ADMIN_KEY, GatewayUnderTest, free_port
from tests.fakes.wire import wait_until

BENCH = (sys.executable, "-P", "-m", "cli.main", "bench")
SMALL = ("--vocab-size", "256", "--input-tokens", "12", "--output-tokens", "4")


def bench(*options: str) -> Result:
    return CliRunner().invoke(main, ["bench", *SMALL, *options], env={"TPUGATE_API_KEY": None})


def at(gateway: GatewayUnderTest) -> tuple[str, ...]:
    return ("--url", f"{gateway.url}/v1", "--api-key", ADMIN_KEY)


def test_all_requests_are_measured(steady_gateway: GatewayUnderTest) -> None:
    load = ("--concurrency", "3", "--requests", "10", "--num-chips", "2", "--seed", "1", "--json")
    result = bench(*at(steady_gateway), *load)
    assert result.exit_code == 0, result.output
    facts: dict[str, Any] = json.loads(result.stdout)
    assert (facts["model"], facts["num_requests"], facts["num_errors"]) == ("m-small", 10, 0)
    assert facts["prompt_tokens_mean"] == 12.0
    assert facts["output_tokens_per_s_per_chip"] == facts["output_tokens_per_s"] / 2
    assert 0 < facts["ttft_p50_ms"] <= facts["e2e_p99_ms"]
    assert not facts["interrupted"]


def test_a_load_may_end_by_the_clock(steady_gateway: GatewayUnderTest) -> None:
    result = bench(*at(steady_gateway), "--concurrency", "2", "--seconds", "0.3")
    assert result.exit_code == 0, result.output
    assert " answered in " in result.stdout


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--requests", "1", "--seconds", "1"), "do not go together"),
        (("--url", "ftp://x"), "--url must be like"),
        (("--url", "http://x:port"), "--url must be like"),
        (("--url", "http://x", "--device", "cpu"), "--device is for a server that is started here"),
        (("--device", "abacus"), "--device"),
        (("--url", "http://x", "--num-chips", "none"), "--num-chips"),
        (("--save-baseline", "h 200"), "--save-baseline"),
        (("--url", "http://x", "--save-baseline", "h200"), "--engine-name"),
        (("--url", "http://x", "--save-baseline", "h200", "--engine-name", "e 1"), "--dtype"),
        (("--concurrency", "0"), "--concurrency"),
        (("--seconds", "nan"), "--seconds"),
        (("--input-tokens", "many"), "--input-tokens"),
    ],
)
def test_a_wrong_setting_is_named(options: tuple[str, ...], said: str) -> None:
    result = bench(*options)
    assert (result.exit_code, result.exception.__class__) == (2, SystemExit), result.output
    assert said in result.output


def test_who_does_not_answer_is_named() -> None:
    url = f"http://127.0.0.1:{free_port()}"
    for options in ((), ("--model", "m-small")):
        result = bench("--url", url, *options)
        assert (result.exit_code, result.exception.__class__) == (1, SystemExit), result.output
        assert url in result.output


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--model", "nobody"), "404"),
        (("--api-key", "wrong", "--model", "m-small"), "401"),
        (("--vocab-size", "90000", "--model", "m-small"), "400"),
    ],
)
def test_what_all_requests_fail_with_is_told_at_once(
    steady_gateway: GatewayUnderTest, options: tuple[str, ...], said: str
) -> None:
    result = bench(*at(steady_gateway), *options)
    assert result.exit_code == 1, result.output
    assert said in result.output


def kept_in(folder: Path) -> list[dict[str, Any]]:
    with sqlite3.connect(folder / "tpugate.sqlite") as database:
        database.row_factory = sqlite3.Row
        return [dict(row) for row in database.execute("SELECT * FROM baselines")]


def test_a_baseline_is_kept_with_all_that_tells_what_it_is_worth(
    steady_gateway: GatewayUnderTest, tmp_path: Path
) -> None:
    """The scripted model's answers are shorter than asked for: that makes it grade C, and says so."""
    about = ("--save-baseline", "h200", "--engine-name", "someone 1.2", "--dtype", "fp8")
    folder = ("--data-dir", str(tmp_path))
    price = ("h200", "3.5", "--source", "a contract", "--from", "2020-01-01")
    assert CliRunner().invoke(main, ["prices", "add", *price, *folder]).exit_code == 0
    for options in (("--output-tokens", "1"), ("--output-tokens", "200")):
        load = ("--concurrency", "2", "--requests", "8", "--num-chips", "4", *options)
        result = bench(*at(steady_gateway), *about, *folder, *load)
        assert result.exit_code == 0, result.output
    good, short = sorted(kept_in(tmp_path), key=lambda row: row["osl"])
    for row in (good, short):
        told = (row["accelerator"], row["num_chips"], row["engine"], row["dtype"])
        assert told == ("h200", 4, "someone 1.2", "fp8")
        assert (row["model"], row["isl"], row["concurrency"]) == ("m-small", 12, 2)
        assert float(row["total_tokens_per_s_chip"]) > float(row["output_tokens_per_s_chip"]) > 0
        assert len(json.loads(row["detail"])["price_id"]) == 32
    assert (good["grade"], good["osl"]) == ("M", 1)
    assert short["grade"] == "C"
    assert "where 200 were asked for" in json.loads(short["detail"])["note"]


def test_an_interruption_tells_what_was_measured(
    steady_gateway: GatewayUnderTest,
) -> None:
    asked = steady_gateway.metric("vllm:request_success_total")
    command = [*BENCH, *SMALL, *at(steady_gateway), "--seconds", "60", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        wait_until(
            lambda: steady_gateway.metric("vllm:request_success_total") > asked + 20,
            "some requests are answered",
        )
        process.send_signal(signal.SIGINT)
        printed, _ = process.communicate(timeout=30)
    facts = json.loads(printed)
    assert process.returncode == 130
    assert facts["interrupted"]
    assert facts["num_requests"] > 10
    assert facts["num_errors"] == 0


def test_a_server_of_its_own_is_started_and_stopped() -> None:
    command = [*BENCH, *SMALL, "--engine", "fake", "--requests", "4", "--concurrency", "2"]
    done = subprocess.run(
        [*command, "--json"], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["num_requests"] == 4
    assert "Stopped." in done.stderr
