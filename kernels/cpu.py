"""The torch path on CPU: what `reference` defines, in few operators; the same bits, and sums within their bound.

    one dtype on both sides   one pass: torch divides bf16 and fp16 by a number in fp32 and rounds once, as required
    two dtypes                blocks that stay in the cache: gathered, computed on in fp32, rounded to their destination
    small gradients           torch.cat where their shapes let it write a whole run at once (0.1 us each), else
                              _foreach_copy_ from or to cached views (0.3 us each); a layout without shapes takes flat
                              views of them, made at every call (1 us each)

A call of an operator costs 1 us, as does making a view: views of the wire are made once per pointer table. What is rare
is left to `reference`: fp64 gradients packed into a 16-bit wire.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

import torch

from . import reference
from .cpu_stats import find_faults, measure_gradients
from .division import division
from .parts import ADD, FOLD, PUSH, Part, Step, steps
from .runs import BLOCK_NUMEL, Run, runs, scratch
from .table import ChunkTable, Gradients, Partials, PointerTable, Shape, SourcePartials

# Elements of a block of combine, 512 KiB of fp32: two tensors of 25 MiB in 3.4 ms, in a quarter of it 5 ms (each costs
# 10 us), in one piece 4.0 ms.
COMBINE_NUMEL = 131072
# Padding of at least so many elements is zeroed as a range; shorter gaps all at once, by their indices.
_LONG_GAP_NUMEL = 64
# torch.mul or torch.div and its second operand; None: nothing to do.
Change: TypeAlias = tuple[Callable[..., torch.Tensor], float] | None


def pack(
    gradients: Gradients,
    chunks: ChunkTable,
    pointers: PointerTable,
    wire: torch.Tensor,
    divisor: float,
    partials: SourcePartials | None = None,
) -> None:
    """Flattens, divides and casts `gradients` into `wire`; arguments as for `kernels.dispatch.pack`."""
    if chunks.fp64 and wire.dtype is not torch.float64:  # it would round twice: see reference.store_rounded
        reference.pack(gradients, chunks, pointers, wire, divisor, partials)
        return
    scalar, exact = division(divisor, chunks.compute_dtype)  # a product is twice as fast in the cache
    change = None if scalar == 1.0 else (torch.mul if exact else torch.div, scalar)
    if chunks.cast is not None:
        pack_flat(gradients, chunks, wire, divisor)
    elif not _in_one_buffer(gradients, chunks):
        _slots_of(chunks, pointers, wire).pack(_as_laid_out(gradients, chunks), change)
    elif (buffer := gradients[0]) is None:
        wire.zero_()
    else:
        flat = wire if buffer is wire else buffer.as_strided(wire.shape, (1,))
        _convert(flat, wire, chunks.compute_dtype, change)
    if partials is not None:
        find_faults(gradients, chunks, wire, partials)


def pack_flat(gradients: Gradients, chunks: ChunkTable, wire: torch.Tensor, divisor: float) -> None:
    """`pack` in four operators on any device, by a bucket of memory in the compute dtype."""
    compute = chunks.compute_dtype
    flat = torch.zeros(chunks.wire_numel, dtype=compute, device=wire.device)
    copy_all(slots(flat, chunks), reference.flattened(gradients, chunks))
    # By a tensor: CUDA divides by a number by multiplying with its inverse, which is rounded.
    by = torch.full((1,), divisor, dtype=compute, device=wire.device)
    if chunks.cast is None:
        torch.div(flat, by, out=wire)
    else:
        reference.store_rounded(wire, flat.div_(by), chunks.cast)


def slots(flat: torch.Tensor, chunks: ChunkTable) -> list[torch.Tensor]:
    """Views of each slot of a buffer that is laid out as the wire."""
    return [flat[at : at + numel] for at, numel in zip(chunks.offsets, chunks.numels, strict=True)]


def unpack(
    gradients: Gradients,
    chunks: ChunkTable,
    pointers: PointerTable,
    wire: torch.Tensor,
    scale: torch.Tensor,
    partials: Partials | None = None,
) -> None:
    """Unflattens, scales and casts `wire` into `gradients`; arguments as for `kernels.dispatch.unpack`."""
    factor = scale.item()
    change = None if factor == 1.0 else (torch.mul, factor)
    if not _in_one_buffer(gradients, chunks):
        _slots_of(chunks, pointers, wire).unpack(_as_laid_out(gradients, chunks), change)
    elif (buffer := gradients[0]) is not None:
        _convert(wire, buffer.as_strided(wire.shape, (1,)), chunks.compute_dtype, change)
    if partials is not None:
        measure_gradients(gradients, chunks, partials)


def measure(gradients: Gradients, chunks: ChunkTable, pointers: PointerTable, partials: Partials) -> None:
    """Fills `partials` with statistics of gradients as they are; arguments as for `kernels.dispatch.measure`."""
    measure_gradients(gradients, chunks, partials)


def scale(gradients: Gradients, chunks: ChunkTable, pointers: PointerTable, factor: torch.Tensor) -> None:
    """Multiplies gradients by `factor`, in place; arguments as for `kernels.dispatch.scale`."""
    if chunks.shared:
        reference.scale(gradients, chunks, pointers, factor)
        return
    present = [gradient.detach() for gradient in gradients if gradient is not None]
    if present:
        torch._foreach_mul_(present, factor.reshape(()))  # a Python float would be rounded to 16 bits first


def combine(
    tensors: Sequence[torch.Tensor],
    outputs: Sequence[torch.Tensor],
    parts: Sequence[Part],
    scale: float = 1.0,
    *,
    begins: Sequence[int] | None = None,
) -> None:
    """Adds `tensors` up and writes the sum, times `scale`, into `outputs`, in blocks that stay in the cache.

    Arguments as for `kernels.dispatch.combine`.
    """
    for part, read, written in reference.pieces(tensors, outputs, parts, begins):
        _combine_piece(read, written, steps(part.adds, part.owner), scale)


def _in_one_buffer(gradients: Gradients, chunks: ChunkTable) -> bool:
    """Whether the gradients lie in one tensor as they do on the wire, and all of them or none are there."""
    return chunks.one_buffer and len(set(map(id, gradients))) == 1


def _shapes(chunks: ChunkTable) -> Iterable[Shape]:
    """Of each slot's gradient as `_Slots` takes it."""
    return (((numel,), (1,)) for numel in chunks.numels) if chunks.shapes is None else chunks.shapes


