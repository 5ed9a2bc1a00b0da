"""`tpugate serve` as a person uses it: one command starts everything, says when it is ready, keeps it
running, and leaves no process behind; what cannot work ends with one sentence and an exit code."""

import json
import os
import re
import signal
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
import redis

from tests.fakes.gateway import free_port
from tests.fakes.processes import SERVE, ProcessUnderTest
from tests.fakes.wire import wait_until
from workers.protocol import WorkerStatus, decode, worker_key


class Serve:
    """A running `tpugate serve --engine fake …`."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self.port = free_port()
        self.data_dir = folder / "data"
        self.process = ProcessUnderTest(
            *SERVE, "--engine", "fake", "--port", str(self.port), "--data-dir", str(self.data_dir),
            *arguments, output=folder / "serve.log",
        )  # fmt: skip
        self.url = f"http://127.0.0.1:{self.port}"

    def wait_for_ready(self) -> None:
        wait_until(
            lambda: "tpugate is ready" in self.process.output or not self.process.is_running,
            "serve is ready",
        )
        assert self.process.is_running, self.process.output

    def children(self) -> list[int]:
        path = f"/proc/{self.process.pid}/task/{self.process.pid}/children"
        return [int(pid) for pid in Path(path).read_text().split()]

    def child(self, command: str) -> int:
        """The pid of the child that runs this subcommand."""
        for pid in self.children():
            if Path(f"/proc/{pid}/cmdline").read_bytes().endswith(command.encode() + b"\0"):
                return pid
        raise AssertionError(f"no {command} process")

    def num_running(self) -> int:
        """Requests that its workers say they run."""
        (socket_path,) = self.data_dir.glob("*.sock")
        with redis.Redis(unix_socket_path=str(socket_path)) as client:
            payloads = client.mget(client.keys(worker_key("*"))) or []
        return sum(decode(WorkerStatus, payload).num_running for payload in payloads if payload)

    def ask(self, script: list[str], model: str = "m-small") -> str:
        key = (self.data_dir / "admin.key").read_text().strip()
        answer = httpx.post(
            f"{self.url}/v1/chat/completions",
            headers={"authorization": f"Bearer {key}", "x-model-script": json.dumps(script)},
            json={"model": model, "messages": [{"role": "user", "content": "Hello"}]},
            timeout=30,
        )
        assert answer.status_code == 200, answer.text
        return str(answer.json()["choices"][0]["message"]["content"])


def exists(pid: int) -> bool:
    """Whether the process is there and not a zombie that waits for its parent."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    server = Serve(tmp_path)
    server.wait_for_ready()
    yield server
    server.process.kill()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_it_starts_answers_and_stops_leaving_nothing_behind(serve: Serve, number: signal.Signals):
    assert httpx.get(f"{serve.url}/ready").status_code == 200
    assert serve.ask(["Hel", "lo"]) == "Hello"
    assert serve.url in serve.process.output
    assert "m-small" in serve.process.output
    assert str(serve.data_dir / "admin.key") in serve.process.output
    children = serve.children()
    assert len(children) == 3
    serve.process.send(number)
    assert serve.process.wait() == 0
    assert not [pid for pid in children if exists(pid)]
    assert not list(serve.data_dir.glob("*.sock"))
    assert "Traceback" not in serve.process.output


def test_a_stop_says_what_it_waits_for(tmp_path: Path):
    server = Serve(tmp_path, "--step-delay-s", "0.5")
    try:
        server.wait_for_ready()
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(server.ask, ["x"] * 16)
            wait_until(lambda: server.num_running() == 1, "it runs")
            server.process.send(signal.SIGINT)
            assert answer.result() == "x" * 16
        assert server.process.wait() == 0
        assert "Waiting for 1 request." in server.process.output
    finally:
        server.process.kill()


def test_nothing_outlives_a_serve_that_is_killed(serve: Serve):
    children = serve.children()
    os.kill(serve.process.pid, signal.SIGKILL)
    serve.process.wait()
    wait_until(lambda: not [pid for pid in children if exists(pid)], "its children are gone")


def test_a_worker_that_dies_is_started_again(serve: Serve):
    first = serve.child("worker")
    os.kill(first, signal.SIGKILL)
    wait_until(lambda: "worker ended (SIGKILL)" in serve.process.output, "its end is noticed")
    wait_until(lambda: serve.process.output.count("m-small is ready.") == 2, "another one is ready")
    assert serve.child("worker") != first
    assert serve.ask(["again"]) == "again"


