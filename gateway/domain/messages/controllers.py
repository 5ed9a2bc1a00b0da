"""Anthropic's routes; their refusals are worded in `errors`."""

from dataclasses import replace

from litestar import Controller, post
from litestar.types import ASGIApp

from gateway.domain.accounting.tags import PARAMETER as TAG
from gateway.domain.accounts.guards import requires_key
from gateway.domain.messages.schemas import (
    CountTokensRequest,
    MessageAnswer,
    MessagesError,
    MessagesRequest,
    TokenCount,
)
from gateway.domain.messages.services import MessageService
from gateway.domain.openai.replays import answered_once
from gateway.domain.openai.services import HttpRequest
from gateway.openapi.operations import BODY_ERRORS, GENERATION_ERRORS, operation

_HELLO = {
    "model": "smollm2-135m-instruct",
    "messages": [{"role": "user", "content": "Name five rivers."}],
}


class MessageController(Controller):
    path = "/v1/messages"
    tags = ["anthropic"]
    guards = [requires_key]

    @post(
        "/",
        status_code=200,
        operation_class=operation(
            MessagesRequest,
            MessageAnswer,
            generates=True,
            parameters=[TAG],
            errors=replace(GENERATION_ERRORS, body=MessagesError),
            example={**_HELLO, "max_tokens": 60},
        ),
        summary="Answer a conversation, in Anthropic's words",
    )
    async def create_message(self, request: HttpRequest, messages: MessageService) -> ASGIApp:
        return await answered_once(request, messages.create)

    @post(
        "/count_tokens",
        status_code=200,
        operation_class=operation(
            CountTokensRequest,
            TokenCount,
            errors=replace(BODY_ERRORS, body=MessagesError),
            example=_HELLO,
        ),
        summary="Count the tokens of a prompt",
    )
    async def count_message_tokens(self, request: HttpRequest, messages: MessageService) -> ASGIApp:
        return await messages.count_tokens(request)
