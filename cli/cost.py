"""`tpugate cost`: what was spent, on what, and whether it adds up."""

import csv
import io
import json
import time
from dataclasses import asdict
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import click

from cli.database import database_options, with_database

if TYPE_CHECKING:
    from gateway.db.engine import Database
    from gateway.domain.accounting.audit import Audit
    from gateway.domain.accounting.explain import Explanation
    from gateway.domain.accounting.report import Line, Report
    from gateway.domain.accounting.waste import WasteLine
    from gateway.domain.accounting.what_if import Answer

UNSOUND = 1
"""Exit code of an audit that has found a fault, and of an explanation that log and ledger differ in."""
_NANOS = 10**9


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
        if flags["with_waste"]:
            found["waste"] = await waste(database, window)
        return found

    found = with_database(work, flags["database_url"], flags["data_dir"])
    made: Report = found["report"]
    if flags["as_json"]:
        click.echo(json.dumps(_document(found), indent=2))
    elif flags["as_csv"]:
        click.echo(_csv(made), nl=False)
    else:
        _print_report(made)
        if "what_if" in found:
            _print_what_if(found["what_if"])
        if "waste" in found:
            _print_waste(found["waste"])


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
        click.echo(json.dumps(_explanation(found), indent=2))
    else:
        _print_explanation(found)
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
        _print_audit(found)
    if not found.is_sound:
        raise SystemExit(UNSOUND)


# Documents


def _document(found: dict[str, Any]) -> dict[str, Any]:
    made: Report = found["report"]
    document: dict[str, Any] = {
        "from": _day(made.window.from_s),
        "to": _day(made.window.to_s),
        "lines": [_fields(line) for line in made.lines],
        "total": _fields(made.total),
        "prices": [_price(row) for row in made.prices.values()],
        "open_hours": made.num_open_hours,
    }
    if "what_if" in found:
        answer: Answer = found["what_if"]
        document["what_if"] = {
            "assumptions": answer.assumptions,
            "loaded_usd": _text(answer.total.loaded_usd),
            "reason": answer.total.reason,
            "per_million_mix": _text(answer.total.per_million_mix),
            "ratio": _text(answer.total.ratio),
            "price": None if answer.price is None else _price(answer.price),
        }
    if "waste" in found:
        document["waste"] = [
            {**asdict(line), "share": _text(line.share), "usd": _text(line.usd)}
            for line in found["waste"]
        ]
    return document


def _fields(line: "Line") -> dict[str, Any]:
    return {
        **line.keys,
        **line.amounts,
        "active_usd": _text(line.active_usd),
        "loaded_usd": _text(line.loaded_usd),
        "reason": line.reason,
        "usd_per_million": {name: _text(usd) for name, usd in line.per_million().items()},
    }


def _price(row: Any) -> dict[str, Any]:  # noqa: ANN401  a row of the price book
    return {
        "price_id": row.price_id,
        "sku": row.sku,
        "region": row.region,
        "term": row.term,
        "usd_per_chip_hour": _text(row.usd_per_chip_hour),
        "source": row.source,
        "retrieved_at": row.retrieved_at,
    }


