"""Reference: the kernels' functions in torch, the definition of correct and the path on CPU.

    pack:    wire[offset + i]  = round_to_wire(gradient[i] / divisor)
    unpack:  gradient[i]       = round_to_gradient(wire[offset + i] * scale)
    scale:   gradient[i]       = round_to_gradient(gradient[i] * factor)

The compute dtype is fp32 (fp64 for fp64): one correctly rounded division or product, then one rounding to the
destination's dtype. Signatures are the launchers'. It works on any device; on CPU, calls with vouched=True take the
quicker forms of `reference_quick`, with the same result, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping, Sequence
from typing import TypeAlias
from weakref import WeakKeyDictionary

import torch

from . import reference_quick
from .checks import check_transfer, check_walk
from .division import division
from .reference_gather import (
    Run,
    as_laid_out,
    copy_all,
    gathered,
    members_of,
    memories,
    memory_of,
    missing_slots,
    numbered,
    slot_of,
    slots_of,
)
from .reference_stats import Measured, Sources, scratch
from .table import ChunkTable, Partials, PointerTable, SourcePartials

# Largest number of elements of a run, which has a fixed cost of 30 us. 1,000 gradients of 1,000: 0.41 ms bf16 -> bf16
# in one run, 0.75 ms in eight; `reference_quick` converts in smaller blocks, which stay in the cache.
BLOCK_NUMEL = 524288
# Slots of at least so many elements are converted one by one; for smaller ones the fixed cost of operators (about 5 us
# in all) shows.
LARGE_NUMEL = 16384


def pack(
    gradients: Sequence[torch.Tensor | None],
    chunks: ChunkTable,
    pointers: PointerTable,
    wire: torch.Tensor,
    divisor: float,
    partials: SourcePartials | None = None,
    *,
    vouched: bool = False,
) -> None:
    """Flattens, divides and casts `gradients` into `wire`; arguments as for `kernels.dispatch.pack`."""
    if not vouched:
        check_transfer(gradients, chunks, pointers, wire, None, partials)
    elif partials is None and gradients[0] is wire and wire.dtype is chunks.compute_dtype:
        if divisor != 1.0:
            operation, operand = _division(divisor, wire.dtype, wire.device)
            operation(wire, operand, out=wire)
        return
    elif partials is None and (kept := reference_quick.kept_for(chunks, pointers, wire)) is not None:
        reference_quick.pack(gradients, runs(chunks), kept, wire, divisor)
        return
    sources = None if partials is None else Sources(chunks, wire, partials)
    for run in runs(chunks):
        members = members_of(gradients, run)
        _pack_run(members, run, chunks, pointers, wire, divisor, vouched=vouched)
        if sources is not None:
            _look_at_sources(members, run, chunks, wire, sources)
    if sources is not None:
        sources.write_partials()


def _look_at_sources(
    gradients: Sequence[torch.Tensor | None], run: Run, chunks: ChunkTable, wire: torch.Tensor, sources: Sources
) -> None:
    """Statistics of a run that has been packed: from the wire, and only if that looks suspicious from the gradients."""
    missing = missing_slots(gradients, run)
    if len(missing) == len(run.slots):
        return
    begin, end, zeros = chunks.offsets[run.slots.start], run.end, 0
    if len(run.slots) > 1:
        begin = run.begin
        zeros = end - begin - sum(chunks.numels[run.slots.start : run.slots.stop])
        zeros += sum(chunks.numels[slot] for slot in missing)
    else:
        end = begin + chunks.numels[run.slots.start]
    suspicion = sources.look(run.dtypes, begin, end, zeros)
    if any(suspicion):
        if len(run.slots) > 1:
            laid_out = [as_laid_out(gradient, chunks, slot) for slot, gradient in numbered(gradients, run)]
            flat = gathered(laid_out, chunks, run, chunks.compute_dtype)
        else:
            (gradient,) = gradients
            assert gradient is not None
            flat = memory_of(gradient, chunks, run.slots.start)
        sources.search(begin, flat, suspicion)


def uses_views(chunks: ChunkTable, wire_dtype: torch.dtype) -> bool:
    """Whether small gradients may have any strides, or be lazily negated, in calls with vouched=True.

    They may if gradients and wire have the compute dtype: torch loses the sign of a lazily negated fp32 tensor when it
    copies it to fp16.
    """
    return chunks.shapes is not None and {*chunks.dtypes, wire_dtype} == {chunks.compute_dtype}


def _pack_run(
    gradients: Sequence[torch.Tensor | None],
    run: Run,
    chunks: ChunkTable,
    pointers: PointerTable,
    wire: torch.Tensor,
    divisor: float,
    *,
    vouched: bool,
) -> None:
    """Packs the gradients of one run, and zeros the run's padding."""
    if run.end == run.begin:
        return
    if vouched and (kept := reference_quick.kept_for(chunks, pointers, wire)) is not None:
        reference_quick.pack(gradients, [run], kept, wire, divisor)
    elif len(run.slots) > 1:
        block = gathered(memories(gradients, run, chunks), chunks, run, chunks.compute_dtype, wire.device)
        _convert(block, wire[run.begin : run.end], *_division(divisor, chunks.compute_dtype, wire.device))
    else:
        slot, (gradient,) = run.slots.start, gradients
        begin, end = chunks.offsets[slot], chunks.offsets[slot] + chunks.numels[slot]
        if gradient is None:
            wire[begin:end].zero_()
        elif not run.small and wire.device.type == "cpu" and not chunks.fp64:  # a comm hook's flat buffer
            source = memory_of(gradient, chunks, slot)
            reference_quick.pack_flat(source, wire[begin:end], divisor, chunks.compute_dtype)
        else:
            source = memory_of(gradient, chunks, slot)
            _convert(source, wire[begin:end], *_division(divisor, chunks.compute_dtype, wire.device))
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
    """Unflattens, scales and casts `wire` into `gradients`; arguments as for `kernels.dispatch.unpack`."""
    if not vouched:
        check_transfer(gradients, chunks, pointers, wire, scale, partials)
    # On CPU reading the scale is free, and a plain copy is one pass instead of two.
    unscaled = scale.device.type == "cpu" and scale.item() == 1.0
    if partials is None and vouched and (kept := reference_quick.kept_for(chunks, pointers, wire)) is not None:
        reference_quick.unpack(gradients, runs(chunks), kept, wire, scale.item())
        return
    measured = None if partials is None else Measured(chunks, partials)
    factor = None if unscaled else scale
    for run in runs(chunks):
        members = members_of(gradients, run)
        if len(run.slots) > 1:
            views = None
            if vouched and unscaled and chunks.shapes is not None:
                views = pointers.views(chunks, wire)[run.slots.start : run.slots.stop]
            _deliver(members, run, chunks, wire[run.begin : run.end], factor, measured, views)
        elif members[0] is not None:
            source = slot_of(wire, chunks, run.slots.start)
            _deliver_slot(members[0], run.slots.start, chunks, source, factor, measured)
    if measured is not None:
        measured.write_partials()


