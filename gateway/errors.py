"""Errors of the gateway, and the one place that turns them into OpenAI's error object.

GatewayError                      carries HTTP status, type, code, param
├── StartupError                  the process cannot start; one sentence, exit code 1
│   ├── SettingsError             an environment variable has a bad value
│   └── PortTakenError            somebody else listens there
├── BadRequestError          400  the client can fix it; `param` names the field
│   └── ContextLengthError   400  prompt and answer do not fit the model
├── UnauthorizedError        401  no key, or a wrong one
├── ForbiddenError           403  the key may not do this
├── NotFoundError            404
│   └── UnknownModelError    404  code model_not_found
├── BodyTimeoutError         408  the request did not arrive in time
├── BodyTooLargeError        413
├── EncodedBodyError         415  the body is compressed
├── IdempotencyError         422  the key was used for another body
├── HeadTooLargeError        431
├── ClientGoneError          499  nobody is left to read the answer
├── QueueFullError           429  with Retry-After
│   └── KeyBusyError         429  this API key has as many requests as it may
├── ServerError              500
│   ├── EngineError          500  the model failed on this request
│   │   └── RefusedError     400  the model cannot do what the field `param` wants
│   └── AnswerLostError      500  the worker died after part of the answer was sent
├── UnavailableError         503  no ready worker, or Redis is down; with Retry-After
└── RequestTimeoutError      504
"""

from dataclasses import dataclass
from typing import ClassVar

import msgspec


class GatewayError(Exception):
    """Base of all. The message is one sentence for the client: no path, no class name, no input echoed."""

    status: ClassVar[int] = 500
    type: ClassVar[str] = "server_error"
    code: str | None = None

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code if code is not None else type(self).code
        self.retry_after_s = retry_after_s


class StartupError(GatewayError):
    pass


class SettingsError(StartupError):
    pass


class PortTakenError(StartupError):
    pass


class BadRequestError(GatewayError):
    status = 400
    type = "invalid_request_error"


class ContextLengthError(BadRequestError):
    code = "context_length_exceeded"


class UnauthorizedError(GatewayError):
    status = 401
    type = "invalid_request_error"


class ForbiddenError(GatewayError):
    status = 403
    type = "invalid_request_error"
    code = "insufficient_permissions"


class NotFoundError(GatewayError):
    status = 404
    type = "invalid_request_error"


class UnknownModelError(NotFoundError):
    code = "model_not_found"


class BodyTimeoutError(GatewayError):
    status = 408
    type = "invalid_request_error"
    code = "body_timeout"


class BodyTooLargeError(GatewayError):
    status = 413
    type = "invalid_request_error"
    code = "request_too_large"


class EncodedBodyError(GatewayError):
    status = 415
    type = "invalid_request_error"
    code = "unsupported_content_encoding"


class IdempotencyError(GatewayError):
    status = 422
    type = "invalid_request_error"
    code = "idempotency_key_reused"


class HeadTooLargeError(GatewayError):
    status = 431
    type = "invalid_request_error"
    code = "head_too_large"


class ClientGoneError(GatewayError):
    status = 499
    type = "invalid_request_error"
    code = "client_gone"


class QueueFullError(GatewayError):
    status = 429
    type = "rate_limit_error"
    code = "rate_limit_exceeded"


class KeyBusyError(QueueFullError):
    pass


class ServerError(GatewayError):
    pass


class EngineError(ServerError):
    code = "engine_error"


class RefusedError(EngineError):
    status = 400
    type = "invalid_request_error"
    code = "invalid_value"


class AnswerLostError(ServerError):
    code = "answer_lost"


class UnavailableError(GatewayError):
    status = 503
    code = "server_unavailable"


class RequestTimeoutError(GatewayError):
    status = 504
    code = "request_timeout"


@dataclass(frozen=True)
class ErrorResponse:
    """What goes over the wire: status, header pairs beside the content type, JSON body."""

    status: int
    headers: dict[str, str]
    body: bytes


def error_body(error: GatewayError) -> bytes:
    """`{"error": {…}}` with all of OpenAI's four keys; also the payload of an in-band event of a stream."""
    fields = {
        "message": error.message,
        "type": error.type,
        "param": error.param,
        "code": error.code,
    }
    return msgspec.json.encode({"error": fields})


def error_response(error: GatewayError) -> ErrorResponse:
    headers: dict[str, str] = {}
    if error.status == UnauthorizedError.status:
        headers["www-authenticate"] = "Bearer"
    if error.retry_after_s is not None:
        headers["retry-after"] = str(max(1, error.retry_after_s))
    return ErrorResponse(status=error.status, headers=headers, body=error_body(error))
