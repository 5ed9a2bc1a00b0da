"""From a group's entries to rows of the ledger: plain Python, no database.

    entries ──post──> raw log, amounts of periods, requests that are open, charges of those that ended

An entry is booked in the hour, and at the price, in which it ends. A request has one open charge, of the hour
and price that its group is in; when either changes, or the request ends, it becomes a line of the ledger.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

from gateway.domain.accounting.tables import HOUR_S
from workers.attribution import shares
from workers.chip_time import (
    AnyEntry,
    Coefficients,
    Ended,
    Joined,
    Member,
    Opened,
    Released,
    Span,
    Step,
)

_NANOS = 10**9

Amounts = dict[str, int]
PeriodKey = tuple[int, str]
"""Hour and price."""
FAULT, RUNNING = "fault", "running"
_FAILED = ("error", FAULT)


@dataclass(frozen=True)
class KnownFit:
    """A bucket's coefficients and how far off they are."""

    coefficients: Coefficients
    residual_ppm: int


Fits = Mapping[tuple[str, str], KnownFit]
"""By fit and bucket."""


@dataclass
class Open:
    """A request in its group's hour; the fields are those of `tables.OpenCharge`."""

    request_id: str
    key_id: str
    tag: str
    hour: int
    price_id: str
    first_number: int
    last_number: int
    num_prompt_tokens: int = 0
    num_choices: int = 1
    fit_id: str = ""
    amounts: Amounts = field(default_factory=lambda: defaultdict(int))

    def row(self) -> dict[str, object]:
        fields = {name: value for name, value in self.__dict__.items() if name != "amounts"}
        return {**fields, **self.amounts}


@dataclass
class Line:
    """A charge: the fields are those of `tables.Charge`, whose amounts are `open.amounts`."""

    open: Open
    status: str

    @property
    def active_ns(self) -> int:
        return self.open.amounts["prefill_ns"] + self.open.amounts["decode_ns"]

    def row(self) -> dict[str, object]:
        amounts = self.open.amounts
        return {
            **amounts,
            "kind": "charge",
            "hour": self.open.hour,
            "price_id": self.open.price_id,
            "request_id": self.open.request_id,
            "key_id": self.open.key_id,
            "tag": self.open.tag,
            "status": self.status,
            "loaded_ns": self.active_ns,
            "loaded_prefill_ns": amounts["prefill_ns"],
            "loaded_decode_ns": amounts["decode_ns"],
            "method": self._method(),
            "fit_id": self.open.fit_id,
            "first_number": self.open.first_number,
            "last_number": self.open.last_number,
        }

    def rollup(self) -> Amounts:
        """What it adds to its hour and its day."""
        is_aborted, is_failed = self.status == "abort", self.status in _FAILED
        delivered = self.open.amounts["delivered_tokens"]
        return {
            **self.open.amounts,
            "num_requests": int(self.status != RUNNING),
            "loaded_ns": self.active_ns,
            "loaded_prefill_ns": self.open.amounts["prefill_ns"],
            "loaded_decode_ns": self.open.amounts["decode_ns"],
            "aborted_ns": self.active_ns * is_aborted,
            "failed_ns": self.active_ns * is_failed,
            "aborted_tokens": delivered * is_aborted,
            "failed_tokens": delivered * is_failed,
        }

    def _method(self) -> str:
        fitted = self.open.amounts["fitted_ns"]
        if not fitted:
            return "token-proportional"
        return "affine" if fitted == self.active_ns else "mixed"


@dataclass(frozen=True)
class Raw:
    """An entry as it goes into the log."""

    entry: AnyEntry
    unix_end_ns: int
    price_id: str

    @property
    def kind(self) -> str:
        return self.entry.spent.value if isinstance(self.entry, Span) else _KINDS[type(self.entry)]


_KINDS: dict[type, str] = {Opened: "opened", Step: "step", Released: "released"}


