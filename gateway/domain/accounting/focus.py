"""Costs in FOCUS 1.2's columns (FinOps Open Cost and Usage Specification, focus.finops.org), for tools that read bills.

A row is a model, key and tag in one day at one price. Billed and effective cost are the loaded one; the list cost is what
the same chips cost on demand, where the price book knows it. What has no price has empty costs, which is FOCUS's null,
and says so in `x_CostReason`: FOCUS would have a number there, but 0 would be a lie.
"""

import csv
import io
import json
from datetime import UTC, datetime, timedelta
from decimal import Decimal

from gateway.domain.accounting.documents import inert
from gateway.domain.accounting.prices import PriceBook
from gateway.domain.accounting.report import By, Cell, Report
from gateway.domain.accounting.tables import IDLE, PriceRow

BY = (By.DAY, By.MODEL, By.KEY, By.TAG)
"""How the report has to be made."""
COLUMNS = (
    "BilledCost", "BillingAccountId", "BillingAccountName", "BillingCurrency", "BillingPeriodEnd",
    "BillingPeriodStart", "ChargeCategory", "ChargeClass", "ChargeDescription", "ChargeFrequency",
    "ChargePeriodEnd", "ChargePeriodStart", "ConsumedQuantity", "ConsumedUnit", "ContractedCost",
    "ContractedUnitPrice", "EffectiveCost", "InvoiceIssuerName", "ListCost", "ListUnitPrice",
    "PricingCategory", "PricingQuantity", "PricingUnit", "ProviderName", "PublisherName", "RegionId",
    "RegionName", "ResourceId", "ResourceName", "ResourceType", "ServiceCategory", "ServiceName",
    "ServiceSubcategory", "SkuId", "SkuPriceId", "SubAccountId", "SubAccountName", "Tags",
    "x_ActiveChipHours", "x_CachedInputTokens", "x_CostReason", "x_OutputTokens", "x_PriceSource",
    "x_Provisional", "x_Requests", "x_UncachedInputTokens",
)  # fmt: skip
"""All that FOCUS wants of everybody, and of the others those that there is something to say in; ours begin with x_."""
_NANOS_PER_HOUR = 3600 * 10**9
_TERMS = {
    "on_demand": "Standard",
    "spot": "Dynamic",
    "flex": "Dynamic",
    "1y": "Committed",
    "3y": "Committed",
}


def focus_csv(report: Report, book: PriceBook) -> str:
    """`report` is made by `BY`; `book` knows what its prices would be without a discount."""
    out = io.StringIO()
    writer = csv.DictWriter(out, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(_row(report, cell, book) for cell in report.cells)
    return out.getvalue()


def _row(report: Report, cell: Cell, book: PriceBook) -> dict[str, str]:
    day, model, key, tag = cell.keys
    begin = datetime.fromisoformat(day).replace(tzinfo=UTC)
    month = begin.replace(day=1)
    hours = Decimal(cell.amounts["loaded_ns"]) / _NANOS_PER_HOUR
    named = "nobody: nothing ran" if key == IDLE else key
    return {
        "BillingAccountId": "tpugate",
        "BillingAccountName": "tpugate",
        "BillingPeriodStart": _time(month),
        "BillingPeriodEnd": _time((month + timedelta(days=32)).replace(day=1)),
        "ChargeCategory": "Usage",
        "ChargeClass": "",
        "ChargeDescription": f"Chip-time of {model}",
        "ChargeFrequency": "Usage-Based",
        "ChargePeriodStart": _time(begin),
        "ChargePeriodEnd": _time(begin + timedelta(days=1)),
        "ConsumedQuantity": format(hours, "f"),
        "ConsumedUnit": "Chip-Hours",
        "InvoiceIssuerName": "tpugate",
        "PricingQuantity": format(hours, "f"),
        "PricingUnit": "Chip-Hours",
        "ProviderName": "tpugate",
        "PublisherName": "tpugate",
        "ResourceId": inert(model),
        "ResourceName": inert(model),
        "ResourceType": "Model",
        "ServiceCategory": "AI and Machine Learning",
        "ServiceName": "Model serving",
        "ServiceSubcategory": "Generative AI",
        "SubAccountId": key,
        "SubAccountName": named,
        "Tags": json.dumps({"tag": tag} if tag else {}),
        **_priced(report.prices.get(cell.price_id), book, begin, hours),
        "x_ActiveChipHours": format(_hours(cell, "prefill_ns", "decode_ns"), "f"),
        "x_UncachedInputTokens": str(cell.amounts["uncached_tokens"]),
        "x_CachedInputTokens": str(cell.amounts["cached_tokens"]),
        "x_OutputTokens": str(cell.amounts["delivered_tokens"]),
        "x_Requests": str(cell.amounts["num_requests"]),
        "x_Provisional": "true" if report.num_open_hours else "false",
    }


def _priced(
    price: PriceRow | None, book: PriceBook, begin: datetime, hours: Decimal
) -> dict[str, str]:
    """All that hangs on a price; empty, and a reason, without one."""
    if price is None:
        return {"BillingCurrency": "USD", "PricingCategory": "Other", "x_CostReason": "no_price"}
    own = book.get(price.price_id)
    without = None if own is None else book.list_price(own, int(begin.timestamp()) * 10**9)
    each = price.usd_per_chip_hour
    list_each = each if without is None else without.usd_per_chip_hour
    cost = format(each * hours, "f")
    return {
        "BillingCurrency": "USD",
        "BilledCost": cost,
        "ContractedCost": cost,
        "ContractedUnitPrice": format(each, "f"),
        "EffectiveCost": cost,
        "ListCost": format(list_each * hours, "f"),
        "ListUnitPrice": format(list_each, "f"),
        "PricingCategory": _TERMS.get(price.term, "Other"),
        "RegionId": price.region,
        "RegionName": price.region,
        "SkuId": price.sku,
        "SkuPriceId": price.price_id,
        "x_PriceSource": f"{price.source} ({price.retrieved_at})",
    }


def _hours(cell: Cell, *names: str) -> Decimal:
    return Decimal(sum(cell.amounts[name] for name in names)) / _NANOS_PER_HOUR


def _time(moment: datetime) -> str:
    return moment.strftime("%Y-%m-%dT%H:%M:%SZ")
