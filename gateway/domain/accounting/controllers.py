"""Costs over HTTP, for admins: the same reports as `tpugate cost report`."""

import asyncio
import time
from dataclasses import dataclass, replace
from typing import Annotated, Any

from litestar import Controller, Request, Response, get
from litestar.di import Provide
from litestar.params import QueryParameter

from gateway.db.engine import Database
from gateway.domain.accounting.documents import csv_of, document
from gateway.domain.accounting.focus import BY, focus_csv
from gateway.domain.accounting.price_store import read_book
from gateway.domain.accounting.queries import by_of, format_of, refuse_unknown, window_of
from gateway.domain.accounting.report import Report, report
from gateway.domain.accounting.schemas import CostReport
from gateway.domain.accounting.waste import waste
from gateway.domain.accounting.what_if import parse, reprice
from gateway.domain.accounts.guards import requires_admin
from gateway.openapi.operations import ADMIN_ERRORS, operation

_CSV = "text/csv"
"""The framework adds the character set."""
MAX_LINES = 10_000


@dataclass(frozen=True)
class Asked:
    """The query, but for the page; checked where it is read."""

    begin: str | None
    end: str | None
    by: str | None
    what_if: str | None
    form: str | None
    with_waste: bool


@dataclass(frozen=True)
class Page:
    limit: int
    offset: int

    def of(self, made: Report) -> tuple[Report, int | None]:
        """The page's lines, and where the next one begins."""
        end = self.offset + self.limit
        lines = made.lines[self.offset : end]
        return replace(made, lines=lines), end if end < len(made.lines) else None


async def provide_asked(
    begin: Annotated[str | None, QueryParameter(name="from")] = None,
    end: Annotated[str | None, QueryParameter(name="to")] = None,
    by: Annotated[str | None, QueryParameter(name="by", max_length=100)] = None,
    what_if: Annotated[str | None, QueryParameter(name="what_if", max_length=200)] = None,
    form: Annotated[str | None, QueryParameter(name="format")] = None,
    waste: Annotated[bool, QueryParameter(name="waste")] = False,
) -> Asked:
    return Asked(begin, end, by, what_if, form, with_waste=waste)


async def provide_page(
    limit: Annotated[int, QueryParameter(name="limit", ge=1, le=MAX_LINES)] = 1000,
    offset: Annotated[int, QueryParameter(name="offset", ge=0, le=10**9)] = 0,
) -> Page:
    return Page(limit, offset)


class CostController(Controller):
    path = "/admin/api/costs"
    tags = ["admin"]
    guards = [requires_admin]
    dependencies = {"asked": Provide(provide_asked), "page": Provide(provide_page)}

    @get(
        summary="What was spent, by model, key, tag, day or hour",
        operation_class=operation(None, CostReport, errors=ADMIN_ERRORS),
    )
    async def costs(
        self, request: Request[Any, Any, Any], database: Database, asked: Asked, page: Page
    ) -> Response[Any]:
        refuse_unknown(request.query_params)
        form = format_of(asked.form, request.headers.get("accept", ""))
        window = window_of(asked.begin, asked.end, time.time())
        wanted = parse(asked.what_if) if asked.what_if else None
        made = await report(database, window, BY if form == "focus" else by_of(asked.by))
        # Thousands of lines take seconds to write: not in the loop that answers go through.
        if form == "focus":
            async with database.session() as session:
                book = await read_book(session)
            return Response(await asyncio.to_thread(focus_csv, made, book), media_type=_CSV)
        if form == "csv":
            return Response(await asyncio.to_thread(csv_of, made), media_type=_CSV)
        shown, next_offset = page.of(made)
        found: dict[str, Any] = {"report": shown}
        if wanted is not None:
            found["what_if"] = await reprice(database, made, wanted, time.time_ns())
        if asked.with_waste:
            found["waste"] = await waste(database, window)
        answer = await asyncio.to_thread(document, found)
        return Response({**answer, "num_lines": len(made.lines), "next_offset": next_offset})
