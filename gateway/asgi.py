"""The application: parts put together, errors mapped once, a request id on every answer, and the server."""

import asyncio
import gc
import logging
import signal
import socket
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from typing import Any, cast

import uvicorn
import uvloop
from litestar import Litestar, Request, Response
from litestar.di import Provide
from litestar.exceptions import HTTPException, SerializationException
from litestar.types import (
    BeforeMessageSendHookHandler,
    ExceptionHandlersMap,
    Message,
    Scope,
)

from gateway.connections import Limits, keep_honest, protocol_of
from gateway.cors import cors_headers
from gateway.db.engine import Database
from gateway.dispatch import Dispatcher
from gateway.domain.accounting.controllers import CostController
from gateway.domain.accounting.live import LiveCosts
from gateway.domain.accounting.metrics import CostCollector
from gateway.domain.accounting.rates import read_rates
from gateway.domain.accounting.service import Accounting
from gateway.domain.accounts.controllers import KeyController
from gateway.domain.accounts.services import AccountService
from gateway.domain.messages.controllers import MessageController
from gateway.domain.messages.errors import messages_error_response
from gateway.domain.messages.services import MessageService
from gateway.domain.openai.controllers import OpenAIController, TokenController
from gateway.domain.openai.replays import Replays
from gateway.domain.openai.services import CompletionService
from gateway.domain.openai.tokenization import TokenizationService
from gateway.domain.responses.controllers import ResponseController
from gateway.domain.responses.services import ResponseService
from gateway.domain.responses.store import ResponseStore
from gateway.domain.system.controllers import SystemController
from gateway.domain.system.services import Metrics
from gateway.errors import (
    BadRequestError,
    BodyTooLargeError,
    GatewayError,
    NotFoundError,
    PortTakenError,
    ServerError,
    StartupError,
    error_response,
)
from gateway.openapi.document import openapi_config
from gateway.request_ids import log_failure, request_id
from gateway.settings import GatewaySettings

logger = logging.getLogger(__name__)

_ANTHROPIC = "/v1/messages"
"""What is below it speaks Anthropic's words."""
_SWITCH_S = 0.001
"""After which a thread hands the interpreter on; Python's own 5 ms add up, as an answer needs it some times."""
_KEEP_ALIVE_S = 75
_CLIENTS_AFFAIR = ("Invalid HTTP request", "upgrade request", "WebSocket library")
_GC_THRESHOLDS = (700, 10, 50)
"""Python's own but for the last: a look at all objects of a thousand streams takes 40 ms, in one piece, so it
comes once for 350,000 new ones (about 100 MiB) instead of with every few hundred streams."""
_CUT_AFTER_S = 5
"""What answers that were told to end may take to say so."""


def create_app(settings: GatewaySettings) -> Litestar:
    """The gateway as an ASGI application; it reaches for Redis and the database when its lifespan starts."""
    database = Database(settings)
    accounts = AccountService(settings, database)
    dispatcher = Dispatcher(settings)
    metrics = Metrics(dispatcher)
    costs = LiveCosts(partial(read_rates, database, settings), settings.cost_refresh_s)
    accounting = Accounting(settings, database, dispatcher.gateway_id)
    metrics.add(CostCollector(lambda: costs.rates.totals))
    completions = CompletionService(settings, dispatcher, metrics, costs)
    tokenization = TokenizationService(settings, dispatcher)
    messages = MessageService(settings, dispatcher, completions)
    replays = Replays(settings, dispatcher.gateway_id)
    stored = ResponseStore(settings)
    responses = ResponseService(settings, completions, stored, dispatcher.gateway_id)

    @asynccontextmanager
    async def lifespan(_: Litestar) -> AsyncIterator[None]:
        try:
            await accounts.prepare()
            await dispatcher.start()
            costs.start()
            accounting.start()
            yield
        finally:
            await accounting.stop()
            await costs.stop()
            await responses.stop()
            await replays.stop()
            await stored.close()
            await dispatcher.stop()
            await database.close()

    app = Litestar(
        route_handlers=[
            OpenAIController,
            ResponseController,
            MessageController,
            TokenController,
            KeyController,
            CostController,
            SystemController,
        ],
        lifespan=[lifespan],
        dependencies={
            "accounts": Provide(lambda: accounts, sync_to_thread=False),
            "database": Provide(lambda: database, sync_to_thread=False),
            "completions": Provide(lambda: completions, sync_to_thread=False),
            "dispatcher": Provide(lambda: dispatcher, sync_to_thread=False),
            "messages": Provide(lambda: messages, sync_to_thread=False),
            "metrics": Provide(lambda: metrics, sync_to_thread=False),
            "responses": Provide(lambda: responses, sync_to_thread=False),
            "tokenization": Provide(lambda: tokenization, sync_to_thread=False),
        },
        exception_handlers=_exception_handlers(),
        before_send=[_header_adder(settings.cors_origin)],
        request_max_body_size=settings.max_body_bytes,
        openapi_config=openapi_config(),
        logging_config=None,
    )
    app.state["accounts"] = accounts
    app.state["dispatcher"] = dispatcher
    app.state["replays"] = replays
    return app


def _exception_handlers() -> ExceptionHandlersMap:
    return {
        GatewayError: _handle_gateway_error,
        HTTPException: _handle_http_exception,
        Exception: _handle_unexpected,
    }


def _handle_gateway_error(request: Request[Any, Any, Any], error: GatewayError) -> Response[bytes]:
    if request.url.path.startswith(_ANTHROPIC):
        answer = messages_error_response(error, request_id(request.scope).decode())
    else:
        answer = error_response(error)
    if answer.status >= 500:
        log_failure(request.scope, error)
    return Response(
        answer.body,
        status_code=answer.status,
        headers=answer.headers,
        media_type="application/json",
    )


