"""What the measured load would cost elsewhere: at the prices of other chips, beside published throughput.

Two figures wherever a baseline matches (same model and class of dtype, lengths within 25 %):

    saturated floor   chip-s of an output token = 1 / X_out        no idle time, no bound on latency: a lower bound
    load-matched      ⌈demand / (X_out · chips)⌉ · chips           whole groups for the demand that was seen, idle
                                                                   time included, as ours is

X_out is what one configuration (engine, dtype, number of chips, source) gives at its fullest: of its rows of one shape
the fastest counts, and between shapes it is interpolated. Of several configurations the cheapest counts, and ranges
go over all of them. Rows of grade C count only where there are no better ones.

Without a row that matches nothing is claimed. What can be said is what the same chip-time costs at another price, if
it took as long there, and what another chip would have to do: at a price of p dollars an hour it is as cheap as we were
if it gives p / (3600 · our dollars per output token) tokens a second. Published throughput of other models stands
beside it, as context and nothing more. A percentage is shown for rows of grade A, B and our own measurements only, and
the verdict is always a break-even with its range.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from decimal import ROUND_CEILING, Decimal
from enum import StrEnum

from gateway.domain.accounting.baselines import Baseline, by_distance, interpolated, matching
from gateway.domain.accounting.prices import NANOS_PER_HOUR, Price, Term

DEFAULT_SKUS = ("v5e", "v6e", "l4", "a100-80", "h100", "h200", "b200")
"""That a report stands beside if nobody says which."""
_HOUR_S = 3600
_MILLION = 10**6
Range = tuple[Decimal, Decimal]
"""The lower and the higher end."""


class Missing(StrEnum):
    """Why a figure is not there."""

    NOT_MATCHED = "not_matched"
    """No row of this model in this dtype and shape: no floor, no load-matched cost, no break-evens of price and use."""
    NO_PRICE = "no_price"
    """Ours has no dollars, or no output token: nothing that is held against them."""
    WEAK_EVIDENCE = "weak_evidence"
    """Rows of grade C only: no percentage."""


@dataclass(frozen=True)
class Load:
    """What was measured here, of one model."""

    model: str
    dtype: str
    requests: int
    input_tokens: int
    output_tokens: int
    seconds: Decimal
    """For which it was served, by however many chips."""
    chip_ns: int
    """All chip-time of that, idle time and overhead included."""
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
    missing: tuple[Missing, ...]
    baselines: tuple[Baseline, ...]
    """The rows that were used, or, if none matches, the nearest in shape of that accelerator, as context."""
    same_time_usd: Decimal
    """What as much chip-time costs there: a claim about prices, none about speed."""
    break_even_tokens_per_s: Decimal | None
    """An output rate of a chip at which it costs what we did."""
    floor_usd_per_million: Decimal | None = None
    matched_usd_per_million: Decimal | None = None
    break_even_price: Range | None = None
    """Dollars an hour of that chip, saturated, at which it costs what we did."""
    break_even_utilisation: Range | None = None
    """Share of its throughput that it has to be used at; above 1 it cannot be as cheap."""
    own_break_even_price: Range | None = None
    """Dollars an hour of our chips at which we cost what it does, saturated and load-matched; needs no price of ours."""
    percent: Decimal | None = None
    """Ours over the floor, less 100."""

    @property
    def is_matched(self) -> bool:
        return Missing.NOT_MATCHED not in self.missing

    @property
    def is_latency_bound(self) -> bool:
        """Whether the rows that were used had a bound on requests at once; if not, users would wait for long."""
        return self.is_matched and not any(row.is_saturated for row in self.baselines)


@dataclass(frozen=True)
class _Configuration:
    rows: tuple[Baseline, ...]
    """One for each shape."""
    seconds: Decimal
    """Chip-seconds of an output token at the load's shape."""

    @property
    def num_chips(self) -> int:
        return self.rows[0].num_chips


def compare(load: Load, baselines: Sequence[Baseline], prices: Iterable[Price]) -> list[Beside]:
    """One for each price, in its order."""
    return [_beside(load, baselines, price) for price in prices]


def _beside(load: Load, baselines: Sequence[Baseline], price: Price) -> Beside:
    own = [row for row in baselines if row.accelerator == price.sku]
    ours = load.usd_per_token
    per_second = price.usd_per_chip_hour / _HOUR_S
    same_time = price.dollars(load.chip_ns)
    break_even = None if not ours else per_second / ours
    missing = () if ours else (Missing.NO_PRICE,)
    found = _configurations(load, own)
    if not found:
        near = by_distance(own, load.isl, load.osl)[:1] if load.osl and load.isl else []
        missing = (Missing.NOT_MATCHED, *missing)
        return Beside(price, missing, tuple(near), same_time, break_even)
    best = min(found, key=lambda one: one.seconds)
    floor = per_second * best.seconds
    matched = min((_load_matched(load, one, per_second) for one in found), default=floor)
    rates = [1 / one.seconds for one in found]
    slowest, fastest = min(rates), max(rates)
    is_weak = not all(row.grade.allows_percent for row in best.rows)
    return Beside(
        price=price,
        missing=(*missing, Missing.WEAK_EVIDENCE) if is_weak else missing,
        baselines=tuple(row for one in found for row in one.rows),
        same_time_usd=same_time,
        break_even_tokens_per_s=break_even,
        floor_usd_per_million=floor * _MILLION,
        matched_usd_per_million=matched * _MILLION,
        break_even_price=(ours * slowest * _HOUR_S, ours * fastest * _HOUR_S) if ours else None,
        break_even_utilisation=(break_even / fastest, break_even / slowest) if break_even else None,
        own_break_even_price=_own_break_even(load, floor, matched),
        percent=None if is_weak or not ours else 100 * (ours / floor - 1),
    )


def _configurations(load: Load, rows: Iterable[Baseline]) -> list[_Configuration]:
    """Those with rows that match, each at its fullest."""
    if not load.output_tokens or not load.input_tokens:
        return []
    found = matching(rows, load.model, load.dtype, load.isl, load.osl)
    found = [row for row in found if row.grade.allows_percent] or found
    fullest: dict[tuple[object, ...], dict[tuple[int | None, int | None], Baseline]] = {}
    for row in found:
        setting = (row.engine, row.num_chips, row.dtype, row.source, row.detail.get("parallelism"))
        shapes = fullest.setdefault(setting, {})
        there = shapes.get((row.isl, row.osl))
        if there is None or there.output_tokens_per_s_chip < row.output_tokens_per_s_chip:
            shapes[row.isl, row.osl] = row
    return [
        _Configuration(tuple(shapes.values()), interpolated([*shapes.values()], load.isl, load.osl))
        for shapes in fullest.values()
    ]


def _load_matched(load: Load, one: _Configuration, per_second: Decimal) -> Decimal:
    """Dollars of an output token on whole groups of chips for the demand, paid for as long as the load was served."""
    if not load.demand:
        return per_second * one.seconds
    groups = (load.demand * one.seconds / one.num_chips).to_integral_value(ROUND_CEILING)
    return max(Decimal(1), groups) * one.num_chips * per_second / load.demand


def _own_break_even(load: Load, floor: Decimal, matched: Decimal) -> Range | None:
    if not load.chip_ns:
        return None
    tokens_per_hour = Decimal(load.output_tokens) * NANOS_PER_HOUR / load.chip_ns
    return floor * tokens_per_hour, matched * tokens_per_hour


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
