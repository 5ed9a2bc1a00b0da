"""What a compiled program computes and moves between HBM and the chip, counted from its schedule.

XLA's own `cost_analysis` counts a loop once, counts traffic within the chip as bytes accessed, and knows
nothing of custom calls. Here loops count as often as they run, only arrays in HBM count, and a Pallas kernel
counts with the estimate that it was compiled with. Bytes are those of memory, the padding of tiles included.
It is an estimate: what a fusion reads of an operand is seen in its slices and gathers, not measured.
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Literal

from torchtpu.ahead_of_time.hlo import Computation, Instruction, Program, Shape

Cause = Literal["weights", "kv", "other"]
Groups = Sequence[tuple[int, Cause]]
"""Index of the first input of each group, rising, and what the group is."""

# fmt: off
_FREE = frozenset((
    "parameter", "constant", "get-tuple-element", "tuple", "bitcast", "after-all", "iota", "partition-id",
    "replica-id", "optimization-barrier", "copy-done", "slice-done", "async-done", "async-update",
    "custom-call-start",
))
# fmt: on
_SAME = frozenset(("bitcast", "get-tuple-element", "optimization-barrier", "reshape"))
_SLICING = frozenset(("dynamic-slice", "slice", "gather"))
_WRITING = {"dynamic-update-slice": 1, "scatter": 2}
"""Which operand holds what is written into operand 0."""
_ESTIMATE = re.compile(r'"cost_estimate":\{([^}]*)\}')
_NUMBER = re.compile(r'"(\w+)":"?(\d+)"?')
_ALIASES = re.compile(r'"indices":\["(\d+)","(\d+)"\]')
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')


@dataclass(frozen=True)
class Cost:
    flops: int
    """Of matrix products, kernels included."""
    read: Mapping[Cause, int]
    """Bytes from HBM. What is read twice, or copied first, counts twice."""
    written: Mapping[Cause, int]

    @property
    def hbm_bytes(self) -> int:
        return sum(self.read.values()) + sum(self.written.values())

    def of(self, cause: Cause) -> int:
        return self.read.get(cause, 0) + self.written.get(cause, 0)


def read_cost(program: Program, groups: Groups) -> Cost:
    counter = _Counter(program, groups)
    counter.walk(program.entry, 1)
    return Cost(int(counter.flops), dict(counter.read), dict(counter.written))


class _Counter:
    def __init__(self, program: Program, groups: Groups) -> None:
        self._program, self._groups = program, groups
        self.flops = 0.0
        self.read: Counter[Cause] = Counter()
        self.written: Counter[Cause] = Counter()

    def walk(self, name: str, times: int) -> None:
        computation = self._program.computations[name]
        for instruction in computation.values():
            if instruction.opcode in ("while", "call", "conditional", "async-start"):
                trips = _TRIPS.search(instruction.attributes)
                for called in instruction.called():
                    self.walk(called, times * int(trips[1] if trips else 1))
            elif instruction.opcode not in _FREE:
                self.flops += times * self._flops(instruction, computation)
                for cause, num_bytes in self._reads(instruction, computation):
                    self.read[cause] += times * num_bytes
                for cause, num_bytes in self._writes(instruction, computation):
                    self.written[cause] += times * num_bytes

    def _cause(self, name: str, computation: Computation) -> Cause:
        """Whose memory an operand is: followed through views and updates in place."""
        instruction = computation[name]
        if instruction.opcode == "parameter":
            if computation is not self._program.computations[self._program.entry]:
                return "other"
            index = int(instruction.attributes)
            return next((what for first, what in reversed(self._groups) if first <= index), "other")
        if instruction.opcode in _SAME:
            return self._cause(instruction.operands[0], computation)
        aliased = _aliases(instruction)
        if aliased:
            return self._cause(instruction.operands[next(iter(aliased.values()))], computation)
        return "other"

    def _reads(
        self, instruction: Instruction, computation: Computation
    ) -> Iterator[tuple[Cause, int]]:
        if instruction.opcode == "custom-call-done":
            # A gather on the chip's sparse cores reads what it gives.
            source = computation[instruction.operands[0]].operands[0]
            num_bytes = sum(shape.num_bytes for shape in instruction.shapes)
            yield self._cause(source, computation), num_bytes
            return
        estimate = _estimate(instruction)
        if estimate:
            # Beside the cache, whose share the kernel knows, a kernel reads its operands whole.
            yield "kv", estimate["bytes_accessed"]
        for index, name in enumerate(instruction.operands):
            shape = computation[name].shapes[:1]
            if not shape or not shape[0].in_hbm:
                continue
            cause = self._cause(name, computation)
            if not (estimate and cause == "kv"):
                yield cause, self._read_of(instruction, index, shape[0])

    def _read_of(self, instruction: Instruction, index: int, whole: Shape) -> int:
        opcode = instruction.opcode
        if opcode == "fusion":
            called = self._program.computations[instruction.called()[0]]
            return min(self._read_in(called, index, whole), whole.num_bytes)
        if opcode in _WRITING and index == 0:
            return 0
        if opcode in _SLICING and index == 0:
            return instruction.shapes[0].num_bytes
        if opcode == "slice-start":
            return instruction.shapes[1].num_bytes
        return 0 if _allocates(instruction) else whole.num_bytes

    def _read_in(self, computation: Computation, index: int, whole: Shape) -> int:
        """Bytes of its parameter that a fusion really reads."""
        views, total = self._views(computation, index), 0
        for user in computation.values():
            places = [place for place, name in enumerate(user.operands) if name in views]
            if not places or user.name in views:
                continue
            if user.opcode in _SLICING and places == [0]:
                total += user.shapes[0].num_bytes
            elif user.opcode == "fusion":
                called = self._program.computations[user.called()[0]]
                total += sum(self._read_in(called, place, whole) for place in places)
            elif not (user.opcode in _WRITING and places == [0]):
                return whole.num_bytes
        return total

    def _views(self, computation: Computation, index: int) -> set[str]:
        """A parameter, and what is the same memory under another shape."""
        views = {
            instruction.name
            for instruction in computation.values()
            if instruction.opcode == "parameter" and int(instruction.attributes) == index
        }
        for user in computation.values():
            places = [place for place, name in enumerate(user.operands) if name in views]
            if user.opcode == "bitcast" and places:
                views.add(user.name)
            elif user.opcode == "fusion" and places:
                called = self._program.computations[user.called()[0]]
                inner = [self._views(called, place) for place in places]
                roots = [name for name, instruction in called.items() if instruction.is_root]
                if any(root in names for root in roots for names in inner):
                    views.add(user.name)
        return views

    def _writes(
        self, instruction: Instruction, computation: Computation
    ) -> Iterator[tuple[Cause, int]]:
        if _allocates(instruction):
            return
        shapes: Sequence[Shape] = instruction.shapes
        if instruction.opcode.endswith("-start"):
            # copy-start gives (result, operand, …), slice-start ((operands), result, …).
            shapes = shapes[:1] if instruction.opcode == "copy-start" else shapes[1:2]
        aliased = _aliases(instruction)
        for index, shape in enumerate(shapes):
            if not shape.in_hbm:
                continue
            updated = self._updated(instruction, computation)
            if updated is not None and (index in aliased or instruction.opcode in _WRITING):
                yield self._cause(instruction.operands[aliased.get(index, 0)], computation), updated
            else:
                yield "other", shape.num_bytes

    def _updated(self, instruction: Instruction, computation: Computation) -> int | None:
        """Bytes that an update in place writes; None if it is none."""
        if instruction.opcode == "fusion":
            called = self._program.computations[instruction.called()[0]]
            updates = [self._updated(i, called) for i in called.values()]
            return sum(n for n in updates if n is not None) if any(updates) else None
        place = _WRITING.get(instruction.opcode)
        if place is None:
            return None
        return computation[instruction.operands[place]].shapes[0].num_bytes

    def _flops(self, instruction: Instruction, computation: Computation) -> float:
        if instruction.opcode == "fusion":
            called = self._program.computations[instruction.called()[0]]
            return sum(self._flops(inner, called) for inner in called.values())
        if instruction.opcode == "dot":
            return _dot_flops(instruction, computation)
        if instruction.opcode == "convolution":
            return _convolution_flops(instruction, computation)
        return _estimate(instruction).get("flops", 0)


def _estimate(instruction: Instruction) -> dict[str, int]:
    """What a kernel says of itself."""
    found = _ESTIMATE.search(instruction.attributes)
    return {name: int(number) for name, number in _NUMBER.findall(found[1])} if found else {}


def _aliases(instruction: Instruction) -> dict[int, int]:
    """Results that lie in operands' memory: the compiler numbers operands first, then results."""
    pairs = _ALIASES.findall(instruction.attributes)
    num_operands = len(instruction.operands)
    return {int(result) - num_operands: int(operand) for operand, result in pairs}


