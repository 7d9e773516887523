"""Reference: the definition of correct, in loops over the rows of a ChunkTable.

    pack:    wire[offset + i]  = round_once(gradient[i] / divisor)   by a CastWire's rounding, if there is one
    unpack:  gradient[i]       = round_once(wire[offset + i] * scale)
    scale:   gradient[i]       = round_once(gradient[i] * factor)
    combine: output[i]         = round_once((tensor_0[i] + tensor_1[i] + ...) * scale), in the order of the parts

The compute dtype is fp32 (fp64 for fp64): correctly rounded operations, then one rounding to the destination's dtype.
Signatures are those of the kernels' launchers. The kernels and `cpu` are tested against these functions, which run on
any device; nothing here is for speed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from .cast import CastWire
from .parts import Part, parts_within
from .table import ChunkTable, Gradients, Partials, PointerTable, SourcePartials, SourceTotals, Spans, Totals, may_flush


def pack(
    gradients: Gradients,
    chunks: ChunkTable,
    pointers: PointerTable,
    wire: torch.Tensor,
    divisor: float,
    partials: SourcePartials | None = None,
) -> None:
    """Flattens, divides and casts `gradients` into `wire`; arguments as for `kernels.dispatch.pack`."""
    by = torch.tensor(divisor, dtype=chunks.compute_dtype, device=wire.device)
    for row, (slot, begin, end, offset, _) in enumerate(chunks.rows.tolist()):
        packed = wire[offset : offset + end - begin]
        source = _elements(gradients, slot, begin, end)
        if source is None:
            packed.zero_()
        else:
            store_rounded(packed, source.to(chunks.compute_dtype) / by, chunks.cast)
        if partials is not None and row < chunks.data_rows:
            _write_source_row(partials, row, begin, source, packed)


def unpack(
    gradients: Gradients,
    chunks: ChunkTable,
    pointers: PointerTable,
    wire: torch.Tensor,
    scale: torch.Tensor,
    partials: Partials | None = None,
) -> None:
    """Unflattens, scales and casts `wire` into `gradients`; arguments as for `kernels.dispatch.unpack`."""
    for row, (slot, begin, end, offset, _) in enumerate(chunks.rows[: chunks.data_rows].tolist()):
        destination = _elements(gradients, slot, begin, end)
        if destination is not None:
            store_rounded(destination, wire[offset : offset + end - begin].to(chunks.compute_dtype) * scale)
        if partials is not None:
            write_row(partials, row, begin, destination)


def measure(gradients: Gradients, chunks: ChunkTable, pointers: PointerTable, partials: Partials) -> None:
    """Fills `partials` with statistics of gradients as they are; arguments as for `kernels.dispatch.measure`."""
    for row, (slot, begin, end, _, _) in enumerate(chunks.rows[: chunks.data_rows].tolist()):
        write_row(partials, row, begin, _elements(gradients, slot, begin, end))


def scale(gradients: Gradients, chunks: ChunkTable, pointers: PointerTable, factor: torch.Tensor) -> None:
    """Multiplies gradients by `factor`, in place; arguments as for `kernels.dispatch.scale`."""
    for slot, begin, end, _, _ in chunks.rows[: chunks.data_rows].tolist():
        values = _elements(gradients, slot, begin, end)
        if values is not None:
            store_rounded(values, values.to(chunks.compute_dtype) * factor)


def combine(
    tensors: Sequence[torch.Tensor],
    outputs: Sequence[torch.Tensor],
    parts: Sequence[Part],
    scale: float = 1.0,
    *,
    begins: Sequence[int] | None = None,
) -> None:
    """Adds `tensors` up and writes the sum, times `scale`, into `outputs`; also across CUDA devices.

    Arguments as for `kernels.dispatch.combine`. A partial sum is copied to the device of the tensor that it is added
    to; the current streams order these copies.
    """
    compute = torch.float64 if tensors[0].dtype is torch.float64 else torch.float32
    for part, terms, written in pieces(tensors, outputs, parts, begins):
        sums: dict[int, torch.Tensor] = {}  # of the tensors that something has been added to
        for into, source in part.adds:
            other = sums.pop(source, terms[source]).to(terms[into].device, non_blocking=True)
            own = sums[into] if into in sums else terms[into].to(compute, copy=True)
            sums[into] = own.add_(other)
        total = sums.get(part.owner, terms[part.owner]).to(compute) * scale
        rounded = total.to(outputs[0].dtype)
        for output in written:
            output.copy_(rounded, non_blocking=True)


def pieces(
    tensors: Sequence[torch.Tensor],
    outputs: Sequence[torch.Tensor],
    parts: Sequence[Part],
    begins: Sequence[int] | None,
) -> Iterator[tuple[Part, list[torch.Tensor], list[torch.Tensor]]]:
    """What combine adds up: each part, or of it what one output gets, and these elements of tensors and outputs."""
    flat, written = [one.view(-1) for one in tensors], [one.view(-1) for one in outputs]
    groups = [(0, flat[0].numel(), written)]
    if begins is not None:
        groups = [(begin, begin + one.numel(), [one]) for begin, one in zip(begins, written, strict=True)]
    for begin, end, into in groups:
        for part in parts_within(parts, begin, end):
            terms = [one[begin + part.begin : begin + part.end] for one in flat]
            yield part, terms, [one[part.begin : part.end] for one in into]


def reduce_partials(partials: Partials, spans: Spans) -> Totals:
    """Adds partials up per parameter and in total; arguments as for `kernels.dispatch.reduce_partials`."""
    device, pairs = partials.sums.device, spans[1:].view(-1, 2).tolist()
    sums = torch.zeros(len(pairs), dtype=torch.float64, device=device)
    peaks, first = torch.zeros_like(sums), torch.full((len(pairs),), -1, dtype=torch.int64, device=device)
    for parameter, (begin, end) in enumerate(pairs):
        if begin < end:
            sums[parameter] = partials.sums[begin:end].sum()
            peaks[parameter] = partials.peaks[begin:end].amax()
            first[parameter] = _lowest(partials.first_non_finite[begin:end])
    peak = peaks.amax() if pairs else sums.sum()
    return Totals(sums, peaks, first, torch.stack([sums.sum(), peak, (first >= 0).sum().double()]))


def reduce_source_partials(partials: SourcePartials, spans: Spans) -> SourceTotals:
    """Reduces partials of pack per parameter; arguments as for `kernels.dispatch.reduce_source_partials`."""
    device, pairs = partials.flushed.device, spans[1:].view(-1, 2).tolist()
    first, flushed = (torch.full((len(pairs),), value, dtype=torch.int64, device=device) for value in (-1, 0))
    for parameter, (begin, end) in enumerate(pairs):
        first[parameter] = _lowest(partials.first_non_finite[begin:end])
        flushed[parameter] = partials.flushed[begin:end].sum()
    bad = [[parameter, index] for parameter, index in enumerate(first.tolist()) if index >= 0]
    return SourceTotals(first, flushed, torch.tensor(bad[0] if bad else [-1, -1], dtype=torch.int64, device=device))


def memory_of(gradient: torch.Tensor, begin: int, end: int) -> torch.Tensor:
    """Elements [begin, end) of a dense tensor, flat, in the order of memory."""
    return gradient.detach().as_strided((end - begin,), (1,), gradient.storage_offset() + begin)


def flattened(gradients: Gradients, chunks: ChunkTable) -> list[torch.Tensor | None]:
    """`memory_of` each slot's elements of its gradient; None for a missing one."""
    slots = zip(gradients, chunks.begins, chunks.numels, strict=True)
    return [None if gradient is None else memory_of(gradient, begin, begin + numel) for gradient, begin, numel in slots]


