"""Reads a kernel's machine code: its instructions, where in the Python source each was written, its basic blocks.

NVIDIA: `nvdisasm -gp` names for each instruction the PTX line that it was made from, and Triton's PTX says at each
`.loc` which Python line follows and through which calls it was inlined. AMD: the assembly text has those comments:

    .loc 2 33 19    // chunk.py:33:19 @[ chunk.py:146:51 @[ pack.py:73:107 ] ]

is line 33 of chunk.py, called from line 146 of chunk.py, called from line 73 of pack.py, the kernel. Line 0 stands for
code that the compiler has merged from several lines.

Blocks are maximal: two that always run one after the other are one. AMD skips a masked access with a branch when
no lane wants it; blocks here are those of a wavefront whose lanes are all active, so `s_cbranch_execz` is never
taken and `s_cbranch_execnz` always is, and such a skip does not end a block.
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

# global: gradients, wire and tables. scalar: the same memory, through AMD's scalar unit. exchange: shared memory,
# barriers, shuffles. other: every other way to memory (atomics, generic addresses, textures, bulk copies).
Space = Literal["global", "scalar", "stack", "exchange", "other"]


@dataclass(frozen=True)
class Frame:
    """A Python line, by the name of its file."""

    file: str
    line: int


@dataclass(frozen=True)
class Instruction:
    """One instruction. `frames` says where it was written: innermost line first, the kernel's own line last."""

    opcode: str
    frames: tuple[Frame, ...] = ()
    jumps_to: str | None = None
    falls_through: bool = True


@dataclass(frozen=True)
class Access:
    """How an instruction touches memory: `width` in bytes per thread (0 where it has none)."""

    space: Space
    store: bool
    width: int


@dataclass
class Block:
    """A basic block; `successors` are indices of blocks."""

    instructions: list[Instruction] = field(default_factory=list)
    successors: list[int] = field(default_factory=list)


# ---- NVIDIA

_PTX_LOCATION = re.compile(r"\s*\.loc\s+(\d+ \d+ \d+)(?:, function_name \S+, inlined_at (\d+ \d+ \d+))?")
_SASS_PTX_LINE = re.compile(r'\.nv_debug_ptx_txt", line (\d+)')
_SASS_LABEL = re.compile(r"^(\.?[\w$]+):\s*$")
_SASS_INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)\s*([^;]*);")
_SASS_TARGET = re.compile(r"`\((\.L_\w+)\)")
_SASS_SPACES: dict[str, tuple[Space, bool]] = {
    "LDG": ("global", False),
    "LDGSTS": ("global", False),
    "STG": ("global", True),
    "LDL": ("stack", False),
    "STL": ("stack", True),
    **dict.fromkeys(("LDS", "LDSM", "BAR", "SHFL", "REDUX", "SYNCS"), ("exchange", False)),
    **dict.fromkeys(("STS", "STSM", "ATOMS", "STAS"), ("exchange", True)),
}
# Constants, dependency counters and tensor memory, which no rule is about.
_SASS_HARMLESS = {"LDC", "LDCU", "ULDC", "LDGDEPBAR", "LDTM", "STTM"}
_SASS_MEMORY = ("LD", "ST", "ATOM", "RED", "SULD", "SUST", "SURED", "TEX", "TLD", "UTMA", "UBLK", "UST", "ULD")


def parse_sass(disassembly: str, ptx: str) -> list[Block]:
    """Blocks from the output of `nvdisasm -gp -c` and the PTX that the cubin was made from."""
    written = _ptx_frames(ptx)
    frames: tuple[Frame, ...] = ()
    items: list[str | Instruction] = []
    for line in disassembly.splitlines():
        if found := _SASS_PTX_LINE.search(line):
            frames = written[int(found[1])]
        elif found := _SASS_LABEL.match(line):
            items.append(found[1])
        elif found := _SASS_INSTRUCTION.match(line):
            guard, opcode, operands = found.groups()
            items.append(_sass_instruction(guard, opcode, operands.strip(), frames))
    return _blocks(items)


def _sass_instruction(guard: str | None, opcode: str, operands: str, frames: tuple[Frame, ...]) -> Instruction:
    kind = opcode.split(".")[0]
    target = _SASS_TARGET.search(operands)
    # BSSY only names where threads meet again, and each BSYNC stands right before that label.
    jumps_to = target[1] if target and kind != "BSSY" else None
    # A condition can also stand among the operands: `BRA !P1, ...`.
    always = guard is None and (kind in ("EXIT", "RET") or (kind == "BRA" and operands.startswith("`")))
    return Instruction(opcode, frames, jumps_to, falls_through=not always)


