"""`tpugate cost`: what was spent, on what, and whether it adds up."""

import json
import time
from typing import TYPE_CHECKING, Any

import click

from cli.comparison_tables import print_beside
from cli.cost_tables import (
    print_audit,
    print_explanation,
    print_report,
    print_waste,
    print_what_if,
)
from cli.database import database_options, with_database
from gateway.domain.accounting.documents import csv_of, document, explanation

if TYPE_CHECKING:
    from gateway.db.engine import Database
    from gateway.domain.accounting.comparison import Beside, Load
    from gateway.domain.accounting.report import Report

UNSOUND = 1
"""Exit code of an audit that has found a fault, and of an explanation that log and ledger differ in."""


@click.group()
def cost() -> None:
    """What requests have cost: reports, one request step by step, an audit."""


@cost.command()
@click.option(
    "--from", "from_text", metavar="DATE", help="First day or hour (default: 30 days ago)."
)
@click.option("--to", "to_text", metavar="DATE", help="End, exclusive (default: now).")
@click.option(
    "--by", metavar="NAMES", help="model, key, tag, day, hour; commas between (default: model)."
)
@click.option(
    "--what-if", "what_if", metavar="NAME=VALUE,…", help="The same chip-time at another price."
)
@click.option("--waste", "with_waste", is_flag=True, help="What was spent on nobody, as money.")
@click.option(
    "--beside", metavar="CHIPS", help="Other chips: v6e,h100 … or `default`; with sources."
)
@click.option(
    "--dtype", default="bfloat16", show_default=True, help="Of our weights, for --beside."
)
@click.option("--csv", "as_csv", is_flag=True, help="Print CSV.")
@database_options
def report(
    from_text: str | None,
    to_text: str | None,
    by: str | None,
    what_if: str | None,
    **flags: Any,  # noqa: ANN401
) -> None:
    """Chip-time, dollars and dollars per million tokens, by line."""
    from gateway.domain.accounting import queries
    from gateway.domain.accounting.report import report as make_report
    from gateway.domain.accounting.waste import waste
    from gateway.domain.accounting.what_if import parse, reprice

    async def work(database: "Database") -> dict[str, Any]:
        window = queries.window_of(from_text, to_text, time.time())
        asked = parse(what_if) if what_if else None
        found: dict[str, Any] = {"report": await make_report(database, window, queries.by_of(by))}
        if asked is not None:
            found["what_if"] = await reprice(database, found["report"], asked, time.time_ns())
        if flags["beside"]:
            found["beside"] = await _compared(
                database, found["report"], flags["beside"], flags["dtype"]
            )
        if flags["with_waste"]:
            found["waste"] = await waste(database, window)
        return found

    found = with_database(work, flags["database_url"], flags["data_dir"])
    made: Report = found["report"]
    if flags["as_json"]:
        click.echo(json.dumps(document(found), indent=2))
    elif flags["as_csv"]:
        click.echo(csv_of(made), nl=False)
    else:
        print_report(made)
        if "what_if" in found:
            print_what_if(found["what_if"])
        if "beside" in found:
            print_beside(found["beside"])
        if "waste" in found:
            print_waste(found["waste"])


async def _compared(
    database: "Database", made: "Report", text: str, dtype: str
) -> "list[tuple[Load, list[Beside]]]":
    """Each model of the report beside other chips."""
    from gateway.domain.accounting.baseline_store import read_baselines
    from gateway.domain.accounting.comparison import DEFAULT_SKUS, compare, prices_beside
    from gateway.domain.accounting.loads import read_loads
    from gateway.domain.accounting.price_store import read_book
    from gateway.errors import BadRequestError

    async with database.session() as session:
        valid = (await read_book(session)).valid_at(time.time_ns())
    skus = DEFAULT_SKUS if text == "default" else tuple(dict.fromkeys(text.split(",")))
    prices = prices_beside(valid, skus)
    without = sorted(set(skus) - {price.sku for price in prices})
    if without and (text != "default" or not prices):
        raise BadRequestError(
            f"Invalid 'beside': the price book has no on-demand price of {', '.join(without)[:100]} that is valid "
            "now (tpugate prices import --builtin, tpugate prices add).",
            param="beside",
        )
    baselines = await read_baselines(database)
    loads = await read_loads(database, made.window, dtype)
    return [(load, compare(load, baselines, prices)) for load in loads]


@cost.command()
@click.argument("request_id")
@database_options
def explain(request_id: str, as_json: bool, database_url: str | None, data_dir: str | None) -> None:
    """Work one request's cost out again from the raw log, step by step.

    REQUEST_ID is an answer's id or the x-request-id of its headers.
    """
    from gateway.domain.accounting.explain import explain as explain_request

    found = with_database(
        lambda database: explain_request(database, request_id), database_url, data_dir
    )
    if as_json:
        click.echo(json.dumps(explanation(found), indent=2))
    else:
        print_explanation(found)
    if found.is_equal is False:
        raise SystemExit(UNSOUND)


@cost.command()
@database_options
def audit(as_json: bool, database_url: str | None, data_dir: str | None) -> None:
    """Does the ledger add up? Six invariants with their residuals; exit code 1 if one does not hold."""
    from gateway.domain.accounting.audit import audit as audit_ledger

    found = with_database(audit_ledger, database_url, data_dir)
    if as_json:
        click.echo(json.dumps(found.as_dict(), indent=2))
    else:
        print_audit(found)
    if not found.is_sound:
        raise SystemExit(UNSOUND)
