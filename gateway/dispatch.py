"""Requests in flight: queued on Redis, heard from, taken over by another worker, aborted."""

import asyncio
import contextlib
import logging
import os
import secrets
import socket
from collections import Counter
from collections.abc import Sequence

from gateway.directory import Directory, ServedModel
from gateway.errors import KeyBusyError, QueueFullError, UnavailableError
from gateway.jobs import Exchange, Job
from gateway.settings import GatewaySettings
from gateway.streams import Outbox, ReplyReader, connect
from workers.protocol import GenerateRequest, StepDeltas, replies_stream, requests_stream

logger = logging.getLogger(__name__)

_FLUSH_S = 2.0
_CANCEL_AGAIN_S = 0.05
_NO_LIMIT = 2**53


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
