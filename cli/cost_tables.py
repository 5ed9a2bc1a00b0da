"""A cost report for people: tables on a terminal."""

from decimal import Decimal
from typing import TYPE_CHECKING

import click

from gateway.domain.accounting.documents import day

if TYPE_CHECKING:
    from gateway.domain.accounting.audit import Audit
    from gateway.domain.accounting.explain import Explanation
    from gateway.domain.accounting.report import Line, Report
    from gateway.domain.accounting.waste import WasteLine
    from gateway.domain.accounting.what_if import Answer

_NANOS = 10**9


def print_report(made: "Report") -> None:
    click.echo(f"{day(made.window.from_s)} to {day(made.window.to_s)} (UTC)\n")
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
            f"\nhours still open: {made.num_open_hours}; their idle time and overhead come at their end"
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


def print_what_if(answer: "Answer") -> None:
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


def print_waste(lines: "list[WasteLine]") -> None:
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


def print_explanation(found: "Explanation") -> None:
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


def print_audit(found: "Audit") -> None:
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


def _seconds(nanos: int) -> str:
    return f"{Decimal(nanos) / _NANOS:.6f}"


def _usd(usd: Decimal | None) -> str:
    return "-" if usd is None else f"{usd:.6g}" if abs(usd) < 1 else f"{usd:.4f}"


def _percent(share: Decimal | None) -> str:
    return "-" if share is None else f"{100 * share:.2f} %"
