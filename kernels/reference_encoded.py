"""Reference of encoded buckets: the definition of correct, in numpy, block by block.

    encode:          blocks of round_fp32(gradient[i]) / divisor + residual, encoded
    combine_encoded: the decoded contributions of one shard, added up in fp32 in their order, encoded again
    decode:          gradient[i] = round_once(sum of the contributions' decoded values * scale)

`encodings` has the formulas. Signatures are those of the kernels' launchers; nothing here is for speed.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from .encoded_table import EncodedTable, Residuals
from .encodings import EncodedLayout, Encoding
from .philox import fractions
from .reference import first_non_finite, memory_of, store_rounded, write_row
from .table import Gradients, Partials, PointerTable, SourcePartials

Floats: TypeAlias = npt.NDArray[np.float32]
_SMALLEST_SCALE = np.float32(2.0**-126)


def encode_blocks(
    values: Floats, encoding: Encoding, added: Floats | None = None
) -> tuple[Floats, npt.NDArray[np.int8]]:
    """Encodes blocks.

    Args:
        values: fp32 [blocks, block_numel].
        encoding: how.
        added: fractions of stochastic rounding, of the same shape; None: codes are rounded to nearest.

    Returns:
        Scales, fp32 [blocks], and codes, int8 [blocks, block_numel].
    """
    levels, one = np.float32(encoding.levels), np.float32(1)
    with np.errstate(all="ignore"):
        peak = np.abs(values).max(axis=1, initial=0)  # NaN where one is NaN
        scale = peak / levels
        finite, zero = np.isfinite(peak), scale < _SMALLEST_SCALE
        if encoding.scale_bytes == 2:
            scale = round_up_to_bf16(scale)
        scale = np.where(zero, np.float32(0), scale)
        inverse = one / np.where(zero, one, scale)
        ratio = np.where((finite & ~zero)[:, None], values * inverse[:, None], np.float32(0))
        codes = np.rint(ratio) if added is None else np.floor(np.clip(ratio, -levels, levels) + added)
    return np.where(finite, scale, np.float32(np.nan)), codes.astype(np.int8)


def round_up_to_bf16(scale: Floats) -> Floats:
    """The smallest bf16 that is not below `scale`, as fp32. Of NaN and infinity it is not asked."""
    return ((scale.view(np.uint32) + np.uint32(0xFFFF)) & np.uint32(0xFFFF0000)).view(np.float32)


def decode_blocks(scales: Floats, codes: npt.NDArray[np.int8]) -> Floats:
    """Values of blocks, fp32 [blocks, block_numel]; NaN where the scale is."""
    return codes.astype(np.float32) * scales[:, None]


def write_blocks(
    shard: torch.Tensor, layout: EncodedLayout, first: int, scales: Floats, codes: npt.NDArray[np.int8]
) -> None:
    """Writes blocks into the bytes of one shard, from its block `first` on."""
    encoding, last = layout.encoding, first + len(scales)
    bits = scales.view(np.uint32)
    bits = np.where(np.isnan(scales), np.uint32(0x7FC00000), bits)
    half = encoding.scale_bytes == 2
    stored = (bits >> np.uint32(16)).astype(np.uint16) if half else bits
    size = encoding.scale_bytes
    shard[first * size : last * size] = torch.from_numpy(stored.view(np.uint8))
    if encoding.bits == 4:
        low, high = codes[:, : encoding.block_numel // 2], codes[:, encoding.block_numel // 2 :]
        codes = 16 * high + low
    flat = torch.from_numpy(np.ascontiguousarray(codes).view(np.uint8).reshape(-1))
    shard[layout.scales_bytes :][first * encoding.code_bytes : last * encoding.code_bytes] = flat


def read_blocks(shard: torch.Tensor, layout: EncodedLayout, first: int, last: int) -> Floats:
    """Decodes blocks [first, last) of the bytes of one shard, fp32 [blocks, block_numel]."""
    encoding, size = layout.encoding, layout.encoding.scale_bytes
    stored = shard[first * size : last * size].cpu().numpy().copy()
    if encoding.scale_bytes == 2:
        scales = (stored.view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)
    else:
        scales = stored.view(np.float32)
    flat = shard[layout.scales_bytes :][first * encoding.code_bytes : last * encoding.code_bytes].cpu().numpy()
    codes = flat.view(np.int8).reshape(last - first, encoding.code_bytes)
    if encoding.bits == 4:
        low = (codes << 4) >> 4
        codes = np.concatenate([low, (codes - low) >> 4], axis=1)
    return decode_blocks(scales, codes)


def encode(
    gradients: Gradients,
    chunks: EncodedTable,
    pointers: PointerTable,
    encoded: torch.Tensor,
    divisor: float,
    partials: SourcePartials | None = None,
    *,
    residuals: Residuals | None = None,
    draw: torch.Tensor | None = None,
) -> None:
    """Flattens, divides and encodes `gradients`; arguments as for `kernels.encoded.encode`."""
    layout, block = chunks.layout, chunks.layout.encoding.block_numel
    by = torch.tensor(divisor, dtype=torch.float32, device="cpu")
    for row, (slot, begin, end, offset, _) in enumerate(chunks.rows.tolist()):
        count = end - begin
        blocks = -(-count // block)
        gradient = gradients[slot] if slot < len(gradients) else None
        source = None if gradient is None else memory_of(gradient, begin, end)
        values = np.zeros(blocks * block, dtype=np.float32)
        if source is not None:
            values[:count] = (source.cpu().to(torch.float32) / by).numpy()
        key, element = chunks.places[row, 2:].tolist()
        before, weights = None, np.ones(2, dtype=np.float32)
        if residuals is not None and slot < len(gradients):
            live, weights = int(residuals.live), residuals.weights.cpu().numpy()
            before = np.zeros_like(values)
            before[:count] = memory_of(residuals.copies[live][slot], element, element + count).cpu().numpy()
            values += before * weights[0]
        scales, codes = encode_blocks(
            values.reshape(-1, block), layout.encoding, _fractions(draw, layout, element // block, blocks, key)
        )
        shard, nth = divmod(offset // block, layout.shard_blocks)
        write_blocks(encoded[shard * layout.shard_bytes :][: layout.shard_bytes], layout, nth, scales, codes)
        if before is not None and residuals is not None:
            left = _left(values, before, weights, scales, codes)
            after = memory_of(residuals.copies[1 - int(residuals.live)][slot], element, element + count)
            after.copy_(torch.from_numpy(left[:count]))
        if partials is not None and row < chunks.data_rows:
            partials.first_non_finite[row] = -1 if source is None else first_non_finite(source, begin)
            partials.flushed[row] = 0


def combine_encoded(
    received: torch.Tensor,
    chunks: EncodedTable,
    output: torch.Tensor,
    *,
    residuals: Residuals | None = None,
    draw: torch.Tensor | None = None,
) -> None:
    """Adds up the encoded contributions of a shard; arguments as for `kernels.encoded.combine_encoded`."""
    layout = chunks.layout
    if not layout.shard_blocks:
        return
    values = _sum(received.view(-1, layout.shard_bytes), layout, 0, layout.shard_blocks)
    before, weights = None, np.ones(2, dtype=np.float32)
    if residuals is not None:
        live, weights = int(residuals.live), residuals.weights.cpu().numpy()
        before = residuals.copies[live][0].cpu().numpy().reshape(values.shape)
        values = values + before * weights[0]
    parameter = 0 if draw is None else int(draw[3])
    scales, codes = encode_blocks(values, layout.encoding, _fractions(draw, layout, 0, layout.shard_blocks, parameter))
    write_blocks(output, layout, 0, scales, codes)
    if before is not None and residuals is not None:
        left = _left(values.reshape(-1), before.reshape(-1), weights, scales, codes)
        residuals.copies[1 - int(residuals.live)][0].copy_(torch.from_numpy(left))


def decode(
    gradients: Gradients,
    chunks: EncodedTable,
    pointers: PointerTable,
    encoded: torch.Tensor,
    scale: torch.Tensor,
    partials: Partials | None = None,
) -> None:
    """Decodes, adds up, scales and unflattens; arguments as for `kernels.encoded.decode`."""
    layout, block = chunks.layout, chunks.layout.encoding.block_numel
    buckets = encoded.view(-1, max(layout.nbytes, 1))
    for row, (slot, begin, end, offset, _) in enumerate(chunks.rows[: chunks.data_rows].tolist()):
        gradient = gradients[slot]
        values = None if gradient is None else memory_of(gradient, begin, end)
        if values is not None:
            shard, nth = divmod(offset // block, layout.shard_blocks)
            parts = buckets[:, shard * layout.shard_bytes : (shard + 1) * layout.shard_bytes]
            total = _sum(parts, layout, nth, nth - (begin - end) // block).reshape(-1)[: end - begin]
            store_rounded(values, torch.from_numpy(total).to(values.device, chunks.compute_dtype) * scale)
        if partials is not None:
            write_row(partials, row, begin, values)


def _sum(shards: torch.Tensor, layout: EncodedLayout, first: int, last: int) -> Floats:
    """Blocks [first, last) of several encodings of one shard, decoded and added up in their order."""
    total = read_blocks(shards[0], layout, first, last)
    with np.errstate(all="ignore"):
        for shard in shards[1:]:
            total = total + read_blocks(shard, layout, first, last)
    return total


def _left(values: Floats, before: Floats, weights: Floats, scales: Floats, codes: npt.NDArray[np.int8]) -> Floats:
    """The residual: what the encoding has lost; of a block that is not finite, what it was before."""
    with np.errstate(all="ignore"):
        lost = (values - decode_blocks(scales, codes).reshape(-1)) * weights[1]
    bad = np.repeat(np.isnan(scales), codes.shape[1])
    return np.where(bad, before, lost)


def _fractions(
    draw: torch.Tensor | None, layout: EncodedLayout, first_block: int, blocks: int, parameter: int
) -> Floats | None:
    if draw is None:
        return None
    seed, stream, step, _ = draw.tolist()
    return fractions((seed, stream), first_block, blocks, layout.encoding.block_numel, parameter, step)
