"""What a worker takes in: new requests, those whose turn it is, those of workers that are gone; and aborts."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable

import msgspec
from redis.asyncio import Redis

from workers.backlog import Backlog, choose
from workers.claims import Claim, Claims, Entry
from workers.consumer import AbortFeed, RequestQueue
from workers.engine.interface import EXPIRED
from workers.engine_thread import EngineThread, terminal
from workers.gateway_watch import GatewayWatch
from workers.link import OUTAGE, Patience
from workers.protocol import FinishReason, GenerateRequest, OutputDelta, decode
from workers.publisher import Publisher

RECLAIM_INTERVAL_S = 1.0
MAX_DELIVERIES = 3
"""A request that this many workers have taken and none has finished is given up."""
MAX_PENDING = 10_000
"""More entries than a worker can have pending."""
MAX_RECENT_ABORTS = 10_000
GIVEN_UP = "The request was given up after several workers failed while running it."

log = logging.getLogger("worker")


class Intake:
    """Three loops, and the claims they make for the engine."""

    def __init__(
        self,
        redis: Redis,
        queue: RequestQueue,
        publisher: Publisher,
        engine: EngineThread,
        on_deltas: Callable[[list[OutputDelta]], None],
    ) -> None:
        """`on_deltas` hears of requests that end before the engine gets them."""
        self._queue = queue
        self._publisher = publisher
        self._engine = engine
        self._on_deltas = on_deltas
        self._backlog = Backlog(queue)
        self._aborts = AbortFeed(redis, queue.model)
        self._gateways = GatewayWatch(redis)
        self.claims = Claims(0)
        self._recent_aborts: dict[str, None] = {}
        self._closed = asyncio.Event()
        self._is_leaving = False
        self._taking_over = asyncio.Lock()
        """Entries that were just reclaimed look like entries whose read was lost."""

    def close(self) -> None:
        """Take nothing in any more; the loops that claim end when what they read by now is here."""
        self._closed.set()
        self.claims.close()

    def leave(self) -> None:
        """Nor any aborts."""
        self._is_leaving = True

    async def claim_loop(self) -> None:
        patience = Patience("consumer")
        is_first, is_linked, looks = True, False, True
        while await self.claims.wait_for_room() and not self._closed.is_set():
            try:
                if not is_linked:
                    await self._queue.ensure_group()
                    await self._settle_pending(is_first=is_first)
                    is_first, is_linked, looks = False, True, True
                    patience.reset()
                if looks and await self._take_turn():
                    continue
                for entry in await self._queue.read(self.claims.num_free):
                    await self._take(entry)
                # While there is room, entries are read as they come and nothing waits here.
                looks = self._queue.may_wait or not self.claims.num_free
            except OUTAGE as error:
                is_linked = False
                await patience.pause(error)

    async def _take_turn(self) -> bool:
        """Take of what waits already as much as there is room for; False if nothing waits."""
        waiting = await self._backlog.look()
        running = [claim.request for claim in self.claims.all()]
        chosen = choose(waiting, running, self.claims.num_free, self._recent_aborts)
        if chosen:
            for entry in await self._queue.take([head.entry_id for head in chosen]):
                await self._take(entry)
        return bool(waiting)

    async def _settle_pending(self, *, is_first: bool) -> None:
        """What Redis counts as read by this worker but this worker never saw.

        At first it is what an earlier process of the same id has left: like any gone worker's, it is
        reclaimed with its number of deliveries. Later it is what a lost reply held, and is taken.
        """
        async with self._taking_over:
            ended = set(self._publisher.unacknowledged)
            known = {entry_id for claim in self.claims.all() for entry_id in claim.entry_ids}
            entries = [
                entry
                for entry in await self._queue.read_pending(MAX_PENDING)
                if entry.entry_id not in known and entry.entry_id not in ended
            ]
            if is_first and entries:
                await self._queue.give_back([entry.entry_id for entry in entries])
            elif not is_first:
                for entry in entries:
                    await self._take(entry)

    async def reclaim_loop(self) -> None:
        while not self._closed.is_set():
            for request in await self._gateways.orphans(c.request for c in self.claims.all()):
                self._engine.abort(request.request_id)
            if self.claims.num_free:
                async with self._taking_over:
                    await self._reclaim()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(RECLAIM_INTERVAL_S):
                    await self._closed.wait()

    async def _reclaim(self) -> None:
        try:
            entries = await self._queue.reclaim(self.claims.num_free)
            for entry in entries:
                log.warning(
                    "Takes over entry %s of a worker that is gone.", entry.entry_id.decode()
                )
                await self._take(entry)
        except OUTAGE as error:
            # The claim loop reports and waits for the same outage.
            log.debug("Nothing reclaimed: %s", error)

    async def abort_loop(self) -> None:
        patience = Patience("aborts")
        while not self._is_leaving:
            try:
                request_ids = await self._aborts.read()
            except OUTAGE as error:
                await patience.pause(error)
                continue
            patience.reset()
            for request_id in request_ids:
                self._abort(request_id)

    def _abort(self, request_id: str) -> None:
        if self.claims.get(request_id) is not None:
            self._engine.abort(request_id)
            return
        self._recent_aborts[request_id] = None
        if len(self._recent_aborts) > MAX_RECENT_ABORTS:
            del self._recent_aborts[next(iter(self._recent_aborts))]

    async def _take(self, entry: Entry) -> None:
        try:
            request = decode(GenerateRequest, entry.payload)
        except (msgspec.MsgspecError, ValueError) as error:
            log.warning("Entry %s is no request and is dropped: %s", entry.entry_id.decode(), error)
            await self._queue.drop(entry.entry_id)
            return
        resident = self.claims.get(request.request_id)
        if resident is not None:
            # Enqueued again after an outage, while it runs here: one run answers both.
            if entry.entry_id not in resident.entry_ids:
                resident.entry_ids.append(entry.entry_id)
            return
        self.claims.add(Claim(request, [entry.entry_id]))
        self._start(request, entry.num_deliveries)

    def _start(self, request: GenerateRequest, num_deliveries: int) -> None:
        if request.request_id in self._recent_aborts:
            self._on_deltas(terminal(request, FinishReason.ABORT))
        elif request.deadline_s and time.time() > request.deadline_s:
            self._on_deltas(terminal(request, FinishReason.ERROR, EXPIRED))
        elif num_deliveries > MAX_DELIVERIES:
            self._on_deltas(terminal(request, FinishReason.ERROR, GIVEN_UP))
        else:
            self._engine.add(request)
