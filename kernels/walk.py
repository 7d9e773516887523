"""Gradients as they are, through a table of addresses, in one launch: measured, or multiplied in place.

    measure:  sums[c], peaks[c], first_non_finite[c] of each chunk c
    scale:    gradient[i] = round_to_gradient(gradient[i] * factor)      one rounding

fp32 arithmetic (fp64 for fp64). Shapes: P gradients of any sizes, factor one element. Bytes moved per element: gradient
itemsize, read once (scale: and written once); plus 40 bytes of table per chunk (measure: and 24 of partials). A missing
gradient counts as zeros.

Example: gradients [3.0, -4.0] (fp32) in one chunk -> sum 25, peak 4, first non-finite -1. gradients [3.0, -4.0] (bf16),
factor 0.1 (fp32) -> [0.30078125, -0.400390625], the nearest of bf16.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch.autograd.graph import increment_version

from .chunk import IN_PLACE, MULTIPLY, NOTHING, READ, STORED, gradient_sums, load_row, walk_gradient
from .table import ChunkTable, Partials, PointerTable
from .variants import (
    GRADIENTS,
    PARTIALS,
    POINTERS,
    TABLES,
    Tuning,
    Variant,
    absent,
    partials_of,
    variant_on,
    walk_variant,
)


@triton.jit(do_not_specialize=POINTERS)
def _walk_kernel(
    addresses,
    rows,
    scalar,
    partial_sums,
    partial_peaks,
    first_non_finite,
    FP64: tl.constexpr,
    SCALES: tl.constexpr,
    TILE_BYTES: tl.constexpr,
    LANES: tl.constexpr,
):
    """One program per data row."""
    program = tl.program_id(0).to(tl.int64)
    address, begin, count, offset, dtype = load_row(addresses, rows, program)
    WAY: tl.constexpr = IN_PLACE if SCALES else READ
    WATCH: tl.constexpr = NOTHING if SCALES else STORED
    if SCALES:
        factor = tl.load(scalar)
    else:
        factor = 1.0
    sums, marks, edge_sums, edge_marks = walk_gradient(
        address, begin, address, count, factor, dtype, WAY, tl.float32, FP64, MULTIPLY, WATCH, TILE_BYTES, LANES
    )
    if not SCALES:
        total, peak, first = gradient_sums(
            sums, marks, edge_sums, edge_marks, address, begin, count, dtype, FP64, LANES
        )
        tl.store(partial_sums + program, total)
        tl.store(partial_peaks + program, peak)
        tl.store(first_non_finite + program, first)


def measure(
    gradients: Sequence[torch.Tensor | None],
    chunks: ChunkTable,
    pointers: PointerTable,
    partials: Partials,
) -> None:
    """Fills `partials` with statistics of `gradients`, in one launch; arguments as for `kernels.dispatch.measure`."""
    device = partials.sums.device
    variant = variant_on(device, walk_variant_of, chunks.fp64, False)
    if chunks.data_rows:
        variant.launch(
            chunks.data_rows, (pointers.upload(gradients, device), chunks.on(device), None, *partials_of(partials))
        )
        pointers.launched()


def scale(
    gradients: Sequence[torch.Tensor | None],
    chunks: ChunkTable,
    pointers: PointerTable,
    factor: torch.Tensor,
) -> None:
    """Multiplies `gradients` by `factor`, in place, in one launch; arguments as for `kernels.dispatch.scale`."""
    assert factor.dtype is chunks.compute_dtype  # a kept launch takes its type for granted
    variant = variant_on(factor.device, walk_variant_of, chunks.fp64, True)
    if chunks.data_rows:
        variant.launch(
            chunks.data_rows,
            (pointers.upload(gradients, factor.device), chunks.on(factor.device), factor, *partials_of(None)),
        )
        pointers.launched()
        increment_version([gradient for gradient in gradients if gradient is not None])


@functools.cache
def walk_variant_of(fp64: bool, scales: bool, tuning: Tuning, backend: str) -> Variant:
    """The compilation of scale or measure for mixed or fp64 gradients."""
    scalar = {"scalar": "*fp64" if fp64 else "*fp32"}
    return walk_variant(
        "scale" if scales else "measure",
        _walk_kernel,
        {**TABLES, **(scalar if scales else absent(scalar)), **(absent(PARTIALS) if scales else PARTIALS)},
        {"FP64": fp64, "SCALES": scales},
        tuning,
        backend,
        branches=tuple((gradient, gradient if scales else None) for gradient in GRADIENTS[fp64]),
        label="fp64" if fp64 else "mixed",
    )


def variants(tuning: Tuning, backend: str) -> tuple[Variant, ...]:
    """All variants that this file can launch on one architecture."""
    return tuple(walk_variant_of(fp64, scales, tuning, backend) for scales in (False, True) for fp64 in (False, True))