def _ptx_frames(ptx: str) -> list[tuple[Frame, ...]]:
    """For each line of PTX, counted from 1, where it was written.

    Up to Triton 3.8 a comment names the calls that a line was inlined through. From 3.9 on `.loc` names the nearest,
    and the `.loc` of that call stands before it; where it is inlined several times, the latest one counts. And there
    every line of inline assembly has a `.loc`, whose line is counted on from that of the first.
    """
    frames: tuple[Frame, ...] = ()
    written = [frames]
    calls: dict[str, tuple[Frame, ...]] = {}
    inside = counted_on = False
    for line in ptx.splitlines():
        if "inline asm" in line:
            counted_on = False
            inside = "begin" in line
        elif (found := _PTX_LOCATION.match(line)) and not counted_on:
            place, call = found.groups()
            calls[place] = frames = _parse_frames(line.partition("//")[2]) + calls.get(call, ())
            counted_on = inside
        written.append(frames)
    return written


def _sass_access(opcode: str) -> Access | None:
    kind, *modifiers = opcode.split(".")
    if kind in _SASS_SPACES:
        space, store = _SASS_SPACES[kind]
    elif kind.startswith(_SASS_MEMORY) and kind not in _SASS_HARMLESS:
        space, store = "other", not kind.startswith(("LD", "SULD", "TEX", "TLD", "ULD"))
    else:
        return None
    widths = {"256": 32, "128": 16, "64": 8, "U16": 2, "S16": 2, "U8": 1, "S8": 1}
    return Access(space, store, next((widths[name] for name in modifiers if name in widths), 4))


# ---- AMD

_GCN_LABEL = re.compile(r"^([.\w$]+):")
_GCN_INSTRUCTION = re.compile(r"^\s+([a-z]\w+)\s*([^;]*)")
_GCN_MEMORY = re.compile(r"(global|buffer|flat|scratch|s|ds)_(?:buffer_)?(load|store|atomic|read|write)\w*?")
_GCN_WIDTHS = {
    "dwordx16": 64,
    "dwordx8": 32,
    "dwordx4": 16,
    "dwordx3": 12,
    "dwordx2": 8,
    "dword": 4,
    "short": 2,
    "byte": 1,
}
_RDNA_BITS = re.compile(r"_[bui](\d+)$")  # global_load_b128, global_store_d16_hi_b16: names from gfx11 on


def parse_gcn(assembly: str) -> list[Block]:
    """Blocks from the text that Triton's AMD backend keeps as `amdgcn`."""
    frames: tuple[Frame, ...] = ()
    items: list[str | Instruction] = []
    for line in assembly.splitlines():
        if line.startswith("\t.section") and items:
            break  # the kernel ends here; what follows describes it
        if line.lstrip().startswith(".loc"):
            frames = _parse_frames(line.partition(";")[2])
        elif found := _GCN_LABEL.match(line):
            items.append(found[1])
        elif found := _GCN_INSTRUCTION.match(line):
            items.append(_gcn_instruction(found[1], found[2].strip(), frames))
    return _blocks(items)


def _gcn_instruction(opcode: str, operands: str, frames: tuple[Frame, ...]) -> Instruction:
    if opcode == "s_endpgm":
        return Instruction(opcode, frames, falls_through=False)
    if opcode in ("s_branch", "s_cbranch_execnz"):
        return Instruction(opcode, frames, operands, falls_through=False)
    if opcode.startswith("s_cbranch") and opcode != "s_cbranch_execz":
        return Instruction(opcode, frames, operands)
    return Instruction(opcode, frames)


def _gcn_access(opcode: str) -> Access | None:
    if opcode.startswith(("ds_", "s_barrier", "v_permlane")) or opcode.endswith("_dpp"):
        return Access("exchange", opcode.startswith(("ds_write", "ds_store")), 0)
    found = _GCN_MEMORY.match(opcode)
    if not found:
        return None
    spaces: dict[str, Space] = {"global": "global", "buffer": "global", "scratch": "stack", "s": "scalar"}
    space = "other" if found[2] == "atomic" else spaces.get(found[1], "other")
    bits = _RDNA_BITS.search(opcode)
    width = int(bits[1]) // 8 if bits else next((width for name, width in _GCN_WIDTHS.items() if name in opcode), 4)
    return Access(space, found[2] != "load", width)


