"""What the machine code of a kernel must look like, per basic block and dtype branch, and the figures read from it.

Rules, by the names that a violation carries:
    vector width   In every block, what load_vector and store_vector move per thread is what the tile calls for, or a
                   whole multiple (unrolling): TILE_BYTES / (16 x threads) accesses a side, of 16 bytes on the wider
                   side, of as many elements (8 or 4 bytes) or more on the narrower one. (SPREAD, and DIVISIONS_SPREAD:
                   in all blocks together.)
    narrow piece   What load_single and store_single move is one element per access, at most UNROLL_LIMIT of them in
                   a block: one head-or-tail piece, whose loop the compiler may unroll. (BLOCKED: any number of them.)
    branch         Every dtype branch is there, with vector and narrow accesses on each of its sides, and no other.
                   (Codes, and kernels of WHOLE blocks: vector accesses.)
    placement      Gradients and wire are touched through those four functions alone; tables and partials by the
                   kernel itself, outside its loops, or (tables alone) by LOOKING_UP; scales by SCALES.
    exchange       No shared memory, barrier or shuffle, but for the reductions and debug_barrier of REDUCERS, and those
                   within a warp of WARP_REDUCERS.
    memory         No atomics, generic addresses or other ways to memory.
    stack          No stack, no spills.
    fusion         Kernels of encoded blocks round each product and each sum: none is fused, or left to ptxas, which may
                   fuse what has no ".rn". (Of the PTX, so not for AMD.)

Example, fp32 -> bf16, TILE_BYTES 8192, 128 threads: 4 loads of 16 bytes and 4 stores of 8 bytes. Where one branch of
three lost its hints, it has 16 loads of 4 bytes, and "widest access: 16 bytes" still holds; "vector width" does not.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from fusedreduce.kernels.triton_versions import VERSION
from fusedreduce.kernels.variants import Variant

from .disassembly import Block, Frame, access_of, in_loop, shortest_turn
from .provenance import SINGLE_FUNCTIONS, VECTOR_FUNCTIONS, Branch, Sources

# Where threads of a program may exchange values, besides kernels that have no dtype branches (the second stage).
REDUCERS = ("chunk_sum", "chunk_faults", "careful_sum", "count_faults")
# Where threads of one warp may, without shared memory.
WARP_REDUCERS = ("block_peaks",)
WITHIN_A_WARP = ("SHFL", "REDUX", "ds_swizzle", "ds_bpermute", "v_permlane")
# Kernels that fill missing gradients with zeros: one branch more, which writes only.
ZEROING = ("pack",)
# Kernels whose addresses come from a table in a loop, or whose loops are short: the compilers for AMD (and sm_80) make
# several blocks of a tile's accesses.
SPREAD = ("combine", "combine_encoded", "decode")
# What reads a row of a table, or walks a tile once for each entry of one.
LOOKING_UP = ("load_row", "load_place", "combine_tile", "combine_blocks", "load_residuals", "load_key")
# What reads and writes the scales of encoded blocks.
SCALES = ("load_scales", "store_scales")
# Kernels of encoded blocks: a tile's last elements move one by one within the tile.
BLOCKED = ("encode", "decode", "combine_encoded")
# Those that move whole blocks at aligned addresses alone. (Codes are never anything else.)
WHOLE = ("combine_encoded",)
# From Triton 3.9 on the call that divides subnormal numbers may fall between the stores of a tile.
DIVISIONS_SPREAD = VERSION >= (3, 9)
UNROLL_LIMIT = 8 if VERSION >= (3, 9) else 4
_FUSIBLE = re.compile(r"\b(?:fma|mad)\.\S*f(?:16|32|64)\S*|\b(?:add|sub|mul)\.(?!rn\b)\S*f(?:16|32|64)\S*")
ITEMSIZES: Mapping[str, int] = {"fp32": 4, "bf16": 2, "fp16": 2, "fp64": 8, "i8": 1}


class Violation(NamedTuple):
    """One broken rule. `branch` is empty where the rule is about the whole kernel."""

    kernel: str
    target: str
    branch: str
    rule: str
    detail: str

    def __str__(self) -> str:
        branch = f", branch {self.branch}" if self.branch else ""
        return f"{self.kernel} on {self.target}{branch}: {self.rule}: {self.detail}"


@dataclass(frozen=True)
class BranchFigures:
    """Of one dtype branch: bytes of vector loads that one thread issues in a block, and the cost of its tile loop.

    `per_16_bytes` counts the instructions of the shortest turn of the loop for 16 bytes of the wider side; None if the
    branch has no such loop. `loads` and `stores` count its accesses to gradients and wire by their width.
    """

    load_bytes: int
    per_16_bytes: float | None
    loads: Mapping[int, int] = field(default_factory=dict)
    stores: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Findings:
    """What reading one kernel gave. `loads` and `stores` count the accesses to gradients and wire by their width."""

    violations: tuple[Violation, ...]
    branches: Mapping[str, BranchFigures]
    loads: Mapping[int, int]
    stores: Mapping[int, int]


class _Key(NamedTuple):
    branch: Branch
    function: str


def examine(
    variant: Variant, target: str, blocks: Sequence[Block], threads: int, must_be_zero: Mapping[str, int]
) -> Findings:
    """Judges the machine code of one variant.

    Args:
        target: the architecture's name, for messages.
        blocks: its basic blocks, from `disassembly`.
        threads: of one program.
        must_be_zero: what the compiler says of stack and spills.
    """
    sources, name = Sources(variant), variant.label.partition("[")[0]
    faults: Counter[tuple[str, str, str]] = Counter()
    reducers = REDUCERS if variant.branches else (variant.kernel.__name__,)
    data: defaultdict[_Key, dict[int, list[int]]] = defaultdict(dict)
    for index, block in enumerate(blocks):
        for instruction in block.instructions:
            access = access_of(instruction)
            if access is None:
                continue
            frames, opcode = instruction.frames, instruction.opcode
            writer, branch = sources.writer(frames, access.store), sources.branch(frames)
            where = str(branch or "")
            if access.space == "stack":
                faults[where, "stack", opcode] += 1
            elif access.space == "other":
                faults[where, "memory", f"{opcode}{_at(frames)}"] += 1
            elif access.space == "exchange":
                within = opcode.startswith(WITHIN_A_WARP) or opcode.endswith("_dpp")
                if not sources.reduces(frames, (*reducers, *(WARP_REDUCERS if within else ()))):
                    faults[where, "exchange", f"{opcode}{_at(frames)}"] += 1
            elif access.space == "scalar" and name in BLOCKED:
                continue  # kernel arguments where they are first needed: what threads share is no gradient
            elif writer in VECTOR_FUNCTIONS + SINGLE_FUNCTIONS:
                if branch is None or access.space != "global":
                    faults[where, "placement", f"{opcode} of no branch, or scalar,{_at(frames)}"] += 1
                elif access.store != writer.startswith("store"):
                    faults[where, "placement", f"{opcode} in {writer}"] += 1
                else:
                    data[_Key(branch, writer)].setdefault(index, []).append(access.width)
            elif access.space == "scalar" and (not frames or frames[0].line == 0):
                continue  # kernel arguments, for all the code that needs them
            elif writer in SCALES or (writer in LOOKING_UP and not access.store):
                continue
            elif writer != variant.kernel.__name__:
                faults[where, "placement", f"{opcode} goes round {', '.join(VECTOR_FUNCTIONS)}, ...:{_at(frames)}"] += 1
            elif name in BLOCKED and not sources.touches_memory(frames[0]):
                continue  # one instruction made of those of two branches, on the line of a call: both are narrow ones
            elif variant.branches and in_loop(blocks, index):
                faults[where, "placement", f"{opcode} on a table in a loop{_at(frames)}"] += 1
    faults.update(("", "stack", f"{what} is {value}") for what, value in must_be_zero.items() if value)
    if variant.branches:
        vectors = max(1, variant.constexprs["TILE_BYTES"] // (16 * threads))
        divides = not variant.constexprs.get("EXACT", True)
        spread = name in SPREAD or (divides and DIVISIONS_SPREAD)
        blocked = name in BLOCKED
        # Residuals may be wider than both sides of a branch.
        least = (8 if variant.constexprs.get("FP64") else 4) if variant.constexprs.get("FEEDBACK") else 1
        packed = variant.constexprs.get("BITS") == 4
        for key, by_block in data.items():
            judged = {0: [width for widths in by_block.values() for width in widths]} if spread else by_block
            judged = judged if key.function in VECTOR_FUNCTIONS else by_block
            itemsize = _itemsize(key)
            width = 16 // max(_wide_itemsize(key.branch), least) * itemsize
            share = 2 if packed and itemsize == 1 else 1
            limit = math.inf if blocked else UNROLL_LIMIT
            found = _width_faults(key, judged, width, vectors * width, share, limit)
            faults.update((str(key.branch), *fault) for fault in found)
        faults.update(_missing(variant, data))
    return Findings(
        violations=tuple(
            Violation(variant.label, target, branch, rule, detail if times == 1 else f"{times} x {detail}")
            for (branch, rule, detail), times in sorted(faults.items())
        ),
        branches={str(branch): _figures(blocks, branch, data) for branch in _tiled(data)},
        loads=_by_width(data, "load"),
        stores=_by_width(data, "store"),
    )


def fusion(variant: Variant, target: str, ptx: str) -> tuple[Violation, ...]:
    """Rule "fusion", for the PTX of one variant."""
    found = Counter(_FUSIBLE.findall(ptx)) if variant.label.partition("[")[0] in BLOCKED else {}
    return tuple(
        Violation(variant.label, target, "", "fusion", f"{times} x {operation}")
        for operation, times in sorted(found.items())
    )


def _width_faults(
    key: _Key, by_block: Mapping[int, Sequence[int]], width: int, total: int, share: int, limit: float
) -> Iterator[tuple[str, str]]:
    """Rules "vector width" and "narrow piece", for one side of one branch.

    Args:
        key: the side.
        by_block: widths of its accesses.
        width: of an access, at least.
        total: bytes of a tile per thread; `share` of them in each byte of this side.
        share: elements in a byte.
        limit: most accesses of single elements in a block.
    """
    itemsize = _itemsize(key)
    store = "stores" if key.function.startswith("store") else "loads"
    for widths in by_block.values():
        seen = ", ".join(f"{times} {store} of {width} bytes" for width, times in sorted(Counter(widths).items()))
        if key.function in SINGLE_FUNCTIONS:
            if set(widths) != {itemsize} or len(widths) > limit:
                yield "narrow piece", f"{seen} in a block; wanted at most {limit} of {itemsize}"
            continue
        if min(widths) < width or sum(widths) * share % total:
            wanted = f"{total // width // share} of {width}" if total >= width * share else f"1 of {width}"
            yield "vector width", f"{seen} in a block; the tile calls for {wanted} or a multiple"


def _missing(variant: Variant, data: Mapping[_Key, Any]) -> Iterator[tuple[str, str, str]]:
    """Rule "branch": what `variant.branches` names and the machine code lacks, or the reverse."""
    wanted = [Branch(source, destination) for source, destination in variant.branches]
    if variant.label.partition("[")[0] in ZEROING:
        wanted.append(Branch(None, wanted[0].destination))
    whole = variant.label.partition("[")[0] in WHOLE
    for branch in wanted:
        absent = [
            f"{side}_{kind}"
            for side, dtype in zip(("load", "store"), branch, strict=True)
            if dtype
            for kind in (("vector",) if whole or dtype == "i8" else ("vector", "single"))
        ]
        absent = [function for function in absent if _Key(branch, function) not in data]
        if absent:
            yield str(branch), "branch", f"missing: no {', '.join(absent)}"
    for branch in sorted({key.branch for key in data if key.branch.destination} - set(wanted), key=str):
        yield str(branch), "branch", "is not one of the variant's"


def _figures(
    blocks: Sequence[Block], branch: Branch, data: Mapping[_Key, Mapping[int, Sequence[int]]]
) -> BranchFigures:
    loads = data.get(_Key(branch, "load_vector"), {})
    stores = data.get(_Key(branch, "store_vector"), {})
    wide = loads if branch.source and ITEMSIZES[branch.source] == _wide_itemsize(branch) else stores
    of_branch = {key: by_block for key, by_block in data.items() if key.branch == branch}
    costs = []
    for store in stores or loads:  # reading alone is a turn too
        for load in loads or [store]:
            turn = shortest_turn(blocks, *dict.fromkeys((load, store)))
            if turn is not None:
                costs.append(16 * turn / sum(wide[load if wide is loads else store]))
    return BranchFigures(
        load_bytes=max((sum(widths) for widths in loads.values()), default=0),
        per_16_bytes=min(costs, default=None),
        loads=_by_width(of_branch, "load"),
        stores=_by_width(of_branch, "store"),
    )


def _tiled(data: Mapping[_Key, Any]) -> list[Branch]:
    return sorted({key.branch for key in data if key.function in VECTOR_FUNCTIONS}, key=str)


def _wide_itemsize(branch: Branch) -> int:
    return max(ITEMSIZES[dtype] for dtype in branch if dtype)


def _itemsize(key: _Key) -> int:
    dtype = key.branch.source if key.function.startswith("load") else key.branch.destination
    assert dtype is not None
    return ITEMSIZES[dtype]


def _by_width(data: Mapping[_Key, Mapping[int, Sequence[int]]], side: str) -> dict[int, int]:
    widths: Counter[int] = Counter()
    for key, by_block in data.items():
        if key.function.startswith(side):
            for block in by_block.values():
                widths.update(block)
    return dict(sorted(widths.items(), reverse=True))


def _at(frames: Sequence[Frame]) -> str:
    if not frames:
        return " without line information"
    return " at " + " from ".join(f"{frame.file}:{frame.line}" for frame in frames)
