"""Encoded buckets on CPU: what `reference_encoded` defines, in few operators; the same bits.

A bucket is worked on in pieces that stay in the cache: gathered as fp32 and encoded, decoded and scattered. An operator
costs 1 us at least, a piece about 25 of them. The two codes of a byte of int4 are put together and taken apart as
floating-point numbers, in which 16 * high + low and its sixteenth are exact: torch's integer operators take longer.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch

from . import reference_encoded
from .checks import check_combine_encoded, check_decode, check_encode
from .cpu import Change, copy_all
from .cpu_stats import measure_gradients
from .division import division
from .encoded_table import EncodedTable, Residuals
from .encodings import EncodedLayout, Encoding
from .philox import fractions
from .reference import Gradients, first_non_finite, memory_of
from .runs import scratch
from .table import Partials, PointerTable, SourcePartials

# Elements of a piece: 512 KiB of fp32, of which two are worked on at a time. In pieces of half the size encode and
# decode take a quarter longer, in those of a quarter twice as long.
PIECE_NUMEL = 131072
_SMALLEST_SCALE = 2.0**-126


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
    vouched: bool = False,
) -> None:
    """Flattens, divides and encodes `gradients`; arguments as for `kernels.encoded.encode`."""
    if not vouched:
        check_encode(gradients, chunks, pointers, encoded, partials, residuals, draw)
    if encoded.device.type != "cpu":
        reference_encoded.encode(
            gradients, chunks, pointers, encoded, divisor, partials, residuals=residuals, draw=draw, vouched=True
        )
        return
    scalar, exact = division(divisor, torch.float32)
    change = None if scalar == 1.0 else (torch.mul if exact else torch.div, scalar)
    if partials is not None:
        partials.first_non_finite.fill_(-1)
        partials.flushed.zero_()
    layout, pieces = chunks.layout, _pieces_of(chunks, pointers)
    for piece in pieces.all:
        memory = _Memory(piece.blocks, layout.encoding)
        pieces.gather(piece, gradients, memory.values, change)
        before = None if residuals is None else residuals.copies[int(residuals.live)]
        if residuals is not None and before is not None:
            pieces.gather_flat(piece, before, memory.work)
            memory.values.add_(memory.work.mul_(residuals.weights[0]))
        shard = encoded[piece.shard * layout.shard_bytes :][: layout.shard_bytes]
        added = None if draw is None else pieces.fractions(piece, draw)
        bad = _encode_blocks(memory, layout, shard, piece.first, added)
        if residuals is not None and before is not None:
            lost = _lost(memory, layout, shard, piece.first, residuals)
            if bad is not None:
                pieces.gather_flat(piece, before, memory.work)
                lost[bad] = memory.work[bad]
            pieces.scatter_flat(piece, lost, residuals.copies[1 - int(residuals.live)])
        if partials is not None and bad is not None:
            pieces.find_non_finite(piece, gradients, partials)


def combine_encoded(
    received: torch.Tensor,
    chunks: EncodedTable,
    output: torch.Tensor,
    *,
    residuals: Residuals | None = None,
    draw: torch.Tensor | None = None,
    vouched: bool = False,
) -> None:
    """Adds up the encoded contributions of a shard; arguments as for `kernels.encoded.combine_encoded`."""
    if not vouched:
        check_combine_encoded(received, chunks, output, residuals, draw)
    if output.device.type != "cpu":
        reference_encoded.combine_encoded(received, chunks, output, residuals=residuals, draw=draw, vouched=True)
        return
    layout, block = chunks.layout, chunks.layout.encoding.block_numel
    shards = received.split(layout.shard_bytes) if layout.shard_blocks else ()
    for first in range(0, layout.shard_blocks, PIECE_NUMEL // block):
        blocks = min(PIECE_NUMEL // block, layout.shard_blocks - first)
        memory = _Memory(blocks, layout.encoding)
        _sum_blocks(shards, layout, first, memory)
        before = None
        if residuals is not None:
            before = residuals.copies[int(residuals.live)][0][first * block :][: blocks * block].view(blocks, block)
            memory.values.add_(torch.mul(before, residuals.weights[0], out=memory.work))
        added = None
        if draw is not None:
            seed, stream, step, number = draw.tolist()
            added = torch.from_numpy(fractions((seed, stream), first, blocks, block, number, step))
        bad = _encode_blocks(memory, layout, output, first, added)
        if residuals is not None and before is not None:
            lost = _lost(memory, layout, output, first, residuals)
            if bad is not None:
                lost[bad] = before[bad]
            residuals.copies[1 - int(residuals.live)][0][first * block :][: blocks * block].copy_(lost.view(-1))


def decode(
    gradients: Gradients,
    chunks: EncodedTable,
    pointers: PointerTable,
    encoded: torch.Tensor,
    scale: torch.Tensor,
    partials: Partials | None = None,
    *,
    vouched: bool = False,
) -> None:
    """Decodes, adds up, scales and unflattens; arguments as for `kernels.encoded.decode`."""
    if not vouched:
        check_decode(gradients, chunks, pointers, encoded, scale, partials)
    if encoded.device.type != "cpu":
        reference_encoded.decode(gradients, chunks, pointers, encoded, scale, partials, vouched=True)
        return
    layout, pieces = chunks.layout, _pieces_of(chunks, pointers)
    factor = scale.item()
    shards = encoded.split(layout.shard_bytes) if layout.shard_blocks else ()
    for piece in pieces.all:
        if not piece.parts:
            continue
        memory = _Memory(piece.blocks, layout.encoding)
        _sum_blocks(shards[piece.shard :: layout.shards], layout, piece.first, memory)
        pieces.scatter(piece, memory.values, gradients, factor)
    if partials is not None:
        measure_gradients(gradients, chunks, partials)


class _Memory:
    """What this thread works on some blocks in: `values` and `work` [blocks, block], `half` [blocks, block / 2]."""

    def __init__(self, blocks: int, encoding: Encoding) -> None:
        shape = blocks, encoding.block_numel
        numel = max(PIECE_NUMEL, blocks * encoding.block_numel)
        values, work, half = scratch(torch.float32, 5 * numel // 2).split([numel, numel, numel // 2])
        self.values = values[: blocks * encoding.block_numel].view(shape)
        self.work = work[: blocks * encoding.block_numel].view(shape)
        self.half = half[: blocks * encoding.block_numel // 2].view(blocks, -1)


def _encode_blocks(
    memory: _Memory, layout: EncodedLayout, shard: torch.Tensor, first: int, added: torch.Tensor | None
) -> torch.Tensor | None:
    """Encodes `memory.values` into a shard, from its block `first` on; which blocks are not finite, if one is not."""
    encoding, work = layout.encoding, memory.work
    peak = torch.amax(torch.abs(memory.values, out=work), 1)  # NaN where one is NaN
    scale = peak / encoding.levels
    zero = scale < _SMALLEST_SCALE
    scale.masked_fill_(zero, 0.0)
    if encoding.scale_dtype is torch.bfloat16:  # rounded up
        scale.view(torch.int32).add_(0xFFFF).bitwise_and_(-0x10000)
    torch.mul(memory.values, scale.reciprocal().masked_fill_(zero, 0.0).unsqueeze(1), out=work)
    bad = None
    if not math.isfinite(peak.amax().item()):
        bad = ~peak.isfinite()
        work[bad], scale[bad] = 0.0, math.nan
    if added is None:
        work.round_()
    else:
        work.clamp_(-encoding.levels, encoding.levels).add_(added).floor_()
    scales, codes = _stored(shard, layout, first, len(scale))
    scales.copy_(scale if encoding.scale_dtype is torch.float32 else scale.view(torch.int16)[1::2])
    if encoding.bits == 4:
        half = encoding.block_numel // 2
        work = torch.add(work[:, :half], work[:, half:], alpha=16, out=memory.half)
    codes.copy_(work)
    return bad


def _sum_blocks(shards: Sequence[torch.Tensor], layout: EncodedLayout, first: int, memory: _Memory) -> None:
    """Decodes blocks of several encodings of one shard, from its block `first` on, and adds them up in their order."""
    _decode_blocks(shards[0], layout, first, memory.values, memory.half)
    for shard in shards[1:]:
        _decode_blocks(shard, layout, first, memory.work, memory.half)
        memory.values.add_(memory.work)


def _decode_blocks(
    shard: torch.Tensor, layout: EncodedLayout, first: int, into: torch.Tensor, half: torch.Tensor
) -> None:
    scales, codes = _stored(shard, layout, first, len(into))
    if layout.encoding.bits == 4:
        low, high = into[:, : half.shape[1]], into[:, half.shape[1] :]
        half.copy_(codes)
        torch.mul(half, 1 / 16, out=high).round_().add_(0.0)  # a code has no negative zero
        torch.add(half, high, alpha=-16, out=low)
    else:
        into.copy_(codes)
    if layout.encoding.scale_dtype is torch.bfloat16:
        scales = scales.to(torch.int32).bitwise_left_shift_(16).view(torch.float32)
    into.mul_(scales.unsqueeze(1))


def _stored(shard: torch.Tensor, layout: EncodedLayout, first: int, blocks: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales (as int16 if they are bf16) and bytes of codes of some blocks, where they lie."""
    encoding, last = layout.encoding, first + blocks
    size = encoding.scale_dtype.itemsize
    scales = shard[first * size : last * size].view(torch.float32 if size == 4 else torch.int16)
    begin = layout.scales_bytes
    codes = shard[begin + first * encoding.code_bytes : begin + last * encoding.code_bytes]
    return scales, codes.view(torch.int8).view(blocks, encoding.code_bytes)


