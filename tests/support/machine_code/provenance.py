"""Provenance of machine code: from the source lines of an instruction to jit functions and dtype branches.

`frames` are an instruction's lines, innermost first, as `disassembly` reads them. Example, in pack for a bf16 wire:
chunk.py:33, chunk.py:146, pack.py:73 is load_vector (line 33), called by convert_chunk (146), called by the kernel with
tl.float32 for SOURCE and WIRE for DESTINATION: an access of load_vector in the branch fp32->bf16.
"""

from __future__ import annotations

import ast
import textwrap
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import PurePath
from typing import Any, NamedTuple

from triton.runtime.jit import JITFunction

from fusedreduce.kernels.variants import Variant

from .disassembly import Frame

VECTOR_FUNCTIONS = ("load_vector", "store_vector")
SINGLE_FUNCTIONS = ("load_single", "store_single")
REDUCING_CALLS = ("sum", "max", "min", "debug_barrier")
_DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "float64": "fp64", "int8": "i8"}


class Branch(NamedTuple):
    """One dtype branch. Without a source it writes zeros; without a destination it only reads."""

    source: str | None
    destination: str | None

    def __str__(self) -> str:
        if self.destination is None:
            return f"read {self.source}"
        return f"{self.source or 'zero'}->{self.destination}"


class Sources:
    """The sources of a kernel and of every jit function that it calls."""

    def __init__(self, variant: Variant) -> None:
        self._kernel = variant.kernel
        self._signature = variant.signature
        self._by_file: defaultdict[str, list[Any]] = defaultdict(list)
        self._trees: dict[Any, ast.AST] = {}
        self._all_calls: dict[Any, list[ast.Call]] = {}
        waiting = [variant.kernel]
        while waiting:
            function = waiting.pop()
            if function not in self._trees:
                tree = ast.parse(textwrap.dedent("".join(function.raw_src)))
                self._trees[function] = ast.increment_lineno(tree, function.starting_line_number - 1)
                self._all_calls[function] = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
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
        """The dtype branch, by the arguments of the call that it was inlined through; None if that is ambiguous.

        That call is to a function of SOURCE and DESTINATION (convert_chunk), of DESTINATION alone (zero_chunk,
        store_kept) or of SOURCE alone (measure_chunk, careful_sum, load_kept).
        """
        for depth, frame in enumerate(frames):
            names = getattr(self.function(frame), "arg_names", ())
            wanted = [name for name in ("SOURCE", "DESTINATION") if name in names]
            if wanted:
                found = {name: self._dtype(name, frames[depth:]) for name in wanted}
                return Branch(found.get("SOURCE"), found.get("DESTINATION")) if all(found.values()) else None
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

    def touches_memory(self, frame: Frame) -> bool:
        """Whether `tl.load` or `tl.store` is called on a line."""
        calls = self._calls(self.function(frame), frame.line) if self.function(frame) else ()
        return any(isinstance(call.func, ast.Attribute) and call.func.attr in ("load", "store") for call in calls)

    def _calls(self, function: Any, line: int) -> Iterator[ast.Call]:
        for call in self._all_calls[function]:
            if call.lineno <= line <= (call.end_lineno or call.lineno):
                yield call

    def _dtype(self, parameter: str, frames: Sequence[Frame]) -> str | None:
        """The value of a dtype parameter of the function at frames[0], from the calls above it."""
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
