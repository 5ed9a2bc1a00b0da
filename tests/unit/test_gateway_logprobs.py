"""Log-probabilities as OpenAI's clients read them: the same whole and streamed, exact bytes, true
offsets, nothing that is no JSON, and the prompt in front of every choice that echoes it."""

import json
import time
from pathlib import Path
from typing import Any

import pytest

from gateway.dispatch import Dispatcher
from gateway.domain.accounting.live import NOT_METERED
from gateway.domain.openai.answers import collect
from gateway.domain.openai.chunks import stream
from gateway.domain.openai.logprobs import Echo, echo_of
from gateway.domain.openai.plan import Plan
from gateway.domain.system.services import Metrics
from gateway.errors import EngineError
from gateway.jobs import Job
from gateway.settings import GatewaySettings
from models.tokenizer import TextTokenizer
from tests.fakes.gateway import events
from workers.engine.scripted import scripted_card
from workers.protocol import (
    FinishReason,
    GenerateRequest,
    OutputDelta,
    SamplingParams,
    TokenLogprobs,
    Usage,
)

TOKENIZER = TextTokenizer(scripted_card("m").tokenizer_json, bos_token="<|im_start|>")
CRAB = "\U0001f980"
INF = float("inf")


def ids(text: str | bytes) -> list[int]:
    if isinstance(text, bytes):
        known = {TOKENIZER.token_bytes(i): i for i in range(TOKENIZER.vocab_size)}
        return [known[bytes([byte])] for byte in text]
    return TOKENIZER.encode(text)


def scored(text: str | bytes, logprob: float = -0.5, others: str = "") -> list[TokenLogprobs]:
    """`text` a token a byte, with `others` as alternatives that are a bit less likely each."""
    top = tuple((token, logprob - i) for i, token in enumerate(ids(others)))
    return [TokenLogprobs(token, logprob, top) for token in ids(text)]


def delta(
    seq: int, text: str, tokens: list[TokenLogprobs], *, last: bool = False, **fields: Any
) -> OutputDelta:
    return OutputDelta(
        request_id="r",
        seq=seq,
        text=text,
        num_tokens=len(tokens),
        logprobs=tuple(tokens),
        finish_reason=FinishReason.STOP if last else None,
        **fields,
    )


def usage(completion_tokens: int) -> Usage:
    return Usage(prompt_tokens=1, completion_tokens=completion_tokens)


class Answering:
    """A request whose deltas a test hands in. The dispatcher is not started: nothing here needs Redis."""

    def __init__(self, folder: Path, **plan: Any) -> None:
        self._dispatcher = Dispatcher(GatewaySettings(data_dir=folder))
        self._metrics = Metrics(self._dispatcher).of("m")
        fields: dict[str, Any] = {"num_choices": 1, "num_logprobs": None} | plan
        fields.setdefault("num_candidates", fields["num_choices"])
        self._plan = Plan(
            **{
                "id": "x",
                "created_s": 1,
                "model": "m",
                "fingerprint": None,
                "chat": False,
                "include_usage": False,
                "started_s": time.monotonic(),
                "tokenizer": TOKENIZER,
                "num_prompt_logprobs": None,
                "skips_special": True,
                "cost_of": lambda model, usages: NOT_METERED,
                **fields,
            }
        )

    def _job(self, deltas: list[OutputDelta], *, streaming: bool) -> Job:
        request = GenerateRequest(
            request_id="r",
            model="m",
            reply_to="s",
            prompt_token_ids=[1],
            sampling=SamplingParams(max_tokens=9),
        )
        job = Job(self._dispatcher, [request], streaming=streaming)
        for one in deltas:
            job.exchanges[0].offer("w", one)
        return job

    async def whole(self, *deltas: OutputDelta) -> Any:
        job = self._job(list(deltas), streaming=False)
        answer = await collect(job, self._plan, self._metrics)
        return json.loads(answer.body)

    async def streamed(self, *deltas: OutputDelta) -> list[Any]:
        """The choices of all chunks in their order."""
        job = self._job(list(deltas), streaming=True)
        blocks = [block async for block in stream(job, self._plan, self._metrics, 1)]
        chunks = events(b"".join(blocks).decode())
        assert chunks.pop() == "[DONE]"
        return [chunk["choices"][0] for chunk in chunks]


