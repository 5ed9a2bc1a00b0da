"""A cost report as JSON and as CSV: money is text, as a float would round it."""

import csv
import io
import time
from dataclasses import asdict
from decimal import Decimal
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gateway.domain.accounting.comparison import Beside
    from gateway.domain.accounting.explain import Explanation
    from gateway.domain.accounting.report import Line, Report
    from gateway.domain.accounting.what_if import Answer


def document(found: dict[str, Any]) -> dict[str, Any]:
    """A report with what was asked beside it."""
    made: Report = found["report"]
    made_of: dict[str, Any] = {
        "from": day(made.window.from_s),
        "to": day(made.window.to_s),
        "lines": [_fields(line) for line in made.lines],
        "total": _fields(made.total),
        "prices": [_price(row) for row in made.prices.values()],
        "open_hours": made.num_open_hours,
    }
    if "what_if" in found:
        answer: Answer = found["what_if"]
        made_of["what_if"] = {
            "assumptions": answer.assumptions,
            "loaded_usd": exact(answer.total.loaded_usd),
            "reason": answer.total.reason,
            "per_million_mix": exact(answer.total.per_million_mix),
            "ratio": exact(answer.total.ratio),
            "price": None if answer.price is None else _price(answer.price),
        }
    if "beside" in found:
        made_of["beside"] = [
            {
                "model": load.model,
                "dtype": load.dtype,
                "chip_ns": load.chip_ns,
                "loaded_usd": exact(load.loaded_usd),
                "output_tokens_per_s": exact(load.demand),
                "mean_input_tokens": exact(load.isl),
                "mean_output_tokens": exact(load.osl),
                "usd_per_million_output": exact(million(load.usd_per_token)),
                "chips": [_beside(one) for one in those],
            }
            for load, those in found["beside"]
        ]
    if "waste" in found:
        made_of["waste"] = [
            {**asdict(line), "share": exact(line.share), "usd": exact(line.usd)}
            for line in found["waste"]
        ]
    return made_of


def _fields(line: "Line") -> dict[str, Any]:
    return {
        **line.keys,
        **line.amounts,
        "active_usd": exact(line.active_usd),
        "loaded_usd": exact(line.loaded_usd),
        "reason": line.reason,
        "usd_per_million": {name: exact(usd) for name, usd in line.per_million().items()},
    }


def _price(row: Any) -> dict[str, Any]:  # noqa: ANN401  a row of the price book
    return {
        "price_id": row.price_id,
        "sku": row.sku,
        "region": row.region,
        "term": row.term,
        "usd_per_chip_hour": exact(row.usd_per_chip_hour),
        "source": row.source,
        "retrieved_at": row.retrieved_at,
    }


def _beside(one: "Beside") -> dict[str, Any]:
    return {
        "sku": one.price.sku,
        "region": one.price.region,
        "usd_per_chip_hour": exact(one.price.usd_per_chip_hour),
        "price_source": one.price.source_line,
        "is_matched": one.is_matched,
        "missing": [reason.value for reason in one.missing],
        "same_chip_time_usd": exact(one.same_time_usd),
        "is_latency_bound": one.is_latency_bound if one.is_matched else None,
        "saturated_floor_usd_per_million": exact(one.floor_usd_per_million),
        "load_matched_usd_per_million": exact(one.matched_usd_per_million),
        "break_even_tokens_per_s_chip": exact(one.break_even_tokens_per_s),
        "break_even_usd_per_chip_hour": _range(one.break_even_price),
        "break_even_utilisation": _range(one.break_even_utilisation),
        "own_break_even_usd_per_chip_hour": _range(one.own_break_even_price),
        "percent": exact(one.percent),
        "baselines": [
            {
                "model": row.model,
                "engine": row.engine,
                "dtype": row.dtype,
                "shape": row.shape,
                "output_tokens_per_s_chip": exact(row.output_tokens_per_s_chip),
                "grade": row.grade.value,
                "source": row.source_line,
            }
            for row in one.baselines
        ],
    }


def _range(pair: tuple[Decimal, Decimal] | None) -> list[str | None] | None:
    return None if pair is None else [exact(number) for number in pair]


def csv_of(made: "Report") -> str:
    """A line for each of the report's."""
    out = io.StringIO()
    rows = [_fields(line) for line in made.lines]
    names = [name.value for name in made.by] + list(made.total.amounts)
    names += ["active_usd", "loaded_usd", "reason"]
    writer = csv.DictWriter(out, names, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    # A cell that begins like a formula is one to a spreadsheet; keys and tags come from clients.
    writer.writerows({name: inert(value) for name, value in row.items()} for row in rows)
    return out.getvalue()


def inert(value: Any) -> Any:  # noqa: ANN401
    """A text that no spreadsheet takes for a formula."""
    if isinstance(value, str) and value[:1] in ("=", "+", "-", "@", "\t", "\r"):
        return "'" + value
    return value


def explanation(found: "Explanation") -> dict[str, Any]:
    """With each step."""
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


def day(unix_s: int) -> str:
    """To the minute, UTC."""
    return time.strftime("%Y-%m-%dT%H:%MZ", time.gmtime(unix_s))


def million(usd: Decimal | None) -> Decimal | None:
    return None if usd is None else 1_000_000 * usd


def exact(number: Decimal | None) -> str | None:
    """Money as text: a float would round it."""
    return None if number is None else format(number, "f")


def _plain(value: object) -> object:
    return format(value, "f") if isinstance(value, Decimal) else value