def test_all_recovers_when_the_queue_dies(serve: Serve):
    (valkey,) = [
        pid for pid in serve.children() if b"valkey-server" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]  # fmt: skip
    os.kill(valkey, signal.SIGKILL)
    wait_until(lambda: "valkey ended" in serve.process.output, "its end is noticed")
    wait_until(lambda: httpx.get(f"{serve.url}/ready").status_code == 503, "/ready says so")
    wait_until(lambda: httpx.get(f"{serve.url}/ready").status_code == 200, "it is ready again")
    assert serve.ask(["again"]) == "again"


def test_one_worker_for_each_model(tmp_path: Path):
    server = Serve(tmp_path, "--model", "first", "--model", "second")
    try:
        server.wait_for_ready()
        assert len(server.children()) == 4
        for model in ("first", "second"):
            assert server.ask(["I am ", model], model) == f"I am {model}"
    finally:
        server.process.kill()


def test_a_folder_of_the_users_is_not_taken_for_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    for name in ("cli", "workers", "gateway", "models"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise SystemExit('not ours')")
    monkeypatch.chdir(tmp_path)
    server = Serve(tmp_path)
    try:
        server.wait_for_ready()
    finally:
        server.process.kill()


def failure(tmp_path: Path, *arguments: str, **settings: str) -> tuple[int, str]:
    """Exit code and output of a `serve` that must not start."""
    process = ProcessUnderTest(
        *SERVE, *arguments, output=tmp_path / "failure.log",
        **{"data_dir": str(tmp_path / "failing"), "port": str(free_port()), **settings},
    )  # fmt: skip
    with process:
        return process.wait(), process.output


def assert_one_sentence(output: str) -> None:
    assert "Traceback" not in output
    last = output.rstrip().splitlines()[-1]
    assert re.fullmatch(r"Error: ([A-Z'/].+|--[a-z].+)[.`]", last), output


def test_a_taken_port_is_named(tmp_path: Path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        code, output = failure(tmp_path, "--engine", "fake", "--port", str(port))
    assert code == 1
    assert f"port {port}" in output
    assert_one_sentence(output)


def test_a_second_serve_on_the_same_data_folder_is_refused(serve: Serve, tmp_path: Path):
    code, output = failure(tmp_path, "--engine", "fake", data_dir=str(serve.data_dir))
    assert code == 1
    assert str(serve.data_dir) in output
    assert_one_sentence(output)
    assert serve.ask(["still here"]) == "still here"


def test_a_data_folder_that_cannot_be_one_is_named(tmp_path: Path):
    (tmp_path / "file").write_text("")
    code, output = failure(tmp_path, "--engine", "fake", data_dir=str(tmp_path / "file" / "data"))
    assert code == 1
    assert_one_sentence(output)


def test_a_full_disk_is_named(tmp_path: Path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "serve.lock").symlink_to("/dev/full")
    code, output = failure(tmp_path, "--engine", "fake", data_dir=str(tmp_path / "data"))
    assert code == 1
    assert "No space left on device" in output
    assert_one_sentence(output)


@pytest.mark.parametrize(
    "arguments",
    [
        ("--model", "no-such-model"),
        ("--model", "/no/such/folder"),
        ("--engine", "imaginary"),
        ("--engine", "fake", "--max-rows", "many"),
        ("--engine", "fake", "--port", "70000"),
        ("--engine", "fake", "--redis-url", "http://localhost"),
    ],
)
def test_a_wrong_setting_ends_at_once_with_exit_code_2(tmp_path: Path, arguments: tuple[str, ...]):
    code, output = failure(tmp_path, *arguments)
    assert code == 2
    assert_one_sentence(output)


def test_a_corrupt_model_is_named(tmp_path: Path):
    folder = tmp_path / "torn"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "llama"}')
    (folder / "model.safetensors").write_bytes(b"torn")
    code, output = failure(tmp_path, "--model", str(folder), "--device", "cpu")
    assert code == 2
    assert str(folder) in output.splitlines()[-1]
    assert "starts again" not in output
    assert_one_sentence(output)


def test_a_redis_that_does_not_answer_is_named(tmp_path: Path):
    code, output = failure(
        tmp_path, "--engine", "fake", "--redis-url", f"redis://127.0.0.1:{free_port()}/0"
    )
    assert code == 1
    assert "Redis does not answer" in output
    assert_one_sentence(output)