async def test_a_chat(tmp_path: Path):
    answering = Answering(tmp_path, chat=True, num_logprobs=2)
    deltas = [
        delta(0, "a", scored("a", -0.5, "abc")),
        delta(1, "", scored(b"\xf0\x9f")),
        delta(2, CRAB, scored(b"\xa6\x80"), last=True, usage=usage(5)),
    ]
    logprobs = (await answering.whole(*deltas))["choices"][0]["logprobs"]
    assert logprobs["refusal"] is None
    assert logprobs["content"][0] == {
        "token": "a",
        "logprob": -0.5,
        "bytes": [97],
        "top_logprobs": [
            {"token": "a", "logprob": -0.5, "bytes": [97]},
            {"token": "b", "logprob": -1.5, "bytes": [98]},
        ],
    }
    assert [token["token"] for token in logprobs["content"]] == [
        "a",
        *[r"\xf0", r"\x9f", r"\xa6", r"\x80"],
    ]
    assert bytes(sum((token["bytes"] for token in logprobs["content"]), [])).decode() == "a" + CRAB

    chunks = await answering.streamed(*deltas)
    told = [chunk["logprobs"]["content"] for chunk in chunks if chunk["logprobs"]]
    assert [len(tokens) for tokens in told] == [1, 2, 2]
    assert sum(told, []) == logprobs["content"]
    assert [chunk["delta"].get("content") for chunk in chunks] == ["", "a", "", CRAB, None]


async def test_a_plain_completion(tmp_path: Path):
    answering = Answering(tmp_path, num_logprobs=1)
    deltas = [
        delta(0, "é" + CRAB, scored("é" + CRAB, -1.0)),
        delta(1, "b", scored("b", -0.25, "ac")),
        delta(2, "", scored("<|im_end|>"), last=True, usage=usage(8)),
    ]
    choice = (await answering.whole(*deltas))["choices"][0]
    logprobs = choice["logprobs"]
    assert choice["text"] == "é" + CRAB + "b"
    assert logprobs["tokens"][:2] == [r"bytes:\xc3", r"bytes:\xa9"]
    assert logprobs["tokens"][-2:] == ["b", "<|im_end|>"]
    assert logprobs["token_logprobs"] == [-1.0] * 6 + [-0.25, -0.5]
    assert logprobs["text_offset"] == [0, 0, 1, 1, 1, 1, 2, 3]
    assert logprobs["top_logprobs"][6] == {"a": -0.25, "b": -0.25}

    told = [chunk["logprobs"] for chunk in await answering.streamed(*deltas) if chunk["logprobs"]]
    assert {name: sum((part[name] for part in told), []) for name in logprobs} == logprobs


@pytest.mark.parametrize("logprob", [-INF, float("nan"), -1e30])
@pytest.mark.parametrize("chat", [True, False])
async def test_what_json_does_not_know(tmp_path: Path, chat: bool, logprob: float):
    answering = Answering(tmp_path, chat=chat, num_logprobs=1, num_prompt_logprobs=1)
    token = TokenLogprobs(ids("a")[0], logprob, ((ids("b")[0], logprob),))
    one = delta(0, "a", [token], last=True, usage=usage(1), prompt_logprobs=(None, token))
    body = await answering.whole(one)
    choice = body["choices"][0]
    logprobs, prompt = choice["logprobs"], (body if chat else choice)["prompt_logprobs"]
    if chat:
        assert logprobs["content"][0]["logprob"] == -9999.0
        assert logprobs["content"][0]["top_logprobs"][0]["logprob"] == -9999.0
    else:
        assert logprobs["token_logprobs"] == [-9999.0]
        assert logprobs["top_logprobs"] == [{"a": -9999.0, "b": -9999.0}]
    assert {fields["logprob"] for fields in prompt[1].values()} == {-9999.0}


@pytest.mark.parametrize("chat", [True, False])
async def test_ids_without_a_token(tmp_path: Path, chat: bool):
    """Models have more rows than their tokenizers have tokens."""
    answering = Answering(tmp_path, chat=chat, num_logprobs=1)
    one = delta(0, "", [TokenLogprobs(9999, -1.0, ((9998, -0.5),))], last=True, usage=usage(1))
    logprobs = (await answering.whole(one))["choices"][0]["logprobs"]
    if chat:
        assert (logprobs["content"][0]["token"], logprobs["content"][0]["bytes"]) == ("", None)
    else:
        assert (logprobs["tokens"], logprobs["top_logprobs"]) == ([""], [{"": -0.5}])


async def test_prompt_logprobs_are_vllms(tmp_path: Path):
    prompt = (None, *scored("b", -3.0, "ac"), *scored("a", -1.0, "ac"))
    one = delta(0, "z", [], last=True, usage=usage(1), prompt_logprobs=prompt)
    answering = Answering(tmp_path, num_choices=1, num_prompt_logprobs=1)
    choice = (await answering.whole(one))["choices"][0]
    a, b = str(ids("a")[0]), str(ids("b")[0])
    assert choice["logprobs"] is None
    assert choice["prompt_logprobs"] == [
        None,
        {
            b: {"logprob": -3.0, "rank": None, "decoded_token": "b"},
            a: {"logprob": -3.0, "rank": 1, "decoded_token": "a"},
        },
        {a: {"logprob": -1.0, "rank": 1, "decoded_token": "a"}},
    ]


def echo(prompt: str | list[int], *, bos: bool = False, skips_special: bool = True) -> Echo:
    token_ids = TOKENIZER.encode(prompt, add_bos=bos) if isinstance(prompt, str) else prompt
    return echo_of(TOKENIZER, prompt, token_ids, skips_special=skips_special)


