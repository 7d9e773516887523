"""The kernels' functions in torch: the definition of correct, and the path on CPU.

    pack:    wire[offset + i]  = round_to_wire(gradient[i] / divisor)
    unpack:  gradient[i]       = round_to_gradient(wire[offset + i] * scale)

Compute dtype fp32 (fp64 for fp64); one correctly rounded division or product there, then one rounding to the
destination's dtype. Signatures are the launchers'. Works on any device.
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Collection, MutableMapping, Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch

from .checks import check_transfer
from .table import ChunkTable, Partials, PointerTable, Totals

# Elements converted at a time: the fp32 values in between stay in the cache (fp32 -> bf16 on one core: 1.8 ms
# for 25 MiB, against 10.8 ms for torch.div(x, divisor, out=wire)).
BLOCK_NUMEL = 131072
# Slots from here on are converted one by one; below, the fixed cost per operator (about 5 us in all) shows.
LARGE_NUMEL = 16384


def pack(
    gradients: Sequence[torch.Tensor | None],
    chunks: ChunkTable,
    pointers: PointerTable,
    wire: torch.Tensor,
    divisor: torch.Tensor,
    partials: Partials | None = None,
    *,
    vouched: bool = False,
    done: Collection[int] = (),
) -> None:
    """Flattens, divides and casts `gradients` into `wire`; see `kernels.pack.pack`.

    `done`: first slots of the runs that `pack_run` has packed.
    """
    if not vouched:
        check_transfer(gradients, chunks, pointers, wire, divisor, partials)
        pointers.remember(gradients, chunks, wire)
    for run in runs(chunks):
        if run.slots.start not in done:
            pack_run(gradients[run.slots.start : run.slots.stop], run, chunks, pointers, wire, divisor, vouched=vouched)
    if partials is not None:
        stored = [None if g is None else _slot(wire, chunks, slot) for slot, g in enumerate(gradients)]
        _fill_partials(stored, chunks, partials)


def uses_views(chunks: ChunkTable, wire_dtype: torch.dtype) -> bool:
    """Whether small gradients are copied into views of the wire: one dtype throughout, in which is computed too."""
    compute = torch.float64 if chunks.fp64 else torch.float32
    return chunks.shapes is not None and {*chunks.dtypes, wire_dtype} == {compute}


def pack_run(
    gradients: Sequence[torch.Tensor | None],
    run: Run,
    chunks: ChunkTable,
    pointers: PointerTable,
    wire: torch.Tensor,
    divisor: torch.Tensor,
    *,
    vouched: bool,
) -> None:
    """Packs the gradients of one run, and zeros the padding that is its."""
    if run.end == run.begin:
        return
    if vouched and run.small and uses_views(chunks, wire.dtype):
        _pack_views(gradients, pointers.views(chunks, wire)[run.slots.start : run.slots.stop], run, wire, divisor)
    elif len(run.slots) > 1:
        _pack_flat(gradients, chunks, run, wire, divisor)
    else:
        slot, (gradient,) = run.slots.start, gradients
        begin, end = chunks.offsets[slot], chunks.offsets[slot] + chunks.numels[slot]
        if gradient is None:
            wire[begin:end].zero_()
        elif vouched and chunks.shapes is not None and gradient.dtype == wire.dtype == divisor.dtype:
            divide(gradient, divisor.item(), pointers.views(chunks, wire)[slot])
        else:
            _convert(_memory(gradient, chunks, slot), wire[begin:end], divisor, torch.div)
        if run.padded:
            wire[run.begin : begin].zero_()
            wire[end : run.end].zero_()


def unpack(
    gradients: Sequence[torch.Tensor | None],
    chunks: ChunkTable,
    pointers: PointerTable,
    wire: torch.Tensor,
    scale: torch.Tensor,
    partials: Partials | None = None,
    *,
    vouched: bool = False,
) -> None:
    """Unflattens, scales and casts `wire` into `gradients`; see `kernels.unpack.unpack`."""
    if not vouched:
        check_transfer(gradients, chunks, pointers, wire, scale, partials)
        pointers.remember(gradients, chunks, wire)
    # On CPU a look at the scale is free, and copying without it is one pass instead of two.
    unscaled = scale.device.type == "cpu" and scale.item() == 1.0
    if vouched and unscaled and chunks.shapes is not None:
        present, views = _present(gradients, pointers.views(chunks, wire))
        if any(map(torch.Tensor.is_neg, present)):  # lazily negated: _foreach_copy_ cannot write to them
            for negated, view in zip(present, views, strict=True):
                negated.copy_(view)
        elif present:
            torch._foreach_copy_(present, views)
    else:
        for slot, gradient in enumerate(gradients):
            if gradient is None:
                continue
            if unscaled:
                store_rounded(_memory(gradient, chunks, slot), _slot(wire, chunks, slot))
            else:
                _convert(_slot(wire, chunks, slot), _memory(gradient, chunks, slot), scale, torch.mul)
    if partials is not None:
        stored = [None if g is None else _memory(g, chunks, slot) for slot, g in enumerate(gradients)]
        _fill_partials(stored, chunks, partials)


def reduce_partials(partials: Partials, chunks: ChunkTable) -> Totals:
    """Adds the partials of one launch up per parameter and in total; see `kernels.stats.reduce_partials`."""
    starts = chunks.starts[1:].tolist()
    sums = torch.zeros(len(chunks), dtype=torch.float64, device=partials.sums.device)
    first = torch.full((len(chunks),), -1, dtype=torch.int64, device=partials.sums.device)
    for slot, (begin, end) in enumerate(zip(starts, starts[1:], strict=False)):
        if end > begin:
            sums[slot] = partials.sums[begin:end].sum()
            found = partials.first_non_finite[begin:end]
            first[slot] = torch.where(found < 0, torch.iinfo(torch.int64).max, found).min()
    first[first == torch.iinfo(torch.int64).max] = -1
    return Totals(parameter_sums=sums, first_non_finite=first, total=sums.sum().reshape(1))


def round_once(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`values` rounded to `dtype`, once."""
    rounded = torch.empty_like(values, dtype=dtype)
    store_rounded(rounded, values)
    return rounded


