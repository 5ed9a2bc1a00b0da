"""The Responses API: a chat in other words, whole, streamed or in the background, and what is kept of it."""

import asyncio
import logging
import sys
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, replace
from typing import Any

import msgspec
from litestar.types import ASGIApp

from gateway.domain.openai.bodies import aside
from gateway.domain.openai.converted import Names, chat_request
from gateway.domain.openai.schemas import ChatCompletionRequest
from gateway.domain.openai.services import ChatJob, CompletionService, HttpRequest, read_body
from gateway.domain.openai.validation import validated
from gateway.domain.responses.answers import Draft, failed
from gateway.domain.responses.conversion import chat_fields, check, given_items
from gateway.domain.responses.schemas import ItemList, ResponsesRequest
from gateway.domain.responses.store import IN_PROGRESS, ResponseStore, Stored
from gateway.errors import (
    BadRequestError,
    BodyTooLargeError,
    GatewayError,
    NotFoundError,
    ServerError,
    UnavailableError,
)
from gateway.settings import GatewaySettings
from gateway.sse import EventStream, WholeAnswer

logger = logging.getLogger(__name__)

_LOST = "The server stopped while it worked on this response. Send it again."
_CANCEL_POLL_S = 1.0
"""How often a background response looks whether it is still wanted."""
_SILENCE_S = 3600.0


@dataclass(frozen=True)
class _Work:
    """A response that is being made."""

    chat: ChatJob
    draft: Draft
    key_id: str
    items: list[dict[str, Any]]
    is_stored: bool


