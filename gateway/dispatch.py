"""Requests in flight: queued on Redis, heard from, taken over by another worker, aborted.

An `Exchange` is one `GenerateRequest` as the gateway sees it; a `Job` is one HTTP request with one or
several exchanges (the completions endpoint takes many prompts) and the mailbox its handler reads.

Who may answer. The first worker heard from is the producer. If its heartbeat goes and another worker
starts the request over, that worker's deltas replace what was received, provided that nothing of it has
been sent to the client. They may arrive before the gateway sees the heartbeat gone, so they are kept
aside until a poll of the directory decides. Once content was sent, a lost producer ends the stream.
"""

import asyncio
import contextlib
import logging
import os
import secrets
import socket
from collections import Counter, deque
from collections.abc import Iterable, Sequence

import msgspec
from litestar.types import Receive

from gateway.directory import Directory, ServedModel
from gateway.errors import (
    AnswerLostError,
    ClientGoneError,
    GatewayError,
    KeyBusyError,
    QueueFullError,
    RequestTimeoutError,
    UnavailableError,
)
from gateway.settings import GatewaySettings
from gateway.streams import Outbox, ReplyReader, connect
from workers.protocol import (
    GenerateRequest,
    OutputDelta,
    StepDeltas,
    replies_stream,
    requests_stream,
)

logger = logging.getLogger(__name__)

_POLLS_UNTIL_LOST = 2
"""A worker that has just started may answer before the directory has seen it."""
_FLUSH_S = 2.0
_CANCEL_AGAIN_S = 0.05
_SHRINK_AT = 256
"""So many deltas may wait to be taken before their texts are put together."""
_MAX_UNREAD = 8192
"""Deltas, after that, at which a stream's client is given up."""
_NO_LIMIT = 2**53


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
        dispatcher: "Dispatcher",
        requests: Sequence[GenerateRequest],
        *,
        streaming: bool,
        timeout_s: float | None = None,
    ) -> None:
        """`timeout_s` is the server's own limit for None."""
        self._dispatcher = dispatcher
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
        limit_s = dispatcher.request_timeout_s if timeout_s is None else timeout_s
        self._deadline_s = self._loop.time() + limit_s
        self.exchanges = [Exchange(self, request, i) for i, request in enumerate(requests)]

    def __enter__(self) -> "Job":
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._watch is not None:
            self._watch.cancel()
        if self._timer is not None:
            self._timer.cancel()
        self._dispatcher.release(self)

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