def store_rounded(destination: torch.Tensor, values: torch.Tensor) -> None:
    """Writes `values` into `destination`, rounded once to its dtype."""
    if values.dtype is torch.float64 and destination.dtype in (torch.float16, torch.bfloat16):
        values = _round_to_odd(values)
    destination.copy_(values)


def _round_to_odd(values: torch.Tensor) -> torch.Tensor:
    """fp64 -> fp32 with the last bit set when anything was lost.

    torch takes fp64 to bf16 and fp16 through an fp32 rounded to nearest, and so rounds twice; through this one the
    second rounding sees on which side of a tie the value was.
    """
    nearest = values.to(torch.float32)
    back = nearest.to(torch.float64)
    bits = nearest.view(torch.int32)
    lost = (back != values) & (values == values) & ((bits & 1) == 0)
    toward = torch.where(values.abs() > back.abs(), 1, -1).to(torch.int32)
    return torch.where(lost, bits + toward, bits).view(torch.float32)


@dataclass(frozen=True)
class Run:
    """Consecutive slots that are packed together, and the range of the wire that is theirs, padding included."""

    slots: range
    begin: int
    end: int
    padded: bool
    small: bool


_of_thread = threading.local()
_known_runs: MutableMapping[ChunkTable, tuple[Run, ...]] = WeakKeyDictionary()


def runs(chunks: ChunkTable) -> tuple[Run, ...]:
    """Cuts a layout so that small slots go together, up to a block of wire; a large one goes alone."""
    known = _known_runs.get(chunks)
    if known is not None:
        return known
    found: list[Run] = []
    first = 0
    for slot in range(len(chunks)):
        following = slot + 1
        end = chunks.offsets[following] if following < len(chunks) else chunks.wire_numel
        begin = chunks.offsets[first] if first else 0
        ends_here = following == len(chunks) or max(chunks.numels[slot], chunks.numels[following]) >= LARGE_NUMEL
        if ends_here or chunks.offsets[following] + chunks.numels[following] - begin > BLOCK_NUMEL:
            padded = sum(chunks.numels[first:following]) < end - begin
            small = max(chunks.numels[first:following]) < LARGE_NUMEL
            found.append(Run(range(first, following), begin, end, padded, small))
            first = following
    return _known_runs.setdefault(chunks, tuple(found))


def _pack_views(
    gradients: Sequence[torch.Tensor | None],
    views: Sequence[torch.Tensor],
    run: Run,
    wire: torch.Tensor,
    divisor: torch.Tensor,
) -> None:
    """Copies every gradient into its slot, then divides the run at once, while it is in the cache."""
    present, into = _present(gradients, views)
    part = wire[run.begin : run.end]
    if run.padded or len(present) < len(run.slots):
        first, last = part.data_ptr(), part.data_ptr() + part.numel() * part.element_size()
        inside = [first <= gradient.data_ptr() < last for gradient in present]
        if any(inside):  # gradients that are their slots
            present = [one.clone() if within else one for one, within in zip(present, inside, strict=True)]
        part.zero_()
    if present:
        torch._foreach_copy_(into, present)
    divide(part, divisor.item(), part)


