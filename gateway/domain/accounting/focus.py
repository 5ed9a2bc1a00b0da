"""Costs in FOCUS 1.2's columns (FinOps Open Cost and Usage Specification, focus.finops.org), for tools that read bills.

A row is a model, key and tag in one day at one price; its effective cost is the loaded one. What has no price has
empty costs, which is FOCUS's null.
"""

import csv
import io
import json
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

from gateway.domain.accounting.report import By, Report
from gateway.domain.accounting.tables import PriceRow

BY = (By.DAY, By.MODEL, By.KEY, By.TAG)
"""How the report has to be made."""
_NANOS_PER_HOUR = 3600 * 10**9
_TERMS = {
    "on_demand": "Standard",
    "spot": "Dynamic",
    "flex": "Dynamic",
    "1y": "Committed",
    "3y": "Committed",
}


def focus_csv(report: Report) -> str:
    """`report` is made by `BY`."""
    out = io.StringIO()
    rows = [
        _row(report, cell.keys, cell.price_id, cell.amounts["loaded_ns"]) for cell in report.cells
    ]
    writer = csv.DictWriter(
        out, list(_row(report, ("2026-01-01", "", "", ""), "", 0)), lineterminator="\n"
    )
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


def _row(report: Report, keys: tuple[str, ...], price_id: str, loaded_ns: int) -> dict[str, Any]:
    day, model, key, tag = keys
    price: PriceRow | None = report.prices.get(price_id)
    begin = datetime.fromisoformat(day).replace(tzinfo=UTC)
    month = begin.replace(day=1)
    hours = Decimal(loaded_ns) / _NANOS_PER_HOUR
    usd = None if price is None else price.usd_per_chip_hour * hours
    cost = "" if usd is None else format(usd, "f")
    return {
        "BilledCost": cost,
        "BillingAccountId": "tpugate",
        "BillingCurrency": "USD",
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
        "ContractedCost": cost,
        "EffectiveCost": cost,
        "InvoiceIssuerName": "tpugate",
        "ListCost": cost,
        "ListUnitPrice": "" if price is None else format(price.usd_per_chip_hour, "f"),
        "PricingCategory": "" if price is None else _TERMS.get(price.term, "Other"),
        "PricingQuantity": format(hours, "f"),
        "PricingUnit": "Chip-Hours",
        "ProviderName": "tpugate",
        "PublisherName": "tpugate",
        "RegionId": "" if price is None else price.region,
        "ResourceId": model,
        "ResourceName": model,
        "ResourceType": "Model",
        "ServiceCategory": "AI and Machine Learning",
        "ServiceName": "Model serving",
        "SkuId": "" if price is None else price.sku,
        "SkuPriceId": price_id,
        "SubAccountId": key,
        "Tags": json.dumps({"tag": tag} if tag else {}),
    }


def _time(moment: datetime) -> str:
    return moment.strftime("%Y-%m-%dT%H:%M:%SZ")
