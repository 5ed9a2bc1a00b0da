"""Tables of the ledger.

    chip_entries ──> chip_groups, open_charges ──> charges ──> rollups
         raw log        working state         append-only      sums of charges
                            └──> periods ──> closings ──> charges (corrections), rollups

Units: `_ns` of work is nano-chip-seconds; `_unix_ns` is nanoseconds of the calendar (UTC); `hour`, `start` are
unix seconds of the beginning. An entry belongs to the hour in which it ends. `price_id` "" is: no price was
valid. Sums hold exactly, in integers, once an hour is closed:

    Σ charges.loaded_ns = Σ periods.measured_ns = chips × time            by model, hour and price
    Σ charges.prefill_ns + decode_ns = Σ periods.step_ns
    Σ rollups = Σ charges, column by column
"""

from decimal import Decimal
from typing import Any

from advanced_alchemy.base import DefaultBase, IdentityBase
from sqlalchemy import JSON, BigInteger, Dialect, Index, LargeBinary, String, Text, TypeDecorator
from sqlalchemy.orm import Mapped, mapped_column

IDLE = "__idle__"
"""Request and key of the line that takes what nobody can be charged with: nothing ran in that hour."""
HOUR_S = 3600
DAY_S = 86400

_ID = String(200)
_WORD = String(64)


def _amount() -> Mapped[int]:
    return mapped_column(BigInteger, default=0)


class ExactDecimal(TypeDecorator[Decimal]):
    """A Decimal as text: SQLite would make a float of it."""

    impl = String(48)
    cache_ok = True

    def process_bind_param(self, value: Decimal | None, dialect: Dialect) -> str | None:
        return None if value is None else format(value, "f")

    def process_result_value(self, value: Any | None, dialect: Dialect) -> Decimal | None:  # noqa: ANN401
        return None if value is None else Decimal(value)


class ChipGroup(DefaultBase):
    """A lockstep group of chips and how far its line is in SQL; one for each worker process that ever lived."""

    __tablename__ = "chip_groups"
    __table_args__ = (Index("ix_chip_groups_ended", "ended"),)

    group_id: Mapped[str] = mapped_column(_ID, primary_key=True)
    model: Mapped[str] = mapped_column(_ID)
    worker_id: Mapped[str] = mapped_column(_ID)
    engine: Mapped[str] = mapped_column(_WORD)
    sku: Mapped[str] = mapped_column(_WORD)
    region: Mapped[str] = mapped_column(_WORD)
    num_chips: Mapped[int] = mapped_column(BigInteger)
    granted_unix_ns: Mapped[int] = mapped_column(BigInteger)
    next_number: Mapped[int] = mapped_column(BigInteger)
    """The first entry that is not here yet: a transaction that finds another one than it read has lost."""
    head: Mapped[bytes] = mapped_column(LargeBinary(16))
    """The chain's hash after the entry before that."""
    end_ns: Mapped[int] = mapped_column(BigInteger)
    """Where that entry ended, on the group's clock: the line is complete from 0 to here."""
    seen_unix_ns: Mapped[int] = mapped_column(BigInteger)
    """The last sign of life: an entry or the worker's status."""
    next_step: Mapped[int] = _amount()
    """Number of the next step."""
    computed_tokens: Mapped[int] = _amount()
    """Of all steps, as the engine counts them; so are the three below."""
    padded_tokens: Mapped[int] = _amount()
    cached_tokens: Mapped[int] = _amount()
    delivered_tokens: Mapped[int] = _amount()
    ended: Mapped[str] = mapped_column(_WORD, default="")
    """"" while it runs, then `released`, or `fault` if it was lost and the accountant wrote its last entries."""
    broken_at: Mapped[int | None] = mapped_column(BigInteger, default=None)
    """Number of the first entry that did not fit the hash, or the line, of what came before it."""
    broken_why: Mapped[str] = mapped_column(Text, default="")
    first_kept: Mapped[int] = _amount()
    """Number of the first entry that retention has left in `chip_entries`."""
    checkpoint: Mapped[bytes | None] = mapped_column(LargeBinary(16), default=None)
    """The chain's hash before that entry; None: `workers.chip_time.first_hash`."""


