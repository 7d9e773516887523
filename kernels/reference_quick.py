"""Quick forms of `reference` on CPU, for gradients of known shapes and vouched=True; the same result, bit for bit.

    one dtype on both sides   one pass: torch divides bf16 and fp16 by a number in fp32 and rounds once, as required
    two dtypes                blocks that stay in the cache: gathered, computed on in fp32, rounded to their destination
    small gradients           torch.cat where their shapes let it write a whole run at once (0.1 us each), else
                              _foreach_copy_ from or to cached views (0.3 us each)

A call of an operator costs 1 us, as does making a view: views are made once per pointer table.
"""

from __future__ import annotations

import bisect
import math
import operator
from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch

from .division import division
from .reference_gather import Run, copy_all, members_of, present
from .reference_stats import scratch
from .table import ChunkTable, PointerTable

# Elements of a block, 1 MiB in fp32: 8 million fp32 -> bf16 take 3.2 ms, in blocks of half the size 3.9 ms.
BLOCK_NUMEL = 262144
# Up to so many gradients of the wire's dtype are divided one by one into their slots: a run costs as much as four.
_FEW = 4
# Padding of at least so many elements is zeroed as a range; shorter gaps of a run all at once, by their indices.
_LONG_GAP_NUMEL = 64
# torch.mul or torch.div and its second operand; None: nothing to do.
Change: TypeAlias = tuple[Callable[..., torch.Tensor], float] | None


def kept_for(chunks: ChunkTable, pointers: PointerTable, wire: torch.Tensor) -> Kept | None:
    """What is kept for the buckets' quick forms; None where they do not apply.

    They apply on CPU, with known shapes, and without rounding from fp64.
    """
    kept: Kept | None = pointers.kept
    if kept is not None and kept.chunks is chunks and kept.wire is wire:
        return kept
    if chunks.shapes is None or wire.device.type != "cpu" or (chunks.fp64 and wire.dtype is not torch.float64):
        return None
    kept = pointers.kept = Kept(chunks, wire, pointers.views(chunks, wire))
    return kept


def pack(
    gradients: Sequence[torch.Tensor | None], runs: Sequence[Run], kept: Kept, wire: torch.Tensor, divisor: float
) -> None:
    """Packs some runs of a layout, and zeros their padding.

    `gradients` begin with the first run's first slot; those of slots in no run are ignored.
    """
    views, change = kept.views, _change(divisor, kept.compute)
    native = kept.chunks.kinds == {wire.dtype}
    base = runs[0].slots.start if runs else 0
    for run in runs:
        slots = run.slots
        if len(slots) > _FEW or (len(slots) > 1 and run.dtypes != {wire.dtype}):
            members = members_of(gradients, run, base)
            if not _pack_concatenated(members, run, kept, wire, change):
                _pack_copied(members, views[slots.start : slots.stop], run, kept, wire, change)
        else:
            for slot in slots:
                if (gradient := gradients[slot - base]) is None:
                    views[slot].zero_()
                elif native:
                    _apply(gradient, change, views[slot])
                else:
                    _convert(gradient, views[slot], kept, slot, change)
    if any(map(_padded, runs)):
        kept.zero_gaps(wire, [run for run in runs if run.padded])


def pack_flat(source: torch.Tensor, destination: torch.Tensor, divisor: float, compute: torch.dtype) -> None:
    """destination = round_once(source / divisor), for flat tensors on CPU."""
    _convert_flat(source, destination, compute, _change(divisor, compute))


def unpack(
    gradients: Sequence[torch.Tensor | None], runs: Sequence[Run], kept: Kept, wire: torch.Tensor, scale: float
) -> None:
    """gradient = round_once(wire * scale), without statistics; small gradients may have any strides."""
    views, change = kept.views, None if scale == 1.0 else (torch.mul, scale)
    if change is None and (wire.dtype is kept.compute or kept.chunks.kinds <= {kept.compute, wire.dtype}):
        copy_all(gradients, views)
        return
    for run in runs:
        if not run.small:
            slot = run.slots.start
            if (gradient := gradients[slot]) is not None:
                _convert(views[slot], gradient, kept, slot, change)
        elif run.end > run.begin:
            # Nothing is written before all of the run is read: a gradient may be its own slot.
            block, staged = kept.staged(run)
            _convert_flat(wire[run.begin : run.end], block, kept.compute, change)
            copy_all(members_of(gradients, run), staged)


