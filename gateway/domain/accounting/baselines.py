"""What other hardware did with a load: published rows, and rows that our own benchmark measured.

A row matches a load if model and class of dtype are the same and both lengths are within 25 %. What lies
between matching rows of one accelerator is interpolated, in chip-seconds for each output token, which is what
adds up; nothing is extrapolated.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from enum import StrEnum
from functools import cached_property

TOLERANCE = Decimal("0.25")


class Grade(StrEnum):
    """How much a row is worth as evidence."""

    MEASURED = "M"
    """By our own benchmark, with the load that it stands beside."""
    A = "A"
    """A vendor's own, with its whole configuration."""
    B = "B"
    """A vendor's test run or a community's post, with its whole configuration."""
    C = "C"
    """Obsolete, partly configured, or not saturating: for orientation only."""
    D = "D"
    """Second hand: kept out of everything that users see."""

    @property
    def allows_percent(self) -> bool:
        return self in {Grade.MEASURED, Grade.A, Grade.B}


class DtypeClass(StrEnum):
    """Dtypes of weights that are compared with each other."""

    FOUR_BIT = "4-bit"
    FP8 = "fp8"
    INT8 = "int8"
    """Apart from fp8: a v6e is twice as fast with the one and no faster with the other."""
    SIXTEEN_BIT = "16-bit"
    FP32 = "fp32"


_DTYPES = {
    "fp4": DtypeClass.FOUR_BIT,
    "nvfp4": DtypeClass.FOUR_BIT,
    "mxfp4": DtypeClass.FOUR_BIT,
    "int4": DtypeClass.FOUR_BIT,
    "fp8": DtypeClass.FP8,
    "int8": DtypeClass.INT8,
    "bf16": DtypeClass.SIXTEEN_BIT,
    "bfloat16": DtypeClass.SIXTEEN_BIT,
    "fp16": DtypeClass.SIXTEEN_BIT,
    "float16": DtypeClass.SIXTEEN_BIT,
    "fp32": DtypeClass.FP32,
    "float32": DtypeClass.FP32,
}


def dtype_class(dtype: str) -> DtypeClass | None:
    """By its first word, which is of the weights: `fp8, fp8 KV`. None for one that is not known: it matches nothing."""
    return _DTYPES.get(re.split(r"[^a-z0-9]", dtype.lower().strip(), maxsplit=1)[0])


_TUNED = re.compile(r"-(instruct|it|chat|base|hf|\d{4}|fp8|bf16|fp4|nvfp4)$")


def model_key(model: str) -> str:
    """What names of one architecture and size share: `meta-llama/Llama-3.1-8B-Instruct` is `llama-3.1-8b`.

    Tuning changes no speed.
    """
    name = model.rpartition("/")[2].lower().partition("@")[0].removeprefix("meta-")
    while (shorter := _TUNED.sub("", name)) != name:
        name = shorter
    return name


@dataclass(frozen=True)
class Baseline:
    """A row; rates are tokens per second and chip."""

    accelerator: str
    """A sku of the price book."""
    num_chips: int
    """That work together: what must be rented as a whole."""
    model: str
    engine: str
    """Name and version."""
    dtype: str
    isl: int | None
    """Input tokens of a request; None: mixed, see `detail["workload"]`."""
    osl: int | None
    concurrency: int | None
    """None: all requests at once, no bound on latency."""
    output_tokens_per_s_chip: Decimal
    grade: Grade
    source: str
    """Title and address: one line."""
    date: str
    total_tokens_per_s_chip: Decimal | None = None
    detail: Mapping[str, str] = field(default_factory=dict)
    """`tpot_ms`, `ttft_ms`, `parallelism`, `note` …"""

    @cached_property
    def id(self) -> str:
        """Hash of all the fields: equal rows are one."""
        fields = [
            self.accelerator,
            self.num_chips,
            self.model,
            self.engine,
            self.dtype,
            self.isl,
            self.osl,
            self.concurrency,
            _plain(self.output_tokens_per_s_chip),
            self.grade.value,
            self.source,
            self.date,
            _plain(self.total_tokens_per_s_chip),
            dict(self.detail),
        ]
        text = json.dumps(fields, sort_keys=True, separators=(",", ":"))
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    @property
    def is_saturated(self) -> bool:
        """Offline: every request at once."""
        return self.concurrency is None

    @property
    def seconds_per_token(self) -> Decimal:
        """Chip-seconds of an output token, its share of the prompt included."""
        return 1 / self.output_tokens_per_s_chip

    @property
    def source_line(self) -> str:
        return f"{self.source} ({self.date}, grade {self.grade.value})"

    @property
    def shape(self) -> str:
        if self.isl is None or self.osl is None:
            return self.detail.get("workload", "mixed")
        return f"{self.isl}/{self.osl}"


def _plain(number: Decimal | None) -> str | None:
    return None if number is None else format(number.normalize(), "f")


def is_near(length: int | None, wanted: Decimal) -> bool:
    """Whether a row's length is within 25 % of the load's."""
    return length is not None and abs(length - wanted) <= TOLERANCE * wanted


def matching(
    rows: Iterable[Baseline], model: str, dtype: str, isl: Decimal, osl: Decimal
) -> list[Baseline]:
    """Rows of the same model, class of dtype and shape bucket; those of grade D never."""
    key, kind = model_key(model), dtype_class(dtype)
    if kind is None:
        return []
    return [
        row
        for row in rows
        if row.grade is not Grade.D
        and model_key(row.model) == key
        and dtype_class(row.dtype) is kind
        and is_near(row.isl, isl)
        and is_near(row.osl, osl)
    ]


def interpolated(rows: Sequence[Baseline], isl: Decimal, osl: Decimal) -> Decimal:
    """Chip-seconds of an output token at a shape amid `rows`, which match it.

    Rows weigh by the inverse of their relative distance, so the result lies between theirs and equals a
    row's at its own shape. Raises ValueError without rows.
    """
    weighed = [(_distance(row, isl, osl), row.seconds_per_token) for row in rows]
    if not weighed:
        raise ValueError("nothing to interpolate between")
    here = [seconds for distance, seconds in weighed if distance == 0]
    if here:
        return sum(here, Decimal(0)) / len(here)
    weights = [1 / distance for distance, _ in weighed]
    sum_of = sum((w * s for w, (_, s) in zip(weights, weighed, strict=True)), Decimal(0))
    return sum_of / sum(weights, Decimal(0))


def _distance(row: Baseline, isl: Decimal, osl: Decimal) -> Decimal:
    if row.isl is None or row.osl is None:
        return Decimal("Infinity")
    return abs(row.isl - isl) / isl + abs(row.osl - osl) / osl


def by_distance(rows: Iterable[Baseline], isl: Decimal, osl: Decimal) -> list[Baseline]:
    """The rows of a like shape first, of any model; better grades before others. For context only."""
    order = [grade.value for grade in Grade]
    return sorted(
        (row for row in rows if row.grade is not Grade.D),
        key=lambda row: (_distance(row, isl, osl), order.index(row.grade.value), row.id),
    )
