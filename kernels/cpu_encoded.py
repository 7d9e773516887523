"""Encoded buckets on CPU: what `reference_encoded` defines, in few operators; the same bits.

A bucket is worked on in pieces that stay in the cache: gathered as fp32 and encoded in place, decoded and scattered. An
operator costs 1 us at least, making a view as well: a piece has about 20 operators, and views of memory are made once.
The two codes of a byte of int4 are put together as floating-point numbers, in which 16 * high + low is exact, and taken
apart as integers: so torch is quickest. Products are never added in one operator, as `addcmul` does not round them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch

from .cpu import Change, copy_all
from .cpu_stats import measure_gradients
from .division import division
from .encoded_table import EncodedTable, Residuals
from .encodings import EncodedLayout, Encoding
from .philox import fractions
from .reference import first_non_finite, memory_of
from .runs import scratch
from .table import Gradients, Partials, PointerTable, SourcePartials

# Elements of a piece: 1 MiB of fp32. In pieces of half the size encode and decode take a sixth longer, in those of
# twice the size as long.
PIECE_NUMEL = 262144
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
) -> None:
    """Flattens, divides and encodes `gradients`; arguments as for `kernels.encoded.encode`."""
    scalar, exact = division(divisor, torch.float32)
    change = None if scalar == 1.0 else (torch.mul if exact else torch.div, scalar)
    if partials is not None:
        partials.first_non_finite.fill_(-1)
        partials.flushed.zero_()
    encoding, stored, pieces = chunks.layout.encoding, _Stored(encoded, chunks.layout), _pieces_of(chunks, pointers)
    for piece in pieces.all:
        memory = pieces.memory(piece)
        pieces.gather(piece, gradients, memory.values, change)
        before = None if residuals is None else residuals.copies[int(residuals.live)]
        if residuals is not None and before is not None:
            pieces.gather_flat(piece, before, memory.work)
            memory.values.add_(memory.work.mul_(residuals.weights[0]))
        into = stored.blocks(piece.shard, piece.first, piece.blocks)
        added = None if draw is None else pieces.fractions(piece, draw)
        bad = _encode_blocks(memory, encoding, into, added, keep=residuals is not None)
        if residuals is not None and before is not None:
            lost = _lost(memory, encoding, into, residuals)
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
) -> None:
    """Adds up the encoded contributions of a shard; arguments as for `kernels.encoded.combine_encoded`."""
    layout, encoding, block = chunks.layout, chunks.layout.encoding, chunks.layout.encoding.block_numel
    contributions, stored = _Stored(received, layout), _Stored(output, layout)
    for first in range(0, layout.shard_blocks, PIECE_NUMEL // block):
        blocks = min(PIECE_NUMEL // block, layout.shard_blocks - first)
        memory = _Memory(_room(blocks, encoding), blocks, encoding)
        shards = range(received.numel() // layout.shard_bytes)
        _sum_blocks(memory, encoding, [contributions.blocks(shard, first, blocks) for shard in shards])
        before = None
        if residuals is not None:
            before = residuals.copies[int(residuals.live)][0][first * block :][: blocks * block].view(blocks, block)
            memory.values.add_(torch.mul(before, residuals.weights[0], out=memory.work))
        added = None
        if draw is not None:
            seed, stream, step, number = draw.tolist()
            added = torch.from_numpy(fractions((seed, stream), first, blocks, block, number, step))
        into = stored.blocks(0, first, blocks)
        bad = _encode_blocks(memory, encoding, into, added, keep=residuals is not None)
        if residuals is not None and before is not None:
            lost = _lost(memory, encoding, into, residuals)
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
) -> None:
    """Decodes, adds up, scales and unflattens; arguments as for `kernels.encoded.decode`."""
    layout, stored, pieces = chunks.layout, _Stored(encoded, chunks.layout), _pieces_of(chunks, pointers)
    factor = scale.item()
    for piece in pieces.all:
        if not piece.parts:
            continue
        memory = pieces.memory(piece)
        shards = range(piece.shard, encoded.numel() // layout.shard_bytes, layout.shards)
        contributions = [stored.blocks(shard, piece.first, piece.blocks) for shard in shards]
        _sum_blocks(memory, layout.encoding, contributions)
        pieces.scatter(piece, memory.values, gradients, factor)
    if partials is not None:
        measure_gradients(gradients, chunks, partials)


class _Blocks(NamedTuple):
    """Blocks where they lie: scales, fp32 [blocks] or the bits of bf16 as int16, and codes, int8 [blocks, bytes]."""

    scales: torch.Tensor
    codes: torch.Tensor


class _Stored:
    """Shards in a buffer, one behind another."""

    def __init__(self, buffer: torch.Tensor, layout: EncodedLayout) -> None:
        self._layout = layout
        if not buffer.numel():  # an empty one may lie at any address
            buffer = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._scales = buffer.view(torch.float32 if layout.encoding.scale_bytes == 4 else torch.int16)
        self._codes = buffer.view(torch.int8)

    def blocks(self, shard: int, first: int, count: int) -> _Blocks:
        """`count` blocks of a shard, from its block `first` on."""
        layout, scales, codes, size = self._layout, self._scales, self._codes, self._layout.encoding.code_bytes
        begin = shard * layout.shard_bytes
        scales_at = scales.storage_offset() + begin // scales.itemsize + first
        codes_at = codes.storage_offset() + begin + layout.scales_bytes + first * size
        return _Blocks(
            scales.as_strided((count,), (1,), scales_at), codes.as_strided((count, size), (size, 1), codes_at)
        )


class _Memory:
    """What this thread works on some blocks in.

    Args:
        room: memory of `_room`.
        blocks: how many.
        encoding: of the blocks.

    Attributes:
        values, work: fp32 [blocks, block].
        halves: views of their halves, fp32 [blocks, block / 2].
        half: fp32 [blocks, block / 2].
        low, high: int8 [blocks, block / 2].
    """

    def __init__(self, room: torch.Tensor, blocks: int, encoding: Encoding) -> None:
        block = encoding.block_numel
        numel, most, size = blocks * block, 4 * len(room) // 11, (blocks, block // 2)
        values, work, half, codes = room.split([most, most, most // 2, most // 4])
        low, high = codes.view(torch.int8).split(most // 2)
        self.values: torch.Tensor = values[:numel].view(blocks, block)
        self.work: torch.Tensor = work[:numel].view(blocks, block)
        self.half = half[: numel // 2].view(size)
        self.low, self.high = low[: numel // 2].view(size), high[: numel // 2].view(size)
        self.halves = self.values.split(block // 2, 1), self.work.split(block // 2, 1)


def _room(blocks: int, encoding: Encoding) -> torch.Tensor:
    """This thread's memory for `_Memory`: no less than for any piece, so that all pieces use the same."""
    return scratch(torch.float32, 11 * max(PIECE_NUMEL, blocks * encoding.block_numel) // 4)


def _encode_blocks(
    memory: _Memory, encoding: Encoding, into: _Blocks, added: torch.Tensor | None, *, keep: bool
) -> torch.Tensor | None:
    """Encodes `memory.values`; which blocks are not finite, if one is not.

    Args:
        memory: the values, in whose place codes are computed.
        encoding: of the blocks.
        into: what is written.
        added: fractions of stochastic rounding, [blocks, block]; None: codes are rounded to nearest.
        keep: leave the values as they are.
    """
    values, codes = memory.values, memory.work if keep else memory.values
    peak = torch.maximum(values.amax(1), values.amin(1).neg_())  # NaN where one is NaN
    scale = peak / encoding.levels
    zero = scale < _SMALLEST_SCALE
    scale.masked_fill_(zero, 0.0)
    if encoding.scale_bytes == 2:  # rounded up
        scale.view(torch.int32).add_(0xFFFF).bitwise_and_(-0x10000)
    torch.mul(values, scale.reciprocal().masked_fill_(zero, 0.0).unsqueeze(1), out=codes)
    bad = None
    if not math.isfinite(peak.amax().item()):
        bad = ~peak.isfinite()
        codes[bad], scale[bad] = 0.0, math.nan
    if added is None:
        codes.round_()
    else:
        codes.clamp_(-encoding.levels, encoding.levels).add_(added).floor_()
    into.scales.copy_(scale if encoding.scale_bytes == 4 else scale.view(torch.int16)[1::2])
    if encoding.bits == 4:
        low, high = memory.halves[keep]
        codes = torch.add(low, high, alpha=16, out=memory.half)
    into.codes.copy_(codes)
    return bad


def _sum_blocks(memory: _Memory, encoding: Encoding, contributions: Sequence[_Blocks]) -> None:
    """Decodes blocks of several contributions into `memory.values`, and adds them up in their order."""
    for nth, one in enumerate(contributions):
        _decode_blocks(memory, encoding, one, work=nth > 0)
        if nth:
            memory.values.add_(memory.work)


def _decode_blocks(memory: _Memory, encoding: Encoding, blocks: _Blocks, *, work: bool) -> torch.Tensor:
    """Decodes blocks into `memory.values`, or into `memory.work`."""
    values, scales = memory.work if work else memory.values, blocks.scales
    if encoding.bits == 4:
        low, high = memory.halves[work]
        torch.add(blocks.codes, 8, out=memory.high).bitwise_right_shift_(4)
        high.copy_(memory.high)
        low.copy_(torch.sub(blocks.codes, memory.high, alpha=16, out=memory.low))
    else:
        values.copy_(blocks.codes)
    if encoding.scale_bytes == 2:
        scales = scales.to(torch.int32).bitwise_left_shift_(16).view(torch.float32)
    values.mul_(scales.unsqueeze(1))
    return values


def _lost(memory: _Memory, encoding: Encoding, blocks: _Blocks, residuals: Residuals) -> torch.Tensor:
    """What the encoding has lost of `memory.values`, in their place."""
    decoded = _decode_blocks(memory, encoding, blocks, work=True)
    return torch.sub(memory.values, decoded, out=memory.values).mul_(residuals.weights[1])


class _Part(NamedTuple):
    """Elements [begin, end) of a slot's memory, [at, ...) of a piece; `whole`: all of the slot, in its known shape."""

    slot: int
    begin: int
    end: int
    at: int
    whole: bool


class _Piece(NamedTuple):
    """Consecutive blocks of one shard, from its block `first` on.

    Attributes:
        slots: those of the parts, if these are consecutive slots as a whole, else None.
        full: no element is padding.
    """

    number: int
    shard: int
    first: int
    blocks: int
    parts: tuple[_Part, ...]
    slots: slice | None
    rows: tuple[int, ...]
    full: bool


class _Pieces:
    """The pieces of one layout, and views of the memory that they are worked on in."""

    def __init__(self, chunks: EncodedTable) -> None:
        self.chunks = chunks
        self.all = tuple(_cut(chunks))
        # By piece, and by address of the memory, of which each thread has its own.
        self._memory: dict[tuple[int, int], _Memory] = {}
        self._views: dict[tuple[int, int], list[torch.Tensor]] = {}

    def memory(self, piece: _Piece) -> _Memory:
        """What this thread works on a piece in."""
        encoding = self.chunks.layout.encoding
        room = _room(piece.blocks, encoding)
        key = piece.number, room.data_ptr()
        if key not in self._memory:
            with torch.inference_mode(False):  # a view in another dtype would be a tensor of that mode, and outlives it
                self._memory[key] = _Memory(room, piece.blocks, encoding)
        return self._memory[key]

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

    def _members(self, piece: _Piece, gradients: Gradients) -> Gradients:
        if piece.slots is not None:
            return gradients[piece.slots]
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
    slots = None
    if parts and all(part.whole for part in parts) and parts[-1].slot - parts[0].slot < len(parts):
        slots = slice(parts[0].slot, parts[-1].slot + 1)
    return _Piece(number, shard, first, blocks, tuple(parts), slots, tuple(data), full)
