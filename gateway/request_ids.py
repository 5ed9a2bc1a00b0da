"""The `x-request-id` of an answer: what a client quotes and the log has."""

import logging
import re
import secrets
from typing import cast

from litestar.types import Scope

from gateway.errors import GatewayError, ServerError

logger = logging.getLogger(__name__)

_CLEAN = re.compile(rb"[\x21-\x7e]{1,128}")
_STATE = "tpugate_request_id"
_FAILED = "tpugate_has_failed"


def new_request_id() -> bytes:
    return b"req_" + secrets.token_hex(16).encode()


def request_id(scope: Scope) -> bytes:
    """The client's own if it is clean, else one of ours; the answer's header and the log agree on it."""
    state = scope["state"]
    if _STATE not in state:
        given = next((value for name, value in scope["headers"] if name == b"x-request-id"), b"")
        state[_STATE] = given if _CLEAN.fullmatch(given) is not None else new_request_id()
    return cast(bytes, state[_STATE])


def log_failure(scope: Scope, error: GatewayError) -> None:
    """The line of the log that the request id of a failed answer leads to; with the trace of an unexpected error."""
    scope["state"][_FAILED] = True
    logger.error(
        "request %s to %.100s failed: %s (%s)",
        request_id(scope).decode(),
        scope["path"],
        error.message,
        error.code,
        # What is expected to fail has its own words; a trace may hold what is nobody's business.
        exc_info=error.__cause__ if type(error) is ServerError else None,
    )


def has_failed(scope: Scope) -> bool:
    """Whether the log has a failure of this request."""
    return _FAILED in scope["state"]
