"""Refusals and failures in Anthropic's words."""

import msgspec

from gateway.errors import ErrorResponse, GatewayError, error_response

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def messages_error_body(error: GatewayError, request_id: str) -> bytes:
    """`{"type": "error", "error": {…}, "request_id": …}`; also the payload of a stream's error event."""
    fallback = "api_error" if error.status >= 500 else "invalid_request_error"
    details = {"type": _TYPES.get(error.status, fallback), "message": error.message}
    return msgspec.json.encode({"type": "error", "error": details, "request_id": request_id})


def messages_error_response(error: GatewayError, request_id: str) -> ErrorResponse:
    answer = error_response(error)
    return ErrorResponse(answer.status, answer.headers, messages_error_body(error, request_id))
