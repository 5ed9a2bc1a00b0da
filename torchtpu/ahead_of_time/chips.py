"""The TPUs that programs can be compiled for. Plain Python."""

from dataclasses import dataclass

GIB = 1 << 30


@dataclass(frozen=True)
class Chip:
    name: str
    topology: str
    """One chip, as libtpu names it."""
    hbm_bytes: int
    """What the compiler lets one device's program use; tpu7x has two devices a chip."""


CHIPS = {
    chip.name: chip
    for chip in (
        Chip("v5e", "v5e:1x1", int(15.75 * GIB)),
        Chip("v6e", "v6e:1x1", int(31.25 * GIB)),
        Chip("tpu7x", "tpu7x:1x1x1", int(94.75 * GIB)),
    )
}
