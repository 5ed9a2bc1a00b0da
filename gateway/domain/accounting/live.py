"""What a request has cost, told with its answer: its own chip-time at the price of now and the κ of the last day.

    active = Σ price × nano-chip-seconds / 3.6e12          loaded = κ × active

It is provisional: the ledger books the same chip-time, but what idle time adds to it is known at the hour's
end only. All that is needed from the database is read ahead, by a task in the background: a request asks
nobody. While the database is away, the rates that were read last go on.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from enum import StrEnum

from gateway.errors import GatewayError
from workers.protocol import Usage

logger = logging.getLogger(__name__)

HEADER = b"x-cost-usd"
_NANOS_PER_HOUR = 3600 * 10**9
_SHOWN = Decimal("1e-12")
"""Dollars are shown to the trillionth: about what a nanosecond of a chip costs."""


class Unknown(StrEnum):
    """Why there is no cost."""

    NOT_METERED = "not_metered"
    """The worker did not tell its chip-time."""
    NO_PRICE = "no_price"
    """The price book has no price that is valid now."""
    NO_KAPPA = "no_kappa"
    """The ledger has no step of the model in the last day."""


@dataclass(frozen=True)
class Price:
    """What a chip costs now."""

    id: str
    sku: str
    term: str
    usd_per_chip_hour: Decimal


@dataclass(frozen=True)
class Rates:
    """What costs are told with, as it was read last."""

    prices: Mapping[str, Price] = field(default_factory=dict)
    """By sku."""
    kappas: Mapping[str, Decimal] = field(default_factory=dict)
    """By model: all chip-time of the last day over that of steps, >= 1."""


@dataclass(frozen=True)
class LiveCost:
    """Of one answer, all its prompts and choices together."""

    reason: Unknown | None
    """Why `loaded` is None."""
    prefill_ns: int | None = None
    """Nano-chip-seconds."""
    decode_ns: int | None = None
    prices: tuple[Price, ...] = ()
    kappa: Decimal | None = None
    active: Decimal | None = None
    """US dollars."""
    loaded: Decimal | None = None

    def fields(self) -> dict[str, object]:
        """For `usage`. Flat, and numbers are floats throughout: clients add up what several answers have there."""
        return {
            "cost": _dollars(self.loaded),
            "cost_details": {
                "provisional": True,
                "active": _dollars(self.active),
                "loaded": _dollars(self.loaded),
                "kappa": None if self.kappa is None else round(float(self.kappa), 9),
                "prefill_chip_seconds": _seconds(self.prefill_ns),
                "decode_chip_seconds": _seconds(self.decode_ns),
                "price_id": _joined(price.id for price in self.prices),
                "sku": _joined(price.sku for price in self.prices),
                "term": _joined(price.term for price in self.prices),
                "reason": self.reason,
            },
        }

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Of a whole answer; none if the cost is not known."""
        if self.loaded is None:
            return []
        return [(HEADER, f"{self.loaded.quantize(_SHOWN):f}".encode())]


NOT_METERED = LiveCost(Unknown.NOT_METERED)


def live_cost(rates: Rates, model: str, usages: Iterable[Usage]) -> LiveCost:
    """What the requests (one for each prompt) of an answer have cost together."""
    nanos: dict[str, int] = {}
    prefill_ns = decode_ns = 0
    for usage in usages:
        prefill_ns += usage.prefill_chip_ns
        decode_ns += usage.decode_chip_ns
        spent = usage.prefill_chip_ns + usage.decode_chip_ns
        nanos[usage.sku] = nanos.get(usage.sku, 0) + spent
    if not nanos or "" in nanos:
        return NOT_METERED
    prices = tuple(rates.prices[sku] for sku in nanos if sku in rates.prices)
    if len(prices) < len(nanos):
        return LiveCost(Unknown.NO_PRICE, prefill_ns, decode_ns, prices)
    active = sum(
        (price.usd_per_chip_hour * nanos[price.sku] / _NANOS_PER_HOUR for price in prices),
        Decimal(0),
    )
    kappa = rates.kappas.get(model)
    if kappa is None:
        return LiveCost(Unknown.NO_KAPPA, prefill_ns, decode_ns, prices, None, active)
    return LiveCost(None, prefill_ns, decode_ns, prices, kappa, active, kappa * active)


class LiveCosts:
    """One per application; owns the task that keeps its rates fresh."""

    def __init__(self, read: Callable[[], Awaitable[Rates]], interval_s: float) -> None:
        """`read` raises `GatewayError` if the database cannot tell."""
        self._read = read
        self._interval_s = interval_s
        self._rates = Rates()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    def of(self, model: str, usages: Iterable[Usage]) -> LiveCost:
        """See `live_cost`. Asks nobody."""
        return live_cost(self._rates, model, usages)

    async def _run(self) -> None:
        while True:
            try:
                self._rates = await self._read()
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
    """Several only where the prompts of a request ran on different chips."""
    return ",".join(words) or None