def _as_laid_out(gradients: Gradients, chunks: ChunkTable) -> Gradients:
    """The gradients in the shapes of `_shapes`."""
    return gradients if chunks.shapes is not None else reference.flattened(gradients, chunks)


class _Slots:
    """The slots of one wire, and memory to convert them in.

    Args:
        chunks: the layout's table.
        wire: the wire buffer.
    """

    def __init__(self, chunks: ChunkTable, wire: torch.Tensor) -> None:
        self.chunks = chunks
        self.wire = wire
        self._compute = chunks.compute_dtype
        self._shapes = tuple(_shapes(chunks))
        places = zip(self._shapes, chunks.offsets, strict=True)
        base = wire.storage_offset()
        self._views = [wire.as_strided(size, strides, base + offset) for (size, strides), offset in places]
        self._runs = [
            (run, wire[run.begin : run.end], self._views[run.slots.start : run.slots.stop]) for run in runs(chunks)
        ]
        self._staged: dict[int, tuple[torch.Tensor, list[torch.Tensor]]] = {}
        self._blocks: dict[torch.dtype, torch.Tensor] = {}
        alone = len(chunks.gaps) == 1
        self._long = [wire[lo:hi] for lo, hi in chunks.gaps if alone or hi - lo >= _LONG_GAP_NUMEL]
        short = [
            torch.arange(lo, hi, dtype=torch.int64, device="cpu")
            for lo, hi in chunks.gaps
            if not alone and hi - lo < _LONG_GAP_NUMEL
        ]
        self._short = torch.cat(short) if short else None

    def pack(self, gradients: Gradients, change: Change) -> None:
        """Fills the wire, padding included."""
        whole = len(self._runs) == 1
        for run, part, views in self._runs:
            if len(run.slots) == 1:
                gradient = gradients[run.slots.start]
                if gradient is None:
                    part.zero_()
                elif gradient.dtype is part.dtype:
                    _convert(gradient, views[0], self._compute, change)
                else:
                    _convert(gradient.as_strided((run.numel,), (1,)), part, self._compute, change)
                continue
            # Into the wire itself, unless that would round before the division.
            in_wire = change is None or part.dtype in (self._compute, run.dtype)
            block, into = (part, views) if in_wire else self._staged.get(run.begin) or self._stage(run)
            _gather(gradients if whole else run.members(gradients), run, block, into)
            _convert(block, part, self._compute, change)
        for gap in self._long:
            gap.zero_()
        if self._short is not None:
            self.wire.index_fill_(0, self._short, 0.0)

    def unpack(self, gradients: Gradients, change: Change) -> None:
        """Writes the gradients; one may be its own slot."""
        if change is None:
            copy_all(gradients, self._views)
            return
        for run, part, _ in self._runs:
            if len(run.slots) == 1:
                if (gradient := gradients[run.slots.start]) is not None:
                    _convert(part, gradient.as_strided((run.numel,), (1,)), self._compute, change)
            else:
                block, staged = self._staged.get(run.begin) or self._stage(run)
                _convert(part, block, self._compute, change)
                copy_all(run.members(gradients), staged)

    def _stage(self, run: Run) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Memory laid out as a run of the wire, and views of its slots, with the gradients' shapes."""
        if run.dtype not in self._blocks:  # one for all runs
            longest = max(run.end - run.begin for run, _, _ in self._runs if len(run.slots) > 1)
            with torch.inference_mode(False):  # it outlives the caller's
                self._blocks[run.dtype] = torch.empty(longest, dtype=run.dtype, device="cpu")
        block = self._blocks[run.dtype][: run.end - run.begin]
        views = [block.as_strided(*self._shapes[slot], self.chunks.offsets[slot] - run.begin) for slot in run.slots]
        self._staged[run.begin] = block, views
        return block, views