def _deliver_slot(
    gradient: torch.Tensor,
    slot: int,
    chunks: ChunkTable,
    source: torch.Tensor,
    factor: torch.Tensor | None,
    measured: Measured | None,
) -> None:
    """gradient = round_once(source * factor), and its statistics, block by block."""
    memory = memory_of(gradient, chunks, slot)
    step = max(1, memory.numel()) if measured is None else measured.block_numel
    for begin in range(0, memory.numel(), step):
        part, into = source[begin : begin + step], memory[begin : begin + step]
        if factor is not None:
            _convert(part, into, torch.mul, factor)
        elif part.data_ptr() != into.data_ptr():
            store_rounded(into, part)
        if measured is not None:
            measured.rows(slot, begin, into)


def _deliver(
    gradients: Sequence[torch.Tensor | None],
    run: Run,
    chunks: ChunkTable,
    source: torch.Tensor,
    factor: torch.Tensor | None,
    measured: Measured | None,
    views: Sequence[torch.Tensor] | None = None,
) -> None:
    """As `_deliver_slot`, for a run of small slots: `source` is laid out as the wire, `views` are its slots with the
    gradients' shapes."""
    missing = missing_slots(gradients, run)
    if len(missing) == len(run.slots):
        return
    compute = chunks.compute_dtype
    if len(run.dtypes) == 1:
        (dtype,) = run.dtypes
        # Rounded before any gradient is written: one may be its own source.
        block = source
        if factor is not None:
            block = round_once(source.to(compute) * factor, dtype)
        elif source.dtype != dtype:
            block = round_once(source, dtype)
        if views is None:
            views = slots_of(block, run, chunks)
            gradients = memories(gradients, run, chunks)
        copy_all(gradients, views)
    else:
        for slot, gradient in numbered(gradients, run):
            if gradient is not None:
                begin = chunks.offsets[slot] - run.begin
                _deliver_slot(gradient, slot, chunks, source[begin : begin + chunks.numels[slot]], factor, None)
        if measured is not None:
            block = gathered(memories(gradients, run, chunks), chunks, run, compute)
    if measured is not None:
        measured.run(run.slots, block, begin=run.begin, missing=missing)


def measure(
    gradients: Sequence[torch.Tensor | None],
    chunks: ChunkTable,
    pointers: PointerTable,
    partials: Partials,
    *,
    vouched: bool = False,
) -> None:
    """Fills `partials` with statistics of gradients as they are; arguments as for `kernels.dispatch.measure`."""
    if not vouched:
        check_walk(gradients, chunks, pointers, None, partials)
    measured = Measured(chunks, partials)
    for run in runs(chunks):
        _measure_run(gradients[run.slots.start : run.slots.stop], run, chunks, measured)
    measured.write_partials()


