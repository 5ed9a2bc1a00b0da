"""The main job, end to end: `tpugate serve` with a real model on the TorchTPU device answers OpenAI's
official client, compiles nothing while it serves, frees what an absent client held, and survives the
death of its worker."""

import asyncio
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest

from tests.fakes.processes import ProcessUnderTest
from tests.fakes.wire import wait_until
from tests.integration.test_serve import SERVE, free_port

MODEL = "smollm2-135m-instruct"
# A short ladder of buckets: what is tested here does not depend on its length.
LADDER = ("--max-rows", "8", "--context-len", "256")
READY_S = 600.0
PARIS = [{"role": "user", "content": "What is the capital of France?"}]
ESSAY = [{"role": "user", "content": "Write a long essay about rivers."}]


class ModelServer:
    def __init__(self, folder: Path) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.data_dir = folder / "data"
        self.process = ProcessUnderTest(
            *SERVE, "--model", MODEL, "--port", str(self.port), "--data-dir", str(self.data_dir),
            *LADDER, output=folder / "serve.log",
        )  # fmt: skip

    def wait_for_ready(self) -> None:
        wait_until(self._is_ready, "the model is ready", seconds=READY_S)

    def _is_ready(self) -> bool:
        assert self.process.is_running, self.process.output
        try:
            return httpx.get(f"{self.url}/ready").status_code == 200
        except httpx.TransportError:
            return False

    @property
    def key(self) -> str:
        return (self.data_dir / "admin.key").read_text().strip()

    def client(self, **options: object) -> openai.OpenAI:
        return openai.OpenAI(
            base_url=f"{self.url}/v1", api_key=self.key, _strict_response_validation=True, **options
        )

    def metric(self, name: str) -> float:
        """Sum over all labels."""
        headers = {"authorization": f"Bearer {self.key}"}
        text = httpx.get(f"{self.url}/metrics", headers=headers).text
        values = re.findall(rf"^{re.escape(name)}(?:{{.*}})? (\S+)$", text, re.MULTILINE)
        assert values, f"no metric {name}"
        return sum(float(value) for value in values)

    def worker_pid(self) -> int:
        for folder in Path("/proc").iterdir():
            if folder.name.isdigit() and self._is_worker(folder):
                return int(folder.name)
        raise AssertionError("no worker process")

    def _is_worker(self, folder: Path) -> bool:
        try:
            command = (folder / "cmdline").read_bytes()
            parent = (folder / "stat").read_text().rsplit(")", 1)[1].split()[1]
        except OSError:
            return False
        return command.endswith(b"worker\0") and int(parent) == self.process.pid


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, smollm2_dir: Path) -> Iterator[ModelServer]:
    served = ModelServer(tmp_path_factory.mktemp("model"))
    with served.process:
        served.wait_for_ready()
        yield served


def test_the_capital_of_france(server: ModelServer) -> None:
    answer = server.client().chat.completions.create(model=MODEL, messages=PARIS, temperature=0)
    assert "Paris" in (answer.choices[0].message.content or "")
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 8


def test_the_example_of_the_readme_prints_what_the_readme_says(
    server: ModelServer, tmp_path: Path
) -> None:
    text = (Path(__file__).resolve().parents[2] / "README.md").read_text()
    blocks = dict(re.findall(r"^```(python|text)\n(.*?)^```", text, re.MULTILINE | re.DOTALL))
    share = tmp_path / ".local" / "share"
    share.mkdir(parents=True)
    (share / "tpugate").symlink_to(server.data_dir)
    done = subprocess.run(
        [sys.executable, "-c", blocks["python"].replace("http://127.0.0.1:8000", server.url)],
        env={**os.environ, "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.stdout.strip(), done.returncode) == (blocks["text"].strip(), 0), done.stderr


def test_the_capital_of_france_streamed_is_the_same_text(server: ModelServer) -> None:
    client = server.client()
    whole = client.chat.completions.create(model=MODEL, messages=PARIS, temperature=0)
    stream = client.chat.completions.create(
        model=MODEL,
        messages=PARIS,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage == whole.usage


async def test_nothing_compiles_while_mixed_requests_are_served(server: ModelServer) -> None:
    client = openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key=server.key)

    async def ask(i: int) -> int:
        answer = await client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "Count to ten. " * (1 + i % 9)}],
            max_tokens=1 + i % 7,
            temperature=(i % 3) / 2,
            top_p=1.0 if i % 2 else 0.8,
            n=1 + i % 2,
            stop="ten" if i % 5 == 0 else None,
        )
        assert answer.usage is not None
        return answer.usage.completion_tokens

    counts = await asyncio.gather(*(ask(i) for i in range(24)))
    await client.close()
    assert all(count >= 1 for count in counts)
    assert server.metric("tpugate_compiles_after_warmup") == 0


def test_a_client_that_leaves_frees_its_row(server: ModelServer) -> None:
    stream = server.client().chat.completions.create(
        model=MODEL, messages=ESSAY, max_tokens=150, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    stream.close()
    wait_until(lambda: server.metric("vllm:num_requests_running") == 0, "the row is free")


def test_a_prompt_beyond_the_context_is_refused_with_the_real_numbers(server: ModelServer) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        server.client().chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "word " * 400}]
        )
    assert caught.value.code == "context_length_exceeded"
    assert "256" in caught.value.message


def test_a_killed_worker_ends_the_stream_with_an_error_and_comes_back(server: ModelServer) -> None:
    client = server.client(max_retries=0, timeout=120)
    stream = client.chat.completions.create(
        model=MODEL, messages=ESSAY, max_tokens=200, stream=True, extra_body={"ignore_eos": True}
    )
    chunks = iter(stream)
    while not next(chunks).choices[0].delta.content:
        pass
    os.kill(server.worker_pid(), signal.SIGKILL)
    with pytest.raises(openai.APIError):
        list(chunks)
    server.wait_for_ready()
    answer = client.chat.completions.create(model=MODEL, messages=PARIS, temperature=0)
    assert "Paris" in (answer.choices[0].message.content or "")
