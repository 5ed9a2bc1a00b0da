"""The price book: what an hour of a chip costs, where, on which term, from when, and who says so.

A price is never edited. It is valid from `effective_from_ns` until `effective_to_ns`, or until the next price
of the same sku, region and term begins; ranges of one line do not overlap. Times are nanoseconds of the
calendar (UTC), money is US dollars in `Decimal`.

A region is `cloud/region` (`gcp/us-central1`), `cloud/all`, or `any`. It is asked for as `cloud/region`, or as
the region alone where only one cloud has it; `cloud/all` and `any` answer where nothing nearer does.
"""

import hashlib
import json
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from enum import StrEnum
from functools import cached_property

ANY = "any"
NANOS_PER_HOUR = 3600 * 10**9


class Term(StrEnum):
    """How a chip is bought."""

    ON_DEMAND = "on_demand"
    SPOT = "spot"
    FLEX = "flex"
    """Google's flex start: waits for capacity, runs for at most a week."""
    ONE_YEAR = "1y"
    THREE_YEARS = "3y"

    @property
    def hours(self) -> int | None:
        """That are paid for, used or not; None without a commitment."""
        return {Term.ONE_YEAR: 8760, Term.THREE_YEARS: 26280}.get(self)


class NoPriceReason(StrEnum):
    UNKNOWN_SKU = "unknown_sku"
    """The book has no price of the chip on this term."""
    UNKNOWN_REGION = "unknown_region"
    """It has, but for other regions, or nobody said which region it is."""
    AMBIGUOUS_REGION = "ambiguous_region"
    """Several clouds have a region of this name."""
    NOT_EFFECTIVE = "not_effective"
    """None of the region was valid at that time."""


@dataclass(frozen=True)
class Price:
    """A row of the book."""

    sku: str
    """`v6e`, `h200` …: what workers call their chips."""
    region: str
    term: Term
    usd_per_chip_hour: Decimal
    """Amortised: a payment in advance is spread over the hours of the term."""
    effective_from_ns: int
    effective_to_ns: int | None
    source: str
    """Title and address: one line."""
    retrieved_at: str
    """The date, YYYY-MM-DD, on which the source said so."""
    currency: str = "USD"
    """That the source has; what it was exchanged at is in `detail`."""
    detail: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def id(self) -> str:
        """Hash of all the fields: equal prices are one row."""
        fields = [
            self.sku,
            self.region,
            self.term.value,
            format(self.usd_per_chip_hour.normalize(), "f"),
            self.effective_from_ns,
            self.effective_to_ns,
            self.source,
            self.retrieved_at,
            self.currency,
            dict(self.detail),
        ]
        text = json.dumps(fields, sort_keys=True, separators=(",", ":"))
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    @property
    def line(self) -> tuple[str, str, Term]:
        """Of one line only one price is valid at a time."""
        return (self.sku, self.region, self.term)

    @property
    def cloud(self) -> str:
        return self.region.partition("/")[0]

    @property
    def source_line(self) -> str:
        """What is printed wherever the price is used."""
        return f"{self.source} ({self.retrieved_at})"

    def dollars(self, nanos: int) -> Decimal:
        """Of so many nano-chip-seconds; not rounded beyond `Decimal`'s 28 digits."""
        return self.usd_per_chip_hour * nanos / NANOS_PER_HOUR


@dataclass(frozen=True)
class NoPrice:
    """Why there is none; the message is a sentence for people."""

    reason: NoPriceReason
    message: str


@dataclass(frozen=True)
class Segment:
    """A stretch of time, [from, to), at one price."""

    from_ns: int
    to_ns: int
    price: Price | NoPrice


