"""Encode: gradients, through a table of addresses, into the encoded shards of one bucket, in one launch.

    value = gradient[i] / divisor + weight * residual[i]        in fp32, then as `encodings` says, block by block

Shapes: P gradients of any sizes -> uint8 [layout.nbytes]. Bytes moved per element: gradient itemsize + 1.016 (int8) or
0.531 (int4); with residuals 4 read and 4 written more; plus 72 bytes of tables per chunk. A missing gradient counts as
zeros, and so does padding.

Example, int8: a block of 127 elements 1.0, one 2.0 and 128 zeros has scale 2 / 127 and codes 64 (63.5 is a tie, to
even), 127 and 0; it decodes to 1.0079, 2.0 and 0.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from .blocks import encode_tile, load_halves, load_kept, load_key, load_residuals, store_kept
from .chunk import DIVIDE, MULTIPLY, PADDING, ROW, apply_scalar, careful_gradient, load_row
from .division import division
from .encoded_table import EncodedTable, Residuals, launched, uploaded
from .encodings import ENCODINGS, Encoding
from .table import PointerTable, SourcePartials
from .variants import (
    ENCODED_POINTERS,
    GRADIENTS,
    KEPT,
    RESIDUALS,
    SOURCE_PARTIALS,
    TABLES,
    Tuning,
    Variant,
    absent,
    encoded_variant,
    sources_of,
    variant_on,
)

# With statistics, with residuals, rounded stochastically.
OPTIONS = ((False,) * 3, (True, False, False), (False, True, False), (False, False, True), (True,) * 3)
# Columns of a row of EncodedTable.places: first scale, first code, parameter's number, first element.
PLACE = tl.constexpr(4)


@triton.jit
def count_faults(bad):
    return tl.sum(bad, axis=0)


@triton.jit
def encode_chunk(
    chunk,
    SOURCE: tl.constexpr,
    DESTINATION: tl.constexpr,
    OP: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK: tl.constexpr,
    FEEDBACK: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    TILE_BYTES: tl.constexpr,
):
    """Encodes `count` elements; returns how many blocks are not finite.

    `source`, `scales`, `codes`, `before` and `after` are addresses of the chunk's first; 0: zeros, and no residual.
    Residuals are multiplied by `weight` when they are read, by `back` when they are written.
    """
    source, count, scales, codes, scalar, before, after, weight, back, key, step, parameter, first_block = chunk
    BYTES: tl.constexpr = SOURCE.primitive_bitwidth // 8
    # 16 bytes of the widest of what is read and written; of fp64 twice as many, or half a block would take two warps.
    WIDE_BYTES: tl.constexpr = 4 if FEEDBACK and BYTES < 4 else BYTES
    VECTOR: tl.constexpr = 4 if BYTES == 8 else 16 // WIDE_BYTES
    HALF: tl.constexpr = BLOCK // 2
    ROWS: tl.constexpr = TILE_BYTES // WIDE_BYTES // BLOCK
    TILE: tl.constexpr = ROWS * BLOCK
    SCALE_BYTES: tl.constexpr = 4 if BITS == 8 else 2
    present, kept = tl.where(source == 0, 0, count), tl.where(before == 0, 0, count)
    middle = tl.where(source % 16 == 0, present // VECTOR * VECTOR, 0)
    kept_middle = tl.where((before | after) % 16 == 0, kept // VECTOR * VECTOR, 0)
    row = tl.arange(0, ROWS)
    index = row[:, None] * BLOCK + tl.arange(0, HALF)[None, :]
    bad = tl.zeros((ROWS,), tl.int32)
    for start in tl.range(0, count, TILE):
        begin = tl.multiple_of(start, TILE)
        rest = begin + TILE > middle
        low, high = load_halves(source, begin + index, HALF, middle, present, rest, SOURCE, VECTOR)
        low = apply_scalar(low.to(tl.float32), scalar, OP)
        high = apply_scalar(high.to(tl.float32), scalar, OP)
        if FEEDBACK:
            kept_rest = begin + TILE > kept_middle
            low_before, high_before = load_kept(
                before, begin + index, HALF, kept_middle, kept, kept_rest, tl.float32, VECTOR
            )
            low += low_before * weight
            high += high_before * weight
        inside = begin + row * BLOCK < count
        first = begin // BLOCK
        place = (
            scales + first * SCALE_BYTES,
            codes + first * (BLOCK * BITS // 8),
            key,
            step,
            parameter,
            first_block + first,
        )
        low_sent, high_sent, finite = encode_tile(low, high, inside, place, BITS, VECTOR, STOCHASTIC)
        if FEEDBACK:
            low = tl.where(finite[:, None], (low - low_sent) * back, low_before)
            high = tl.where(finite[:, None], (high - high_sent) * back, high_before)
            store_kept(after, begin + index, HALF, low, high, kept_middle, kept, kept_rest, tl.float32, VECTOR)
        bad += (~finite).to(tl.int32)
    return count_faults(bad)


@triton.jit(do_not_specialize=ENCODED_POINTERS)
def _encode_kernel(
    addresses,
    rows,
    places,
    encoded,
    number: tl.float64,
    first_copy,
    second_copy,
    live,
    weights,
    draw,
    first_non_finite,
    flushed,
    FP64: tl.constexpr,
    EXACT: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK: tl.constexpr,
    FEEDBACK: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    STATS: tl.constexpr,
    TILE_BYTES: tl.constexpr,
    LANES: tl.constexpr,
):
    """One program per table row."""
    program = tl.program_id(0).to(tl.int64)
    address, begin, count, offset, dtype = load_row(addresses, rows, program)
    place = places + program * PLACE
    scales = encoded.to(tl.int64) + tl.load(place)
    codes = encoded.to(tl.int64) + tl.load(place + 1)
    parameter, element = tl.load(place + 2), tl.load(place + 3)
    before, after = tl.full((), 0, tl.int64), tl.full((), 0, tl.int64)
    weight, back = 1.0, 1.0
    key, step = element, element
    if STOCHASTIC:
        key, step = load_key(draw)
    if FEEDBACK:
        weight, back = tl.load(weights), tl.load(weights + 1)
        before, after = load_residuals(first_copy, second_copy, tl.load(live), tl.load(rows + program * ROW))
        before = tl.where(before == 0, 0, before + element * 4)
        after = tl.where(after == 0, 0, after + element * 4)
    OP: tl.constexpr = MULTIPLY if EXACT else DIVIDE
    scalar = tl.full((), number, tl.float32)
    BYTES: tl.constexpr = 8 if FP64 else 4
    size = tl.where(dtype == 0, BYTES, BYTES // 2) if not FP64 else BYTES
    present = address != 0
    source = tl.where(present, address + begin * size, 0)
    chunk = source, count, scales, codes, scalar, before, after, weight, back, key, step, parameter, element // BLOCK
    if FP64:
        faults = encode_chunk(chunk, tl.float64, tl.int8, OP, BITS, BLOCK, FEEDBACK, STOCHASTIC, TILE_BYTES)
    elif dtype == 0:
        faults = encode_chunk(chunk, tl.float32, tl.int8, OP, BITS, BLOCK, FEEDBACK, STOCHASTIC, TILE_BYTES)
    elif dtype == 1:
        faults = encode_chunk(chunk, tl.bfloat16, tl.int8, OP, BITS, BLOCK, FEEDBACK, STOCHASTIC, TILE_BYTES)
    else:
        faults = encode_chunk(chunk, tl.float16, tl.int8, OP, BITS, BLOCK, FEEDBACK, STOCHASTIC, TILE_BYTES)
    if STATS:
        found = tl.full((), -1, tl.int64)
        # Read again, rather than kept in registers.
        address, begin, count, offset, dtype = load_row(addresses, rows, program)
        if (address != 0) & (faults > 0):
            squares, found = careful_gradient(address, begin, count, dtype, FP64, LANES)
        data = dtype != PADDING
        tl.store(first_non_finite + program, found, mask=data)
        tl.store(flushed + program, tl.full((), 0, tl.int64), mask=data)


def encode(
    gradients: Sequence[torch.Tensor | None],
    chunks: EncodedTable,
    pointers: PointerTable,
    encoded: torch.Tensor,
    divisor: float,
    partials: SourcePartials | None = None,
    *,
    residuals: Residuals | None = None,
    draw: torch.Tensor | None = None,
) -> None:
    """Flattens, divides and encodes `gradients`, in one launch; arguments as for `kernels.encoded.encode`."""
    device = encoded.device
    number, exact = division(divisor, torch.float32)
    options = partials is not None, residuals is not None, draw is not None
    variant = variant_on(device, encode_variant, chunks.layout.encoding, chunks.fp64, exact, *options)
    if len(chunks.rows):
        tables = pointers.upload(gradients, device), chunks.on(device), chunks.places_on(device)
        variant.launch(
            len(chunks.rows), (*tables, encoded, number, *uploaded(residuals, device), draw, *sources_of(partials))
        )
        pointers.launched()
        launched(residuals, encoded)


@functools.cache
def encode_variant(
    encoding: Encoding,
    fp64: bool,
    exact: bool,
    stats: bool,
    feedback: bool,
    stochastic: bool,
    tuning: Tuning,
    backend: str,
) -> Variant:
    """The compilation for this encoding, mixed or fp64 gradients, by product or division, and its options."""
    outputs = SOURCE_PARTIALS if stats else absent(SOURCE_PARTIALS)
    kept = RESIDUALS if feedback else absent(RESIDUALS)
    arguments = {**TABLES, "places": "*i64", "encoded": "*u8", "number": "fp64", **kept}
    return encoded_variant(
        "encode",
        _encode_kernel,
        {**arguments, "draw": "*i64" if stochastic else "constexpr", **outputs},
        {"FP64": fp64, "EXACT": exact, "FEEDBACK": feedback, "STOCHASTIC": stochastic, "STATS": stats},
        encoding,
        # A tile has as many elements as one of fp32.
        dataclasses.replace(tuning, tile_bytes=2 * tuning.tile_bytes) if fp64 else tuning,
        backend,
        branches=(*((gradient, "i8") for gradient in GRADIENTS[fp64]), *(KEPT if feedback else ())),
        words={"fp64": fp64, "mixed": not fp64, "stats": stats, "div": not exact},
    )


def variants(tuning: Tuning, backend: str) -> tuple[Variant, ...]:
    """Of the variants that this file can launch on one architecture those with no option, with one, and with all."""
    mixed = [*((False, True, *one) for one in OPTIONS), (False, False, *OPTIONS[-1])]
    fp64 = [(True, True, *OPTIONS[0]), (True, False, *OPTIONS[-1])]
    return tuple(
        encode_variant(encoding, *choice, tuning, backend)
        for encoding in ENCODINGS.values()
        for choice in (*mixed, *fp64)
    )