def _allocates(instruction: Instruction) -> bool:
    """Custom calls that only name memory."""
    names = ("AllocateBuffer", "ConcatBitcast")
    return instruction.opcode == "custom-call" and any(n in instruction.attributes for n in names)


def _dot_flops(instruction: Instruction, computation: Computation) -> int:
    left = computation[instruction.operands[0]].shapes[0].dims
    found = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", instruction.attributes)
    summed = [left[int(n)] for n in found[1].split(",") if n] if found else []
    return 2 * prod(instruction.shapes[0].dims) * prod(summed)


def _convolution_flops(instruction: Instruction, computation: Computation) -> float:
    """XLA:TPU writes batched products as convolutions whose windows pick out the batch."""
    left, right = (computation[name].shapes[0].dims for name in instruction.operands[:2])
    result = instruction.shapes[0].dims
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", instruction.attributes)
    if labels is None:
        return 0
    in_labels, kernel_labels, out_labels = labels.groups()
    window = _window(instruction.attributes)
    hits = 1
    for axis in (label for label in in_labels if label.isdigit()):
        hits *= _window_hits(
            left[in_labels.index(axis)],
            right[kernel_labels.index(axis)],
            result[out_labels.index(axis)],
            {name: values[int(axis)] for name, values in window.items()},
        )
    batches = re.search(r"batch_group_count=(\d+)", instruction.attributes)
    features = result[out_labels.index("b")] * result[out_labels.index("f")]
    products = hits * features * right[kernel_labels.index("i")]
    return 2 * products / int(batches[1] if batches else 1)


def _window(attributes: str) -> dict[str, list[str]]:
    found = re.search(r"window=\{([^}]*)\}", attributes)
    fields = [field.split("=") for field in found[1].split()] if found else []
    return {name: values.split("x") for name, values in fields}


def _window_hits(size: int, kernel: int, result: int, window: Mapping[str, str]) -> int:
    """Pairs of result and kernel places that meet an element, on one axis."""
    stride, dilate = int(window.get("stride", 1)), int(window.get("lhs_dilate", 1))
    spread, pad = int(window.get("rhs_dilate", 1)), int(window.get("pad", "0_0").split("_")[0])
    end = (size - 1) * dilate + 1
    places = (out * stride + k * spread - pad for out in range(result) for k in range(kernel))
    return sum(0 <= place < end and place % dilate == 0 for place in places)
