"""Measure: statistics of gradients as they are, through a table of addresses, in one launch.

    sums[c], peaks[c], first_non_finite[c] of each chunk c; fp32 arithmetic (fp64 for fp64)

Shapes: P gradients of any sizes. Bytes moved per element: gradient itemsize, read once; plus 64 bytes of table and
partials per chunk. A missing gradient counts as zeros.

Example: gradients [3.0, -4.0] (fp32) in one chunk -> sum 25, peak 4, first non-finite -1.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from .checks import check_walk
from .chunk import ROW, STORED, gradient_sums, measure_chunk, no_marks, no_sums
from .table import ChunkTable, Partials, PointerTable
from .variants import (
    GRADIENTS,
    PARTIALS,
    POINTERS,
    TABLES,
    Tuning,
    Variant,
    current_target,
    partials_of,
    tuning_for,
    walk_variant,
)


@triton.jit(do_not_specialize=POINTERS)
def _measure_kernel(
    addresses,
    rows,
    partial_sums,
    partial_peaks,
    first_non_finite,
    FP64: tl.constexpr,
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

    COMPUTE: tl.constexpr = tl.float64 if FP64 else tl.float32
    sums, edge_sums = no_sums(TILE_BYTES // 16, COMPUTE), no_sums(LANES, tl.float64)
    marks, edge_marks = no_marks(TILE_BYTES // 16, COMPUTE, STORED), no_marks(LANES, COMPUTE, STORED)
    if address != 0:
        if FP64:
            sums, marks, edge_sums, edge_marks = measure_chunk(
                address + begin * 8, count, tl.float64, TILE_BYTES, LANES
            )
        elif dtype == 0:
            sums, marks, edge_sums, edge_marks = measure_chunk(
                address + begin * 4, count, tl.float32, TILE_BYTES, LANES
            )
        elif dtype == 1:
            sums, marks, edge_sums, edge_marks = measure_chunk(
                address + begin * 2, count, tl.bfloat16, TILE_BYTES, LANES
            )
        else:
            sums, marks, edge_sums, edge_marks = measure_chunk(
                address + begin * 2, count, tl.float16, TILE_BYTES, LANES
            )
    total, peak, first = gradient_sums(sums, marks, edge_sums, edge_marks, address, begin, count, dtype, FP64, LANES)
    tl.store(partial_sums + program, total)
    tl.store(partial_peaks + program, peak)
    tl.store(first_non_finite + program, first)


def measure(
    gradients: Sequence[torch.Tensor | None],
    chunks: ChunkTable,
    pointers: PointerTable,
    partials: Partials,
    *,
    vouched: bool = False,
    tuning: Tuning | None = None,
) -> None:
    """Fills `partials` with statistics of `gradients`, in one launch; writes nothing else.

    Args:
        gradients: P tensors on one device, dense in memory (any order of dimensions), at any address; None: no
            gradient, which counts as zeros.
        chunks: the layout's table, with the size and dtype of each gradient. Its wire offsets are not used.
        pointers: the address table of these gradients.
        partials: from `chunks.new_partials`, on the gradients' device.
        vouched: skip the checks of arguments (3 us per gradient whose address is new); the caller has made them.
        tuning: launch shape; None: the architecture's.

    Raises:
        ValueError, TypeError: arguments that do not fit together; nothing is written then.
    """
    if not vouched:
        check_walk(gradients, chunks, pointers, None, partials)
    device = partials.sums.device
    target = current_target(device)
    variant = measure_variant(chunks.fp64, tuning or tuning_for(target), target[0])
    addresses = pointers.upload(gradients, device)
    if chunks.data_rows:
        variant.launch(chunks.data_rows, (addresses, chunks.on(device), *partials_of(partials)))
        pointers.launched()


@functools.cache
def measure_variant(fp64: bool, tuning: Tuning, backend: str) -> Variant:
    """The compilation for mixed or fp64 gradients."""
    return walk_variant(
        "measure",
        _measure_kernel,
        {**TABLES, **PARTIALS},
        {"FP64": fp64},
        tuning,
        backend,
        branches=tuple((gradient, None) for gradient in GRADIENTS[fp64]),
        label="fp64" if fp64 else "mixed",
    )


def variants(tuning: Tuning, backend: str) -> tuple[Variant, ...]:
    """All variants that this file can launch on one architecture."""
    return tuple(measure_variant(fp64, tuning, backend) for fp64 in (False, True))