# ---- both


def access_of(instruction: Instruction) -> Access | None:
    """How the instruction touches memory; None if it does not. SASS is in capitals, GCN assembly is not."""
    opcode = instruction.opcode
    return _sass_access(opcode) if opcode[0].isupper() else _gcn_access(opcode)


def _parse_frames(comment: str) -> tuple[Frame, ...]:
    return tuple(Frame(file, int(line)) for file, line in re.findall(r"([^\s:\[\]]+):(\d+)", comment))


def _blocks(items: Iterable[str | Instruction]) -> list[Block]:
    """Blocks of labels and instructions in the order in which they lie; block 0 is the entry."""
    blocks = [Block()]
    begins: dict[str, int] = {}
    ended = False
    for item in items:
        if blocks[-1].instructions and (ended or isinstance(item, str)):
            blocks.append(Block())
        if isinstance(item, str):
            begins[item] = len(blocks) - 1
            continue
        blocks[-1].instructions.append(item)
        ended = item.jumps_to is not None or not item.falls_through
    for index, block in enumerate(blocks):
        if not block.instructions:
            continue
        last = block.instructions[-1]
        if last.jumps_to is not None and last.jumps_to in begins:
            block.successors.append(begins[last.jumps_to])
        if last.falls_through and index + 1 < len(blocks) and index + 1 not in block.successors:
            block.successors.append(index + 1)
    return _merged(blocks)


def _merged(blocks: Sequence[Block]) -> list[Block]:
    """The same blocks with every chain (one way out, one way in) as one."""
    reached = set(_walk(blocks, [0]))
    ways_in = [0] * len(blocks)
    for index in reached:
        for successor in blocks[index].successors:
            ways_in[successor] += 1
    inner = {
        block.successors[0]
        for index, block in enumerate(blocks)
        if index in reached and len(block.successors) == 1 and ways_in[block.successors[0]] == 1
    } - {0}
    heads = [index for index in range(len(blocks)) if index not in inner]
    place = {head: position for position, head in enumerate(heads)}
    merged = []
    for head in heads:
        chain = [head]
        while (ahead := blocks[chain[-1]].successors) and len(ahead) == 1 and ahead[0] in inner and head in reached:
            chain.append(ahead[0])
        instructions = [instruction for index in chain for instruction in blocks[index].instructions]
        merged.append((instructions, blocks[chain[-1]].successors))
    # What nothing leads to is kept, so that its accesses are judged; it can lead into the middle of a chain.
    return [Block(done, [place[index] for index in ahead if index in place]) for done, ahead in merged]


def _walk(blocks: Sequence[Block], starts: Iterable[int]) -> Iterator[int]:
    waiting, seen = list(starts), set(starts)
    while waiting:
        index = waiting.pop()
        yield index
        fresh = [successor for successor in blocks[index].successors if successor not in seen]
        seen.update(fresh)
        waiting.extend(fresh)


def in_loop(blocks: Sequence[Block], index: int) -> bool:
    """Whether a block can run more than once."""
    return index in _walk(blocks, blocks[index].successors)


def shortest_turn(blocks: Sequence[Block], *through: int) -> int | None:
    """Instructions of the shortest way from a block through the others, in order, back to it; None if there is none."""
    total = 0
    for begin, end in zip(through, (*through[1:], through[0]), strict=True):
        if begin == end and len(through) > 1:
            continue
        length = _shortest(blocks, begin, end)
        if length is None:
            return None
        total += length
    return total


def _shortest(blocks: Sequence[Block], begin: int, end: int) -> int | None:
    """Instructions from a block's first one up to, and without, the other's; a block is led back to itself."""
    waiting = [(len(blocks[begin].instructions), successor) for successor in blocks[begin].successors]
    heapq.heapify(waiting)
    seen: set[int] = set()
    while waiting:
        length, index = heapq.heappop(waiting)
        if index == end:
            return length
        if index not in seen:
            seen.add(index)
            for successor in blocks[index].successors:
                heapq.heappush(waiting, (length + len(blocks[index].instructions), successor))
    return None
