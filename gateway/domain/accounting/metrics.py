"""The ledger's sums for Prometheus, read in the background; names are OpenCost's where it has them.

OpenCost speaks of nodes and GPUs: a node is a running group of chips, a GPU one of its chips. Chip-time and dollars
are ours. Prices that are not known are left out, never 0.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from decimal import Decimal

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncSession

from gateway.domain.accounting.prices import NoPrice, Price, Pricing, Term
from gateway.domain.accounting.tables import DAY_S, ChipGroup, Period, Rollup
from workers.chip_time import Spent

_NODE = ["instance", "node", "instance_type", "region", "model_name"]
"""OpenCost's, and the model; an instance's type is its sku."""


@dataclass(frozen=True)
class Node:
    """A running group."""

    worker_id: str
    model: str
    sku: str
    region: str
    num_chips: int
    price: Price | None


@dataclass(frozen=True)
class Totals:
    """Of the whole ledger."""

    nodes: list[Node] = field(default_factory=list)
    spent_ns: dict[tuple[str, str], int] = field(default_factory=dict)
    """Nano-chip-seconds by model and class."""
    usd: dict[str, Decimal] = field(default_factory=dict)
    """Loaded, by model; without what has no price."""


async def read_totals(session: AsyncSession, pricing: Pricing, now_ns: int) -> Totals:
    """With the prices of now for nodes, and those that lines name for dollars."""
    classes = [func.sum(getattr(Period, f"{spent.value}_ns")) for spent in Spent]
    groups = await session.scalars(select(ChipGroup).where(ChipGroup.ended == ""))
    nodes = [_node(group, pricing, now_ns) for group in groups]
    spent = {
        (row[0], name.value): int(amount)
        for row in await session.execute(select(Period.model, *classes).group_by(Period.model))
        for name, amount in zip(Spent, row[1:], strict=True)
    }
    usd: dict[str, Decimal] = {}
    query = (
        select(Rollup.model, Rollup.price_id, func.sum(Rollup.loaded_ns))
        .where(Rollup.grain_s == DAY_S)
        .group_by(Rollup.model, Rollup.price_id)
    )
    for model, price_id, loaded_ns in await session.execute(query):
        price = pricing.book.get(price_id)
        if price is not None:
            usd[model] = usd.get(model, Decimal(0)) + price.dollars(int(loaded_ns))
    return Totals(nodes, spent, usd)


def _node(group: ChipGroup, pricing: Pricing, now_ns: int) -> Node:
    price = pricing.price_at(group.sku, group.region, now_ns)
    return Node(
        group.worker_id,
        group.model,
        group.sku,
        group.region,
        group.num_chips,
        None if isinstance(price, NoPrice) else price,
    )


class CostCollector(Collector):
    """Tells the totals that were read last."""

    def __init__(self, totals: Callable[[], Totals]) -> None:
        self._totals = totals

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        totals = self._totals()
        each = GaugeMetricFamily("node_gpu_hourly_cost", "US$ an hour of one chip", labels=_NODE)
        whole = GaugeMetricFamily(
            "node_total_hourly_cost", "US$ an hour of a group's chips", labels=_NODE
        )
        spot = GaugeMetricFamily(
            "kubecost_node_is_spot", "Whether the chips can be taken away", labels=_NODE
        )
        count = GaugeMetricFamily("node_gpu_count", "Chips of a running group", labels=_NODE)
        for node in totals.nodes:
            labels = [node.worker_id, node.worker_id, node.sku, node.region, node.model]
            count.add_metric(labels, node.num_chips)
            if node.price is not None:
                usd = node.price.usd_per_chip_hour
                each.add_metric(labels, float(usd))
                whole.add_metric(labels, float(usd * node.num_chips))
                spot.add_metric(labels, node.price.term is Term.SPOT)
        yield from (each, whole, count, spot)
        spent = CounterMetricFamily(
            "tpugate_chip_seconds", "Chip-time in the ledger", labels=["model_name", "spent"]
        )
        for (model, name), nanos in totals.spent_ns.items():
            spent.add_metric([model, name], nanos / 1e9)
        yield spent
        usd_family = CounterMetricFamily(
            "tpugate_cost_usd", "US$ in the ledger, idle time of closed hours included",
            labels=["model_name"],
        )  # fmt: skip
        for model, dollars in totals.usd.items():
            usd_family.add_metric([model], float(dollars))
        yield usd_family
