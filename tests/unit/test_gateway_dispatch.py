"""Which deltas reach a client: in order, once each, from one worker at a time, whatever workers do."""

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from gateway.dispatch import Dispatcher
from gateway.errors import AnswerLostError, ClientGoneError, RequestTimeoutError
from gateway.jobs import Job
from gateway.settings import GatewaySettings
from workers.protocol import (
    FinishReason,
    GenerateRequest,
    OutputDelta,
    SamplingParams,
    TokenLogprobs,
    Usage,
)

NOBODY: frozenset[str] = frozenset()


@pytest.fixture
def dispatcher(tmp_path: Path) -> Dispatcher:
    """Not started: nothing here needs Redis."""
    return Dispatcher(GatewaySettings(data_dir=tmp_path))


def job_of(dispatcher: Dispatcher, *, streaming: bool) -> Job:
    request = GenerateRequest(
        request_id="r",
        model="m",
        reply_to="s",
        prompt_token_ids=[1],
        sampling=SamplingParams(max_tokens=9),
    )
    return Job(dispatcher, [request], streaming=streaming)


def delta(seq: int, text: str, *, last: bool = False) -> OutputDelta:
    return OutputDelta(
        request_id="r",
        seq=seq,
        text=text,
        num_tokens=1,
        finish_reason=FinishReason.STOP if last else None,
        usage=Usage(prompt_tokens=1, completion_tokens=seq + 1) if last else None,
    )


def texts(items: list) -> Iterator[str | None]:
    return (item[1].text if item[1] is not None else None for item in items)


async def test_repeats_are_dropped_and_the_rest_keeps_its_order(dispatcher: Dispatcher):
    job = job_of(dispatcher, streaming=True)
    exchange = job.exchanges[0]
    for one in (delta(0, "a"), delta(0, "a"), delta(1, "b"), delta(0, "a"), delta(2, "c")):
        exchange.offer("w", one)
    assert list(texts(await job.take(1))) == ["a", "b", "c"]


async def test_a_gap_ends_the_answer_after_what_was_whole(dispatcher: Dispatcher):
    job = job_of(dispatcher, streaming=True)
    job.exchanges[0].offer("w", delta(0, "a"))
    job.exchanges[0].offer("w", delta(2, "c"))
    assert list(texts(await job.take(1))) == ["a"]
    with pytest.raises(AnswerLostError):
        await job.take(1)


async def test_nothing_follows_the_end(dispatcher: Dispatcher):
    job = job_of(dispatcher, streaming=True)
    job.exchanges[0].offer("w", delta(0, "a", last=True))
    job.exchanges[0].offer("w", delta(1, "b"))
    assert job.exchanges[0].done
    assert list(texts(await job.take(1))) == ["a"]


@pytest.mark.parametrize("streaming", [True, False])
async def test_a_second_worker_is_ignored_while_the_first_lives(
    dispatcher: Dispatcher, streaming: bool
):
    job = job_of(dispatcher, streaming=streaming)
    exchange = job.exchanges[0]
    exchange.offer("old", delta(0, "a"))
    exchange.offer("new", delta(0, "x"))
    exchange.check_producer(frozenset({"old", "new"}))
    exchange.offer("old", delta(1, "b", last=True))
    assert list(texts(await job.take(1))) == ["a", "b"]


async def test_a_second_worker_takes_over_what_was_not_sent(dispatcher: Dispatcher):
    """Its deltas may come before the first one's heartbeat is seen to be gone."""
    job = job_of(dispatcher, streaming=False)
    exchange = job.exchanges[0]
    exchange.offer("old", delta(0, "a"))
    assert list(texts(await job.take(1))) == ["a"]
    exchange.offer("old", delta(1, "b"))
    exchange.offer("new", delta(0, "x"))
    exchange.check_producer(frozenset({"new"}))
    exchange.offer("old", delta(2, "c"))
    exchange.offer("new", delta(1, "y", last=True))
    assert list(texts(await job.take(1))) == [None, "x", "y"]


async def test_a_rival_without_its_beginning_takes_nothing_over(dispatcher: Dispatcher):
    job = job_of(dispatcher, streaming=False)
    exchange = job.exchanges[0]
    exchange.offer("old", delta(0, "a"))
    exchange.offer("new", delta(1, "y"))
    exchange.check_producer(frozenset({"new"}))
    assert exchange.producer == "old"