def _lost(
    memory: _Memory, layout: EncodedLayout, shard: torch.Tensor, first: int, residuals: Residuals
) -> torch.Tensor:
    """What the encoding has lost of `memory.values`, in their place."""
    _decode_blocks(shard, layout, first, memory.work, memory.half)
    return torch.sub(memory.values, memory.work, out=memory.values).mul_(residuals.weights[1])


class _Part(NamedTuple):
    """Elements [begin, end) of a slot's memory, [at, ...) of a piece; `whole`: all of the slot, in its known shape."""

    slot: int
    begin: int
    end: int
    at: int
    whole: bool


class _Piece(NamedTuple):
    """Consecutive blocks of one shard, from its block `first` on; `full` if no element of them is padding."""

    number: int
    shard: int
    first: int
    blocks: int
    parts: tuple[_Part, ...]
    rows: tuple[int, ...]
    full: bool


class _Pieces:
    """The pieces of one layout, and views of the memory that they are worked on in."""

    def __init__(self, chunks: EncodedTable) -> None:
        self.chunks = chunks
        self.all = tuple(_cut(chunks))
        # By piece and address of the memory, of which each thread has its own.
        self._views: dict[tuple[int, int], list[torch.Tensor]] = {}

    def gather(self, piece: _Piece, gradients: Gradients, values: torch.Tensor, change: Change) -> None:
        """Gradients as fp32, changed; zeros for padding and for those that are missing."""
        views, members = self._views_of(piece, values), self._members(piece, gradients)
        if not piece.full or any(one is None for one in members):
            values.zero_()
        if not views:
            return
        if change is not None and len(members) == 1 and members[0] is not None and members[0].dtype is torch.float32:
            change[0](members[0], change[1], out=views[0])
        else:
            copy_all(views, members)
            if change is not None:
                change[0](values, change[1], out=values)

    def scatter(self, piece: _Piece, values: torch.Tensor, gradients: Gradients, factor: float) -> None:
        """Writes gradients, each rounded once."""
        views, members = self._views_of(piece, values), self._members(piece, gradients)
        if factor != 1.0 and self.chunks.fp64:
            views = [view.double().mul_(factor) for view in views]
        elif factor != 1.0:
            values.mul_(factor)
        copy_all(members, views)

    def gather_flat(self, piece: _Piece, tensors: Sequence[torch.Tensor], values: torch.Tensor) -> None:
        """Parts of flat tensors, one per parameter; zeros for padding."""
        flat = values.view(-1)
        if not piece.full:
            flat.zero_()
        for part, one in self._flat(piece, tensors):
            flat[part.at : part.at + len(one)] = one

    def scatter_flat(self, piece: _Piece, values: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
        """Writes what `gather_flat` reads."""
        flat = values.view(-1)
        for part, one in self._flat(piece, tensors):
            one.copy_(flat[part.at : part.at + len(one)])

    def fractions(self, piece: _Piece, draw: torch.Tensor) -> torch.Tensor:
        """What stochastic rounding adds, [blocks, block]; zeros for blocks that are padding."""
        seed, stream, step, _ = draw.tolist()
        block = self.chunks.layout.encoding.block_numel
        added = np.zeros((piece.blocks, block), dtype=np.float32)
        for slot, begin, end, at, _ in piece.parts:
            first, blocks = begin // block, -((begin - end) // block)
            key = self.chunks.keys[slot]
            added[at // block :][:blocks] = fractions((seed, stream), first, blocks, block, key, step)
        return torch.from_numpy(added)

    def find_non_finite(self, piece: _Piece, gradients: Gradients, partials: SourcePartials) -> None:
        """Fills the rows of one piece."""
        for row in piece.rows:
            slot, begin, end = self.chunks.rows[row, :3].tolist()
            if (gradient := gradients[slot]) is not None:
                partials.first_non_finite[row] = first_non_finite(memory_of(gradient, begin, end), begin)

    def _members(self, piece: _Piece, gradients: Gradients) -> list[torch.Tensor | None]:
        found: list[torch.Tensor | None] = []
        for slot, begin, end, _, whole in piece.parts:
            one = gradients[slot]
            found.append(one if whole or one is None else memory_of(one, begin, end))
        return found

    def _views_of(self, piece: _Piece, values: torch.Tensor) -> list[torch.Tensor]:
        key = piece.number, values.data_ptr()
        if key not in self._views:
            base, shapes = values.storage_offset(), self.chunks.shapes or ()
            self._views[key] = [
                values.as_strided(*shapes[slot], base + at)
                if whole
                else values.as_strided((end - begin,), (1,), base + at)
                for slot, begin, end, at, whole in piece.parts
            ]
        return self._views[key]

    def _flat(self, piece: _Piece, tensors: Sequence[torch.Tensor]) -> Iterator[tuple[_Part, torch.Tensor]]:
        for part in piece.parts:
            yield part, tensors[part.slot][part.begin : part.end]


def _pieces_of(chunks: EncodedTable, pointers: PointerTable) -> _Pieces:
    """What is kept with the pointer table for this layout."""
    known = pointers.kept
    if not isinstance(known, _Pieces) or known.chunks is not chunks:
        known = pointers.kept = _Pieces(chunks)
    return known


def _cut(chunks: EncodedTable) -> Iterator[_Piece]:
    """Brings rows together, in the order of the bucket, up to PIECE_NUMEL elements of one shard."""
    layout, block = chunks.layout, chunks.layout.encoding.block_numel
    held: list[int] = []
    held_blocks = number = 0
    for row in np.argsort(chunks.rows[:, 3], kind="stable").tolist():
        _, begin, end, offset, _ = chunks.rows[row].tolist()
        blocks = -((begin - end) // block)
        starts_shard = offset % layout.shard_numel == 0
        if held and (starts_shard or (held_blocks + blocks) * block > PIECE_NUMEL):
            yield _piece(chunks, number, held, held_blocks)
            held, held_blocks, number = [], 0, number + 1
        held.append(row)
        held_blocks += blocks
    if held:
        yield _piece(chunks, number, held, held_blocks)


def _piece(chunks: EncodedTable, number: int, rows: Sequence[int], blocks: int) -> _Piece:
    table = chunks.rows[rows].tolist()
    layout, block, start = chunks.layout, chunks.layout.encoding.block_numel, table[0][3]
    data = [row for row, (slot, *_) in zip(rows, table, strict=True) if slot < len(chunks)]
    parts: list[_Part] = []
    for slot, begin, end, offset, _ in table:
        if parts and parts[-1].slot == slot:
            parts[-1] = parts[-1]._replace(end=end)
        elif slot < len(chunks):
            parts.append(_Part(slot, begin, end, offset - start, whole=False))
    known = chunks.shapes is not None and not chunks.shared
    parts = [part._replace(whole=known and part.end - part.begin == chunks.numels[part.slot]) for part in parts]
    shard, first = divmod(start // block, layout.shard_blocks)
    full = len(data) == len(rows) and sum(part.end - part.begin for part in parts) == blocks * block
    return _Piece(number, shard, first, blocks, tuple(parts), tuple(data), full)