def _change(divisor: float, compute: torch.dtype) -> Change:
    """The operation that divides; a product is twice as fast in the cache."""
    scalar, exact = division(divisor, compute)
    return None if scalar == 1.0 else (torch.mul if exact else torch.div, scalar)


class Kept:
    """What is cached for one pointer table and wire: memory, views of it, positions of padding.

    Args:
        chunks: the layout's table.
        wire: the wire buffer.
        views: its slots, with the gradients' shapes.
    """

    def __init__(self, chunks: ChunkTable, wire: torch.Tensor, views: list[torch.Tensor]) -> None:
        self.chunks = chunks
        self.wire = wire
        self.views = views
        self.compute = chunks.compute_dtype
        self._blocks: dict[torch.dtype, torch.Tensor] = {}
        self._staged: dict[int, tuple[torch.Tensor, list[torch.Tensor]]] = {}
        self._temporaries: dict[int, torch.Tensor] = {}
        self._joined: dict[int, tuple[tuple[int, ...], int, torch.dtype] | None] = {}
        self._gaps: dict[int, tuple[Sequence[Run], torch.Tensor | None, list[tuple[int, int]]]] = {}

    def gathering(self, run: Run) -> torch.dtype:
        """The dtype in which a run is gathered: the gradients' own, if they have one dtype."""
        return next(iter(run.dtypes)) if len(run.dtypes) == 1 else self.compute

    def staged(self, run: Run) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Memory laid out as a run of the wire, and views of its slots, with the gradients' shapes."""
        known = self._staged.get(run.slots.start)
        if known is None:
            block = self._block(self.gathering(run), run.end - run.begin)
            views = [self._view(block, slot, self.chunks.offsets[slot] - run.begin) for slot in run.slots]
            known = self._staged[run.slots.start] = block, views
        return known

    def temporary(self, slot: int) -> torch.Tensor:
        """Memory for one slot in the compute dtype, with its gradient's shape."""
        known = self._temporaries.get(slot)
        if known is None:
            known = self._view(self._block(self.compute, self.chunks.numels[slot]), slot, 0)
            self._temporaries[slot] = known
        return known

    def joined(self, run: Run) -> tuple[tuple[int, ...], int, torch.dtype] | None:
        """If torch.cat can write a whole run: the gradients' shape without the first dimension, elements, and dtype."""
        first = run.slots.start
        if first not in self._joined:
            joined = _joined(self.chunks, run)
            self._joined[first] = None if joined is None else (*joined, self.gathering(run))
        return self._joined[first]

    def zero_gaps(self, wire: torch.Tensor, runs: Sequence[Run]) -> None:
        """Zeros the padding of some runs; its positions are cached per run, and for the latest list of several."""
        key = runs[0].slots.start if len(runs) == 1 else -1
        known = self._gaps.get(key)
        if known is None or known[0] != runs:
            known = self._gaps[key] = runs, *_gaps(self.chunks, runs)
        _, indices, ranges = known
        if indices is not None:
            wire.index_fill_(0, indices, 0.0)
        for begin, end in ranges:
            wire[begin:end].zero_()

    def _block(self, dtype: torch.dtype, numel: int) -> torch.Tensor:
        block = self._blocks.get(dtype)
        if block is None or block.numel() < numel:
            block = torch.empty(max(numel, min(BLOCK_NUMEL, self.chunks.wire_numel)), dtype=dtype)
            self._blocks[dtype] = block
            # Views of the smaller one would keep it: growing from run to run, as much memory as all of the wire.
            self._staged.clear()
            self._temporaries.clear()
        return block[:numel]

    def _view(self, block: torch.Tensor, slot: int, offset: int) -> torch.Tensor:
        assert self.chunks.shapes is not None
        return block.as_strided(*self.chunks.shapes[slot], offset)


def _joined(chunks: ChunkTable, run: Run) -> tuple[tuple[int, ...], int] | None:
    assert chunks.shapes is not None
    shapes = chunks.shapes[run.slots.start : run.slots.stop]
    numels = chunks.numels[run.slots.start : run.slots.stop]
    rows, numel = shapes[0][0][1:], sum(numels)
    gapless = chunks.offsets[run.slots.stop - 1] + numels[-1] - run.begin == numel
    alike = all(size and size[1:] == rows and _is_dense(size, strides) for size, strides in shapes)
    return (rows, numel) if numel and gapless and alike and len(run.dtypes) == 1 else None


