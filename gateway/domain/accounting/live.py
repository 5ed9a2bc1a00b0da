"""What a request has cost, told with its answer: its own chip-time at the price of now and the κ of the last day.

    active = Σ price × nano-chip-seconds / 3.6e12          loaded = κ × active

It is provisional: the ledger books the same chip-time, but what idle time adds to it is known at the hour's
end only. All that is needed from the database is read ahead, by a task in the background: a request asks
nobody. While the database is away, the rates that were read last go on.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from enum import StrEnum

import msgspec

from gateway.domain.accounting.metrics import Totals
from gateway.domain.accounting.prices import NoPrice, NoPriceReason, Price, PriceBook, Pricing
from gateway.errors import GatewayError
from workers.protocol import Usage

logger = logging.getLogger(__name__)

HEADER = b"x-cost-usd"
_ZERO = Decimal(0)
_SHOWN = Decimal("1e-12")
"""Dollars are shown to the trillionth: about what a nanosecond of a chip costs."""


class Unknown(StrEnum):
    """Why there is no cost, if the price book (`NoPriceReason`) is not at fault."""

    NOT_METERED = "not_metered"
    """The worker did not tell its chip-time."""
    NO_KAPPA = "no_kappa"
    """The ledger has no step of the model in the last day."""


@dataclass(frozen=True)
class Rates:
    """What costs are told with, as it was read last."""

    pricing: Pricing = field(default_factory=lambda: Pricing(PriceBook()))
    kappas: Mapping[str, Decimal] = field(default_factory=dict)
    """By model: all chip-time of the last day over that of steps, >= 1."""
    totals: Totals = field(default_factory=Totals)
    """For metrics."""


class LiveCost(msgspec.Struct, frozen=True):
    """Of one answer, all its prompts and choices together."""

    reason: Unknown | NoPriceReason | None
    """Why `loaded` is None."""
    prefill_ns: int | None = None
    """Nano-chip-seconds."""
    decode_ns: int | None = None
    skus: tuple[str, ...] = ()
    """Of its chips; as `prices` several only where prompts ran on different ones."""
    prices: tuple[Price, ...] = ()
    kappa: Decimal | None = None
    active: Decimal | None = None
    """US dollars."""
    loaded: Decimal | None = None

    def fields(self) -> dict[str, object]:
        """For `usage`. Flat, and numbers are floats throughout: clients add up what several answers have there."""
        loaded = _dollars(self.loaded)
        return {
            "cost": loaded,
            "cost_details": {
                "provisional": True,
                "active": _dollars(self.active),
                "loaded": loaded,
                "kappa": None if self.kappa is None else round(float(self.kappa), 9),
                "prefill_chip_seconds": _seconds(self.prefill_ns),
                "decode_chip_seconds": _seconds(self.decode_ns),
                "price_id": _joined([price.id for price in self.prices]),
                "sku": _joined(self.skus),
                "term": _joined([price.term.value for price in self.prices]),
                "reason": self.reason,
            },
        }

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Of a whole answer; none if the cost is not known."""
        if self.loaded is None:
            return []
        return [(HEADER, f"{self.loaded.quantize(_SHOWN):f}".encode())]


NOT_METERED = LiveCost(Unknown.NOT_METERED)


def live_cost(rates: Rates, model: str, usages: Iterable[Usage], now_ns: int) -> LiveCost:
    """What the requests (one for each prompt) of an answer have cost together."""
    spent: dict[tuple[str, str], int] = {}
    prefill_ns = decode_ns = 0
    for usage in usages:
        prefill_ns += usage.prefill_chip_ns
        decode_ns += usage.decode_chip_ns
        chips = (usage.sku, usage.region)
        spent[chips] = spent.get(chips, 0) + usage.prefill_chip_ns + usage.decode_chip_ns
    skus = tuple([sku for sku, _ in spent])
    if not all(skus) or not skus:
        return NOT_METERED
    active = _ZERO
    prices: list[Price] = []
    for (sku, region), nanos in spent.items():
        price = rates.pricing.price_at(sku, region, now_ns)
        if isinstance(price, NoPrice):
            return LiveCost(price.reason, prefill_ns, decode_ns, skus)
        active += price.dollars(nanos)
        prices.append(price)
    kappa = rates.kappas.get(model)
    reason = Unknown.NO_KAPPA if kappa is None else None
    loaded = None if kappa is None else kappa * active
    return LiveCost(reason, prefill_ns, decode_ns, skus, tuple(prices), kappa, active, loaded)


class LiveCosts:
    """One per application; owns the task that keeps its rates fresh."""

    def __init__(self, read: Callable[[], Awaitable[Rates]], interval_s: float) -> None:
        """`read` raises `GatewayError` if the database cannot tell."""
        self._read = read
        self._interval_s = interval_s
        self.rates = Rates()
        """As they were read last."""
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    def of(self, model: str, usages: Iterable[Usage]) -> LiveCost:
        """See `live_cost`. Asks nobody."""
        return live_cost(self.rates, model, usages, time.time_ns())

    async def _run(self) -> None:
        while True:
            try:
                self.rates = await self._read()
            except GatewayError as error:
                logger.warning("costs are told with what was read before: %s", error.message)
            except Exception:
                logger.exception("prices cannot be read; costs are told with what was read before")
            await asyncio.sleep(self._interval_s)


def _dollars(amount: Decimal | None) -> float | None:
    return None if amount is None else float(amount.quantize(_SHOWN))


def _seconds(nanos: int | None) -> float | None:
    return None if nanos is None else nanos / 1e9


def _joined(words: Iterable[str]) -> str | None:
    return ",".join(words) or None
