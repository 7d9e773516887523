"""Scale: gradients multiplied in place by one factor on the device, through a table of addresses, in one launch.

    gradient[i] = round_to_gradient(gradient[i] * factor)      fp32 arithmetic (fp64 for fp64), one rounding

Shapes: P gradients of any sizes, factor one element. Bytes moved per element: twice the gradient's itemsize, read and
written once; plus 40 bytes of table per chunk. Missing gradients are skipped.

Example: gradients [3.0, -4.0] (bf16), factor 0.1 (fp32) -> [0.30078125, -0.400390625], the nearest of bf16.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch.autograd.graph import increment_version

from .checks import check_walk
from .chunk import MULTIPLY, NOTHING, ROW, STORED, convert_chunk, gradient_sums, no_marks, no_sums
from .table import ChunkTable, Partials, PointerTable
from .variants import (
    GRADIENTS,
    PARTIALS,
    POINTERS,
    TABLES,
    Tuning,
    Variant,
    absent,
    current_target,
    partials_of,
    tuning_for,
    walk_variant,
)


@triton.jit(do_not_specialize=POINTERS)
def _scale_kernel(
    addresses,
    rows,
    scalar,
    partial_sums,
    partial_peaks,
    first_non_finite,
    FP64: tl.constexpr,
    STATS: tl.constexpr,
    TILE_BYTES: tl.constexpr,
    LANES: tl.constexpr,
):
    """One program per data row (parameter, begin, end, offset, dtype); a branch per gradient dtype."""
    program = tl.program_id(0).to(tl.int64)
    row = rows + program * ROW
    parameter = tl.load(row)
    begin = tl.load(row + 1)
    count = (tl.load(row + 2) - begin).to(tl.int32)
    dtype = tl.load(row + 4)
    address = tl.load(addresses + parameter)
    factor = tl.load(scalar)
    WATCH: tl.constexpr = STORED if STATS else NOTHING

    COMPUTE: tl.constexpr = tl.float64 if FP64 else tl.float32
    sums, edge_sums = no_sums(TILE_BYTES // 16, COMPUTE), no_sums(LANES, tl.float64)
    marks, edge_marks = no_marks(TILE_BYTES // 16, COMPUTE, WATCH), no_marks(LANES, COMPUTE, WATCH)
    if address != 0:
        if FP64:
            place = address + begin * 8
            sums, marks, edge_sums, edge_marks = convert_chunk(
                place, place, count, factor, tl.float64, tl.float64, MULTIPLY, WATCH, TILE_BYTES, LANES
            )
        elif dtype == 0:
            place = address + begin * 4
            sums, marks, edge_sums, edge_marks = convert_chunk(
                place, place, count, factor, tl.float32, tl.float32, MULTIPLY, WATCH, TILE_BYTES, LANES
            )
        elif dtype == 1:
            place = address + begin * 2
            sums, marks, edge_sums, edge_marks = convert_chunk(
                place, place, count, factor, tl.bfloat16, tl.bfloat16, MULTIPLY, WATCH, TILE_BYTES, LANES
            )
        else:
            place = address + begin * 2
            sums, marks, edge_sums, edge_marks = convert_chunk(
                place, place, count, factor, tl.float16, tl.float16, MULTIPLY, WATCH, TILE_BYTES, LANES
            )
    if STATS:
        total, peak, first = gradient_sums(
            sums, marks, edge_sums, edge_marks, address, begin, count, dtype, FP64, LANES
        )
        tl.store(partial_sums + program, total)
        tl.store(partial_peaks + program, peak)
        tl.store(first_non_finite + program, first)


def scale(
    gradients: Sequence[torch.Tensor | None],
    chunks: ChunkTable,
    pointers: PointerTable,
    factor: torch.Tensor,
    partials: Partials | None = None,
    *,
    vouched: bool = False,
    tuning: Tuning | None = None,
) -> None:
    """Multiplies `gradients` by `factor`, in place, in one launch.

    Args:
        gradients: P tensors on one device, dense in memory (any order of dimensions), at any address; None: no
            gradient, nothing is done.
        chunks: the layout's table, with the size and dtype of each gradient. Its wire offsets are not used.
        pointers: the address table of these gradients.
        factor: one element on the device, fp32 (fp64 for fp64 gradients).
        partials: from `chunks.new_partials`, filled in the same launch from the values as stored; None: no statistics.
        vouched: skip the checks of arguments (3 us per gradient whose address is new); the caller has made them.
        tuning: launch shape; None: the architecture's.

    Raises:
        ValueError, TypeError: arguments that do not fit together; nothing is written then.
    """
    if not vouched:
        check_walk(gradients, chunks, pointers, factor, partials)
    assert factor.dtype is chunks.compute_dtype  # a kept launch takes its type for granted
    target = current_target(factor.device)
    variant = scale_variant(chunks.fp64, partials is not None, tuning or tuning_for(target), target[0])
    addresses = pointers.upload(gradients, factor.device)
    if chunks.data_rows:
        variant.launch(chunks.data_rows, (addresses, chunks.on(factor.device), factor, *partials_of(partials)))
        pointers.launched()
        increment_version([gradient for gradient in gradients if gradient is not None])


@functools.cache
def scale_variant(fp64: bool, stats: bool, tuning: Tuning, backend: str) -> Variant:
    """The compilation for mixed or fp64 gradients, with or without statistics."""
    return walk_variant(
        "scale",
        _scale_kernel,
        {**TABLES, "scalar": "*fp64" if fp64 else "*fp32", **(PARTIALS if stats else absent(PARTIALS))},
        {"FP64": fp64, "STATS": stats},
        tuning,
        backend,
        branches=tuple((gradient, gradient) for gradient in GRADIENTS[fp64]),
        label=f"{'fp64' if fp64 else 'mixed'}{', stats' if stats else ''}",
    )


def variants(tuning: Tuning, backend: str) -> tuple[Variant, ...]:
    """All variants that this file can launch on one architecture."""
    return tuple(scale_variant(fp64, stats, tuning, backend) for fp64 in (False, True) for stats in (False, True))