def _is_dense(size: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether the elements are contiguous."""
    numel = 1
    for length, stride in zip(reversed(size), reversed(strides), strict=True):
        if length != 1 and stride != numel:
            return math.prod(size) == 0
        numel *= length
    return True


def _gaps(chunks: ChunkTable, runs: Sequence[Run]) -> tuple[torch.Tensor | None, list[tuple[int, int]]]:
    gaps: list[tuple[int, int]] = []
    for run in runs:
        begin, end = (bisect.bisect_left(chunks.gaps, (at, at)) for at in (run.begin, run.end))
        gaps += chunks.gaps[begin:end]
    long = [gap for gap in gaps if len(gaps) == 1 or gap[1] - gap[0] >= _LONG_GAP_NUMEL]
    short = [torch.arange(begin, end) for begin, end in gaps if end - begin < _LONG_GAP_NUMEL and len(gaps) > 1]
    return torch.cat(short) if short else None, long


def _pack_concatenated(
    gradients: Sequence[torch.Tensor | None], run: Run, kept: Kept, wire: torch.Tensor, change: Change
) -> bool:
    """Concatenates a run's gradients, then converts; False if that is impossible, and nothing is written then."""
    joined = kept.joined(run)
    if joined is None:
        return False
    rows, numel, gathering = joined
    part = wire[run.begin : run.begin + numel]
    block = part if gathering is wire.dtype else scratch(gathering, wire.device, numel)
    try:
        torch.cat(gradients, out=block.view(-1, *rows) if rows else block)  # type: ignore[arg-type]
    except (RuntimeError, TypeError):
        return False  # raised before anything is written: one is None, or a view of the wire, or not strided
    _convert_flat(block, part, kept.compute, change)
    return True


def _pack_copied(
    gradients: Sequence[torch.Tensor | None],
    views: Sequence[torch.Tensor],
    run: Run,
    kept: Kept,
    wire: torch.Tensor,
    change: Change,
) -> None:
    """Copies a run's gradients into views, then converts the whole run."""
    part = wire[run.begin : run.end]
    # Into the wire itself, unless that would round before the division.
    rounds = wire.dtype is not kept.compute and kept.gathering(run) is not wire.dtype
    block, into = (part, views) if not rounds or change is None else kept.staged(run)
    there, into = present(gradients, into)
    if there:
        torch._foreach_copy_(into, there)
    _convert_flat(block, part, kept.compute, change)
    if len(there) < len(views):
        torch._foreach_zero_([view for view, gradient in zip(views, gradients, strict=True) if gradient is None])


def _convert(source: torch.Tensor, destination: torch.Tensor, kept: Kept, slot: int, change: Change) -> None:
    """destination = round_once(change(source)), of one shape; larger ones than a block have one layout too."""
    numel = kept.chunks.numels[slot]
    if source.dtype is destination.dtype or (change is None and kept.compute in (source.dtype, destination.dtype)):
        _apply(source, change, destination)
    elif numel <= BLOCK_NUMEL:
        _through(source, destination, kept.temporary(slot), change)
    else:
        _convert_flat(_flat(source, numel), _flat(destination, numel), kept.compute, change)


def _convert_flat(source: torch.Tensor, destination: torch.Tensor, compute: torch.dtype, change: Change) -> None:
    if source.dtype is destination.dtype or (change is None and compute in (source.dtype, destination.dtype)):
        _apply(source, change, destination)
        return
    temporary = scratch(compute, source.device, min(source.numel(), BLOCK_NUMEL))
    for part, into in zip(source.split(BLOCK_NUMEL), destination.split(BLOCK_NUMEL), strict=True):
        _through(part, into, temporary if part.numel() == temporary.numel() else temporary[: part.numel()], change)


def _through(source: torch.Tensor, destination: torch.Tensor, temporary: torch.Tensor, change: Change) -> None:
    """Converts through the dtype of `temporary`, in the cache; `temporary` may be the source's memory."""
    if destination.dtype is temporary.dtype:
        destination.copy_(source)
        _apply(destination, change, destination)
    elif source.dtype is temporary.dtype:
        _apply(source, change, temporary)
        destination.copy_(temporary)
    else:
        temporary.copy_(source)
        _apply(temporary, change, temporary)
        destination.copy_(temporary)


def _apply(source: torch.Tensor, change: Change, destination: torch.Tensor) -> None:
    if change is not None:
        operation, scalar = change
        operation(source, scalar, out=destination)
    elif source is not destination:
        destination.copy_(source)


def _flat(one: torch.Tensor, numel: int) -> torch.Tensor:
    return one.as_strided((numel,), (1,))


_padded = operator.attrgetter("padded")
