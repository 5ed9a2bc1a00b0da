"""Who may call a route. Guards run before a body is read."""

from collections.abc import Awaitable, Callable
from typing import Any, cast

from litestar.connection import ASGIConnection
from litestar.handlers import BaseRouteHandler, HTTPRouteHandler

from gateway.db.models import Role
from gateway.domain.accounts.services import AccountService, Principal
from gateway.errors import ForbiddenError

Connection = ASGIConnection[Any, Any, Any, Any]
Guard = Callable[[Connection, BaseRouteHandler], Awaitable[None]]


async def requires_key(connection: Connection, _: BaseRouteHandler) -> None:
    """Sets `connection.auth` to the `Principal`. Raises `UnauthorizedError`."""
    if connection.scope.get("method") == "OPTIONS":
        return  # A browser asks so before it sends a key; the answer tells methods alone.
    accounts = cast(AccountService, connection.app.state["accounts"])
    authorization = connection.headers.get("authorization")
    if authorization is None and "x-api-key" in connection.headers:
        # As Anthropic's clients send it.
        authorization = "Bearer " + connection.headers["x-api-key"]
    connection.scope["auth"] = await accounts.authenticate(authorization)


class KeyedRoute(HTTPRouteHandler):
    """A route for what is asked often: each guard gets the handler itself instead of a copy."""

    async def authorize_connection(self, connection: Connection) -> None:
        for guard in self.resolve_guards():
            await cast(Guard, guard)(connection, self)


async def requires_admin(connection: Connection, handler: BaseRouteHandler) -> None:
    """Raises `UnauthorizedError` or `ForbiddenError`."""
    await requires_key(connection, handler)
    if cast(Principal, connection.auth).role is not Role.ADMIN:
        raise ForbiddenError("This needs an admin's API key.")
