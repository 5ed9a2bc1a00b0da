"""The Messages API: a chat in Anthropic's words."""

import asyncio
import time

import msgspec
from litestar.response.base import ASGIResponse
from litestar.types import ASGIApp

from gateway.dispatch import Dispatcher
from gateway.domain.messages.answers import collect, stream
from gateway.domain.messages.conversion import chat_fields
from gateway.domain.messages.errors import messages_error_body
from gateway.domain.messages.schemas import CountTokensRequest, MessagesRequest
from gateway.domain.openai.bodies import aside
from gateway.domain.openai.converted import Names, chat_request
from gateway.domain.openai.prompts import render_chat
from gateway.domain.openai.schemas import ChatCompletionRequest
from gateway.domain.openai.services import ChatJob, CompletionService, HttpRequest, read_body
from gateway.domain.openai.tools.offer import shown_tools
from gateway.domain.openai.validation import unsupported, validated
from gateway.errors import ContextLengthError, GatewayError
from gateway.request_ids import request_id
from gateway.settings import GatewaySettings
from gateway.sse import EventStream


class MessageService:
    """Stateless but for its parts; one per application."""

    def __init__(
        self, settings: GatewaySettings, dispatcher: Dispatcher, completions: CompletionService
    ) -> None:
        self._settings = settings
        self._dispatcher = dispatcher
        self._completions = completions

    async def create(self, request: HttpRequest) -> ASGIApp:
        """Answer /v1/messages; everything a client can get wrong is raised before anything is queued."""
        started_s = time.monotonic()
        content = await read_body(request, self._settings)
        body = await aside(len(content), validated, MessagesRequest, content)
        asked, names = await aside(len(content), _converted, body)
        chat = await self._start(request, asked, names, started_s, streaming=bool(body.stream))
        if not body.stream:
            with chat.job as job:
                job.watch(request.receive)
                return await collect(chat, body.max_tokens)
        own_id = request_id(request.scope).decode()

        def on_error(error: GatewayError) -> bytes:
            return b"event: error\ndata: " + messages_error_body(error, own_id) + b"\n\n"

        blocks = stream(chat, body.max_tokens, self._settings.ping_interval_s)
        return EventStream(chat.job, blocks, on_error)

    async def count_tokens(self, request: HttpRequest) -> ASGIApp:
        """Answer /v1/messages/count_tokens, however long the prompt is."""
        content = await read_body(request, self._settings)
        body = await aside(len(content), validated, CountTokensRequest, content)
        chat, names = await aside(len(content), _converted, body)
        served = self._dispatcher.lookup(chat.model)

        def count() -> int:
            return len(served.tokenizer.encode(render_chat(served, chat, shown_tools(chat))))

        with names.spoken():
            num_tokens = await asyncio.to_thread(count)
        answer = msgspec.json.encode({"input_tokens": num_tokens})
        return ASGIResponse(body=answer, media_type="application/json")

    async def _start(
        self,
        request: HttpRequest,
        chat: ChatCompletionRequest,
        names: Names,
        started_s: float,
        *,
        streaming: bool,
    ) -> ChatJob:
        """Clients of this API ask for more tokens than a small context holds: they get what is left of it."""
        served = self._dispatcher.lookup(chat.model)
        unbound = chat.model_copy(update={"max_completion_tokens": None})
        if (chat.max_completion_tokens or 0) >= served.card.context_len:
            chat = unbound
        start = self._completions.start_chat
        with names.spoken():
            try:
                return await start(request, chat, started_s, streaming=streaming)
            except ContextLengthError as error:
                if error.param != "max_completion_tokens":
                    raise
            return await start(request, unbound, started_s, streaming=streaming)


def _converted(body: CountTokensRequest) -> tuple[ChatCompletionRequest, Names]:
    """The same as a chat. Raises `BadRequestError`."""
    for name in ("mcp_servers", "container", "inference_geo"):
        if getattr(body, name, None):
            raise unsupported(name)
    if body.speed == "fast":
        raise unsupported("speed")
    fields, names = chat_fields(body)
    return chat_request(fields, names), names
