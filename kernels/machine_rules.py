"""What the machine code of a kernel must look like, per basic block and dtype branch, and the figures read from it.

Rules, by the names that a violation carries:
    vector width   In every block, what load_vector and store_vector move per thread is what the tile calls for, or a
                   whole multiple (unrolling): TILE_BYTES / (16 x threads) accesses a side, of 16 bytes on the wider
                   side, of as many elements (8 or 4 bytes) or more on the narrower one.
    narrow piece   What load_single and store_single move is one element per access, at most UNROLL_LIMIT of them in
                   a block: one head-or-tail piece, whose loop the compiler may unroll.
    branch         Every dtype branch is there, with vector and narrow accesses on each of its sides, and no other.
    placement      Gradients and wire are touched through those four functions alone; tables and partials by the
                   kernel itself, outside its loops.
    exchange       No shared memory, barrier or shuffle, but for the reductions and debug_barrier of REDUCERS.
    memory         No atomics, generic addresses or other ways to memory.
    stack          No stack, no spills.

Example, fp32 -> bf16, TILE_BYTES 8192, 128 threads: 4 loads of 16 bytes and 4 stores of 8 bytes. Where one branch of
three lost its hints, it has 16 loads of 4 bytes, and "widest access: 16 bytes" still holds; "vector width" does not.
"""

from __future__ import annotations

import ast
import textwrap
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any, NamedTuple

from triton.runtime.jit import JITFunction

from .machine_code import Block, Frame, access_of, in_loop, shortest_turn
from .variants import Variant

VECTOR_FUNCTIONS = ("load_vector", "store_vector")
SINGLE_FUNCTIONS = ("load_single", "store_single")
# Where threads of a program may exchange values, besides kernels that have no dtype branches (the second stage).
REDUCERS = ("chunk_sum", "careful_sum")
REDUCING_CALLS = ("sum", "max", "min", "debug_barrier")
# Kernels that fill missing gradients with zeros: one branch more, which writes only.
ZEROING = ("pack",)
UNROLL_LIMIT = 4
ITEMSIZES: Mapping[str, int] = {"fp32": 4, "bf16": 2, "fp16": 2, "fp64": 8}
_DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "float64": "fp64"}


