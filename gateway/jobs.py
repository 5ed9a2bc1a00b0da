"""Requests in flight as an answer's reader sees them: what has come, who may answer, when it is over.

An `Exchange` is one `GenerateRequest` as the gateway sees it; a `Job` is one HTTP request with one or
several exchanges (the completions endpoint takes many prompts) and the mailbox its handler reads.

Who may answer. The first worker heard from is the producer. If its heartbeat goes and another worker
starts the request over, that worker's deltas replace what was received, provided that nothing of it has
been sent to the client. They may arrive before the gateway sees the heartbeat gone, so they are kept
aside until a poll of the directory decides. Once content was sent, a lost producer ends the stream.
"""

import asyncio
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Protocol

import msgspec
from litestar.types import Receive

from gateway.errors import (
    AnswerLostError,
    ClientGoneError,
    GatewayError,
    RequestTimeoutError,
)
from workers.protocol import GenerateRequest, OutputDelta

_POLLS_UNTIL_LOST = 2
"""A worker that has just started may answer before the directory has seen it."""
_SHRINK_AT = 256
"""So many deltas may wait to be taken before their texts are put together."""
_MAX_UNREAD = 8192
"""Deltas, after that, at which a stream's client is given up."""


class Owner(Protocol):
    """Who has queued a job's requests."""

    request_timeout_s: float

    def release(self, job: "Job") -> None:
        """Forget the job; what it has not finished is aborted."""
        ...


class Exchange:
    """One request on the wire. Lives in one event loop; every method is synchronous."""

    def __init__(self, job: "Job", request: GenerateRequest, index: int) -> None:
        self.request = request
        self.index = index
        """Which prompt of the job this is."""
        self.entry_id = b""
        self.done = False
        """The terminal delta has come, or the exchange has failed."""
        self.producer: str | None = None
        self._job = job
        self._next_seq = 0
        self._rivals: dict[str, list[OutputDelta]] = {}
        self._polls_missed = 0
        self.committed = False
        """Part of the answer has been sent to the client."""

    def offer(self, worker_id: str, delta: OutputDelta) -> None:
        """Take a delta in, put it aside, or drop it."""
        if self.done:
            return
        if self.producer is None:
            self.producer = worker_id
        if worker_id != self.producer:
            if not self.committed:
                self._rivals.setdefault(worker_id, []).append(delta)
            return
        if delta.seq < self._next_seq:
            return
        if delta.seq > self._next_seq:
            self._job.fail(
                AnswerLostError("Part of the answer was lost on its way. Send it again.")
            )
            return
        self._next_seq += 1
        self.done = delta.usage is not None
        self._job.put(self, delta)

    def check_producer(self, alive: frozenset[str]) -> None:
        """Decide, after a poll, whether the producer is lost and who follows it."""
        if self.done or self.producer is None or self.producer in alive:
            self._polls_missed = 0
            return
        self._polls_missed += 1
        if self.committed:
            if self._polls_missed >= _POLLS_UNTIL_LOST:
                self._job.fail(
                    AnswerLostError(
                        "The worker stopped in the middle of the answer. Send it again."
                    )
                )
            return
        for worker_id, deltas in self._rivals.items():
            if deltas[0].seq == 0:
                self._take_over(worker_id, deltas)
                return

    def fail(self, error: GatewayError) -> None:
        """End the job with `error`, unless this exchange has ended already."""
        if not self.done:
            self._job.fail(error)

    def _take_over(self, worker_id: str, deltas: list[OutputDelta]) -> None:
        self._job.forget(self)
        self.producer = worker_id
        self._next_seq = 0
        self._polls_missed = 0
        self._rivals = {}
        for delta in deltas:
            self.offer(worker_id, delta)


Item = tuple[Exchange, OutputDelta | None]
"""A delta of an exchange; None says: drop what this exchange has given so far."""


