"""PTX as Triton writes it, read into instructions."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np

Array: TypeAlias = np.ndarray[Any, Any]
WARP = 32
RAW = {8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}
INTEGERS = {
    f"{kind}{bits}": np.dtype(f"{'i' if kind == 's' else 'u'}{bits // 8}") for kind in "bus" for bits in (8, 16, 32, 64)
}
TYPES = {**INTEGERS, "f16": np.dtype("f2"), "f32": np.dtype("f4"), "f64": np.dtype("f8"), "bf16": np.dtype("u2")}


class PtxError(Exception):
    """The code does what it must not do, or what this emulator does not know."""


@dataclass(frozen=True)
class Instruction:
    """One instruction: `guard` is (register, negated) or None, `where` the line of the source."""

    operation: str
    operands: tuple[Any, ...]
    guard: tuple[str, bool] | None
    text: str
    where: str


@dataclass
class Kernel:
    """A parsed kernel; parameters are (name, type)."""

    name: str
    target: str
    parameters: list[tuple[str, str]]
    threads: int
    widths: dict[str, int]
    code: list[Instruction]
    labels: dict[str, int]
    steps: list[Callable[[Any, Any], Any]] = field(default_factory=list)
    executed: Array = field(default_factory=lambda: np.zeros(0, dtype=np.int64))

    def coverage(self) -> tuple[int, int]:
        """Instructions that have run in any thread, and all."""
        return int((self.executed > 0).sum()), len(self.code)


@dataclass(frozen=True)
class Register:
    name: str


@dataclass(frozen=True)
class Literal:
    """A number as its bits; `floating` is the width of a floating-point literal, 0 of an integer."""

    bits: int
    floating: int


@dataclass(frozen=True)
class Place:
    """[base + offset]; base None: an absolute address."""

    base: Any
    offset: int


_FILE = re.compile(r'\s*\.file\s+(\d+)\s+"([^"]*)"(?:\s+"([^"]*)")?')
_LOC = re.compile(r"\s*\.loc\s+(\d+)\s+(\d+)")
_PARAMETER = re.compile(r"\.param\s+\.(\w+)(?:\s+\.ptr[^,\n]*?)?\s+(\w+)(?:,|\s*$)", re.MULTILINE)
_GUARD = re.compile(r"@(!?)(%\w+)\s+(.*)", re.DOTALL)


def parse(ptx: str) -> Kernel:
    """The one kernel of a PTX module."""
    files = {match[1]: (match[3] or match[2]) for match in map(_FILE.match, ptx.splitlines()) if match}
    target = re.search(r"^\.target\s+(\S+)", ptx, re.MULTILINE)
    head = re.search(r"\.visible \.entry (\w+)\((.*?)\)\s*(.*?)\{", ptx, re.DOTALL)
    if head is None or target is None:
        raise PtxError("no kernel in this PTX")
    parameters = [(name, kind) for kind, name in _PARAMETER.findall(head[2])]
    if len(parameters) != head[2].count(".param"):
        raise PtxError(f"parameters not understood: {head[2]}")
    threads = re.search(r"\.reqntid\s+(\d+)", head[3])
    if threads is None:
        raise PtxError("no .reqntid")
    body = ptx[head.end() :]
    body = body[: re.search(r"^\}", body, re.MULTILINE).start()]  # type: ignore[union-attr]
    kernel = Kernel(head[1], target[1].rstrip(","), parameters, int(threads[1]), {}, [], {})
    where = ""
    for line in body.splitlines():
        location = _LOC.match(line)
        if location:
            note = line.partition("//")[2].strip()
            where = note or f"{files.get(location[1], location[1])}:{location[2]}"
            continue
        line = line.partition("//")[0].strip()
        while label := re.match(r"(\$?\w+):\s*", line):
            kernel.labels[label[1]] = len(kernel.code)
            line = line[label.end() :]
        for statement in filter(None, (part.strip() for part in line.split(";"))):
            if declared := re.fullmatch(r"\.reg\s+\.(\w+)\s+%(\w+)<\d+>", statement):
                kernel.widths[declared[2]] = 1 if declared[1] == "pred" else int(declared[1][1:])
            elif statement.startswith((".", "{", "}")):
                raise PtxError(f"not understood: {statement}")
            else:
                kernel.code.append(_instruction(statement, where))
    return kernel


def _instruction(text: str, where: str) -> Instruction:
    guard = None
    if match := _GUARD.fullmatch(text):
        guard, text = (match[2], match[1] == "!"), match[3]
    operation, _, rest = text.partition(" ") if " " in text else text.partition("\t")
    operation = operation.strip()
    operands = tuple(_operand(part) for part in _split(rest.strip()))
    return Instruction(operation, operands, guard, " ".join(text.split()), where)


def _split(text: str) -> list[str]:
    if not any(bracket in text for bracket in "{["):
        return [part.strip() for part in text.split(",")] if text else []
    parts, depth, current = [], 0, ""
    for letter in text:
        depth += (letter in "{[") - (letter in "}]")
        if letter == "," and depth == 0:
            parts.append(current.strip())
            current = ""
        else:
            current += letter
    return [*parts, current.strip()] if current.strip() else parts


@functools.cache  # a kernel names few registers, and often
def _operand(text: str) -> Any:
    if text[0] == "{":
        return tuple(None if part == "_" else _operand(part) for part in _split(text[1:-1].strip()))
    if text[0] == "[":
        base, _, offset = text[1:-1].strip().partition("+")
        return Place(_operand(base.strip()), int(offset or "0", 0))
    if text[0] == "%":
        return Register(text)
    if match := re.fullmatch(r"0[fF]([0-9a-fA-F]{8})", text):
        return Literal(int(match[1], 16), 32)
    if match := re.fullmatch(r"0[dD]([0-9a-fA-F]{16})", text):
        return Literal(int(match[1], 16), 64)
    if re.fullmatch(r"-?(0[xX][0-9a-fA-F]+|\d+)U?", text):
        return Literal(int(text.rstrip("U"), 0), 0)
    return text  # a symbol or label