def _slots_of(chunks: ChunkTable, pointers: PointerTable, wire: torch.Tensor) -> _Slots:
    """What is kept with the pointer table for this layout and wire."""
    known: _Slots | None = pointers.kept
    if known is None or known.chunks is not chunks or known.wire is not wire:
        known = pointers.kept = _Slots(chunks, wire)
    return known


def _gather(gradients: Gradients, run: Run, block: torch.Tensor, views: Sequence[torch.Tensor]) -> None:
    """Copies a run's gradients into `block`, by its `views`; zeros for those that are missing."""
    if run.trailing is not None and block.dtype is run.dtype:
        try:
            torch.cat(gradients, out=block.view(-1, *run.trailing) if run.trailing else block)  # type: ignore[arg-type]
        except (RuntimeError, TypeError):
            pass  # raised before anything is written: one is None, or a view of the wire
        else:
            return
    if not copy_all(views, gradients):
        torch._foreach_zero_([view for view, gradient in zip(views, gradients, strict=True) if gradient is None])


def copy_all(into: Gradients, source: Gradients) -> bool:
    """Copies tensors into tensors of the same shapes, rounding to their dtypes; False if it skipped pairs with None."""
    try:  # 0.3 us each; to look for None first would add a quarter of that
        torch._foreach_copy_(into, source)  # type: ignore[arg-type]
    except TypeError:  # raised before anything is written
        pairs = [(a, b) for a, b in zip(into, source, strict=True) if a is not None and b is not None]
        if pairs:
            torch._foreach_copy_([a for a, _ in pairs], [b for _, b in pairs])
        return False
    return True


def _convert(source: torch.Tensor, destination: torch.Tensor, compute: torch.dtype, change: Change) -> None:
    """destination = round_once(change(source)), for tensors of one shape, which may be the same memory.

    Tensors of two dtypes are flat.
    """
    if change is None:
        if source is not destination:
            destination.copy_(source)
        return
    operation, scalar = change
    if source.dtype is destination.dtype:
        operation(source, scalar, out=destination)
        return
    numel = source.numel()
    if numel > BLOCK_NUMEL:
        for part, into in zip(source.split(BLOCK_NUMEL), destination.split(BLOCK_NUMEL), strict=True):
            _convert(part, into, compute, change)
        return
    wide = destination if destination.dtype is compute else scratch(compute, numel)
    operation(source if source.dtype is compute else wide.copy_(source), scalar, out=wide)
    if wide is not destination:
        destination.copy_(wide)


def _combine_piece(
    tensors: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], program: Sequence[Step], scale: float
) -> None:
    order = [peer for kind, peer in program if kind != FOLD]
    wide = tensors[0].dtype in (torch.float32, torch.float64)
    # If additions need no wider dtype in between (two tensors have one addition), an output can hold the partial sums.
    plain = scale == 1.0 and len(order) > 1 and (FOLD, 0) not in program and (wide or len(order) == 2)
    plain = plain and outputs[0].dtype is tensors[0].dtype  # else `torch.add` would round before it widens
    first = _free(tensors, order, outputs) if plain else None
    ordered = [outputs[first], *outputs[:first], *outputs[first + 1 :]] if first is not None else outputs
    for begin in range(0, tensors[0].numel(), COMBINE_NUMEL):
        end = begin + COMBINE_NUMEL
        total, *others = (one[begin:end] for one in ordered)
        if first is not None:
            torch.add(tensors[order[0]][begin:end], tensors[order[1]][begin:end], out=total)
            for peer in order[2:]:
                total.add_(tensors[peer][begin:end])
        else:
            total.copy_(_evaluated([one[begin:end] for one in tensors], program, scale))
        for output in others:
            output.copy_(total)


def _free(tensors: Sequence[torch.Tensor], order: Sequence[int], outputs: Sequence[torch.Tensor]) -> int | None:
    """The first output that is not among the tensors read after the first two."""
    later = {tensors[peer].data_ptr() for peer in order[2:]}
    return next((index for index, one in enumerate(outputs) if one.data_ptr() not in later), None)


def _evaluated(blocks: Sequence[torch.Tensor], program: Sequence[Step], scale: float) -> torch.Tensor:
    compute = torch.float64 if blocks[0].dtype is torch.float64 else torch.float32
    stack: list[torch.Tensor] = []
    for kind, peer in program:
        if kind == PUSH:
            stack.append(blocks[peer].to(compute, copy=True))
        elif kind == ADD:
            stack[-1].add_(blocks[peer])
        else:
            top = stack.pop()
            stack[-1].add_(top)
    (total,) = stack
    return total if scale == 1.0 else total.mul_(scale)
