"""Combine: the sum of several tensors, written to all of them, to some, or in pieces elsewhere, in one launch.

    output[i] = round_once(scale * (tensor_0[i] + tensor_1[i] + ...))     in the order of the parts (`parts.Part`)

Shapes: P tensors [numel] of one dtype, at any addresses. Sums and the product are in fp32 (fp64 for fp64), from the
first contribution on, with one rounding to the outputs' dtype: the tensors', or of 16-bit tensors any. Bytes moved per
element: P itemsizes read, one written per output; plus 40 bytes of table per tile and 16 per contribution and tile,
which stay in the cache.

A tile is 16-byte accesses where all tensors and its outputs are aligned together, and one element per thread at
its edges or where they are not. Contributions that are added one after another need one sum per element; other
associations (a tree's) keep up to DEPTH of them in registers, and take a smaller tile for it.

Example, bf16: 256 + 1 + 1 = 258 in fp32, which bf16 holds. Rounded after every addition it would be 256.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl
from torch.autograd.graph import increment_version

from .chunk import load_single, load_vector, round_once, store_single, store_vector
from .parts import FOLD, PUSH, Part, depth, steps
from .variants import TRITON_NAMES, Tuning, Variant, lanes, variant_on

# Sums on the stack: enough for any association of up to 31 contributions.
DEPTH = 4
# Columns of a row: begin, end, first step, steps, where its outputs begin. Columns of a step: kind, address.
_ROW = tl.constexpr(5)
_STEP = tl.constexpr(2)
_PUSH = tl.constexpr(PUSH)
_FOLD = tl.constexpr(FOLD)
_POINTERS = ["rows", "steps", "outputs", "wire", "into", "scalar"]
TABLES_KEPT = 256  # tables; a group has a few for each bucket
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@triton.jit
def _take(stack, value, kind, DEPTH: tl.constexpr):
    """One step on the stack, whose top comes first. `value`: the contribution; of a FOLD it is not looked at."""
    if DEPTH == 1:
        return (stack[0] + value,)
    else:
        first, second, third, fourth = stack
        if kind == _PUSH:
            fourth = third
            third = second
            second = first
            first = value
        elif kind == _FOLD:
            first = second + first
            second = third
            third = fourth
        else:
            first = first + value
        return first, second, third, fourth


@triton.jit
def combine_tile(
    steps,
    outputs,
    begin,
    count,
    number,
    scale,
    SOURCE: tl.constexpr,
    DESTINATION: tl.constexpr,
    DEPTH: tl.constexpr,
    TILE_BYTES: tl.constexpr,
    LANES: tl.constexpr,
):
    """Adds up elements [begin, begin + count) by `number` steps and writes them to every output.

    `outputs` points to how many there are, where alignment begins (the element's index modulo a vector; -1: nowhere
    together), and where their element 0 lies, or would lie. Example, fp32, begin 5, aligned from elements 4 n + 3 on,
    count 9: the head is elements 5 and 6, one vector of 7 to 10, the tail 11 to 13.
    """
    BYTES: tl.constexpr = SOURCE.primitive_bitwidth // 8
    WRITTEN_BYTES: tl.constexpr = DESTINATION.primitive_bitwidth // 8
    COMPUTE: tl.constexpr = tl.float64 if BYTES == 8 else tl.float32
    VECTOR: tl.constexpr = 16 // WRITTEN_BYTES  # of outputs, which are no narrower
    TILE: tl.constexpr = TILE_BYTES // WRITTEN_BYTES
    written = tl.load(outputs)
    aligned = tl.load(outputs + 1)
    head = ((aligned + VECTOR - begin % VECTOR) % VECTOR).to(tl.int32)
    head = tl.minimum(tl.where(aligned < 0, count, head), count)
    middle = tl.multiple_of((count - head) // VECTOR * VECTOR, VECTOR)
    first_address = tl.load(steps + 1)

    index = tl.arange(0, TILE)
    inside = index < middle
    place = (first_address + (begin + head) * BYTES).to(tl.pointer_type(SOURCE))
    value = load_vector(tl.multiple_of(place, VECTOR * BYTES) + index, inside).to(COMPUTE)
    if DEPTH == 1:
        stack = (value,)
    else:
        stack = (value, value, value, value)  # type: ignore[assignment]  # one of the two is compiled
    for step in tl.range(1, number):
        kind = tl.load(steps + step * _STEP)
        address = tl.load(steps + step * _STEP + 1)
        place = (address + (begin + head) * BYTES).to(tl.pointer_type(SOURCE))
        wanted = inside & (kind != _FOLD) if DEPTH > 1 else inside
        value = load_vector(tl.multiple_of(place, VECTOR * BYTES) + index, wanted).to(COMPUTE)
        stack = _take(stack, value, kind, DEPTH)
    stored = round_once(stack[0] * scale, DESTINATION)
    for output in tl.range(0, written):
        address = tl.load(outputs + 2 + output)
        target = (address + (begin + head) * WRITTEN_BYTES).to(tl.pointer_type(DESTINATION))
        store_vector(tl.multiple_of(target, 16) + index, stored, inside)

    lane = tl.arange(0, LANES)
    for start in tl.range(0, count - middle, LANES):
        piece = start + lane
        within = piece < count - middle
        element = tl.where(piece < head, piece, piece + middle) + begin
        single = load_single(first_address.to(tl.pointer_type(SOURCE)) + element, within).to(COMPUTE)
        if DEPTH == 1:
            edge = (single,)
        else:
            edge = (single, single, single, single)  # type: ignore[assignment]
        for edge_step in tl.range(1, number):
            edge_kind = tl.load(steps + edge_step * _STEP)
            source = tl.load(steps + edge_step * _STEP + 1).to(tl.pointer_type(SOURCE))
            needed = within & (edge_kind != _FOLD) if DEPTH > 1 else within
            single = load_single(source + element, needed).to(COMPUTE)
            edge = _take(edge, single, edge_kind, DEPTH)
        rounded = round_once(edge[0] * scale, DESTINATION)
        for edge_output in tl.range(0, written):
            destination = tl.load(outputs + 2 + edge_output).to(tl.pointer_type(DESTINATION))
            store_single(destination + element, rounded, within)


@triton.jit(do_not_specialize=_POINTERS)
def _combine_kernel(
    rows,
    steps,
    outputs,
    wire,
    into,
    scalar,
    DEPTH: tl.constexpr,
    TILE_BYTES: tl.constexpr,
    LANES: tl.constexpr,
):
    """One program per row; `wire` and `into`, any of the tensors and any of the outputs, are there for their dtypes."""
    row = rows + tl.program_id(0).to(tl.int64) * _ROW
    begin = tl.load(row)
    count = (tl.load(row + 1) - begin).to(tl.int32)
    WIRE: tl.constexpr = wire.dtype.element_ty
    first = steps + tl.load(row + 2) * _STEP
    number = tl.load(row + 3).to(tl.int32)
    INTO: tl.constexpr = into.dtype.element_ty
    outputs += tl.load(row + 4)
    combine_tile(first, outputs, begin, count, number, tl.load(scalar), WIRE, INTO, DEPTH, TILE_BYTES, LANES)


class CombineTables:
    """Tables that launches read besides tensors, uploaded once per set of addresses, for launches on one stream.

    Rows hold the elements of each program; steps and outputs hold addresses, and change with these.
    """

    def __init__(self) -> None:
        self._uploaded: dict[object, torch.Tensor] = {}

    def rows(
        self, parts: tuple[Part, ...], ranges: tuple[tuple[int, int], ...], tile_numel: int, device: torch.device
    ) -> torch.Tensor:
        """int64 [programs, 5]: begin, end, first step, steps, outputs; `ranges`: of the elements that are written."""
        key = parts, ranges, tile_numel, device
        return self._kept(key, lambda: _rows(parts, ranges, tile_numel), device)

    def places(
        self,
        tensors: Sequence[torch.Tensor],
        outputs: Sequence[torch.Tensor],
        parts: tuple[Part, ...],
        begins: tuple[int, ...] | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Steps, int64 [steps of all parts, 2]: kind, address; and outputs, int64 [ranges, 2 + outputs of each]: count,
        alignment, addresses."""
        read = tuple([one.data_ptr() for one in tensors])
        written = tuple([one.data_ptr() for one in outputs])
        first, itemsizes = tensors[0], (tensors[0].itemsize, outputs[0].itemsize)
        made = self._kept(
            (parts, read, written, begins, first.dtype, outputs[0].dtype),
            lambda: _places(read, written, parts, begins, *itemsizes),
            first.device,
        )
        of_outputs = 2 + len(written) if begins is None else 3 * len(written)
        return made[of_outputs:], made[:of_outputs]

    def scalar(self, value: float, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """One element on the device."""
        return self._kept((value, dtype, device), lambda: np.asarray([value]), device, dtype)

    def _kept(
        self,
        key: object,
        make: Callable[[], npt.NDArray[Any]],
        device: torch.device,
        dtype: torch.dtype = torch.int64,
    ) -> torch.Tensor:
        found = self._uploaded.get(key)
        if found is None:
            if len(self._uploaded) >= TABLES_KEPT:
                self._uploaded.clear()
            host = torch.from_numpy(make()).to(dtype)
            found = host if device.type == "cpu" else host.pin_memory().to(device, non_blocking=True)
            self._uploaded[key] = found
        return found


def combine(
    tensors: Sequence[torch.Tensor],
    outputs: Sequence[torch.Tensor],
    parts: tuple[Part, ...],
    scale: float = 1.0,
    tables: CombineTables | None = None,
    *,
    begins: tuple[int, ...] | None = None,
) -> None:
    """Adds `tensors` up and writes the sum, times `scale`, into `outputs`, in one launch.

    Arguments as for `kernels.dispatch.combine`, on one device, and orders of additions that `serves` allows."""
    first, kept = tensors[0], tables if tables is not None else CombineTables()
    needed = max((depth(steps(part.adds, part.owner)) for part in parts), default=0)
    if not serves(parts, widens=outputs[0].dtype is not first.dtype):
        raise ValueError(
            f"a sum of {len(tensors)} tensors in this order needs {needed} partial sums at a time; the kernel has "
            f"{DEPTH}, or 1 for outputs of another dtype: use kernels.dispatch.combine, which takes the torch path then"
        )
    variant = variant_on(first.device, combine_variant, first.dtype, outputs[0].dtype, needed > 1)
    ranges = tuple((begin, begin + one.numel()) for begin, one in zip(begins or (0,), outputs, strict=False))
    rows = kept.rows(parts, ranges, variant.constexprs["TILE_BYTES"] // outputs[0].itemsize, first.device)
    scalar = kept.scalar(scale, torch.float64 if first.dtype is torch.float64 else torch.float32, first.device)
    places, written = kept.places(tensors, outputs, parts, begins)
    if len(rows):
        variant.launch(len(rows), (rows, places, written, first, outputs[0], scalar))
        increment_version(outputs)


def serves(parts: Sequence[Part], *, widens: bool = False) -> bool:
    """Whether the kernel can add in these orders: with at most DEPTH partial sums per element at a time.

    Args:
        parts: ranges of elements with their orders of additions.
        widens: outputs are of another dtype, for which it is compiled with one partial sum.

    Returns:
        False if only the torch path can.
    """
    return all(depth(steps(part.adds, part.owner)) <= (1 if widens else DEPTH) for part in parts)


def _rows(parts: Sequence[Part], ranges: Sequence[tuple[int, int]], tile_numel: int) -> npt.NDArray[np.int64]:
    rows, first = [], 0
    for part in parts:
        number = len(steps(part.adds, part.owner))
        for nth, (low, high) in enumerate(ranges):
            end = min(part.end, high)
            begins = np.arange(max(part.begin, low), end, tile_numel, dtype=np.int64)
            ends = np.minimum(begins + tile_numel, end)
            same = (np.full_like(begins, one) for one in (first, number, 3 * nth))  # a range alone has all outputs
            rows.append(np.stack([begins, ends, *same], axis=1))
        first += number
    return np.concatenate(rows) if rows else np.zeros((0, 5), dtype=np.int64)


def _places(
    read: Sequence[int],
    written: Sequence[int],
    parts: Sequence[Part],
    begins: Sequence[int] | None,
    itemsize: int,
    written_itemsize: int,
) -> npt.NDArray[np.int64]:
    # The first element from which on 16 bytes of outputs, and as many elements of tensors, are aligned: all must agree.
    vector, flat = 16 // written_itemsize, list[int]()
    of_tensors = {-(address // itemsize) % vector for address in read}
    groups: Sequence[Sequence[int]] = [written]
    if begins is not None:
        groups = [[address - begin * written_itemsize] for address, begin in zip(written, begins, strict=True)]
    for into in groups:
        starts = of_tensors | {-(address // written_itemsize) % vector for address in into}
        flat += [len(into), starts.pop() if len(starts) == 1 else -1, *into]
    for part in parts:
        for kind, peer in steps(part.adds, part.owner):
            flat += (kind, 0 if kind == FOLD else read[peer])
    return np.asarray(flat, dtype=np.int64)


@functools.cache
def combine_variant(dtype: torch.dtype, written: torch.dtype, stacked: bool, tuning: Tuning, backend: str) -> Variant:
    """The compilation for tensors of one dtype and outputs of one, with one partial sum per element or (`stacked`)
    DEPTH of them."""
    name, into = TRITON_NAMES[dtype], TRITON_NAMES[written]
    # With four vectors of fp64 per thread, the loop over contributions is unrolled until it spills.
    smaller = DEPTH if stacked else 2 if written is torch.float64 else 1
    constexprs = {
        "DEPTH": DEPTH if stacked else 1,
        "TILE_BYTES": tuning.tile_bytes // smaller,
        "LANES": lanes(tuning, backend),
    }
    widened = "" if dtype is written else f" to {into}"
    return Variant(
        kernel=_combine_kernel,
        signature={
            "rows": "*i64",
            "steps": "*i64",
            "outputs": "*i64",
            "wire": f"*{name}",
            "into": f"*{into}",
            "scalar": "*fp64" if dtype is torch.float64 else "*fp32",
            **dict.fromkeys(constexprs, "constexpr"),
        },
        constexprs=constexprs,
        num_warps=tuning.num_warps,
        branches=((name, into),),
        label=f"combine[{name}{widened}{', stacked' if stacked else ''}]",
    )


def variants(tuning: Tuning, backend: str) -> tuple[Variant, ...]:
    """All variants that this file can launch on one architecture."""
    same = [(dtype, dtype, stacked) for dtype in _DTYPES for stacked in (False, True)]
    others = [(dtype, into, False) for dtype in _DTYPES for into in _DTYPES if dtype.itemsize == 2 and into != dtype]
    return tuple(combine_variant(*one, tuning, backend) for one in (*same, *others))