def _measure_run(gradients: Sequence[torch.Tensor | None], run: Run, chunks: ChunkTable, measured: Measured) -> None:
    missing = missing_slots(gradients, run)
    if len(missing) == len(run.slots):
        return
    if len(run.slots) == 1:
        (gradient,) = gradients
        assert gradient is not None
        memory, step = memory_of(gradient, chunks, run.slots.start), measured.block_numel
        for begin in range(0, memory.numel(), step):
            measured.rows(run.slots.start, begin, memory[begin : begin + step])
        return
    present = [gradient for gradient in gradients if gradient is not None]
    if chunks.shared or not all(map(torch.Tensor.is_contiguous, present)):
        present = [memory for memory in memories(gradients, run, chunks) if memory is not None]
    measured.run(run.slots, torch._utils._flatten_dense_tensors(present), begin=None, missing=missing)


def scale(
    gradients: Sequence[torch.Tensor | None],
    chunks: ChunkTable,
    pointers: PointerTable,
    factor: torch.Tensor,
    partials: Partials | None = None,
    *,
    vouched: bool = False,
) -> None:
    """Multiplies gradients by `factor`, in place; arguments as for `kernels.dispatch.scale`."""
    if not vouched:
        check_walk(gradients, chunks, pointers, factor, partials)
    measured = None if partials is None else Measured(chunks, partials)
    for run in runs(chunks):
        members = members_of(gradients, run)
        if len(run.slots) > 1:
            if run.dtypes == {factor.dtype} and not chunks.shared:
                present = [gradient.detach() for gradient in members if gradient is not None]
                if present:
                    torch._foreach_mul_(present, factor.reshape(()))
            else:
                block = gathered(memories(members, run, chunks), chunks, run, factor.dtype)
                _deliver(members, run, chunks, block, factor, None)
            if measured is not None:
                _measure_run(members, run, chunks, measured)
        elif members[0] is not None:
            memory = memory_of(members[0], chunks, run.slots.start)
            _deliver_slot(members[0], run.slots.start, chunks, memory, factor, measured)
    if measured is not None:
        measured.write_partials()


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
    """fp64 -> fp32 with the last bit set if the conversion was not exact.

    torch converts fp64 to bf16 and fp16 through fp32 rounded to nearest, and so rounds twice. Rounded to odd, the fp32
    value tells the second rounding on which side of a tie the fp64 value was.
    """
    nearest = values.to(torch.float32)
    back = nearest.to(torch.float64)
    bits = nearest.view(torch.int32)
    lost = (back != values) & (values == values) & ((bits & 1) == 0)
    toward = torch.where(values.abs() > back.abs(), 1, -1).to(torch.int32)
    return torch.where(lost, bits + toward, bits).view(torch.float32)


_known_runs: MutableMapping[ChunkTable, tuple[Run, ...]] = WeakKeyDictionary()


def runs(chunks: ChunkTable) -> tuple[Run, ...]:
    """Divides a layout into runs: of small slots, up to BLOCK_NUMEL elements of wire, or of one large slot."""
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
            dtypes = frozenset(chunks.dtypes[first:following])
            found.append(Run(range(first, following), begin, end, padded, small, dtypes))
            first = following
    return _known_runs.setdefault(chunks, tuple(found))


Operation: TypeAlias = Callable[..., torch.Tensor]


def _division(divisor: float, compute: torch.dtype, device: torch.device) -> tuple[Operation, torch.Tensor]:
    """The operation that divides, and its second operand."""
    scalar, exact = division(divisor, compute)
    # A tensor, since on CUDA torch divides by a Python number by multiplying with its reciprocal; and filled there,
    # since the host would wait for an upload.
    return torch.mul if exact else torch.div, torch.full((), scalar, dtype=compute, device=device)


def _convert(source: torch.Tensor, destination: torch.Tensor, operation: Operation, scalar: torch.Tensor) -> None:
    """destination = round_once(operation(source, scalar)) for flat tensors of one size."""
    compute, operand = scalar.dtype, scalar.reshape(())
    if source.dtype == compute and destination.dtype == compute:
        operation(source, operand, out=destination)
        return
    if source.numel() <= BLOCK_NUMEL:
        result = scratch(compute, source.device, source.numel())
        operation(source if source.dtype == compute else source.to(compute), operand, out=result)
        store_rounded(destination, result)
        return
    for part, out in zip(source.split(BLOCK_NUMEL), destination.split(BLOCK_NUMEL), strict=True):
        result = scratch(compute, source.device, part.numel())
        # The source is converted first: with a 0-dim operand torch computes in the source's dtype.
        operation(part if part.dtype == compute else part.to(compute), operand, out=result)
        store_rounded(out, result)