class Branch(NamedTuple):
    """One dtype branch. Without a source it writes zeros; without a destination it sums what was stored."""

    source: str | None
    destination: str | None

    def __str__(self) -> str:
        if self.destination is None:
            return f"sum of {self.source}"
        return f"{self.source or 'zero'}->{self.destination}"


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

    `per_16_bytes` counts the instructions of the shortest turn of the loop for 16 bytes of the wider side: of the
    path with an exact reciprocal, where division has another. None if the branch has no such loop.
    """

    load_bytes: int
    per_16_bytes: float | None


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


class Sources:
    """Where instructions were written: the kernel and every jit function it calls."""

    def __init__(self, variant: Variant) -> None:
        self._kernel = variant.kernel
        self._signature = variant.signature
        self._by_file: defaultdict[str, list[Any]] = defaultdict(list)
        self._trees: dict[Any, ast.AST] = {}
        waiting = [variant.kernel]
        while waiting:
            function = waiting.pop()
            if function not in self._trees:
                tree = ast.parse(textwrap.dedent("".join(function.raw_src)))
                self._trees[function] = ast.increment_lineno(tree, function.starting_line_number - 1)
                self._by_file[PurePath(function.fn.__code__.co_filename).name].append(function)
                names = (function.fn.__globals__.get(name) for name in function.fn.__code__.co_names)
                waiting.extend(name for name in names if isinstance(name, JITFunction))
        for file, functions in self._by_file.items():
            paths = {function.fn.__code__.co_filename for function in functions}
            assert len(paths) == 1, f"lines are found by file name, and {file} is the name of {sorted(paths)}"

    def function(self, frame: Frame) -> Any | None:
        """The jit function that a line lies in; None for Triton's own and for merged lines."""
        for function in self._by_file.get(frame.file, ()):
            if 0 <= frame.line - function.starting_line_number < len(function.raw_src):
                return function
        return None

    def writer(self, frames: Sequence[Frame], store: bool) -> str | None:
        """Name of the jit function that an access was written in.

        Where the compiler made one instruction of a load and a conversion, it has the line of the expression around
        the call: `load_single(...).to(COMPUTE)` counts as load_single. Line 0 of the kernel's file, inlined through no
        call, is several lines of the kernel.
        """
        if list(frames) == [Frame(PurePath(self._kernel.fn.__code__.co_filename).name, 0)]:
            return str(self._kernel.__name__)
        function = self.function(frames[0]) if frames else None
        if function is None:
            return None
        data = [name for name in VECTOR_FUNCTIONS + SINGLE_FUNCTIONS if name.startswith("store") == store]
        calls = (call.func for call in self._calls(function, frames[0].line))
        called = {call.id for call in calls if isinstance(call, ast.Name) and call.id in data}
        return called.pop() if len(called) == 1 else str(function.__name__)

    def branch(self, frames: Sequence[Frame]) -> Branch | None:
        """The dtype branch, by the arguments of the call that it was inlined through; None if it cannot be told.

        That call is to a function of SOURCE and DESTINATION (convert_chunk), of DESTINATION alone (zero_chunk) or of
        STORED (careful_sum).
        """
        for depth, frame in enumerate(frames):
            names = getattr(self.function(frame), "arg_names", ())
            if "STORED" in names:
                stored = self._dtype("STORED", frames[depth:])
                return Branch(stored, None) if stored else None
            if "DESTINATION" in names:
                destination = self._dtype("DESTINATION", frames[depth:])
                source = self._dtype("SOURCE", frames[depth:]) if "SOURCE" in names else None
                known = destination and (source or "SOURCE" not in names)
                return Branch(source, destination) if known else None
        return None

    def reduces(self, frames: Sequence[Frame], reducers: Sequence[str]) -> bool:
        """Whether an instruction belongs to a reduction or barrier that is written in one of `reducers`."""
        for frame in frames:
            function = self.function(frame)
            if function is not None:
                return function.__name__ in reducers and any(
                    isinstance(call.func, ast.Attribute) and call.func.attr in REDUCING_CALLS
                    for call in self._calls(function, frame.line)
                )
        return False

    def _calls(self, function: Any, line: int) -> Iterator[ast.Call]:
        for node in ast.walk(self._trees[function]):
            if isinstance(node, ast.Call) and node.lineno <= line <= (node.end_lineno or node.lineno):
                yield node

    def _dtype(self, parameter: str, frames: Sequence[Frame]) -> str | None:
        """What a dtype parameter of the function at frames[0] is, from the calls above it."""
        callee, caller = self.function(frames[0]), self.function(frames[1]) if len(frames) > 1 else None
        if callee is None or caller is None:
            return None
        position = callee.arg_names.index(parameter)
        found = set()
        for call in self._calls(caller, frames[1].line):
            if isinstance(call.func, ast.Name) and call.func.id == callee.__name__:
                named = {keyword.arg: keyword.value for keyword in call.keywords}
                argument = call.args[position] if position < len(call.args) else named[parameter]
                if isinstance(argument, ast.Attribute):
                    found.add(_DTYPES.get(argument.attr))
                elif isinstance(argument, ast.Name) and argument.id in caller.arg_names:
                    found.add(self._dtype(argument.id, frames[1:]))
                elif isinstance(argument, ast.Name):
                    found.add(self._element_type(caller, argument.id))
        return found.pop() if len(found) == 1 else None

    def _element_type(self, function: Any, name: str) -> str | None:
        """The dtype of `name: tl.constexpr = pointer.dtype.element_ty` in a kernel."""
        for node in ast.walk(self._trees[function]):
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.target.id == name:
                match node.value:
                    case ast.Attribute(ast.Attribute(ast.Name(pointer), "dtype"), "element_ty"):
                        return self._signature[pointer].removeprefix("*")
        return None