class PriceBook:
    """Prices by line; immutable. Lookups are bisections: cheap enough for each entry of the ledger."""

    def __init__(self, prices: Iterable[Price] = ()) -> None:
        lines: dict[tuple[str, str, Term], list[Price]] = {}
        for price in prices:
            lines.setdefault(price.line, []).append(price)
        for line in lines.values():
            line.sort(key=lambda price: (price.effective_from_ns, price.id))
        self._lines = lines
        self._begins = {
            key: [price.effective_from_ns for price in line] for key, line in lines.items()
        }
        self._regions: dict[tuple[str, Term], list[str]] = {}
        for sku, region, term in sorted(lines):
            self._regions.setdefault((sku, term), []).append(region)
        self._by_id = {price.id: price for line in lines.values() for price in line}

    def __iter__(self) -> Iterator[Price]:
        return iter(self._by_id.values())

    def __len__(self) -> int:
        return len(self._by_id)

    def get(self, price_id: str) -> Price | None:
        """The price that a row of the ledger names."""
        return self._by_id.get(price_id)

    def price_at(self, sku: str, region: str, term: Term, when_ns: int) -> Price | NoPrice:
        """The price that is valid then."""
        lines = self._lines_for(sku, region, term)
        if isinstance(lines, NoPrice):
            return lines
        for key in lines:
            price = self._valid(key, when_ns)
            if price is not None:
                return price
        return NoPrice(
            NoPriceReason.NOT_EFFECTIVE,
            f"The price book has a {term.value} price of {sku} in {lines[0][1]}, but none for that time.",
        )

    def segments(
        self, sku: str, region: str, term: Term, from_ns: int, to_ns: int
    ) -> list[Segment]:
        """[from, to) cut wherever the price changes; neighbours differ."""
        cuts = {from_ns}
        lines = self._lines_for(sku, region, term)
        for key in [] if isinstance(lines, NoPrice) else lines:
            for price in self._lines[key]:
                cuts.update((price.effective_from_ns, price.effective_to_ns or from_ns))
        begins = sorted(cut for cut in cuts if from_ns <= cut < to_ns)
        found: list[Segment] = []
        for begin, end in zip(begins, [*begins[1:], to_ns], strict=True):
            valid = self.price_at(sku, region, term, begin)
            if found and found[-1].price == valid:
                found[-1] = Segment(found[-1].from_ns, end, valid)
            else:
                found.append(Segment(begin, end, valid))
        return found

    def valid_at(self, when_ns: int) -> list[Price]:
        """All that are valid then, by sku, region and term."""
        found = (self._valid(key, when_ns) for key in sorted(self._lines))
        return [price for price in found if price is not None]

    def list_price(self, price: Price, when_ns: int) -> Price | None:
        """What the same chip costs there without any discount: the on-demand price."""
        found = self.price_at(price.sku, price.region, Term.ON_DEMAND, when_ns)
        return found if isinstance(found, Price) else None

    def _valid(self, key: tuple[str, str, Term], when_ns: int) -> Price | None:
        at = bisect_right(self._begins[key], when_ns)
        if at == 0:
            return None
        price = self._lines[key][at - 1]
        is_over = price.effective_to_ns is not None and price.effective_to_ns <= when_ns
        return None if is_over else price

    def _lines_for(
        self, sku: str, region: str, term: Term
    ) -> list[tuple[str, str, Term]] | NoPrice:
        """The lines that answer for a region, the nearest first."""
        regions = self._regions.get((sku, term))
        if regions is None:
            return NoPrice(
                NoPriceReason.UNKNOWN_SKU, f"The price book has no {term.value} price of {sku}."
            )
        near = _nearest(region, regions)
        if len(near) > 1:
            return NoPrice(
                NoPriceReason.AMBIGUOUS_REGION,
                f"{' and '.join(near)} have {term.value} prices of {sku}: name the cloud too.",
            )
        general = [f"{region.partition('/')[0]}/all", ANY]
        found = [*near, *(name for name in general if name in regions and name not in near)]
        if found:
            return [(sku, name, term) for name in found]
        said = f"in {region}" if region else "unless a region is named (TPUGATE_PRICE_REGION)"
        return NoPrice(
            NoPriceReason.UNKNOWN_REGION,
            f"The price book has no {term.value} price of {sku} {said}.",
        )


def _nearest(region: str, regions: Sequence[str]) -> list[str]:
    """Those of `regions` that `region` names."""
    if not region:
        return []
    if "/" in region or region == ANY:
        return [name for name in regions if name == region]
    return [name for name in regions if name.partition("/")[2] == region]


@dataclass(frozen=True)
class Pricing:
    """Which prices the chips of this deployment have."""

    book: PriceBook
    term: Term = Term.ON_DEMAND
    """TPUGATE_PRICE_TERM."""
    region: str = ""
    """TPUGATE_PRICE_REGION: of workers that do not know theirs."""

    def price_at(self, sku: str, worker_region: str, when_ns: int) -> Price | NoPrice:
        return self.book.price_at(sku, worker_region or self.region, self.term, when_ns)

    def segments(self, sku: str, worker_region: str, from_ns: int, to_ns: int) -> list[Segment]:
        region = worker_region or self.region
        return self.book.segments(sku, region, self.term, from_ns, to_ns)


def overlap(prices: Sequence[Price]) -> tuple[Price, Price] | None:
    """Two prices of one line that are both valid at some time, if there are any.

    A price without an end is valid until the next begins, so it overlaps only one that begins with it.
    """
    ordered = sorted(prices, key=lambda price: (*price.line, price.effective_from_ns, price.id))
    for one, other in zip(ordered, ordered[1:], strict=False):
        if one.line != other.line:
            continue
        end = one.effective_to_ns
        if one.effective_from_ns == other.effective_from_ns or (
            end is not None and end > other.effective_from_ns
        ):
            return one, other
    return None