class Dispatcher:
    """The gateway's side of the queue: owns the Redis clients, their tasks and all jobs in flight."""

    def __init__(self, settings: GatewaySettings) -> None:
        self._settings = settings
        self.request_timeout_s = settings.request_timeout_s
        self.gateway_id = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
        self.reply_to = replies_stream(self.gateway_id)
        self._redis = connect(settings.redis_url, settings.redis_timeout_s)
        self.directory = Directory(
            self._redis,
            poll_interval_s=settings.poll_interval_s,
            retry_after_s=settings.retry_after_unavailable_s,
            gateway_id=self.gateway_id,
            on_poll=self._on_poll,
        )
        self._outbox = Outbox(self._redis, retry_after_s=settings.retry_after_unavailable_s)
        self._reader = ReplyReader(
            self._redis, self.reply_to, on_step=self._on_step, on_connect=self._recover
        )
        self._active: dict[str, Exchange] = {}
        self._num_of_key: Counter[str] = Counter()
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def num_active(self) -> int:
        """Requests of this gateway that are queued or being answered."""
        return len(self._active)

    @property
    def connected(self) -> bool:
        return self.directory.connected and self._reader.connected

    async def start(self) -> None:
        """Start the tasks; returns after the first poll, whether or not Redis answers."""
        await self.directory.refresh()
        runs = (self.directory.run(), self._outbox.run(), self._reader.run())
        self._tasks = [asyncio.create_task(run) for run in runs]

    async def stop(self) -> None:
        """Abort what is left, write the aborts, end the tasks, close the connections."""
        for exchange in list(self._active.values()):
            self._abort(exchange)
        await self._outbox.flush(_FLUSH_S)
        pending = set(self._tasks)
        while pending:
            # Again and again: one that comes while the Redis client writes is lost (Python 3.11's
            # `asyncio.wait_for`), and the task would go on for ever.
            for task in pending:
                task.cancel()
            _, pending = await asyncio.wait(pending, timeout=_CANCEL_AGAIN_S)
        await self._redis.aclose()

    def lookup(self, model: str) -> ServedModel:
        """The model, if it can take a request now. Raises `UnavailableError` or `UnknownModelError`."""
        if not self.connected:
            raise UnavailableError(
                "The request queue cannot be reached. Try again shortly.",
                retry_after_s=self._settings.retry_after_unavailable_s,
            )
        return self.directory.lookup(model)

    def end_answers(self) -> None:
        """Fail everything in flight: the process stops."""
        for exchange in list(self._active.values()):
            exchange.fail(
                UnavailableError(
                    "The server is stopping. Send the request again.",
                    retry_after_s=self._settings.retry_after_unavailable_s,
                )
            )

    async def submit(
        self,
        requests: Sequence[GenerateRequest],
        *,
        streaming: bool,
        timeout_s: float | None = None,
    ) -> Job:
        """Queue all of them (one model, one API key) or none. Raises `QueueFullError` or `UnavailableError`."""
        self._check_key(requests)
        job = Job(self, requests, streaming=streaming, timeout_s=timeout_s)
        for exchange in job.exchanges:
            self._active[exchange.request.request_id] = exchange
            self._num_of_key[exchange.request.fair_key] += 1
        queued = False
        try:
            entry_ids = await self._outbox.enqueue(tuple(requests), self._settings.queue_limit)
            if entry_ids is None:
                for exchange in job.exchanges:
                    exchange.done = True  # it was never queued: nothing to abort
                raise QueueFullError(
                    "Too many requests are waiting for this model. Try again shortly.",
                    retry_after_s=self._settings.retry_after_full_s,
                )
            for exchange, entry_id in zip(job.exchanges, entry_ids, strict=True):
                exchange.entry_id = entry_id
            queued = True
        finally:
            if not queued:
                self.release(job)
        return job

    def release(self, job: Job) -> None:
        """Forget a job; what it has not finished is aborted."""
        for exchange in job.exchanges:
            if not exchange.done:
                self._abort(exchange)
            request = exchange.request
            if self._active.pop(request.request_id, None) is not None:
                self._num_of_key[request.fair_key] -= 1
                if not self._num_of_key[request.fair_key]:
                    del self._num_of_key[request.fair_key]

    def _check_key(self, requests: Sequence[GenerateRequest]) -> None:
        """Raises `KeyBusyError`: a key that fills the queue would shut out all others."""
        limit = self._settings.most_of_a_key
        if self._num_of_key[requests[0].fair_key] + len(requests) > limit:
            raise KeyBusyError(
                f"This API key has as many requests at work as it may have ({limit}). Try again shortly.",
                retry_after_s=self._settings.retry_after_full_s,
            )

    def _abort(self, exchange: Exchange) -> None:
        exchange.done = True
        request = exchange.request
        self._outbox.abort(request.model, request.request_id, exchange.entry_id)

    def _on_step(self, step: StepDeltas) -> None:
        for delta in step.deltas:
            exchange = self._active.get(delta.request_id)
            if exchange is not None:
                exchange.offer(step.worker_id, delta)

    def _on_poll(self, alive: frozenset[str]) -> None:
        limit_s = self._settings.no_worker_timeout_s
        deserted = {model for model, s in self.directory.deserted_s.items() if s > limit_s}
        for exchange in list(self._active.values()):
            exchange.check_producer(alive)
            if exchange.request.model in deserted:
                exchange.fail(self._deserted())

    def _deserted(self) -> UnavailableError:
        return UnavailableError(
            "All workers of this model are gone. Try again later.",
            code="model_not_ready",
            retry_after_s=self._settings.retry_after_unavailable_s,
        )

    async def _recover(self) -> None:
        """After a reconnection: requests nobody has answered and that Redis no longer holds are queued again."""
        waiting = [item for item in self._active.values() if not item.producer and item.entry_id]
        if not waiting:
            return
        async with self._redis.pipeline(transaction=False) as pipe:
            for exchange in waiting:
                stream = requests_stream(exchange.request.model)
                entry_id = exchange.entry_id.decode()
                pipe.xrange(stream, entry_id, entry_id)
            found = await pipe.execute()
        lost = [exchange for exchange, entries in zip(waiting, found, strict=True) if not entries]
        if lost:
            logger.warning("%d requests were lost with the queue and are queued again", len(lost))
        for exchange in lost:
            with contextlib.suppress(UnavailableError):
                entry_ids = await self._outbox.enqueue((exchange.request,), _NO_LIMIT)
                exchange.entry_id = entry_ids[0] if entry_ids else exchange.entry_id
                if exchange.request.request_id not in self._active:
                    self._abort(exchange)  # the client left meanwhile