def _pack_flat(
    gradients: Sequence[torch.Tensor | None], chunks: ChunkTable, run: Run, wire: torch.Tensor, divisor: torch.Tensor
) -> None:
    """Gathers a run in the compute dtype, zeros in the gaps, and rounds it at once."""
    zeros = torch.zeros(run.end - run.begin, dtype=divisor.dtype, device=wire.device)
    parts = []
    at = run.begin
    for slot in run.slots:
        gradient, offset, numel = gradients[slot - run.slots.start], chunks.offsets[slot], chunks.numels[slot]
        if offset > at:
            parts.append(zeros[: offset - at])
        parts.append(zeros[:numel] if gradient is None else _memory(gradient, chunks, slot))
        at = offset + numel
    parts.append(zeros[: run.end - at])
    scratch = torch.cat(parts, out=torch.empty_like(zeros))
    divide(scratch, divisor.item(), scratch)
    store_rounded(wire[run.begin : run.end], scratch)


def _convert(source: torch.Tensor, destination: torch.Tensor, scalar: torch.Tensor, operation: object) -> None:
    """destination = round_once(operation(source, scalar)) for flat tensors of one size."""
    assert callable(operation)
    compute, operand = scalar.dtype, scalar.reshape(())
    if operation is torch.div and (factor := _factor(operand.item(), compute, operand.device)) is not None:
        operation, operand = torch.mul, factor
    if source.dtype == compute and destination.dtype == compute:
        operation(source, operand, out=destination)
        return
    scratch = _scratch(compute, source.device)
    if source.numel() <= BLOCK_NUMEL:
        result = scratch[: source.numel()]
        operation(source if source.dtype == compute else source.to(compute), operand, out=result)
        store_rounded(destination, result)
        return
    for part, out in zip(source.split(BLOCK_NUMEL), destination.split(BLOCK_NUMEL), strict=True):
        result = scratch[: part.numel()]
        # An operand of the compute dtype has torch compute in it; with a 0-dim one it would compute in the source's.
        operation(part if part.dtype == compute else part.to(compute), operand, out=result)
        store_rounded(out, result)


@functools.lru_cache(maxsize=256)
def _factor(divisor: float, dtype: torch.dtype, device: torch.device) -> torch.Tensor | None:
    """1 / divisor where multiplying by it is the same, at powers of two: twice as fast in the cache."""
    exact = 2.0**-64 <= divisor <= 2.0**64 and math.frexp(divisor)[0] == 0.5
    return torch.tensor(1.0 / divisor, dtype=dtype, device=device) if exact else None


def divide(source: torch.Tensor, divisor: float, out: torch.Tensor) -> None:
    """out = source / divisor, all of the compute dtype and of one shape."""
    factor = _factor(divisor, out.dtype, out.device)
    if factor is None:
        torch.div(source, torch.tensor(divisor, dtype=out.dtype, device=out.device), out=out)
    else:
        torch.mul(source, factor, out=out)


def _scratch(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """BLOCK_NUMEL elements that this thread alone uses, between two lines of `_convert`."""
    kept: dict[object, torch.Tensor] = _of_thread.__dict__.setdefault("scratch", {})
    if (dtype, device) not in kept:
        kept[dtype, device] = torch.empty(BLOCK_NUMEL, dtype=dtype, device=device)
    return kept[dtype, device]


def _present(
    gradients: Sequence[torch.Tensor | None], views: Sequence[torch.Tensor]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """What is not None, and its views."""
    if type(None) not in set(map(type, gradients)):
        return list(gradients), list(views)  # type: ignore[arg-type]
    pairs = [(gradient, view) for gradient, view in zip(gradients, views, strict=True) if gradient is not None]
    return [gradient for gradient, _ in pairs], [view for _, view in pairs]


def _slot(wire: torch.Tensor, chunks: ChunkTable, slot: int) -> torch.Tensor:
    return wire[chunks.offsets[slot] : chunks.offsets[slot] + chunks.numels[slot]]


def _memory(gradient: torch.Tensor, chunks: ChunkTable, slot: int) -> torch.Tensor:
    """The slot's elements in the order in which they lie in memory, whatever the strides."""
    if not chunks.shared and gradient.is_contiguous():
        return gradient.detach().view(-1)
    begin = gradient.storage_offset() + chunks.begins[slot]
    return gradient.detach().as_strided((chunks.numels[slot],), (1,), begin)


def _fill_partials(stored: Sequence[torch.Tensor | None], chunks: ChunkTable, partials: Partials) -> None:
    row = 0
    for slot, values in enumerate(stored):
        for begin in range(0, chunks.numels[slot], chunks.chunk_numel):
            if values is None:
                partials.sums[row], partials.first_non_finite[row] = 0.0, -1
            else:
                part = values[begin : begin + chunks.chunk_numel].to(torch.float64)
                partials.sums[row] = part.square().sum()
                bad = (~part.isfinite()).nonzero()
                partials.first_non_finite[row] = chunks.begins[slot] + begin + bad[0, 0] if len(bad) else -1
            row += 1
