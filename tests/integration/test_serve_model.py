"""The main job, end to end: `tpugate serve` with a real model on the TorchTPU device answers OpenAI's
official client, compiles nothing while it serves, frees what an absent client held, and survives the
death of its worker."""

import asyncio
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import openai
import pytest

from tests.fakes.model_server import MODEL, ModelServer
from tests.fakes.wire import wait_until

PARIS = [{"role": "user", "content": "What is the capital of France?"}]
ESSAY = [{"role": "user", "content": "Write a long essay about rivers."}]


def test_the_capital_of_france(model_server: ModelServer) -> None:
    answer = model_server.client().chat.completions.create(
        model=MODEL, messages=PARIS, temperature=0
    )
    assert "Paris" in (answer.choices[0].message.content or "")
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 8


def test_the_example_of_the_readme_prints_what_the_readme_says(
    model_server: ModelServer, tmp_path: Path
) -> None:
    text = (Path(__file__).resolve().parents[2] / "README.md").read_text()
    blocks = dict(re.findall(r"^```(python|text)\n(.*?)^```", text, re.MULTILINE | re.DOTALL))
    share = tmp_path / ".local" / "share"
    share.mkdir(parents=True)
    (share / "tpugate").symlink_to(model_server.data_dir)
    done = subprocess.run(
        [sys.executable, "-c", blocks["python"].replace("http://127.0.0.1:8000", model_server.url)],
        env={**os.environ, "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.stdout.strip(), done.returncode) == (blocks["text"].strip(), 0), done.stderr


def test_the_capital_of_france_streamed_is_the_same_text(model_server: ModelServer) -> None:
    client = model_server.client()
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
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert chunks[-1].usage.prompt_tokens == whole.usage.prompt_tokens


async def test_nothing_compiles_while_mixed_requests_are_served(model_server: ModelServer) -> None:
    client = openai.AsyncOpenAI(base_url=f"{model_server.url}/v1", api_key=model_server.key)

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
    assert model_server.metric("tpugate_compiles_after_warmup") == 0


def test_a_client_that_leaves_frees_its_row(model_server: ModelServer) -> None:
    stream = model_server.client().chat.completions.create(
        model=MODEL, messages=ESSAY, max_tokens=150, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    stream.close()
    wait_until(lambda: model_server.metric("vllm:num_requests_running") == 0, "the row is free")


def test_a_prompt_beyond_the_context_is_refused_with_the_real_numbers(
    model_server: ModelServer,
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        model_server.client().chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "word " * 400}]
        )
    assert caught.value.code == "context_length_exceeded"
    assert "256" in caught.value.message


def test_a_killed_worker_ends_the_stream_with_an_error_and_comes_back(
    model_server: ModelServer,
) -> None:
    client = model_server.client(max_retries=0, timeout=120)
    stream = client.chat.completions.create(
        model=MODEL, messages=ESSAY, max_tokens=200, stream=True, extra_body={"ignore_eos": True}
    )
    chunks = iter(stream)
    while not next(chunks).choices[0].delta.content:
        pass
    os.kill(model_server.worker_pid(), signal.SIGKILL)
    with pytest.raises(openai.APIError):
        list(chunks)
    model_server.wait_for_ready()
    answer = client.chat.completions.create(model=MODEL, messages=PARIS, temperature=0)
    assert "Paris" in (answer.choices[0].message.content or "")
