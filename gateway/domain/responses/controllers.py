"""Routes of OpenAI's Responses API."""

from typing import Annotated, Literal

from litestar import Controller, delete, get, post
from litestar.params import Parameter
from litestar.types import ASGIApp

from gateway.domain.accounting.tags import PARAMETER as TAG
from gateway.domain.accounts.guards import requires_key
from gateway.domain.openai.replays import answered_once
from gateway.domain.openai.services import HttpRequest
from gateway.domain.openai.validation import unsupported
from gateway.domain.responses.schemas import (
    DeletedResponse,
    ItemList,
    ResponseAnswer,
    ResponsesRequest,
)
from gateway.domain.responses.services import ResponseService
from gateway.openapi.operations import GENERATION_ERRORS, Errors, operation

_ERRORS = Errors(frozenset({400, 401, 404, 500, 503}))


class ResponseController(Controller):
    path = "/v1/responses"
    tags = ["openai"]
    guards = [requires_key]

    @post(
        "/",
        status_code=200,
        operation_class=operation(
            ResponsesRequest,
            ResponseAnswer,
            generates=True,
            parameters=[TAG],
            errors=GENERATION_ERRORS,
            example={"model": "smollm2-135m-instruct", "input": "Name five rivers."},
        ),
        summary="Answer an input of items; whole, streamed or in the background",
    )
    async def create_response(self, request: HttpRequest, responses: ResponseService) -> ASGIApp:
        return await answered_once(request, responses.create)

    @get(
        "/{response_id:str}",
        operation_class=operation(answer=ResponseAnswer, errors=_ERRORS),
        summary="A stored response",
    )
    async def get_response(
        self,
        request: HttpRequest,
        responses: ResponseService,
        response_id: str,
        stream: bool | None = None,
    ) -> ASGIApp:
        if stream:
            raise unsupported("stream")
        return await responses.get(request, response_id)

    @delete(
        "/{response_id:str}",
        status_code=200,
        operation_class=operation(errors=_ERRORS),
        summary="Forget a stored response",
    )
    async def delete_response(
        self, request: HttpRequest, responses: ResponseService, response_id: str
    ) -> DeletedResponse:
        await responses.delete(request, response_id)
        return DeletedResponse(id=response_id)

    @post(
        "/{response_id:str}/cancel",
        status_code=200,
        operation_class=operation(answer=ResponseAnswer, errors=_ERRORS),
        summary="Stop a background response",
    )
    async def cancel_response(
        self, request: HttpRequest, responses: ResponseService, response_id: str
    ) -> ASGIApp:
        return await responses.cancel(request, response_id)

    @get(
        "/{response_id:str}/input_items",
        operation_class=operation(errors=_ERRORS),
        summary="What the model was given for a stored response",
    )
    async def list_input_items(
        self,
        request: HttpRequest,
        responses: ResponseService,
        response_id: str,
        limit: Annotated[int, Parameter(ge=1, le=100)] = 20,
        order: Literal["asc", "desc"] = "desc",
        after: str | None = None,
    ) -> ItemList:
        return await responses.input_items(request, response_id, limit, order, after)