@pytest.mark.parametrize(
    ("made", "text", "offsets"),
    [
        (echo("aé"), "aé", [0, 1, 1]),
        (echo("ab", bos=True), "ab", [0, 0, 1]),
        (echo("<|im_end|>a"), "<|im_end|>a", [0, 10]),
        (echo("<|im_start|>a", bos=True), "<|im_start|>a", [0, 12, 24]),
        (echo(ids("<|im_end|>a")), "a", [0, 0]),
        (echo(ids("<|im_end|>a"), skips_special=False), "<|im_end|>a", [0, 10]),
        (echo(ids(b"a\xf0\x9f")), "a", [0, 1, 1]),
    ],
)
def test_where_the_tokens_of_a_prompt_begin(made: Echo, text: str, offsets: list[int]):
    assert (made.text, made.offsets) == (text, offsets)


async def test_an_echo_with_scores(tmp_path: Path):
    answering = Answering(tmp_path, num_choices=2, num_logprobs=1, echoes=(echo("ab"),))
    prompt = (None, *scored("b", -2.0, "x"))
    # The second choice may be a step ahead of the first, which brings the prompt's scores.
    deltas = [
        delta(0, "c", scored("c"), choice=1),
        delta(1, "", scored(b"\xc3"), choice=0, prompt_logprobs=prompt),
        delta(2, "d", scored("d"), choice=1, last=True),
        delta(3, "é", scored(b"\xa9"), choice=0, last=True, usage=usage(4)),
    ]
    choices = (await answering.whole(*deltas))["choices"]
    assert [choice["text"] for choice in choices] == ["abé", "abcd"]
    assert choices[1]["logprobs"] == {
        "tokens": ["a", "b", "c", "d"],
        "token_logprobs": [None, -2.0, -0.5, -0.5],
        "top_logprobs": [None, {"x": -2.0, "b": -2.0}, {"c": -0.5}, {"d": -0.5}],
        "text_offset": [0, 1, 2, 3],
    }
    assert choices[0]["logprobs"]["text_offset"] == [0, 1, 2, 2]

    chunks = await answering.streamed(*deltas)
    for choice in choices:
        own = [chunk for chunk in chunks if chunk["index"] == choice["index"]]
        assert "".join(chunk["text"] for chunk in own) == choice["text"]
        assert [chunk["finish_reason"] for chunk in own] == [None] * (len(own) - 1) + ["stop"]
        told = [chunk["logprobs"] for chunk in own if chunk["logprobs"]]
        for name, values in choice["logprobs"].items():
            assert sum((part[name] for part in told), []) == values


async def test_an_echo_without_scores(tmp_path: Path):
    answering = Answering(tmp_path, echoes=(echo("ab"),))
    deltas = [delta(0, "c", []), delta(1, "", [], last=True, usage=usage(1))]
    assert (await answering.whole(*deltas))["choices"][0]["text"] == "abc"
    chunks = await answering.streamed(*deltas)
    assert [(chunk["text"], chunk["logprobs"]) for chunk in chunks] == [
        ("ab", None),
        ("c", None),
        ("", None),
    ]


async def test_a_prompt_that_is_only_scored(tmp_path: Path):
    answering = Answering(tmp_path, num_logprobs=0, echoes=(echo("ab"),), scores_only=True)
    prompt = (None, *scored("b", -2.0))
    one = delta(0, "c", scored("c"), last=True, usage=usage(1), prompt_logprobs=prompt)
    body = await answering.whole(one)
    choice = body["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("ab", "length")
    assert choice["logprobs"]["token_logprobs"] == [None, -2.0]
    assert body["usage"]["completion_tokens"] == 0
    chunks = await answering.streamed(one)
    assert [(chunk["text"], chunk["finish_reason"]) for chunk in chunks] == [
        ("ab", None),
        ("", "length"),
    ]
    assert chunks[0]["logprobs"] == choice["logprobs"]


async def test_a_prompt_that_was_not_scored(tmp_path: Path):
    answering = Answering(tmp_path, num_logprobs=0, echoes=(echo("ab"),))
    one = delta(0, "c", scored("c"), last=True, usage=usage(1))
    with pytest.raises(EngineError, match="score"):
        await answering.whole(one)
    with pytest.raises(EngineError, match="score"):
        await answering.streamed(one)


async def test_the_best_of_several(tmp_path: Path):
    answering = Answering(tmp_path, num_choices=2, num_candidates=3)
    deltas = [
        delta(0, "long", scored("long", -0.2), choice=0, last=True),
        delta(1, "x", scored("x", -0.3), choice=1, last=True),
        delta(2, "y", scored("y", -0.1), choice=2, last=True, usage=usage(6)),
    ]
    body = await answering.whole(*deltas)
    assert [(c["index"], c["text"], c["logprobs"]) for c in body["choices"]] == [
        (0, "y", None),
        (1, "long", None),
    ]
    assert body["usage"]["completion_tokens"] == 6