class ResponseService:
    """One per application; owns the tasks of background responses."""

    def __init__(
        self,
        settings: GatewaySettings,
        completions: CompletionService,
        store: ResponseStore,
        gateway_id: str,
    ) -> None:
        self._settings = settings
        self._completions = completions
        self._store = store
        self._gateway_id = gateway_id
        self._tasks: set[asyncio.Task[None]] = set()

    async def stop(self) -> None:
        """Wait for background responses, which end with the jobs of the process."""
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def create(self, request: HttpRequest) -> ASGIApp:
        """Answer /v1/responses; everything a client can get wrong is raised before anything is queued."""
        started_s = time.monotonic()
        content = await read_body(request, self._settings)
        body = await aside(len(content), validated, ResponsesRequest, content)
        check(body)
        key_id = str(request.auth.key_id)
        history = await self._history(key_id, body.previous_response_id)
        # What is stored may be of any length.
        size = sys.maxsize if history else len(content)
        items, chat_body, names = await aside(size, _converted, body, history)
        streaming = bool(body.stream)
        with names.spoken():
            start = self._completions.start_chat
            chat = await start(request, chat_body, started_s, streaming=streaming)
        work = _Work(chat, Draft(body, chat.plan), key_id, items, body.store is not False)
        if body.background:
            return await self._answer_later(work)
        if streaming:
            return EventStream(chat.job, self._stream(work), work.draft.fail)
        with chat.job as job:
            job.watch(request.receive)
            await self._complete(work)
        await self._keep(work)
        return WholeAnswer(msgspec.json.encode(work.draft.response), work.draft.headers)

    async def get(self, request: HttpRequest, response_id: str) -> ASGIApp:
        stored = await self._find(str(request.auth.key_id), response_id)
        return _json(stored.response)

    async def delete(self, request: HttpRequest, response_id: str) -> None:
        """Raises `NotFoundError`. One that is in progress stops."""
        if not await self._store.delete(str(request.auth.key_id), response_id):
            raise _unknown()

    async def cancel(self, request: HttpRequest, response_id: str) -> ASGIApp:
        """Stop a background response; one that has ended stays as it is."""
        key_id = str(request.auth.key_id)
        stored = await self._find(key_id, response_id)
        if not stored.response.get("background"):
            raise BadRequestError("Only a background response can be cancelled.")
        if stored.status == IN_PROGRESS:
            cancelled = replace(stored, response={**stored.response, "status": "cancelled"})
            if await self._store.settle(key_id, cancelled):
                return _json(cancelled.response)
            stored = await self._find(key_id, response_id)
        return _json(stored.response)

    async def input_items(
        self, request: HttpRequest, response_id: str, limit: int, order: str, after: str | None
    ) -> ItemList:
        """A page of what the model was given. Raises `NotFoundError` or `BadRequestError`."""
        stored = await self._find(str(request.auth.key_id), response_id)
        items = stored.input if order == "asc" else stored.input[::-1]
        if after is not None:
            places = [place for place, item in enumerate(items) if item["id"] == after]
            if not places:
                raise BadRequestError("There is no such item.", param="after")
            items = items[places[0] + 1 :]
        page = items[:limit]
        return ItemList(
            data=page,
            first_id=page[0]["id"] if page else "",
            last_id=page[-1]["id"] if page else "",
            has_more=len(items) > limit,
        )

    async def _history(self, key_id: str, previous_id: str | None) -> list[dict[str, Any]]:
        """What an earlier response was given and said."""
        if previous_id is None:
            return []
        name = "previous_response_id"
        try:
            stored = await self._find(key_id, previous_id)
        except NotFoundError as error:
            raise BadRequestError(
                "There is no such previous response.",
                param=name,
                code="previous_response_not_found",
            ) from error
        if stored.status == IN_PROGRESS:
            raise BadRequestError("The previous response is still in progress.", param=name)
        return stored.input + list(stored.response["output"])

    async def _find(self, key_id: str, response_id: str) -> Stored:
        """Raises `NotFoundError`. A response whose gateway has died has failed."""
        stored = await self._store.get(key_id, response_id)
        if stored is None:
            raise _unknown()
        if stored.status != IN_PROGRESS or await self._store.is_alive(stored.gateway_id):
            return stored
        ended = replace(stored, response=failed(dict(stored.response), _LOST))
        if await self._store.settle(key_id, ended):
            return ended
        return await self._find(key_id, response_id)

    async def _complete(self, work: _Work) -> None:
        """Raises the `GatewayError` that ended it."""
        async for batch in work.chat.events(_SILENCE_S):
            for _, event in batch:
                work.draft.take(event)

    async def _stream(self, work: _Work) -> AsyncGenerator[bytes, None]:
        yield work.draft.begin()
        async for batch in work.chat.events(self._settings.ping_interval_s):
            block = b"".join(event for _, item in batch for event in work.draft.take(item))
            if block or not batch:
                yield block or b": ping\n\n"
        await self._keep(work)
        yield work.draft.end()

    async def _keep(self, work: _Work) -> None:
        """Store a response that has ended; it says itself whether that was possible."""
        if not work.is_stored:
            return
        stored = Stored(work.draft.response, work.items, self._gateway_id)
        try:
            is_kept = await self._store.put(work.key_id, stored)
        except UnavailableError:
            is_kept = False
        work.draft.response["store"] = is_kept

    async def _answer_later(self, work: _Work) -> ASGIApp:
        """The response as it is now, once a task works on it."""
        is_running = False
        try:
            stored = Stored(work.draft.response, work.items, self._gateway_id)
            if not await self._store.put(work.key_id, stored):
                raise BodyTooLargeError("The input is larger than a stored response may be.")
            answer = _json(work.draft.response)
            task = asyncio.create_task(self._work(work))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            is_running = True
        finally:
            if not is_running:
                work.chat.job.__exit__(None, None, None)
        return answer

    async def _work(self, work: _Work) -> None:
        with work.chat.job:
            done = asyncio.create_task(self._end(work))
            try:
                while not (await asyncio.wait({done}, timeout=_CANCEL_POLL_S))[0]:
                    if not await self._is_wanted(work):
                        return
            finally:
                done.cancel()

    async def _end(self, work: _Work) -> None:
        try:
            await self._complete(work)
        except GatewayError as error:
            failed(work.draft.response, error.message)
        except Exception:
            logger.exception("a background response failed")
            failed(work.draft.response, ServerError("The server failed on this request.").message)
        stored = Stored(work.draft.response, work.items, self._gateway_id)
        try:
            await self._store.settle(work.key_id, stored)
        except UnavailableError:
            logger.warning("a background response was lost: it cannot be stored")

    async def _is_wanted(self, work: _Work) -> bool:
        try:
            return await self._store.is_in_progress(work.key_id, work.draft.id)
        except UnavailableError:
            return True


def _converted(
    body: ResponsesRequest, history: list[dict[str, Any]]
) -> tuple[list[dict[str, Any]], ChatCompletionRequest, Names]:
    """All items, and the same as a chat. Raises `BadRequestError`."""
    items = history + given_items(body)
    fields, names = chat_fields(body, items, len(history))
    return items, chat_request(fields, names), names


def _json(fields: dict[str, Any]) -> ASGIApp:
    return WholeAnswer(msgspec.json.encode(fields))


def _unknown() -> NotFoundError:
    return NotFoundError("There is no such response.", param="response_id")
