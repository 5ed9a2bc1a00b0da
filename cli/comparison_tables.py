"""A load beside other chips on a terminal: each figure with its source, and what is missing with its reason."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

import click

from gateway.domain.accounting.documents import million

if TYPE_CHECKING:
    from decimal import Decimal

    from gateway.domain.accounting.baselines import Baseline
    from gateway.domain.accounting.comparison import Beside, Load, Range

_MAX_ROWS = 4
"""Of one chip; JSON has all."""


def print_beside(found: "Iterable[tuple[Load, list[Beside]]]") -> None:
    for load, those in found:
        for line in _about(load):
            click.echo(line)
        for one in those:
            for line in _lines(one):
                click.echo(line)


def _about(load: "Load") -> list[str]:
    cost = million(load.usd_per_token)
    said = (
        "no dollars: some of its time has no price, or nothing was delivered"
        if cost is None
        else f"US$ {_usd(cost)} per million output tokens, with prompts, idle time and overhead"
    )
    return [
        "",
        f"{load.model} ({load.dtype}): {load.requests} requests, on average {load.isl:.0f} tokens in and "
        f"{load.osl:.0f} out, {load.demand:.1f} output tokens a second",
        f"  {said}; {load.chip_ns / 1e9:.1f} chip-seconds",
    ]


def _lines(one: "Beside") -> list[str]:
    price = one.price
    lines = [
        f"  {price.sku} at US$ {price.usd_per_chip_hour.normalize():f} an hour ({price.region} {price.term.value}; "
        f"{price.source_line})",
        f"    US$ {_usd(one.same_time_usd)} for as much chip-time; how much it would take was not measured",
    ]
    if one.break_even_tokens_per_s is not None:
        lines.append(
            f"    as cheap as ours at {one.break_even_tokens_per_s:.1f} output tokens/s a chip of this load"
        )
    lines += _matched(one) if one.is_matched else ["    not matched: nothing is claimed"]
    shown = sorted(one.baselines, key=lambda row: -row.output_tokens_per_s_chip)
    lines += [_row(row, is_matched=one.is_matched) for row in shown[:_MAX_ROWS]]
    if len(shown) > _MAX_ROWS:
        lines.append(f"    … and {len(shown) - _MAX_ROWS} rows more (--json)")
    return lines


def _matched(one: "Beside") -> list[str]:
    bound = "" if one.is_latency_bound else ", without a bound on latency"
    lines = [
        f"    per million output tokens: saturated floor US$ {_usd(one.floor_usd_per_million)}{bound}; "
        f"load-matched US$ {_usd(one.matched_usd_per_million)}"
    ]
    if one.break_even_price is not None:
        lines.append(f"    break-even at US$ {_range(one.break_even_price)} an hour of that chip")
    if one.break_even_utilisation is not None:
        low, high = (f"{share:.1%}" for share in one.break_even_utilisation)
        lines.append(f"    break-even at {low} to {high} of its throughput")
    if one.own_break_even_price is not None:
        lines.append(
            f"    break-even at US$ {_range(one.own_break_even_price)} an hour of our chips"
        )
    if one.percent is not None:
        lines.append(f"    ours is {one.percent:+.0f} % of its saturated floor")
    return lines


def _row(row: "Baseline", *, is_matched: bool) -> str:
    said = "" if is_matched else "for context: "
    mode = row.detail.get("mode", "all").replace("_", " ")
    requests = mode if row.concurrency is None else f"{row.concurrency} requests at once"
    return (
        f"    {said}{row.model} {row.dtype} {row.shape}, {requests}: {row.output_tokens_per_s_chip} output tokens/s "
        f"a chip on {row.engine}; {row.source_line}"
    )


def _usd(amount: "Decimal | None") -> str:
    return "-" if amount is None else f"{amount:.6g}"


def _range(pair: "Range") -> str:
    return " to ".join(_usd(end) for end in pair)