async def test_what_was_sent_cannot_be_taken_over(dispatcher: Dispatcher):
    job = job_of(dispatcher, streaming=True)
    exchange = job.exchanges[0]
    exchange.offer("old", delta(0, "a"))
    await job.take(1)
    exchange.offer("new", delta(0, "x"))
    # A worker that has just started may answer before a poll has seen it, so one miss decides nothing.
    exchange.check_producer(NOBODY)
    assert await job.take(0.001) == []
    exchange.check_producer(NOBODY)
    with pytest.raises(AnswerLostError):
        await job.take(1)


async def test_an_empty_delta_commits_to_nothing(dispatcher: Dispatcher):
    job = job_of(dispatcher, streaming=True)
    exchange = job.exchanges[0]
    exchange.offer("old", delta(0, ""))
    await job.take(1)
    exchange.offer("new", delta(0, "x"))
    exchange.check_producer(frozenset({"new"}))
    assert list(texts(await job.take(1))) == [None, "x"]


@pytest.mark.parametrize("name", ["logprobs", "prompt_logprobs"])
async def test_log_probabilities_without_text_are_sent_too(dispatcher: Dispatcher, name: str):
    job = job_of(dispatcher, streaming=True)
    exchange = job.exchanges[0]
    scores = (TokenLogprobs(1, -0.5),)
    exchange.offer("old", msgspec.structs.replace(delta(0, ""), **{name: scores}))
    await job.take(1)
    assert exchange.committed


async def test_the_end_of_a_whole_answer_is_noticed_before_it_is_waited_for(
    dispatcher: Dispatcher,
):
    job = job_of(dispatcher, streaming=False)
    job.exchanges[0].offer("w", delta(0, "a"))
    job.exchanges[0].offer("w", delta(1, "b", last=True))
    assert list(texts(await job.take(30))) == ["a", "b"]


async def test_a_client_that_left_ends_all_at_once(dispatcher: Dispatcher):
    job = job_of(dispatcher, streaming=True)
    job.exchanges[0].offer("w", delta(0, "a"))
    job.fail(ClientGoneError("gone"))
    with pytest.raises(ClientGoneError):
        await job.take(1)


async def test_the_deadline_holds_for_silent_and_for_busy_answers(tmp_path: Path):
    settings = GatewaySettings(data_dir=tmp_path, request_timeout_s=0.001)
    job = job_of(Dispatcher(settings), streaming=True)
    with pytest.raises(RequestTimeoutError):
        await job.take(30)
    job.exchanges[0].offer("w", delta(0, "a"))
    assert list(texts(await job.take(30))) == ["a"]
    with pytest.raises(RequestTimeoutError):
        await job.take(30)


async def test_texts_that_nobody_takes_are_put_together(dispatcher: Dispatcher):
    job = job_of(dispatcher, streaming=True)
    for number in range(5000):
        job.exchanges[0].offer("w", delta(number, "a"))
    job.exchanges[0].offer("w", delta(5000, "b", last=True))
    items = await job.take(1.0)
    assert len(items) < 1000
    assert "".join(item[1].text for item in items if item[1] is not None) == "a" * 5000 + "b"
    assert sum(item[1].num_tokens for item in items if item[1] is not None) == 5001


async def test_a_stream_that_is_not_read_does_not_grow_for_ever(dispatcher: Dispatcher):
    job = job_of(dispatcher, streaming=True)
    scored = (TokenLogprobs(token_id=1, logprob=-1.0),)
    for number in range(20_000):
        one = msgspec.structs.replace(delta(number, "a"), logprobs=scored)
        job.exchanges[0].offer("w", one)
    with pytest.raises(ClientGoneError):
        await job.take(1.0)


async def test_a_whole_answer_may_be_long(dispatcher: Dispatcher):
    job = job_of(dispatcher, streaming=False)
    scored = (TokenLogprobs(token_id=1, logprob=-1.0),)
    for number in range(20_000):
        one = msgspec.structs.replace(delta(number, "a"), logprobs=scored)
        job.exchanges[0].offer("w", one)
    assert len(await job.take(1.0)) == 20_000