def _csv(made: "Report") -> str:
    out = io.StringIO()
    rows = [_fields(line) for line in made.lines]
    names = [name.value for name in made.by] + list(made.total.amounts)
    names += ["active_usd", "loaded_usd", "reason"]
    writer = csv.DictWriter(out, names, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    # A cell that begins like a formula is one to a spreadsheet; keys and tags come from clients.
    writer.writerows({name: _inert(value) for name, value in row.items()} for row in rows)
    return out.getvalue()


def _inert(value: object) -> object:
    if isinstance(value, str) and value[:1] in ("=", "+", "-", "@", "\t", "\r"):
        return "'" + value
    return value


def _explanation(found: "Explanation") -> dict[str, Any]:
    return {
        "request_ids": found.request_ids,
        "is_equal": found.is_equal,
        "recomputed": found.recomputed,
        "ledger": found.ledger,
        "lines": [
            {name: _plain(value) for name, value in asdict(line).items()} for line in found.lines
        ],
        "fits": found.fits,
        "pruned": found.pruned,
        "steps": [step.as_dict() for step in found.steps],
    }


# Tables


def _print_report(made: "Report") -> None:
    click.echo(f"{_day(made.window.from_s)} to {_day(made.window.to_s)} (UTC)\n")
    names = [name.value for name in made.by]
    header = [
        *names,
        "requests",
        "chip-s active",
        "chip-s loaded",
        "US$ loaded",
        "US$/M in",
        "US$/M out",
    ]
    rows = [[*(line.keys[name] for name in names), *_figures(line)] for line in made.lines]
    rows.append([*("total" if i == 0 else "" for i in range(len(names))), *_figures(made.total)])
    _table(header, rows)
    for row in made.prices.values():
        click.echo(
            f"\nprice: US$ {row.usd_per_chip_hour} per chip-hour of {row.sku}, {row.region}, {row.term}; "
            f"{row.source} ({row.retrieved_at})"
        )
    if made.total.reason == "no_price":
        click.echo("\nno dollars: some of this chip-time has no price (tpugate prices add)")
    if made.num_open_hours:
        click.echo(
            f"\n{made.num_open_hours} hours are still open: their idle time and overhead come at their end"
        )


def _figures(line: "Line") -> list[str]:
    each = line.per_million()
    active = line.amounts["prefill_ns"] + line.amounts["decode_ns"]
    return [
        str(line.amounts["num_requests"]),
        _seconds(active),
        _seconds(line.amounts["loaded_ns"]),
        _usd(line.loaded_usd),
        _usd(each["uncached_input"]),
        _usd(each["output"]),
    ]


def _print_what_if(answer: "Answer") -> None:
    click.echo("\nwhat if:")
    for assumption in answer.assumptions:
        click.echo(f"  {assumption}")
    total = answer.total
    ratio = "" if total.ratio is None else f", {total.ratio:.3f} × what was paid"
    click.echo(
        f"  US$ {_usd(total.loaded_usd)}{ratio}" + (f" ({total.reason})" if total.reason else "")
    )
    if answer.price is not None:
        click.echo(f"  price: {answer.price.source} ({answer.price.retrieved_at})")


def _print_waste(lines: "list[WasteLine]") -> None:
    click.echo("\nspent on nobody, or for nothing:")
    rows = [
        [
            line.model,
            line.day,
            line.kind,
            _seconds(line.chip_ns),
            _percent(line.share),
            _usd(line.usd),
        ]
        for line in lines
    ]
    _table(["model", "day", "kind", "chip-s", "share", "US$"], rows)


def _print_explanation(found: "Explanation") -> None:
    click.echo(f"requests: {', '.join(found.request_ids)}\n")
    rows = [
        [
            str(step.step), step.bucket, step.phase, str(step.num_tokens), str(step.context_len),
            str(step.num_members), step.method, f"{step.weight}/{step.weight_of_all}",
            str(step.cost_ns), str(step.share_ns), str(step.sum_ns),
        ]
        for step in found.steps
    ]  # fmt: skip
    header = ["step", "bucket", "phase", "tokens", "context", "members", "method", "own u / all",
              "step ns", "share ns", "sum ns"]  # fmt: skip
    _table(header, rows)
    click.echo("")
    for line in found.lines:
        kappa = "" if line.kappa is None else f", κ {line.kappa:.6f}"
        click.echo(
            f"{line.hour} {line.group} {line.num_chips} × {line.sku}, {line.status}: active "
            f"{_seconds(line.active_ns)} chip-s, US$ {_usd(line.active_usd)}{kappa}, loaded US$ "
            f"{_usd(line.loaded_usd)}" + (f" ({line.reason})" if line.reason else "")
        )
        if line.price_id:
            click.echo(f"  price: US$ {line.usd_per_chip_hour} per chip-hour; {line.price_source}")
    for what in found.pruned:
        click.echo(f"not in the log any more: {what}")
    verdict = {True: "agree", False: "DIFFER", None: "cannot be compared"}[found.is_equal]
    click.echo(
        f"\nlog {found.recomputed['prefill_ns']} + {found.recomputed['decode_ns']} ns, ledger "
        f"{found.ledger['prefill_ns']} + {found.ledger['decode_ns']} ns: they {verdict}"
    )


def _print_audit(found: "Audit") -> None:
    scope = found.scope.as_dict()
    click.echo(
        ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in scope.items()) + "\n"
    )
    for check in found.checks:
        fields = check.as_dict()
        verdict = "ok" if check.is_sound else "FAILED"
        click.echo(
            f"{check.name}  {verdict:6}  residual {fields['residual']} {check.unit}  "
            f"({check.checked} compared)  {check.text}"
        )
        for fault in check.faults:
            click.echo(f"      {fault}")
        if check.num_faults > len(check.faults):
            click.echo(f"      … and {check.num_faults - len(check.faults)} more")


def _table(header: list[str], rows: list[list[str]]) -> None:
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    for row in (header, *rows):
        click.echo(
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        )


def _day(unix_s: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%MZ", time.gmtime(unix_s))


def _seconds(nanos: int) -> str:
    return f"{Decimal(nanos) / _NANOS:.6f}"


def _usd(usd: Decimal | None) -> str:
    return "-" if usd is None else f"{usd:.6g}" if abs(usd) < 1 else f"{usd:.4f}"


def _percent(share: Decimal | None) -> str:
    return "-" if share is None else f"{100 * share:.2f} %"


def _text(number: Decimal | None) -> str | None:
    """Money as text: a float would round it."""
    return None if number is None else format(number, "f")


def _plain(value: object) -> object:
    return format(value, "f") if isinstance(value, Decimal) else value
