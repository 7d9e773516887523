"""Decode: the encoded shards of one bucket, or several such buckets added up, into the gradients, in one launch.

    gradient[i] = round_to_gradient((decoded_0[i] + decoded_1[i] + ...) * scale)   sums in fp32, in the buckets' order

The product is in fp32 (fp64 for fp64), with one rounding. Shapes: uint8 [buckets x layout.nbytes] -> P gradients of any
sizes. Bytes moved per element: buckets x 1.016 (int8) or 0.531 (int4) + gradient itemsize; plus 72 bytes of tables per
chunk. Slots whose gradient is missing are skipped.

Example: two buckets whose blocks decode to 1.0079 and 2.0, scale 1, gradient bf16 -> 3.0.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch.autograd.graph import increment_version

from .blocks import decode_tile, store_halves
from .chunk import STORED, gradient_sums, load_place, load_row, no_marks, no_sums, round_once
from .encode import PLACE
from .encoded_table import EncodedTable
from .encodings import ENCODINGS, Encoding
from .table import Partials, PointerTable
from .variants import (
    ENCODED_POINTERS,
    GRADIENTS,
    PARTIALS,
    TABLES,
    Tuning,
    Variant,
    absent,
    encoded_variant,
    partials_of,
    variant_on,
)


@triton.jit
def decode_chunk(
    gradient,
    chunk,
    SOURCE: tl.constexpr,
    DESTINATION: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK: tl.constexpr,
    STATS: tl.constexpr,
    TILE_BYTES: tl.constexpr,
):
    """Writes `count` elements; returns sums of squares and largest absolute values, per vector of 16 bytes.

    `gradient`, `scales` and `codes` are addresses of the chunk's first, in the first of `number` buckets.
    """
    count, scales, codes, number, stride, factor = chunk
    BYTES: tl.constexpr = DESTINATION.primitive_bitwidth // 8
    COMPUTE: tl.constexpr = tl.float64 if BYTES == 8 else tl.float32
    VECTOR: tl.constexpr = 16 // BYTES
    HALF: tl.constexpr = BLOCK // 2
    ROWS: tl.constexpr = TILE_BYTES // BYTES // BLOCK
    TILE: tl.constexpr = ROWS * BLOCK
    VECTORS: tl.constexpr = TILE_BYTES // 32
    SCALE_BYTES: tl.constexpr = 4 if BITS == 8 else 2
    middle = tl.where(gradient % 16 == 0, count // VECTOR * VECTOR, 0)
    row = tl.arange(0, ROWS)
    index = row[:, None] * BLOCK + tl.arange(0, HALF)[None, :]
    sums, marks = no_sums(VECTORS, COMPUTE), no_marks(VECTORS, COMPUTE, STORED)
    for start in tl.range(0, count, TILE):
        begin = tl.multiple_of(start, TILE)
        inside = begin + row * BLOCK < count
        scale, code = scales + begin // BLOCK * SCALE_BYTES, codes + begin // BLOCK * (BLOCK * BITS // 8)
        low, high = decode_tile(scale, code, inside, ROWS, HALF, BITS, VECTOR)
        for bucket in tl.range(1, number):
            low_more, high_more = decode_tile(
                scale + bucket * stride, code + bucket * stride, inside, ROWS, HALF, BITS, VECTOR
            )
            low += low_more
            high += high_more
        rest = begin + TILE > middle
        low = round_once(low.to(COMPUTE) * factor, DESTINATION)
        high = round_once(high.to(COMPUTE) * factor, DESTINATION)
        store_halves(gradient, begin + index, HALF, low, high, middle, count, rest, DESTINATION, VECTOR)
        if STATS:
            # What lies behind `count` is padding, which adds nothing, or is NaN as the rest of its block.
            low_seen = tl.reshape(low.to(COMPUTE), (VECTORS, VECTOR))
            high_seen = tl.reshape(high.to(COMPUTE), (VECTORS, VECTOR))
            sums += tl.sum(low_seen * low_seen + high_seen * high_seen, axis=1)
            marks = tl.maximum(marks, tl.max(tl.maximum(tl.abs(low_seen), tl.abs(high_seen)), axis=1))
    return sums, marks


@triton.jit(do_not_specialize=ENCODED_POINTERS)
def _decode_kernel(
    addresses,
    rows,
    places,
    encoded,
    geometry,
    scalar,
    partial_sums,
    partial_peaks,
    first_non_finite,
    FP64: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK: tl.constexpr,
    STATS: tl.constexpr,
    TILE_BYTES: tl.constexpr,
    LANES: tl.constexpr,
):
    """One program per data row."""
    program = tl.program_id(0).to(tl.int64)
    address, begin, count, offset, dtype = load_row(addresses, rows, program)
    place = places + program * PLACE
    scales = encoded.to(tl.int64) + tl.load(place)
    codes = encoded.to(tl.int64) + tl.load(place + 1)
    number, stride, factor = tl.load(geometry), tl.load(geometry + 1), tl.load(scalar)
    COMPUTE: tl.constexpr = tl.float64 if FP64 else tl.float32
    sums, marks = no_sums(TILE_BYTES // 32, COMPUTE), no_marks(TILE_BYTES // 32, COMPUTE, STORED)
    chunk = count, scales, codes, number, stride, factor
    if address != 0:
        if FP64:
            sums, marks = decode_chunk(address + begin * 8, chunk, tl.int8, tl.float64, BITS, BLOCK, STATS, TILE_BYTES)
        elif dtype == 0:
            sums, marks = decode_chunk(address + begin * 4, chunk, tl.int8, tl.float32, BITS, BLOCK, STATS, TILE_BYTES)
        elif dtype == 1:
            sums, marks = decode_chunk(address + begin * 2, chunk, tl.int8, tl.bfloat16, BITS, BLOCK, STATS, TILE_BYTES)
        else:
            sums, marks = decode_chunk(address + begin * 2, chunk, tl.int8, tl.float16, BITS, BLOCK, STATS, TILE_BYTES)
    if STATS:
        # Read again, rather than kept in registers.
        address, begin = load_place(addresses, rows, program)
        edge_sums, edge_marks = no_sums(LANES, tl.float64), no_marks(LANES, COMPUTE, STORED)
        total, peak, first = gradient_sums(
            sums, marks, edge_sums, edge_marks, address, begin, count, dtype, FP64, LANES
        )
        tl.store(partial_sums + program, total)
        tl.store(partial_peaks + program, peak)
        tl.store(first_non_finite + program, first)


def decode(
    gradients: Sequence[torch.Tensor | None],
    chunks: EncodedTable,
    pointers: PointerTable,
    encoded: torch.Tensor,
    scale: torch.Tensor,
    partials: Partials | None = None,
) -> None:
    """Decodes, adds up, scales and unflattens, in one launch; arguments as for `kernels.encoded.decode`."""
    assert scale.dtype is chunks.compute_dtype  # a kept launch takes its type for granted
    device = encoded.device
    variant = variant_on(device, decode_variant, chunks.layout.encoding, chunks.fp64, partials is not None)
    if chunks.data_rows:
        geometry = chunks.geometry(encoded.numel() // chunks.layout.nbytes, device)
        tables = pointers.upload(gradients, device), chunks.on(device), chunks.places_on(device)
        variant.launch(chunks.data_rows, (*tables, encoded, geometry, scale, *partials_of(partials)))
        pointers.launched()
        increment_version([gradient for gradient in gradients if gradient is not None])


@functools.cache
def decode_variant(encoding: Encoding, fp64: bool, stats: bool, tuning: Tuning, backend: str) -> Variant:
    """The compilation for this encoding, mixed or fp64 gradients, with or without statistics."""
    arguments = {**TABLES, "places": "*i64", "encoded": "*u8", "geometry": "*i64"}
    outputs = PARTIALS if stats else absent(PARTIALS)
    return encoded_variant(
        "decode",
        _decode_kernel,
        {**arguments, "scalar": "*fp64" if fp64 else "*fp32", **outputs},
        {"FP64": fp64, "STATS": stats},
        encoding,
        tuning,
        backend,
        branches=tuple(("i8", gradient) for gradient in GRADIENTS[fp64]),
        words={"fp64": fp64, "mixed": not fp64, "stats": stats},
    )


def variants(tuning: Tuning, backend: str) -> tuple[Variant, ...]:
    """All variants that this file can launch on one architecture."""
    switches = list(itertools.product((False, True), repeat=2))
    return tuple(
        decode_variant(encoding, *options, tuning, backend) for encoding in ENCODINGS.values() for options in switches
    )