class ChipEntry(DefaultBase):
    """The raw log: each entry as it was sent. `chip_time.decode_entry(payload)` reads it."""

    __tablename__ = "chip_entries"
    __table_args__ = (Index("ix_chip_entries_end", "unix_end_ns"),)

    group_id: Mapped[str] = mapped_column(_ID, primary_key=True)
    number: Mapped[int] = mapped_column(BigInteger, primary_key=True, autoincrement=False)
    kind: Mapped[str] = mapped_column(_WORD)
    """`opened`, `step`, `released`, or what a span was spent on."""
    begin_ns: Mapped[int] = mapped_column(BigInteger)
    end_ns: Mapped[int] = mapped_column(BigInteger)
    unix_end_ns: Mapped[int] = mapped_column(BigInteger)
    price_id: Mapped[str] = mapped_column(_WORD)
    """Its hour and this are the period that it was booked in."""
    payload: Mapped[bytes] = mapped_column(LargeBinary)
    hash: Mapped[bytes] = mapped_column(LargeBinary(16))
    """The chain's, after this entry."""


class BadBatch(DefaultBase):
    """What came over the stream and is no batch, kept to be looked at; the newest few hundred."""

    __tablename__ = "chip_bad_batches"

    message_id: Mapped[str] = mapped_column(_WORD, primary_key=True)
    reason: Mapped[str] = mapped_column(Text)
    payload: Mapped[bytes] = mapped_column(LargeBinary)


class Amounts:
    """What was spent on a request, or on several, in one hour at one price."""

    prefill_ns: Mapped[int] = _amount()
    """Active: shares of steps."""
    decode_ns: Mapped[int] = _amount()
    fitted_ns: Mapped[int] = _amount()
    """Of both, what was shared by a fit and not by tokens."""
    recomputed_ns: Mapped[int] = _amount()
    """Of `prefill_ns`, what computed again that a preemption had lost."""
    discarded_ns: Mapped[int] = _amount()
    """Of both, steps whose drawn token did not join the answer."""
    uncached_tokens: Mapped[int] = _amount()
    """Prompt tokens that were computed, for all choices; without recomputed ones."""
    cached_tokens: Mapped[int] = _amount()
    """Prompt tokens that were found in the prefix cache."""
    written_tokens: Mapped[int] = _amount()
    """Of the uncached ones, those left in the prefix cache."""
    recomputed_tokens: Mapped[int] = _amount()
    output_tokens: Mapped[int] = _amount()
    """Computed by decode steps and kept; the first token of a choice is its last prompt segment's."""
    delivered_tokens: Mapped[int] = _amount()
    """Sent in answers; counted where the request ends."""


class OpenCharge(Amounts, DefaultBase):
    """A request's part of the hour that its group is in: working state until it becomes a charge."""

    __tablename__ = "open_charges"

    group_id: Mapped[str] = mapped_column(_ID, primary_key=True)
    request_id: Mapped[str] = mapped_column(_ID, primary_key=True)
    key_id: Mapped[str] = mapped_column(_ID)
    tag: Mapped[str] = mapped_column(String(200))
    hour: Mapped[int] = mapped_column(BigInteger)
    price_id: Mapped[str] = mapped_column(_WORD)
    first_number: Mapped[int] = mapped_column(BigInteger)
    """The entries that it is made of are among these."""
    last_number: Mapped[int] = mapped_column(BigInteger)
    fit_id: Mapped[str] = mapped_column(_WORD, default="")
    num_prompt_tokens: Mapped[int] = _amount()
    num_choices: Mapped[int] = _amount()


class Charge(Amounts, IdentityBase):
    """A line of the ledger; never edited. A request has one for each hour, price and group that it ran in.

    `kind` is `charge` (what it was spent: loaded = active) or `correction` (what idle time and overhead of the
    hour add to it: nothing but the `loaded_` columns). Nothing is negative.
    """

    __tablename__ = "charges"
    __table_args__ = (
        Index("ix_charges_request", "request_id"),
        Index("ix_charges_period", "model", "hour", "price_id"),
        Index("ix_charges_hour", "hour"),
    )

    kind: Mapped[str] = mapped_column(_WORD)
    hour: Mapped[int] = mapped_column(BigInteger)
    price_id: Mapped[str] = mapped_column(_WORD)
    model: Mapped[str] = mapped_column(_ID)
    group_id: Mapped[str] = mapped_column(_ID)
    """"" on lines of `IDLE`."""
    request_id: Mapped[str] = mapped_column(_ID)
    key_id: Mapped[str] = mapped_column(_ID)
    tag: Mapped[str] = mapped_column(String(200))
    status: Mapped[str] = mapped_column(_WORD)
    """`running` (it goes on in a later line), how it ended (`stop`, `length`, `abort`, `error`), `fault` (with
    its group); on lines of `IDLE` `idle`."""
    loaded_ns: Mapped[int] = _amount()
    loaded_prefill_ns: Mapped[int] = _amount()
    """Of `loaded_ns`; the two add up to it but on lines of `IDLE`."""
    loaded_decode_ns: Mapped[int] = _amount()
    method: Mapped[str] = mapped_column(_WORD, default="")
    """`affine`, `token-proportional` or `mixed`: how its steps were shared; "" on corrections."""
    fit_id: Mapped[str] = mapped_column(_WORD, default="")
    """The newest of its steps' fits."""
    first_number: Mapped[int | None] = mapped_column(BigInteger, default=None)
    last_number: Mapped[int | None] = mapped_column(BigInteger, default=None)
    closing_id: Mapped[int | None] = mapped_column(BigInteger, default=None)
    """Of a correction."""


