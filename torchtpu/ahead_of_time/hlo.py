"""Reads the text of a compiled, scheduled program (HLO) as libtpu prints it. Plain Python.

    %fusion.7 = bf16[8,576]{1,0:T(8,128)(2,1)S(1)} fusion(%copy-done, %Arg_62.0), kind=kOutput, calls=%f.7, …

`{1,0:T(8,128)(2,1)S(1)}` is the layout: dimensions from the fastest one on, tiles that memory is padded to,
and the memory space, which is HBM where it is not said.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

_BYTES = {
    "pred": 1, "s4": 0.5, "u4": 0.5, "s8": 1, "u8": 1, "f8e4m3fn": 1, "f8e5m2": 1,
    "s16": 2, "u16": 2, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4, "s64": 8, "u64": 8, "f64": 8,
}  # fmt: skip
_SHAPE = re.compile(r"(\w+)\[([\d,]*)\](?:\{([^{}]*)\})?")
_TILE = re.compile(r"T\(([\d,]+)\)")
_COMPUTATION = re.compile(r"(ENTRY )?%?([\w.\-]+) \(")
_INSTRUCTION = re.compile(r"\s+(ROOT )?%?([\w.\-]+) = (.*)$")
_OPCODE = re.compile(r"\s*([\w\-]+)\(")
_OPERAND = re.compile(r"%([\w.\-]+)")


@dataclass(frozen=True)
class Shape:
    """One array, or one part of a tuple."""

    dtype: str
    dims: tuple[int, ...]
    num_bytes: int
    """In memory, the padding of tiles included."""
    in_hbm: bool


@dataclass(frozen=True)
class Instruction:
    name: str
    shapes: tuple[Shape, ...]
    opcode: str
    operands: tuple[str, ...]
    attributes: str
    """What follows the operands; of a parameter or constant what stands for them."""
    is_root: bool

    def called(self) -> list[str]:
        """Names of the computations that it runs."""
        names = re.findall(
            r"(?:calls|to_apply|body|(?:true|false)_computation)=%?([\w.\-]+)", self.attributes
        )
        for branches in re.findall(r"branch_computations=\{([^}]*)\}", self.attributes):
            names += _OPERAND.findall(branches)
        return names


Computation = Mapping[str, Instruction]


@dataclass(frozen=True)
class Program:
    computations: Mapping[str, Computation]
    entry: str


def parse(text: str) -> Program:
    """Raises ValueError if there is no entry computation."""
    computations: dict[str, dict[str, Instruction]] = {}
    current: dict[str, Instruction] | None = None
    entry = None
    for line in text.splitlines():
        if line and not line[0].isspace():
            current = None
            header = _COMPUTATION.match(line)
            if header and line.rstrip().endswith("{"):
                current = computations[header.group(2)] = {}
                entry = header.group(2) if header.group(1) else entry
        elif current is not None:
            instruction = _instruction(line)
            if instruction is not None:
                current[instruction.name] = instruction
    if entry is None:
        raise ValueError("the compiler printed no program")
    return Program(computations, entry)


def _instruction(line: str) -> Instruction | None:
    found = _INSTRUCTION.match(line)
    if found is None:
        return None
    root, name, rest = found.groups()
    end = _closing(rest, 0) + 1 if rest.startswith("(") else rest.index(" ")
    opcode = _OPCODE.match(rest, end)
    if opcode is None:
        return None
    close = _closing(rest, opcode.end() - 1)
    inside = rest[opcode.end() : close]
    return Instruction(
        name=name,
        shapes=tuple(_shape(match) for match in _SHAPE.finditer(rest[:end]) if match[1] in _BYTES),
        opcode=opcode.group(1),
        operands=tuple(_OPERAND.findall(inside)),
        attributes=inside if opcode.group(1) in ("parameter", "constant") else rest[close + 1 :],
        is_root=root is not None,
    )


def _closing(text: str, start: int) -> int:
    """Index of the bracket that closes the one at `start`."""
    depth = 0
    for index in range(start, len(text)):
        depth += {"(": 1, ")": -1}.get(text[index], 0)
        if depth == 0:
            return index
    raise ValueError("a bracket is not closed")


def _shape(match: re.Match[str]) -> Shape:
    dtype, numbers, layout = match.groups()
    dims = tuple(int(n) for n in numbers.split(",") if n)
    order, _, rest = (layout or "").partition(":")
    fastest_first = [dims[int(n)] for n in order.split(",") if n.strip()] or list(dims[::-1])
    tile = _TILE.search(rest)
    if tile and dims:
        sizes = [int(n) for n in tile.group(1).split(",")][::-1]
        for index, size in enumerate(sizes[: len(dims)]):
            fastest_first[index] = -(-fastest_first[index] // size) * size
    num_bytes = int(prod(fastest_first) * _BYTES[dtype])
    return Shape(dtype, dims, num_bytes, "S(" not in rest)
