"""What the OpenAPI document says of a route.

Bodies are parsed and answers written by hand, so the framework cannot read their shapes off the handlers.
A handler names them:

    @post(
        "/responses",
        status_code=200,
        operation_class=operation(
            ResponsesRequest, ResponseObject, generates=True, errors=GENERATION_ERRORS,
            example={"model": "smollm2-135m-instruct", "input": "Name five rivers."},
        ),
    )

Where `answer` is left out, what the framework has read off the handler stays. A surface whose errors have
another shape says so once: `MESSAGES_ERRORS = replace(GENERATION_ERRORS, body=MessagesError)`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from litestar.openapi.spec import (
    Example,
    OpenAPIHeader,
    OpenAPIMediaType,
    OpenAPIResponse,
    OpenAPIType,
    Operation,
    Parameter,
    Reference,
    RequestBody,
    Schema,
)
from pydantic import BaseModel

SECURITY_SCHEME = "api_key"

_MEANINGS = {
    400: "The body, a header or a field is wrong; `param` is its place",
    401: "No API key, or a wrong one",
    403: "The key may not do this",
    404: "Unknown model or object",
    405: "The path knows other methods",
    408: "The body took too long to arrive",
    409: "The request is at odds with another one",
    413: "The body is too large",
    415: "The body has a content-encoding",
    422: "The request cannot be served as it is",
    429: "Too many requests; try again later",
    500: "The server failed on this request",
    503: "No worker is ready, or the queue is away; try again later",
    504: "The answer took too long",
}
_RETRY_STATUSES = frozenset({429, 503})


class ErrorDetails(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """OpenAI's error object."""

    error: ErrorDetails


@dataclass(frozen=True)
class Errors:
    """The statuses that can come instead of an answer, and what they look like."""

    statuses: frozenset[int]
    body: type[BaseModel] = ErrorBody


NO_ERRORS = Errors(frozenset())
READ_ERRORS = Errors(frozenset({401, 500}))
ADMIN_ERRORS = Errors(READ_ERRORS.statuses | {400, 403, 404, 413})
BODY_ERRORS = Errors(READ_ERRORS.statuses | {400, 404, 408, 413, 415, 503})
"""Of routes that read a body and look up a model."""
GENERATION_ERRORS = Errors(BODY_ERRORS.statuses | {422, 429, 504})
"""Of routes that queue work for a worker as well."""


def operation(
    body: type[BaseModel] | None = None,
    answer: type[BaseModel] | dict[int, type[BaseModel]] | None = None,
    *,
    generates: bool = False,
    errors: Errors = NO_ERRORS,
    example: dict[str, Any] | None = None,
    parameters: Sequence[Parameter] = (),
) -> type[Operation]:
    """An `operation_class` for a handler.

    `answer` is that of status 200, or one for each status that is no error. One that a model `generates` may
    be server-sent events too and tells what it has cost. `parameters` are headers that the handler reads itself.
    """
    given = tuple(parameters)
    answers = answer if isinstance(answer, dict) else {200: answer} if answer is not None else {}

    @dataclass
    class Described(Operation):
        def __post_init__(self) -> None:
            self.parameters = [*(self.parameters or ()), *given, _request_id_parameter()]
            if body is not None:
                self.request_body = _request_body(body, example)
            kept = {str(status): _answer(kind, generates) for status, kind in answers.items()}
            for status, response in (self.responses or {}).items():
                if not answers and status.startswith("2") and isinstance(response, OpenAPIResponse):
                    response.headers = {**(response.headers or {}), **_headers()}
                    kept[status] = response
            failures = {str(status): _failure(status, errors.body) for status in errors.statuses}
            self.responses = {**failures, **kept}
            if 401 in errors.statuses:
                self.security = [{SECURITY_SCHEME: []}]

    return Described


def schema_of(kind: type[BaseModel]) -> dict[str, Any]:
    """With its definitions in place: the framework's registry takes no foreign ones."""
    schema = kind.model_json_schema(mode="validation")
    return inlined(schema, schema.pop("$defs", {}))  # type: ignore[no-any-return]


def inlined(node: Any, definitions: dict[str, Any], inside: tuple[str, ...] = ()) -> Any:  # noqa: ANN401
    """`node` without references; a definition within itself may be anything."""
    if isinstance(node, list):
        return [inlined(item, definitions, inside) for item in node]
    if not isinstance(node, dict):
        return node
    if isinstance(node.get("$ref"), str):
        name = node["$ref"].rsplit("/", 1)[1]
        return {} if name in inside else inlined(definitions[name], definitions, (*inside, name))
    return {name: inlined(item, definitions, inside) for name, item in node.items()}


def _request_body(kind: type[BaseModel], example: dict[str, Any] | None) -> RequestBody:
    examples: dict[str, Example | Reference] | None = None
    if example is not None:
        examples = {"example": Example(value=example)}
    media = OpenAPIMediaType(schema=_as_schema(schema_of(kind)), examples=examples)
    return RequestBody(content={"application/json": media}, required=True)


def _answer(kind: type[BaseModel], generates: bool) -> OpenAPIResponse:
    content = {"application/json": OpenAPIMediaType(schema=_as_schema(schema_of(kind)))}
    headers = _headers()
    if generates:
        text = Schema(type=OpenAPIType.STRING, description="Server-sent events")
        content["text/event-stream"] = OpenAPIMediaType(schema=text)
        headers["X-Cost-Usd"] = OpenAPIHeader(
            schema=Schema(type=OpenAPIType.STRING, pattern=r"^[0-9]+\.[0-9]{12}$"),
            description="US dollars that a whole answer has cost, provisionally; absent if that is not known",
        )
    return OpenAPIResponse(description="The answer", headers=headers, content=content)


def _failure(status: int, kind: type[BaseModel]) -> OpenAPIResponse:
    headers = _headers()
    if status in _RETRY_STATUSES:
        seconds = Schema(type=OpenAPIType.INTEGER, minimum=1)
        headers["Retry-After"] = OpenAPIHeader(schema=seconds, description="Seconds to wait")
    if status == 401:
        headers["WWW-Authenticate"] = OpenAPIHeader(schema=Schema(type=OpenAPIType.STRING))
    return OpenAPIResponse(
        description=_MEANINGS[status],
        headers=headers,
        content={"application/json": OpenAPIMediaType(schema=_as_schema(schema_of(kind)))},
    )


def _headers() -> dict[str, Any]:
    text = Schema(type=OpenAPIType.STRING)
    return {"X-Request-Id": OpenAPIHeader(schema=text, description="Finds the request in the log")}


def _request_id_parameter() -> Parameter:
    return Parameter(
        name="X-Request-Id",
        param_in="header",
        description="Comes back with the answer if it is 1 to 128 printable ASCII characters",
        schema=Schema(type=OpenAPIType.STRING),
    )


def _as_schema(schema: dict[str, Any]) -> Any:  # noqa: ANN401
    """The framework writes a dictionary as it is; only its type says Schema."""
    return schema