class Period(DefaultBase):
    """What a group did in an hour at one price, by class; the classes add up to `measured_ns`."""

    __tablename__ = "periods"
    __table_args__ = (Index("ix_periods_hour", "hour"), Index("ix_periods_closed", "is_closed"))

    model: Mapped[str] = mapped_column(_ID, primary_key=True)
    hour: Mapped[int] = mapped_column(BigInteger, primary_key=True, autoincrement=False)
    price_id: Mapped[str] = mapped_column(_WORD, primary_key=True)
    group_id: Mapped[str] = mapped_column(_ID, primary_key=True)
    measured_ns: Mapped[int] = _amount()
    """M: chips × time. κ of some periods is Σ measured_ns / Σ step_ns."""
    step_ns: Mapped[int] = _amount()
    """What requests are charged with."""
    bubble_ns: Mapped[int] = _amount()
    idle_ns: Mapped[int] = _amount()
    provision_ns: Mapped[int] = _amount()
    weights_ns: Mapped[int] = _amount()
    compile_ns: Mapped[int] = _amount()
    drain_ns: Mapped[int] = _amount()
    fault_ns: Mapped[int] = _amount()
    """Also of failed steps."""
    probe_ns: Mapped[int] = _amount()
    num_steps: Mapped[int] = _amount()
    fitted_ns: Mapped[int] = _amount()
    """Of `step_ns`, what was shared by a fit."""
    residual_ns: Mapped[int] = _amount()
    """Σ of fitted steps' time × their fit's residual: over `fitted_ns` it is the period's."""
    prefill_tokens: Mapped[int] = _amount()
    """Computed; recomputed ones too."""
    decode_tokens: Mapped[int] = _amount()
    recomputed_tokens: Mapped[int] = _amount()
    padded_tokens: Mapped[int] = _amount()
    rejected_tokens: Mapped[int] = _amount()
    failed_tokens: Mapped[int] = _amount()
    """Of failed steps; not in the two above."""
    padding_ns: Mapped[int] = _amount()
    """Of `step_ns`: each step's time by its share of padded tokens. An estimate, and a part of charges."""
    rejected_ns: Mapped[int] = _amount()
    """The same for rejected tokens."""
    is_closed: Mapped[bool] = mapped_column(default=False)
    """False again as soon as a late entry arrives."""


class Closing(IdentityBase):
    """What the end of an hour added to its charges; another row if late entries came."""

    __tablename__ = "closings"
    __table_args__ = (Index("ix_closings_period", "model", "hour", "price_id"),)

    model: Mapped[str] = mapped_column(_ID)
    hour: Mapped[int] = mapped_column(BigInteger)
    price_id: Mapped[str] = mapped_column(_WORD)
    measured_ns: Mapped[int] = mapped_column(BigInteger)
    """κ's numerator: of all groups, as it stood then."""
    active_ns: Mapped[int] = mapped_column(BigInteger)
    """κ's denominator."""
    spread_ns: Mapped[int] = mapped_column(BigInteger)
    """What this closing's corrections add up to; over all closings of a period: measured - active."""
    closed_unix_ns: Mapped[int] = mapped_column(BigInteger)


class Rollup(Amounts, DefaultBase):
    """Sums of charges by hour and by day (`grain_s` 3600, 86400); written with the charges, kept for ever."""

    __tablename__ = "rollups"

    grain_s: Mapped[int] = mapped_column(BigInteger, primary_key=True, autoincrement=False)
    start: Mapped[int] = mapped_column(BigInteger, primary_key=True, autoincrement=False)
    model: Mapped[str] = mapped_column(_ID, primary_key=True)
    key_id: Mapped[str] = mapped_column(_ID, primary_key=True)
    """`IDLE` for what nobody can be charged with."""
    tag: Mapped[str] = mapped_column(String(200), primary_key=True)
    price_id: Mapped[str] = mapped_column(_WORD, primary_key=True)
    num_requests: Mapped[int] = _amount()
    """That ended here."""
    loaded_ns: Mapped[int] = _amount()
    loaded_prefill_ns: Mapped[int] = _amount()
    loaded_decode_ns: Mapped[int] = _amount()
    aborted_ns: Mapped[int] = _amount()
    """Active, of lines whose status is `abort`; below `error` or `fault`."""
    failed_ns: Mapped[int] = _amount()
    aborted_tokens: Mapped[int] = _amount()
    """Of `delivered_tokens`."""
    failed_tokens: Mapped[int] = _amount()


