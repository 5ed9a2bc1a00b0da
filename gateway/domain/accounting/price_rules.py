"""What prices have to be beside each other: rules that need the rows of a file and those of the book.

    refused    two prices of one line that are valid at once; on demand below spot in the same place
    doubtful   on demand less than two thirds of the dearest of the same chip and cloud: often it is of another
               kind of purchase, and sometimes most rows are wrong, so that no average tells

Prices are compared at each moment at which one of them begins, so that the price of last year is no measure for
this year's. Rows that are there already are never judged anew.
"""

from bisect import bisect_right, insort
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from decimal import Decimal

from gateway.domain.accounting.prices import Price, PriceBook, Term

FURTHEST_APART = Decimal("1.5")
CONFIRMED = "confirmed_by"
"""Names a second source in `Price.detail`: the row is not doubtful."""
DOUBTFUL = "far below the chip's other on-demand prices of this cloud: a second source is wanted"


@dataclass
class Sorted:
    """New prices by what became of them."""

    good: list[Price] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    """Why, each a sentence that names the rows."""
    doubtful: list[Price] = field(default_factory=list)


def sort_out(new: Iterable[Price], there: Iterable[Price] = ()) -> Sorted:
    """`there` are the prices of the book; what of `new` is among them is passed over."""
    found = Sorted()
    known = {price.id: price for price in there}
    fresh = {price.id: price for price in new if price.id not in known}
    kept = _without_clashes(list(known.values()), fresh.values(), found.refused)
    wrong: set[str] = set()
    for on_demand, spot in _below_spot([*known.values(), *kept]):
        one, other = (on_demand, spot) if on_demand.id in fresh else (spot, on_demand)
        if one.id in fresh and one.id not in wrong:
            wrong.add(one.id)
            found.refused.append(
                f"{named(one)}: an on-demand price below the spot price of the same place "
                f"({named(other)}, {other.source_line})"
            )
    kept = [price for price in kept if price.id not in wrong]
    low = {price.id for price in far_below([*known.values(), *kept])}
    found.doubtful = [price for price in kept if price.id in low]
    found.good = [price for price in kept if price.id not in low]
    return found


def named(price: Price) -> str:
    """A price in a sentence."""
    return f"{price.sku} {price.region} {price.term.value} at US$ {price.usd_per_chip_hour:f}"


def far_below(prices: Sequence[Price]) -> Iterator[Price]:
    """On-demand prices that are doubtful; one may come several times."""
    for valid in _moments(prices):
        on_demand = [price for price in valid if price.term is Term.ON_DEMAND]
        dearest = max((price.usd_per_chip_hour for price in on_demand), default=Decimal(0))
        for price in on_demand:
            if price.usd_per_chip_hour * FURTHEST_APART < dearest and CONFIRMED not in price.detail:
                yield price


def _below_spot(prices: Sequence[Price]) -> Iterator[tuple[Price, Price]]:
    """Pairs of an on-demand price and a higher spot price."""
    for valid in _moments(prices):
        spots = {price.region: price for price in valid if price.term is Term.SPOT}
        for price in valid:
            spot = spots.get(price.region)
            if price.term is Term.ON_DEMAND and spot is not None:  # noqa: SIM102
                if price.usd_per_chip_hour < spot.usd_per_chip_hour:
                    yield price, spot


def _moments(prices: Sequence[Price]) -> Iterator[list[Price]]:
    """What is valid together, of one chip in one cloud, whenever that changes."""
    groups: dict[tuple[str, str], list[Price]] = {}
    for price in prices:
        groups.setdefault((price.sku, price.cloud), []).append(price)
    for group in groups.values():
        book = PriceBook(group)
        for begin in sorted({price.effective_from_ns for price in group}):
            yield book.valid_at(begin)


def _without_clashes(
    there: Iterable[Price], new: Iterable[Price], refused: list[str]
) -> list[Price]:
    """Those of `new` that are valid at no time at which another one of their line is."""
    lines: dict[tuple[str, str, Term], list[Price]] = {}
    for price in there:
        insort(lines.setdefault(price.line, []), price, key=_begin)
    kept = []
    for price in new:
        line = lines.setdefault(price.line, [])
        other = _clash(line, price)
        if other is None:
            kept.append(price)
            insort(line, price, key=_begin)
        else:
            refused.append(
                f"{named(price)} ({price.source_line}) would be valid at the same time as "
                f"US$ {other.usd_per_chip_hour:f} ({other.source_line})"
            )
    return kept


def _clash(line: Sequence[Price], price: Price) -> Price | None:
    """The neighbour that is valid when `price` is; see `prices.overlap`."""
    at = bisect_right(line, price.effective_from_ns, key=_begin)
    if at:
        before = line[at - 1]
        end = before.effective_to_ns
        if before.effective_from_ns == price.effective_from_ns:
            return before
        if end is not None and end > price.effective_from_ns:
            return before
    if at < len(line):
        end = price.effective_to_ns
        if end is not None and end > line[at].effective_from_ns:
            return line[at]
    return None


def _begin(price: Price) -> int:
    return price.effective_from_ns