def examine(
    variant: Variant, target: str, blocks: Sequence[Block], threads: int, must_be_zero: Mapping[str, int]
) -> Findings:
    """Judges the machine code of one variant.

    Args:
        target: the architecture's name, for messages.
        blocks: its basic blocks, from `machine_code`.
        threads: of one program.
        must_be_zero: what the compiler says of stack and spills.
    """
    sources = Sources(variant)
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
                if not sources.reduces(frames, reducers):
                    faults[where, "exchange", f"{opcode}{_at(frames)}"] += 1
            elif writer in VECTOR_FUNCTIONS + SINGLE_FUNCTIONS:
                if branch is None or access.space != "global":
                    faults[where, "placement", f"{opcode} of no branch, or scalar,{_at(frames)}"] += 1
                elif access.store != writer.startswith("store"):
                    faults[where, "placement", f"{opcode} in {writer}"] += 1
                else:
                    data[_Key(branch, writer)].setdefault(index, []).append(access.width)
            elif access.space == "scalar" and not frames:
                continue  # a kernel argument
            elif writer != variant.kernel.__name__:
                faults[where, "placement", f"{opcode} goes round {', '.join(VECTOR_FUNCTIONS)}, ...:{_at(frames)}"] += 1
            elif variant.branches and in_loop(blocks, index):
                faults[where, "placement", f"{opcode} on a table in a loop{_at(frames)}"] += 1
    faults.update(("", "stack", f"{name} is {value}") for name, value in must_be_zero.items() if value)
    if variant.branches:
        vectors = max(1, variant.constexprs["TILE_BYTES"] // (16 * threads))
        for key, by_block in data.items():
            faults.update((str(key.branch), *fault) for fault in _width_faults(key, by_block, vectors))
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


def _width_faults(key: _Key, by_block: Mapping[int, Sequence[int]], vectors: int) -> Iterator[tuple[str, str]]:
    """Rules "vector width" and "narrow piece", for one side of one branch."""
    itemsize = _itemsize(key)
    store = "stores" if key.function.startswith("store") else "loads"
    for widths in by_block.values():
        seen = ", ".join(f"{times} {store} of {width} bytes" for width, times in sorted(Counter(widths).items()))
        if key.function in SINGLE_FUNCTIONS:
            if set(widths) != {itemsize} or len(widths) > UNROLL_LIMIT:
                yield "narrow piece", f"{seen} in a block; wanted at most {UNROLL_LIMIT} of {itemsize}"
            continue
        width = 16 // _wide_itemsize(key.branch) * itemsize
        if min(widths) < width or sum(widths) % (vectors * width):
            yield "vector width", f"{seen} in a block; the tile calls for {vectors} of {width} or a multiple"


def _missing(variant: Variant, data: Mapping[_Key, Any]) -> Iterator[tuple[str, str, str]]:
    """Rule "branch": what `variant.branches` names and the machine code lacks, or the reverse."""
    wanted = [Branch(*pair) for pair in variant.branches]
    if variant.label.partition("[")[0] in ZEROING:
        wanted.append(Branch(None, wanted[0].destination))
    for branch in wanted:
        sides = ("load", "store") if branch.source else ("store",)
        absent = [f"{side}_{kind}" for side in sides for kind in ("vector", "single")]
        absent = [function for function in absent if _Key(branch, function) not in data]
        if absent:
            yield str(branch), "branch", f"missing: no {', '.join(absent)}"
    for branch in sorted({key.branch for key in data if key.branch.destination} - set(wanted), key=str):
        yield str(branch), "branch", "is not one of the variant's"


def _figures(blocks: Sequence[Block], branch: Branch, data: Mapping[_Key, Mapping[int, Sequence[int]]]) -> BranchFigures:
    loads = data.get(_Key(branch, "load_vector"), {})
    stores = data.get(_Key(branch, "store_vector"), {})
    wide = loads if branch.source and ITEMSIZES[branch.source] == _wide_itemsize(branch) else stores
    costs = []
    for store in stores:
        for load in loads or [store]:
            turn = shortest_turn(blocks, *dict.fromkeys((load, store)))
            if turn is not None:
                costs.append(16 * turn / sum(wide[load if wide is loads else store]))
    return BranchFigures(
        load_bytes=max((sum(widths) for widths in loads.values()), default=0),
        per_16_bytes=min(costs, default=None),
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
