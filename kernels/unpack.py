"""Unpack: one flat wire buffer back into the gradients, through a table of addresses, in one launch.

    gradient[i] = round_to_gradient(wire[offset + i] * scale)      fp32 arithmetic (fp64 for fp64), one rounding

Shapes: wire [wire_numel] -> P gradients of any sizes. Bytes moved per element: wire itemsize + gradient itemsize
(bf16 -> fp32: 6), each read or written once; plus 40 bytes of table per chunk. Slots whose gradient is missing are
skipped; padding is not read.

Example: wire [40000.0] (fp16), scale 1, gradient fp32 -> [40000.0].
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch.autograd.graph import increment_version

from .chunk import FROM_WIRE, MULTIPLY, NOTHING, STORED, gradient_sums, load_place, load_row, walk_gradient
from .table import ChunkTable, Partials, PointerTable
from .variants import (
    GRADIENTS,
    PARTIALS,
    POINTERS,
    TABLES,
    TRANSFERS,
    TRITON_NAMES,
    Tuning,
    Variant,
    absent,
    partials_of,
    variant_on,
    walk_variant,
)


@triton.jit(do_not_specialize=POINTERS)
def _unpack_kernel(
    addresses,
    rows,
    wire,
    scalar,
    partial_sums,
    partial_peaks,
    first_non_finite,
    FP64: tl.constexpr,
    STATS: tl.constexpr,
    HINT: tl.constexpr,
    TILE_BYTES: tl.constexpr,
    LANES: tl.constexpr,
):
    """One program per data row."""
    program = tl.program_id(0).to(tl.int64)
    address, begin, count, offset, dtype = load_row(addresses, rows, program)
    WIRE: tl.constexpr = wire.dtype.element_ty
    WATCH: tl.constexpr = STORED if STATS else NOTHING
    place, scale = (wire + offset).to(tl.int64), tl.load(scalar)
    sums, marks, edge_sums, edge_marks = walk_gradient(
        address, begin, place, count, scale, dtype, FROM_WIRE, WIRE, FP64, MULTIPLY, WATCH, TILE_BYTES, LANES, HINT
    )
    if STATS:
        # Read again, rather than kept in registers.
        address, begin = load_place(addresses, rows, program)
        total, peak, first = gradient_sums(
            sums, marks, edge_sums, edge_marks, address, begin, count, dtype, FP64, LANES
        )
        tl.store(partial_sums + program, total)
        tl.store(partial_peaks + program, peak)
        tl.store(first_non_finite + program, first)


def unpack(
    gradients: Sequence[torch.Tensor | None],
    chunks: ChunkTable,
    pointers: PointerTable,
    wire: torch.Tensor,
    scale: torch.Tensor,
    partials: Partials | None = None,
) -> None:
    """Unflattens, scales and casts `wire` into `gradients`, in one launch.

    Arguments as for `kernels.dispatch.unpack`.
    """
    assert scale.dtype is chunks.compute_dtype  # a kept launch takes its type for granted
    variant = variant_on(wire.device, unpack_variant, wire.dtype, chunks.fp64, partials is not None)
    if chunks.data_rows:
        variant.launch(
            chunks.data_rows,
            (pointers.upload(gradients, wire.device), chunks.on(wire.device), wire, scale, *partials_of(partials)),
        )
        pointers.launched()
        increment_version([gradient for gradient in gradients if gradient is not None])


@functools.cache
def unpack_variant(wire: torch.dtype, fp64: bool, stats: bool, tuning: Tuning, backend: str) -> Variant:
    """The compilation for this wire, mixed or fp64 gradients, with or without statistics."""
    name = TRITON_NAMES[wire]
    scalar = "*fp64" if fp64 else "*fp32"
    return walk_variant(
        "unpack",
        _unpack_kernel,
        {**TABLES, "wire": f"*{name}", "scalar": scalar, **(PARTIALS if stats else absent(PARTIALS))},
        {"FP64": fp64, "STATS": stats, "HINT": tuning.hint},
        tuning,
        backend,
        branches=tuple((name, gradient) for gradient in GRADIENTS[fp64]),
        label=f"{'fp64' if fp64 else 'mixed'}, wire {name}{', stats' if stats else ''}",
    )


def variants(tuning: Tuning, backend: str) -> tuple[Variant, ...]:
    """All variants that this file can launch on one architecture."""
    return tuple(unpack_variant(*choice, tuning, backend) for choice in TRANSFERS)