@dataclass
class Posting:
    """What some neighbouring entries of one group come to."""

    num_chips: int
    granted_unix_ns: int
    price_at: Callable[[int], str]
    """Id of the price that is valid at a time of the calendar, nanoseconds; "" without one."""
    fits: Fits
    opened: dict[str, Open]
    """Requests that are open, as they were left."""
    next_step: int = 0
    raw: list[Raw] = field(default_factory=list)
    lines: list[Line] = field(default_factory=list)
    periods: dict[PeriodKey, Amounts] = field(default_factory=dict)
    counters: Amounts = field(default_factory=lambda: defaultdict(int))
    """To be added to the group's."""

    def post(self, entries: Iterable[AnyEntry]) -> None:
        """In order; each is sound (`soundness`), and its fit is at hand."""
        for entry in entries:
            self._post(entry)

    def rollups(self, grain_s: int) -> dict[tuple[int, str, str, str], Amounts]:
        """By start, key, tag and price."""
        found: dict[tuple[int, str, str, str], Amounts] = {}
        for line in self.lines:
            begin = line.open.hour // grain_s * grain_s
            key = (begin, line.open.key_id, line.open.tag, line.open.price_id)
            _add(found.setdefault(key, defaultdict(int)), line.rollup())
        return found

    def _post(self, entry: AnyEntry) -> None:
        unix_end_ns = self.granted_unix_ns + entry.end_ns
        hour = unix_end_ns // _NANOS // HOUR_S * HOUR_S
        price_id = self.price_at(unix_end_ns)
        self.raw.append(Raw(entry, unix_end_ns, price_id))
        self._turn(hour, price_id, entry.number)
        period = self.periods.setdefault((hour, price_id), defaultdict(int))
        period["measured_ns"] += self.num_chips * (entry.end_ns - entry.begin_ns)
        for joined in entry.joined:
            self.opened[joined.request_id] = _opened(joined, hour, price_id, entry.number)
        if isinstance(entry, Span):
            period[f"{entry.spent.value}_ns"] += self.num_chips * (entry.end_ns - entry.begin_ns)
        elif isinstance(entry, Step):
            self._step(entry, period, hour, price_id)
        for ended in entry.ended:
            self._end(ended, hour, price_id, entry.number)
        if isinstance(entry, Released):
            self._lose()

    def _turn(self, hour: int, price_id: str, number: int) -> None:
        """Where the hour or the price is another one, what is open becomes lines, and goes on."""
        for one in self.opened.values():
            if (one.hour, one.price_id) == (hour, price_id):
                continue
            if any(one.amounts.values()):
                self.lines.append(Line(replace(one), RUNNING))
                one.amounts = defaultdict(int)
                one.fit_id = ""
                one.first_number = number
            one.hour, one.price_id = hour, price_id

    def _step(self, step: Step, period: Amounts, hour: int, price_id: str) -> None:
        chips = self.num_chips
        period["idle_ns"] += chips * step.idle_ns
        period["drain_ns" if step.is_draining else "bubble_ns"] += chips * step.bubble_ns
        period["compile_ns"] += chips * step.compile_ns
        length = chips * step.length_ns
        num_tokens = sum(member.num_tokens for member in step.members)
        self.counters["computed_tokens"] += num_tokens
        self.counters["padded_tokens"] += step.num_padded
        self.next_step = step.step + 1
        period["padded_tokens"] += step.num_padded
        period["rejected_tokens"] += step.num_rejected
        if step.is_failed or not step.members:
            period["fault_ns"] += length
            period["failed_tokens"] += num_tokens
            return
        period["step_ns"] += length
        period["num_steps"] += 1
        computed = max(1, num_tokens + step.num_padded)
        period["padding_ns"] += length * step.num_padded // computed
        period["rejected_ns"] += length * step.num_rejected // computed
        fit = self.fits[step.fit, step.bucket] if step.fit else None
        if fit is not None:
            period["fitted_ns"] += length
            period["residual_ns"] += length * fit.residual_ppm // 1_000_000
        self._share(step, length, fit, period, (hour, price_id))

    def _share(
        self, step: Step, length: int, fit: KnownFit | None, period: Amounts, at: PeriodKey
    ) -> None:
        coefficients = None if fit is None else fit.coefficients
        for member, share in zip(
            step.members, shares(length, step.members, coefficients), strict=True
        ):
            one = self.opened.get(member.request_id)
            if one is None:
                # It has ended, or its beginning was lost: nobody knows whose it is, but the time is there.
                one = _opened(Joined(member.request_id, "", "", 0, 1), *at, step.number)
                self.opened[member.request_id] = one
            one.last_number = step.number
            amounts = one.amounts
            if fit is not None:
                amounts["fitted_ns"] += share
                one.fit_id = step.fit
            if member.is_prefill:
                self._prefill(member, share, amounts, period)
            else:
                _decode(member, share, amounts, period)

    def _prefill(self, member: Member, share: int, amounts: Amounts, period: Amounts) -> None:
        period["prefill_tokens"] += member.num_tokens
        self.counters["cached_tokens"] += member.num_cached
        amounts["prefill_ns"] += share
        amounts["cached_tokens"] += member.num_cached
        if member.is_recomputed:
            period["recomputed_tokens"] += member.num_tokens
            amounts["recomputed_tokens"] += member.num_tokens
            amounts["recomputed_ns"] += share
        else:
            amounts["uncached_tokens"] += member.num_tokens
            # All that is computed of a prompt is left in the cache, but for a part of its last block.
            amounts["written_tokens"] += member.num_tokens
        if not member.is_kept:
            amounts["discarded_ns"] += share

    def _end(self, ended: Ended, hour: int, price_id: str, number: int) -> None:
        self.counters["delivered_tokens"] += ended.num_output_tokens
        one = self.opened.pop(ended.request_id, None)
        if one is None:
            one = _opened(Joined(ended.request_id, "", "", 0, 1), hour, price_id, number)
        one.last_number = number
        one.amounts["delivered_tokens"] += ended.num_output_tokens
        self._close(one, ended.reason.value)

    def _lose(self) -> None:
        """The group is gone: what is open has not been finished."""
        for request_id in list(self.opened):
            self._close(self.opened.pop(request_id), FAULT)

    def _close(self, one: Open, status: str) -> None:
        self.lines.append(Line(one, status))


def _decode(member: Member, share: int, amounts: Amounts, period: Amounts) -> None:
    period["decode_tokens"] += member.num_tokens
    amounts["decode_ns"] += share
    if member.is_kept:
        amounts["output_tokens"] += member.num_tokens
    else:
        amounts["discarded_ns"] += share


def _opened(joined: Joined, hour: int, price_id: str, number: int) -> Open:
    return Open(
        request_id=joined.request_id,
        key_id=joined.key_id,
        tag=joined.tag,
        hour=hour,
        price_id=price_id,
        first_number=number,
        last_number=number,
        num_prompt_tokens=joined.num_prompt_tokens,
        num_choices=joined.num_choices,
    )


def _add(total: Amounts, more: Amounts) -> None:
    for name, amount in more.items():
        total[name] += amount