class Fit(DefaultBase):
    """Coefficients by which steps of one bucket were, or are, shared (`chip_time.Coefficients`); kept for ever."""

    __tablename__ = "fits"
    __table_args__ = (Index("ix_fits_model", "model", "fitted_unix_ns"),)

    fit_id: Mapped[str] = mapped_column(_WORD, primary_key=True)
    bucket: Mapped[str] = mapped_column(_ID, primary_key=True)
    model: Mapped[str] = mapped_column(_ID)
    sku: Mapped[str] = mapped_column(_WORD)
    fixed: Mapped[int] = mapped_column(BigInteger)
    prefill: Mapped[int] = mapped_column(BigInteger)
    attention: Mapped[int] = mapped_column(BigInteger)
    decode: Mapped[int] = mapped_column(BigInteger)
    context: Mapped[int] = mapped_column(BigInteger)
    residual_ppm: Mapped[int] = mapped_column(BigInteger)
    """Σ |measured - predicted| / Σ measured of steps that were held out, in millionths."""
    proportional_ppm: Mapped[int] = mapped_column(BigInteger)
    """The same for time in proportion to tokens: what the fit had to beat."""
    num_steps: Mapped[int] = mapped_column(BigInteger)
    first_unix_ns: Mapped[int] = mapped_column(BigInteger)
    """The steps it was made of ended from here …"""
    last_unix_ns: Mapped[int] = mapped_column(BigInteger)
    """… to here."""
    fitted_unix_ns: Mapped[int] = mapped_column(BigInteger)


class PriceRow(DefaultBase):
    """What a chip costs, from when, and who says so; never edited (`prices.py`)."""

    __tablename__ = "prices"
    __table_args__ = (Index("ix_prices_sku", "sku", "effective_from_ns"),)

    price_id: Mapped[str] = mapped_column(_WORD, primary_key=True)
    """Hash of all that follows."""
    sku: Mapped[str] = mapped_column(_WORD)
    region: Mapped[str] = mapped_column(_WORD)
    term: Mapped[str] = mapped_column(_WORD)
    usd_per_chip_hour: Mapped[Decimal] = mapped_column(ExactDecimal)
    currency: Mapped[str] = mapped_column(String(3))
    effective_from_ns: Mapped[int] = mapped_column(BigInteger)
    effective_to_ns: Mapped[int | None] = mapped_column(BigInteger, default=None)
    source: Mapped[str] = mapped_column(Text)
    retrieved_at: Mapped[str] = mapped_column(_WORD)
    """A date, as the source has it."""
    added_unix_ns: Mapped[int] = mapped_column(BigInteger)
    detail: Mapped[dict[str, Any]] = mapped_column(JSON, default=dict)


class BaselineRow(DefaultBase):
    """What other hardware did with a load: published, or measured by our own benchmark (`baselines.py`)."""

    __tablename__ = "baselines"
    __table_args__ = (Index("ix_baselines_model", "model"),)

    baseline_id: Mapped[str] = mapped_column(_WORD, primary_key=True)
    """Hash of all that follows."""
    accelerator: Mapped[str] = mapped_column(_WORD)
    num_chips: Mapped[int] = mapped_column(BigInteger)
    model: Mapped[str] = mapped_column(_ID)
    engine: Mapped[str] = mapped_column(String(200))
    dtype: Mapped[str] = mapped_column(_WORD)
    isl: Mapped[int | None] = mapped_column(BigInteger, default=None)
    """Input tokens of a request."""
    osl: Mapped[int | None] = mapped_column(BigInteger, default=None)
    concurrency: Mapped[int | None] = mapped_column(BigInteger, default=None)
    """None: all at once."""
    output_tokens_per_s_chip: Mapped[Decimal | None] = mapped_column(ExactDecimal, default=None)
    total_tokens_per_s_chip: Mapped[Decimal | None] = mapped_column(ExactDecimal, default=None)
    grade: Mapped[str] = mapped_column(String(1))
    source: Mapped[str] = mapped_column(Text)
    date: Mapped[str] = mapped_column(_WORD)
    detail: Mapped[dict[str, Any]] = mapped_column(JSON, default=dict)
