"""Combine encoded contributions: the sum of several encodings of one shard, encoded again, in one launch.

    value[i] = decoded_0[i] + decoded_1[i] + ... + weight * residual[i]      in fp32, in the contributions' order

Shapes: uint8 [W x shard_bytes] -> uint8 [shard_bytes]. Bytes moved per element of the shard: (W + 1) x 1.016 (int8) or
0.531 (int4); with residuals 4 read and 4 written more.

Example, int8, a block of which one rank sent 1.0 and 3.0 (scale 3 / 127, codes 42 and 127) and another 3.0 and 1.0: the
sums are 3.9921 twice, encoded with scale 3.9921 / 127 and codes 127.
"""

from __future__ import annotations

import dataclasses
import functools

import torch
import triton
import triton.language as tl

from .blocks import decode_tile, encode_tile, load_kept, load_key, load_residuals, store_kept
from .encoded_table import EncodedTable, Residuals, launched, uploaded
from .encodings import ENCODINGS, Encoding
from .variants import (
    ENCODED_POINTERS,
    KEPT,
    RESIDUALS,
    Tuning,
    Variant,
    absent,
    encoded_variant,
    variant_on,
)


@triton.jit
def combine_blocks(
    tables,
    SOURCE: tl.constexpr,
    DESTINATION: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK: tl.constexpr,
    FEEDBACK: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    TILE_BYTES: tl.constexpr,
):
    """Adds up blocks [first, first + rows of a tile) of all contributions; `received` and `output` are addresses."""
    received, output, geometry, first, before, after, weights, draw = tables
    VECTOR: tl.constexpr = 4 if FEEDBACK else 16
    HALF: tl.constexpr = BLOCK // 2
    CODE_BYTES: tl.constexpr = BLOCK * BITS // 8
    SCALE_BYTES: tl.constexpr = 4 if BITS == 8 else 2
    ROWS: tl.constexpr = TILE_BYTES // (BLOCK * 4 if FEEDBACK else CODE_BYTES)
    number, shard_bytes = tl.load(geometry), tl.load(geometry + 2)
    scales_bytes = tl.load(geometry + 3)
    blocks = scales_bytes // SCALE_BYTES
    inside = first + tl.arange(0, ROWS) < blocks
    scales, codes = first * SCALE_BYTES, scales_bytes + first * CODE_BYTES
    low, high = decode_tile(received + scales, received + codes, inside, ROWS, HALF, BITS, VECTOR)
    for contribution in tl.range(1, number):
        shard = received + contribution * shard_bytes
        low_more, high_more = decode_tile(shard + scales, shard + codes, inside, ROWS, HALF, BITS, VECTOR)
        low += low_more
        high += high_more
    if FEEDBACK:
        count = (blocks - first) * BLOCK
        index = tl.arange(0, ROWS)[:, None] * BLOCK + tl.arange(0, HALF)[None, :]
        start, end = before + first * BLOCK * 4, after + first * BLOCK * 4
        # Whole blocks, at addresses that are multiples of 16: there is no rest.
        low_before, high_before = load_kept(start, index, HALF, count, count, False, tl.float32, VECTOR)
        low += low_before * tl.load(weights)
        high += high_before * tl.load(weights)
    key, step, parameter = first, first, first
    if STOCHASTIC:
        key, step = load_key(draw)
        parameter = tl.load(draw + 3)
    place = output + scales, output + codes, key, step, parameter, first
    low_sent, high_sent, finite = encode_tile(low, high, inside, place, BITS, VECTOR, STOCHASTIC)
    if FEEDBACK:
        low = tl.where(finite[:, None], (low - low_sent) * tl.load(weights + 1), low_before)
        high = tl.where(finite[:, None], (high - high_sent) * tl.load(weights + 1), high_before)
        store_kept(end, index, HALF, low, high, count, count, False, tl.float32, VECTOR)


@triton.jit(do_not_specialize=ENCODED_POINTERS)
def _combine_encoded_kernel(
    encoded,
    output,
    geometry,
    first_copy,
    second_copy,
    live,
    weights,
    draw,
    BITS: tl.constexpr,
    BLOCK: tl.constexpr,
    FEEDBACK: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    TILE_BYTES: tl.constexpr,
):
    """One program per tile."""
    ROWS: tl.constexpr = TILE_BYTES // (BLOCK * 4 if FEEDBACK else BLOCK * BITS // 8)
    first = tl.program_id(0).to(tl.int64) * ROWS
    before, after = first, first
    if FEEDBACK:
        before, after = load_residuals(first_copy, second_copy, tl.load(live), 0)
    tables = encoded.to(tl.int64), output.to(tl.int64), geometry, first, before, after, weights, draw
    combine_blocks(tables, tl.int8, tl.int8, BITS, BLOCK, FEEDBACK, STOCHASTIC, TILE_BYTES)


def combine_encoded(
    received: torch.Tensor,
    chunks: EncodedTable,
    output: torch.Tensor,
    *,
    residuals: Residuals | None = None,
    draw: torch.Tensor | None = None,
) -> None:
    """Adds up the contributions to one shard, in one launch; arguments as for `kernels.encoded.combine_encoded`."""
    layout, device = chunks.layout, output.device
    variant = variant_on(device, combine_encoded_variant, layout.encoding, residuals is not None, draw is not None)
    block_bytes = layout.encoding.code_bytes if residuals is None else 4 * layout.encoding.block_numel
    rows = variant.constexprs["TILE_BYTES"] // block_bytes
    if layout.shard_blocks:
        geometry = chunks.geometry(received.numel() // layout.shard_bytes, device)
        variant.launch(
            -(-layout.shard_blocks // rows), (received, output, geometry, *uploaded(residuals, device), draw)
        )
        launched(residuals, output)


@functools.cache
def combine_encoded_variant(
    encoding: Encoding, feedback: bool, stochastic: bool, tuning: Tuning, backend: str
) -> Variant:
    """The compilation for this encoding and these options.

    A tile is TILE_BYTES of codes, so that a thread adds up 32 values, or of residuals, if there are any.
    """
    kept = RESIDUALS if feedback else absent(RESIDUALS)
    drawn = "*i64" if stochastic else "constexpr"
    return encoded_variant(
        "combine_encoded",
        _combine_encoded_kernel,
        {"encoded": "*u8", "output": "*u8", "geometry": "*i64", **kept, "draw": drawn},
        {"FEEDBACK": feedback, "STOCHASTIC": stochastic},
        encoding,
        tuning if feedback else dataclasses.replace(tuning, tile_bytes=tuning.tile_bytes * encoding.bits // 16),
        backend,
        branches=(("i8", "i8"), *(KEPT if feedback else ())),
        words={},
    )


def variants(tuning: Tuning, backend: str) -> tuple[Variant, ...]:
    """Of the variants that this file can launch on one architecture those with no option and with both."""
    return tuple(
        combine_encoded_variant(encoding, option, option, tuning, backend)
        for encoding in ENCODINGS.values()
        for option in (False, True)
    )