def _handle_http_exception(
    request: Request[Any, Any, Any], error: HTTPException
) -> Response[bytes]:
    """The framework's own refusals in OpenAI's words."""
    status = error.status_code
    mapped: GatewayError
    if status == 404:
        mapped = NotFoundError(f"Unknown request URL: {request.method} {request.url.path[:200]}")
    elif status == 413:
        limit = request.app.request_max_body_size
        mapped = BodyTooLargeError(f"The body is larger than this server takes ({limit} bytes).")
    elif status >= 500:
        mapped = ServerError("The server failed on this request.")
        mapped.__cause__ = error
    else:
        mapped = _from_framework(error)
    answer = _handle_gateway_error(request, mapped)
    if 400 <= status < 500:
        answer.status_code = status
    if "allow" in (error.headers or {}):
        answer.headers["allow"] = (error.headers or {})["allow"]
    return answer


def _from_framework(error: HTTPException) -> BadRequestError:
    first = error.extra[0] if isinstance(error.extra, list) and error.extra else None
    if isinstance(first, dict) and "message" in first:
        param = str(first.get("key", "body"))
        if param in ("data", "body"):
            return BadRequestError("The body must be a JSON object.")
        return BadRequestError(f"Invalid '{param}': {first['message']}"[:500], param=param)
    if isinstance(error.__cause__, SerializationException):
        return BadRequestError(f"The body must be a JSON object: {error.detail}"[:500])
    return BadRequestError(error.detail[:500])


def _handle_unexpected(request: Request[Any, Any, Any], error: Exception) -> Response[bytes]:
    failure = ServerError("The server failed on this request.")
    failure.__cause__ = error
    return _handle_gateway_error(request, failure)


def _header_adder(cors_origin: str) -> BeforeMessageSendHookHandler:
    """Puts on every answer what does not depend on the route: a request id, and the word for browsers."""
    for_browsers = cors_headers(cors_origin)

    async def add_headers(message: Message, scope: Scope) -> None:
        if message["type"] == "http.response.start":
            own = (b"x-request-id", request_id(scope))
            message["headers"] = [*message["headers"], own, *for_browsers(scope)]

    return add_headers


class _Server(uvicorn.Server):
    """uvicorn's server that stops politely.

    A signal that asked it to stop is not raised again, so that a clean stop exits with 0; and answers that
    still run when the grace is over end with an error object instead of a cut connection.
    """

    def __init__(
        self, config: uvicorn.Config, grace_s: float, end_answers: Callable[[], None]
    ) -> None:
        super().__init__(config)
        self._grace_s = grace_s
        self._end_answers = end_answers

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        timer = asyncio.get_running_loop().call_later(self._grace_s, self._end_answers)
        try:
            await super().shutdown(sockets)
        finally:
            timer.cancel()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        names = (signal.SIGINT, signal.SIGTERM)
        before = {name: signal.signal(name, self.handle_exit) for name in names}
        try:
            yield
        finally:
            for name, handler in before.items():
                signal.signal(name, handler)


async def serve(settings: GatewaySettings) -> None:
    """Serve until SIGINT or SIGTERM. Raises `StartupError` (`PortTakenError` …) before anything listens."""
    listener = _listen(settings.host, settings.port)
    keep_honest(listener, settings.stalled_timeout_s)
    with listener:
        await _check_data_folder(settings)
        app = create_app(settings)
        config = uvicorn.Config(
            app,
            loop="uvloop",
            http=protocol_of(Limits(settings.body_timeout_s, settings.stalled_timeout_s)),
            ws="none",
            lifespan="on",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=_KEEP_ALIVE_S,
            timeout_graceful_shutdown=settings.graceful_shutdown_s + _CUT_AFTER_S,
        )
        dispatcher = cast(Dispatcher, app.state["dispatcher"])
        server = _Server(config, settings.graceful_shutdown_s, dispatcher.end_answers)
        # What lives as long as the process: a collection that looks at it again stops all answers for 0.1 s.
        gc.collect()
        gc.freeze()
        # Threads parse, render and tokenise beside the loop.
        sys.setswitchinterval(_SWITCH_S)
        gc.set_threshold(*_GC_THRESHOLDS)
        logger.info("listening on http://%s:%d", *listener.getsockname()[:2])
        await server.serve(sockets=[listener])
        if not server.started:
            raise StartupError("the gateway could not start; the log says why")


async def _check_data_folder(settings: GatewaySettings) -> None:
    """Do what the lifespan does first once here, where its failure is one sentence and not a framework's trace."""
    database = Database(settings)
    try:
        notice = await AccountService(settings, database).prepare()
    finally:
        await database.close()
    if notice is not None:
        # Not through the log, which is kept and passed on.
        sys.stderr.write(notice + "\n")
        sys.stderr.flush()


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(2048)
    except OSError as error:
        listener.close()
        raise PortTakenError(f"cannot listen on {host}:{port}: {error.strerror}") from error
    listener.setblocking(False)
    return listener


def _is_worth_logging(record: logging.LogRecord) -> bool:
    """Anybody can send nonsense or ask for an upgrade, as often as they like: no reason for a warning."""
    return not any(words in record.msg for words in _CLIENTS_AFFAIR)


def run(settings: GatewaySettings) -> None:
    """Serve in an event loop of its own until a signal; raises `StartupError` with one sentence."""
    logging.basicConfig(
        level=settings.log_level,
        format="%(asctime)s gateway %(levelname)s %(message)s",
        datefmt="%H:%M:%S",
    )
    logging.getLogger("uvicorn").setLevel(max(logging.WARNING, logging.root.level))
    logging.getLogger("uvicorn.error").addFilter(_is_worth_logging)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(settings))
