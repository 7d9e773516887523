"""Pack: gradients, through a table of addresses, into one flat wire buffer, in one launch.

    wire[offset + i] = round_to_wire(gradient[i] / divisor)        fp32 arithmetic (fp64 for fp64), one rounding

Shapes: P gradients of any sizes -> wire [wire_numel]. Bytes moved per element: gradient itemsize + wire itemsize
(fp32 -> bf16: 6), each read or written once; plus 40 bytes of table per chunk. A missing gradient and the padding
between slots are written as zeros.

Example: gradients [80000.0] (fp32), divisor 2, wire fp16 -> [40000.0]. Casting first would give inf.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch.autograd.graph import increment_version

from . import few_ops
from .chunk import (
    DIVIDE,
    MULTIPLY,
    NEAREST,
    NOTHING,
    PADDING,
    SOURCES,
    TO_WIRE,
    careful_gradient,
    chunk_faults,
    load_place,
    load_row,
    walk_gradient,
)
from .division import division
from .table import ChunkTable, PointerTable, SourcePartials
from .variants import (
    GRADIENTS,
    POINTERS,
    SOURCE_PARTIALS,
    TABLES,
    TRANSFERS,
    TRITON_NAMES,
    Tuning,
    Variant,
    absent,
    sources_of,
    variant_on,
    walk_variant,
)


@triton.jit(do_not_specialize=POINTERS)
def _pack_kernel(
    addresses,
    rows,
    wire,
    number: tl.float64,
    first_non_finite,
    flushed,
    FP64: tl.constexpr,
    EXACT: tl.constexpr,
    STATS: tl.constexpr,
    HINT: tl.constexpr,
    ROUNDING: tl.constexpr,
    TILE_BYTES: tl.constexpr,
    LANES: tl.constexpr,
):
    """One program per table row.

    EXACT: gradients are multiplied by `number`, else divided by it. Its type is fixed, so no value of it compiles.
    ROUNDING: NEAREST, or a CastWire's kernel.
    """
    program = tl.program_id(0).to(tl.int64)
    address, begin, count, offset, dtype = load_row(addresses, rows, program)
    WIRE: tl.constexpr = wire.dtype.element_ty
    WATCH: tl.constexpr = SOURCES if STATS else NOTHING
    OP: tl.constexpr = MULTIPLY if EXACT else DIVIDE
    COMPUTE: tl.constexpr = tl.float64 if FP64 else tl.float32
    place, scalar = (wire + offset).to(tl.int64), tl.full((), number, COMPUTE)
    sums, marks, edge_sums, edge_marks = walk_gradient(
        address, begin, place, count, scalar, dtype, TO_WIRE, WIRE, FP64, OP, WATCH, TILE_BYTES, LANES, HINT, ROUNDING
    )
    if STATS:
        finite, lost = chunk_faults(sums, marks, edge_sums, edge_marks)
        first = tl.full((), -1, tl.int64)
        if not finite:
            # Read again, rather than kept in registers.
            address, begin = load_place(addresses, rows, program)
            # Packed in place, this reads what was divided: what was finite still is, and what was not still is not.
            squares, first = careful_gradient(address, begin, count, dtype, FP64, LANES)
        has_partials = dtype != PADDING
        tl.store(first_non_finite + program, first, mask=has_partials)
        tl.store(flushed + program, lost, mask=has_partials)


def pack(
    gradients: Sequence[torch.Tensor | None],
    chunks: ChunkTable,
    pointers: PointerTable,
    wire: torch.Tensor,
    divisor: float,
    partials: SourcePartials | None = None,
) -> None:
    """Flattens, divides and casts `gradients` into `wire`, in one launch; arguments as for `kernels.dispatch.pack`."""
    rounding = None
    if chunks.cast is not None:
        rounding = chunks.cast.kernel
        if rounding is None:
            few_ops.pack(gradients, chunks, pointers, wire, divisor, partials)
            return
    number, exact = division(divisor, chunks.compute_dtype)
    options = chunks.fp64, partials is not None, exact, rounding
    variant = variant_on(wire.device, pack_variant, wire.dtype, *options)
    if len(chunks.rows):
        variant.launch(
            len(chunks.rows),
            (pointers.upload(gradients, wire.device), chunks.on(wire.device), wire, number, *sources_of(partials)),
        )
        pointers.launched()
        increment_version(wire)


@functools.cache
def pack_variant(
    wire: torch.dtype,
    fp64: bool,
    stats: bool,
    exact: bool,
    rounding: Any,
    tuning: Tuning,
    backend: str,
) -> Variant:
    """The compilation for this wire, mixed or fp64 gradients, with or without statistics, by product or division, and
    the jit function that rounds; None: to nearest."""
    name = TRITON_NAMES[wire]
    outputs = SOURCE_PARTIALS if stats else absent(SOURCE_PARTIALS)
    return walk_variant(
        "pack",
        _pack_kernel,
        {**TABLES, "wire": f"*{name}", "number": "fp64", **outputs},
        {"FP64": fp64, "EXACT": exact, "STATS": stats, "HINT": tuning.hint, "ROUNDING": rounding or NEAREST.value},
        tuning,
        backend,
        branches=tuple((gradient, name) for gradient in GRADIENTS[fp64]),
        label=f"{'fp64' if fp64 else 'mixed'}, wire {name}{', stats' if stats else ''}{'' if exact else ', div'}"
        + ("" if rounding is None else f", {rounding.__name__}"),
    )


def variants(tuning: Tuning, backend: str) -> tuple[Variant, ...]:
    """All variants that this file can launch on one architecture."""
    return tuple(pack_variant(*choice, exact, None, tuning, backend) for choice in TRANSFERS for exact in (True, False))
