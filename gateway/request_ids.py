"""What a request is called: by its client and the log (`x-request-id`), and by workers and the ledger.

Each HTTP request gets a name of ours. The answer's id ends with it; `x-request-id` does too unless the
client has sent one; and its requests on the wire begin with it, one for each prompt:

    x-request-id  req_4f0c…        id  chatcmpl-4f0c…        on the wire  4f0c…   4f0c…-1   4f0c…-2
"""

import logging
import re
import secrets
from typing import cast

from litestar.types import Scope

from gateway.errors import GatewayError, ServerError

logger = logging.getLogger(__name__)

_CLEAN = re.compile(rb"[\x21-\x7e]{1,128}")
_QUOTED = re.compile(r"(?:(?:req|resp|msg)_|chatcmpl-|cmpl-)?([0-9a-f]{32})(?:-[0-9]+)?")
_STATE = "tpugate_request_id"
_OWN = "tpugate_own_id"
_FAILED = "tpugate_has_failed"


def new_request_id() -> bytes:
    return b"req_" + secrets.token_hex(16).encode()


def own_id(scope: Scope) -> str:
    """The name that we give a request, whatever its client has sent; 32 hexadecimal digits."""
    state = scope["state"]
    if _OWN not in state:
        state[_OWN] = secrets.token_hex(16)
    return cast(str, state[_OWN])


def wire_id(own: str, prompt: int) -> str:
    """What workers and the ledger call the request of one prompt, counted from 0."""
    return f"{own}-{prompt}" if prompt else own


def quoted_id(quoted: str) -> str | None:
    """Our name in an id that a client has (see above) or in one of the wire; None if there is none in it."""
    found = _QUOTED.fullmatch(quoted.strip())
    return found[1] if found else None


def request_id(scope: Scope) -> bytes:
    """The client's own if it is clean, else one of ours; the answer's header and the log agree on it."""
    state = scope["state"]
    if _STATE not in state:
        given = next((value for name, value in scope["headers"] if name == b"x-request-id"), b"")
        is_clean = _CLEAN.fullmatch(given) is not None
        state[_STATE] = given if is_clean else b"req_" + own_id(scope).encode()
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