def _elements(gradients: Gradients, slot: int, begin: int, end: int) -> torch.Tensor | None:
    """`memory_of` a slot; None for a missing gradient, and for padding, whose number is that of no slot."""
    gradient = gradients[slot] if slot < len(gradients) else None
    return None if gradient is None else memory_of(gradient, begin, end)


def _write_source_row(
    partials: SourcePartials, row: int, begin: int, source: torch.Tensor | None, packed: torch.Tensor
) -> None:
    """Writes one row of pack's statistics: of `source`, elements [begin, ...) of a gradient, that became `packed`."""
    partials.first_non_finite[row] = -1 if source is None else first_non_finite(source, begin)
    counts = source is not None and may_flush(source.dtype, packed.dtype)
    partials.flushed[row] = ((source != 0) & (packed == 0)).sum() if counts else 0


def write_row(partials: Partials, row: int, begin: int, values: torch.Tensor | None) -> None:
    """Writes one row of unpack's statistics: of `values`, elements [begin, ...) of a gradient; None: a missing one."""
    wide = torch.zeros(1, dtype=torch.float32, device=partials.sums.device) if values is None else values
    partials.sums[row] = wide.double().square().sum()
    partials.peaks[row] = wide.abs().amax()
    partials.first_non_finite[row] = -1 if values is None else first_non_finite(values, begin)


def first_non_finite(values: torch.Tensor, begin: int) -> torch.Tensor:
    """`begin` + the index of the first NaN or Inf of `values`, -1 for none."""
    bad = ~values.isfinite()
    return torch.where(bad.any(), begin + bad.int().argmax(), -1)


def _lowest(first: torch.Tensor) -> torch.Tensor:
    known = first[first >= 0]
    return known.amin() if len(known) else first.new_tensor(-1)


def round_once(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`values` rounded to `dtype`, once."""
    rounded = torch.empty_like(values, dtype=dtype)
    store_rounded(rounded, values)
    return rounded


def store_rounded(destination: torch.Tensor, values: torch.Tensor, cast: CastWire | None = None) -> None:
    """Writes `values` into `destination`, rounded once to its dtype: to nearest, or by `cast`."""
    if values.dtype is torch.float64 and destination.dtype in (torch.float16, torch.bfloat16):
        values = _round_to_odd(values)
    destination.copy_(values if cast is None or cast.rounding is None else cast.rounding(values))


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