class Job:
    """One HTTP request in flight. Use as a context manager: whatever is unfinished at exit is aborted."""

    def __init__(
        self,
        owner: Owner,
        requests: Sequence[GenerateRequest],
        *,
        streaming: bool,
        timeout_s: float | None = None,
    ) -> None:
        """`timeout_s` is the server's own limit for None."""
        self._owner = owner
        self._streaming = streaming
        self._loop = asyncio.get_running_loop()
        self._items: deque[Item] = deque()
        self._has_begun = False
        self._signalled = False
        """There is something to take; items of a whole answer alone are not reason enough."""
        self._failure: GatewayError | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._until_s = 0.0
        """When the reader is woken although nothing has come."""
        self._timer: asyncio.TimerHandle | None = None
        self._watch: asyncio.Task[None] | None = None
        self._shrink_at = _SHRINK_AT
        limit_s = owner.request_timeout_s if timeout_s is None else timeout_s
        self._deadline_s = self._loop.time() + limit_s
        self.exchanges = [Exchange(self, request, i) for i, request in enumerate(requests)]

    def __enter__(self) -> "Job":
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._watch is not None:
            self._watch.cancel()
        if self._timer is not None:
            self._timer.cancel()
        self._owner.release(self)

    def watch(self, receive: Receive) -> None:
        """Abort as soon as the client leaves; the request body must have been read."""
        self._watch = asyncio.create_task(self._until_gone(receive))

    async def take(self, timeout_s: float) -> list[Item]:
        """All items that have come since the last call; waits for the first. Empty after `timeout_s` of silence.

        Raises `ClientGoneError`, `RequestTimeoutError`, `AnswerLostError`.
        """
        if not self._signalled and self._failure is None:
            await self._wait(timeout_s)
        self._signalled = False
        if self._loop.time() >= self._deadline_s:
            self.fail(RequestTimeoutError("The answer took longer than it may."))
        if self._items and not isinstance(self._failure, ClientGoneError):
            items = list(self._items)
            self._items.clear()
            if self._streaming:
                _commit(items)
            return items
        if self._failure is not None:
            raise self._failure
        return []

    def put(self, exchange: Exchange, delta: OutputDelta | None) -> None:
        """Add an item. A whole answer's reader is woken for the first delta and for ends, not for each token."""
        self._items.append((exchange, delta))
        if len(self._items) > self._shrink_at:
            self._shrink()
        if self._streaming or not self._has_begun or (delta and delta.finish_reason):
            self._has_begun = True
            self._signal()

    def forget(self, exchange: Exchange) -> None:
        """Drop what has come from `exchange` and was not taken yet, and tell the reader to start over."""
        self._items = deque(item for item in self._items if item[0] is not exchange)
        self.put(exchange, None)

    def fail(self, error: GatewayError) -> None:
        """End the job with `error`; the first one counts, except that a client that left ends everything."""
        if self._failure is None or isinstance(error, ClientGoneError):
            self._failure = error
        self._signal()

    def _shrink(self) -> None:
        """Put texts of a choice together: a client that reads slowly costs what its answer's text does."""
        self._items = _joined(self._items)
        self._shrink_at = max(_SHRINK_AT, 2 * len(self._items))
        if self._streaming and len(self._items) > _MAX_UNREAD:
            self.fail(ClientGoneError("The client does not read its answer."))

    async def _until_gone(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self.fail(ClientGoneError("The client closed the connection."))

    async def _wait(self, timeout_s: float) -> None:
        self._waiter = self._loop.create_future()
        self._until_s = min(self._loop.time() + timeout_s, self._deadline_s)
        # One timer outlasts many waits: to set and cancel one for each token costs more than the rest.
        if self._timer is None or self._timer.when() > self._until_s:
            self._set_timer()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_at(self._until_s, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        if self._waiter is None:
            return
        if self._loop.time() < self._until_s:
            self._set_timer()
        else:
            self._wake()

    def _signal(self) -> None:
        self._signalled = True
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def _joined(items: Iterable[Item]) -> deque[Item]:
    """The same with neighbouring deltas of a choice made one, where they hold nothing but text."""
    joined: list[Item] = []
    last: dict[tuple[str, int], int] = {}
    """Where a choice's newest delta is that more text can be added to."""
    texts: dict[int, list[OutputDelta]] = {}
    for exchange, delta in items:
        if delta is None:
            last.clear()
        elif not _is_text_alone(delta):
            last.pop((delta.request_id, delta.choice), None)
        else:
            at = last.setdefault((delta.request_id, delta.choice), len(joined))
            texts.setdefault(at, []).append(delta)
            if at < len(joined):
                continue
        joined.append((exchange, delta))
    for at, deltas in texts.items():
        text = "".join(delta.text for delta in deltas)
        num_tokens = sum(delta.num_tokens for delta in deltas)
        whole = msgspec.structs.replace(deltas[0], text=text, num_tokens=num_tokens)
        joined[at] = (joined[at][0], whole)
    return deque(joined)


def _is_text_alone(delta: OutputDelta) -> bool:
    return (
        delta.finish_reason is None
        and delta.usage is None
        and delta.logprobs is None
        and delta.prompt_logprobs is None
    )


def _commit(items: list[Item]) -> None:
    for exchange, delta in items:
        if delta is not None and (
            delta.text or delta.finish_reason or delta.logprobs or delta.prompt_logprobs
        ):
            exchange.committed = True
