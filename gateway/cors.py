"""Pages of other origins: what a browser lets them ask of this server (`TPUGATE_CORS_ORIGIN`).

An API key travels in a header that the page itself has to set, never in a cookie, so every origin may be let in:
without a key it learns nothing. Routes that need no key, and the administration, are not for pages.
"""

from collections.abc import Callable

from litestar.types import Scope

NONE = "none"
"""No origin but the server's own."""
_PATHS = ("/v1/", "/tokenize", "/detokenize")
_MAX_AGE_S = 3600
_MAX_WISHES = 1024

Headers = list[tuple[bytes, bytes]]


def cors_headers(origin: str) -> Callable[[Scope], Headers]:
    """A function that gives the headers to add to the answer of a request."""
    if origin == NONE:
        return lambda _: []
    simple: Headers = [
        (b"access-control-allow-origin", origin.encode()),
        (
            b"access-control-expose-headers",
            b"x-request-id, x-cost-usd, retry-after, idempotent-replayed",
        ),
    ]
    preflight: Headers = [
        *simple,
        (b"access-control-allow-methods", b"GET, POST, DELETE"),
        (b"access-control-max-age", str(_MAX_AGE_S).encode()),
    ]

    def headers(scope: Scope) -> Headers:
        if not scope["path"].startswith(_PATHS):
            return []
        if scope.get("method") != "OPTIONS":
            return simple
        # Named one by one: a star would leave out `authorization`.
        wishes = [v for name, v in scope["headers"] if name == b"access-control-request-headers"]
        if not wishes or len(wishes[0]) > _MAX_WISHES:
            return preflight
        return [*preflight, (b"access-control-allow-headers", wishes[0])]

    return headers
