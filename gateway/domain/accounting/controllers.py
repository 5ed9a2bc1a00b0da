"""Costs over HTTP, for admins: the same reports as `tpugate cost report`."""

import time
from typing import Annotated, Any

from litestar import Controller, Response, get
from litestar.params import QueryParameter

from gateway.db.engine import Database
from gateway.domain.accounting.documents import csv_of, document
from gateway.domain.accounting.focus import BY, focus_csv
from gateway.domain.accounting.queries import by_of, window_of
from gateway.domain.accounting.report import report
from gateway.domain.accounting.schemas import CostReport
from gateway.domain.accounting.what_if import parse, reprice
from gateway.domain.accounts.guards import requires_admin
from gateway.errors import BadRequestError
from gateway.openapi.operations import ADMIN_ERRORS, operation

_CSV = "text/csv; charset=utf-8"
_FORMATS = ("json", "csv", "focus")


class CostController(Controller):
    path = "/admin/api/costs"
    tags = ["admin"]
    guards = [requires_admin]

    @get(
        summary="What was spent, by model, key, tag, day or hour",
        operation_class=operation(None, CostReport, errors=ADMIN_ERRORS),
    )
    async def costs(
        self,
        database: Database,
        begin: Annotated[str | None, QueryParameter(name="from", max_length=40)] = None,
        end: Annotated[str | None, QueryParameter(name="to", max_length=40)] = None,
        by: Annotated[str | None, QueryParameter(name="by", max_length=100)] = None,
        what_if: Annotated[str | None, QueryParameter(name="what_if", max_length=200)] = None,
        form: Annotated[str, QueryParameter(name="format", max_length=10)] = "json",
    ) -> Response[Any]:
        if form not in _FORMATS:
            raise BadRequestError(
                f"Invalid 'format': one of {', '.join(_FORMATS)} is wanted.", param="format"
            )
        window = window_of(begin, end, time.time())
        made = await report(database, window, BY if form == "focus" else by_of(by))
        if form == "focus":
            return Response(focus_csv(made), media_type=_CSV)
        if form == "csv":
            return Response(csv_of(made), media_type=_CSV)
        found: dict[str, Any] = {"report": made}
        if what_if:
            found["what_if"] = await reprice(database, made, parse(what_if), time.time_ns())
        return Response(document(found))
