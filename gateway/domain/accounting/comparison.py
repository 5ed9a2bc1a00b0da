"""What the measured load would cost elsewhere: at the prices of other chips, beside published throughput.

Two figures for each row of a baseline that matches (same model and class of dtype, lengths within 25 %):

    saturated floor   GPU-s of an output token = 1 / X_out        no idle time, no bound on latency: a lower bound
    load-matched      ⌈demand / (X_out · chips)⌉ · chips           whole groups for the demand that was seen, idle
                                                                   time included, as ours is

Without a row that matches nothing is claimed. What can be said is what another chip would have to do: at a price of
p dollars an hour it is as cheap as we were if it gives p / (3600 · our dollars per output token) tokens a second;
published throughput of other models stands beside it, as context and nothing more. A percentage is shown for rows of
grade A, B and our own measurements only, and the verdict is always a break-even with its range.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from decimal import ROUND_CEILING, Decimal

from gateway.domain.accounting.baselines import Baseline, by_distance, interpolated, matching
from gateway.domain.accounting.prices import Price, Term

DEFAULT_SKUS = ("v5e", "v6e", "l4", "a100-80", "h100", "h200", "b200")
"""That a report stands beside if nobody says which."""
_HOUR_S = 3600


@dataclass(frozen=True)
class Load:
    """What was measured here, of one model."""

    model: str
    dtype: str
    requests: int
    input_tokens: int
    output_tokens: int
    seconds: Decimal
    """For which it was served."""
    loaded_usd: Decimal | None

    @property
    def isl(self) -> Decimal:
        return Decimal(self.input_tokens) / max(1, self.requests)

    @property
    def osl(self) -> Decimal:
        return Decimal(self.output_tokens) / max(1, self.requests)

    @property
    def demand(self) -> Decimal:
        """Output tokens a second."""
        return self.output_tokens / self.seconds if self.seconds else Decimal(0)

    @property
    def usd_per_token(self) -> Decimal | None:
        """Loaded, of an output token, its share of the prompt included."""
        if self.loaded_usd is None or not self.output_tokens:
            return None
        return self.loaded_usd / self.output_tokens


@dataclass(frozen=True)
class Beside:
    """One accelerator at one price."""

    price: Price
    is_matched: bool
    baselines: tuple[Baseline, ...]
    """The rows that were used, or, if none matches, the nearest in shape of that accelerator, as context."""
    floor_usd_per_million: Decimal | None
    matched_usd_per_million: Decimal | None
    break_even_tokens_per_s: Decimal | None
    """An output rate of a chip at which it costs what we did."""
    break_even_price: tuple[Decimal, Decimal] | None
    """Dollars an hour of that chip at which it costs what we did: by the slowest and the fastest row."""
    break_even_utilisation: tuple[Decimal, Decimal] | None
    """Share of its throughput that it has to be used at; above 1 it cannot be as cheap."""
    percent: Decimal | None
    """Ours over the floor, less 100; None where the grade does not allow it, or there is no match."""


def compare(load: Load, baselines: Sequence[Baseline], prices: Iterable[Price]) -> list[Beside]:
    """One for each price, in its order."""
    return [_beside(load, baselines, price) for price in prices]


def _beside(load: Load, baselines: Sequence[Baseline], price: Price) -> Beside:
    own = [row for row in baselines if row.accelerator == price.sku]
    rows = matching(own, load.model, load.dtype, load.isl, load.osl)
    ours = load.usd_per_token
    per_second = price.usd_per_chip_hour / _HOUR_S
    break_even = None if ours is None else per_second / ours
    if not rows:
        near = by_distance(own, load.isl, load.osl)[:1] if load.osl and load.isl else []
        return Beside(price, False, tuple(near), None, None, break_even, None, None, None)
    seconds = interpolated(rows, load.isl, load.osl)
    floor = per_second * seconds
    fastest, slowest = (f(row.output_tokens_per_s_chip for row in rows) for f in (max, min))
    break_even_price = utilisation = percent = None
    if ours is not None:
        break_even_price = (ours * slowest * _HOUR_S, ours * fastest * _HOUR_S)
        utilisation = (per_second / ours / fastest, per_second / ours / slowest)
        if all(row.grade.allows_percent for row in rows):
            percent = 100 * (ours / floor - 1)
    return Beside(
        price=price,
        is_matched=True,
        baselines=tuple(rows),
        floor_usd_per_million=floor * 10**6,
        matched_usd_per_million=_load_matched(load, rows[0].num_chips, seconds, per_second),
        break_even_tokens_per_s=break_even,
        break_even_price=break_even_price,
        break_even_utilisation=utilisation,
        percent=percent,
    )


def _load_matched(
    load: Load, num_chips: int, seconds: Decimal, per_second: Decimal
) -> Decimal | None:
    """Whole groups of chips for the demand, paid for as long as the load was served; per million tokens."""
    if not load.demand:
        return None
    groups = (load.demand * seconds / num_chips).to_integral_value(ROUND_CEILING)
    chips = max(Decimal(1), groups) * num_chips
    return chips * per_second / load.demand * 10**6


def prices_beside(valid: Iterable[Price], skus: Sequence[str]) -> list[Price]:
    """Of each chip the cheapest on-demand price that is valid: the one that is hardest to beat."""
    found: dict[str, Price] = {}
    for price in valid:
        if price.sku not in skus or price.term is not Term.ON_DEMAND:
            continue
        best = found.get(price.sku)
        if best is None or price.usd_per_chip_hour < best.usd_per_chip_hour:
            found[price.sku] = price
    return [found[sku] for sku in skus if sku in found]
