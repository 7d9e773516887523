"""Statistics on CPU, and their second stage, in torch and numpy.

Large slots are measured in blocks of whole rows, while a block is in the cache: squares in fp32, added up 16 at a time
in fp32 (with a relative error of 16 times 2^-24 at most) and from there in fp64. Rows whose sums are outside of the
bounds in which fp32 is accurate are measured again in fp64. Small slots, and the remainders of large ones, are measured
together in fp64. No sum is split among threads, so its bits do not depend on their number.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from .reference import memory_of
from .runs import BLOCK_NUMEL, Run, runs, scratch
from .table import ChunkTable, Gradients, Partials, SourcePartials, SourceTotals, Spans, Totals, may_flush

_LOOK_NUMEL = BLOCK_NUMEL // 2
# Row sums of fp32 squares are accurate between these bounds: see SUM_LOWEST and SUM_HIGHEST of `kernels.chunk`.
_LOWEST, _HIGHEST = 1e-27, 3e38
# Number of squares that are added up in fp32.
_FOLD = 16
_NONE_FOUND = np.iinfo(np.int64).max
# The bits of a 16-bit number without its sign, from which on it is not finite.
_NON_FINITE_BITS = {torch.bfloat16: 0x7F80, torch.float16: 0x7C00}


def measure_gradients(gradients: Gradients, chunks: ChunkTable, partials: Partials) -> None:
    """Fills `partials` with statistics of gradients as they are.

    Args:
        gradients: P tensors; None: no gradient, which counts as zeros.
        chunks: the layout's table.
        partials: output [data rows].
    """
    measured = _Measured(chunks, partials)
    for run in runs(chunks):
        if len(run.slots) == 1:
            slot = run.slots.start
            if (gradient := gradients[slot]) is not None:
                begin = chunks.begins[slot]
                measured.large(slot, memory_of(gradient, begin, begin + chunks.numels[slot]))
        else:
            measured.small(run, run.members(gradients))
    measured.finish()


class _Measured:
    """The partials of one layout while they are filled; slots that are not measured count as zeros."""

    def __init__(self, chunks: ChunkTable, partials: Partials) -> None:
        self._chunks = chunks
        self._partials = partials
        self._sums, self._peaks = partials.sums.numpy(), partials.peaks.numpy()
        self._first = partials.first_non_finite.numpy()
        self._sums[:], self._peaks[:], self._first[:] = 0.0, 0.0, -1
        self._whole: list[tuple[int, torch.Tensor]] = []
        self._squares = torch.empty(chunks.data_rows, dtype=torch.float32, device="cpu")
        self._left: list[tuple[int, torch.Tensor]] = []
        self._left_numel = 0

    def large(self, slot: int, memory: torch.Tensor) -> None:
        """Measures one slot, whose values must not change before `finish`."""
        shard, row = self._chunks.shard_numel, int(self._chunks.first_rows[slot])
        if shard is None:
            self._rows(row, memory)
            return
        left = shard - self._chunks.offsets[slot] % shard  # rows end where a shard does
        for part in (memory[:left], *memory[left:].split(shard)):
            row += self._rows(row, part)

    def _rows(self, row: int, memory: torch.Tensor) -> int:
        """Measures rows of a slot from `row` on, all of full length but the last; returns how many."""
        numel, first = self._chunks.chunk_numel, row
        block_numel = max(1, BLOCK_NUMEL // numel) * numel  # as many whole rows as fit into a block, but at least one
        for values in memory.split(block_numel):
            whole = 0 if values.dtype is torch.float64 or numel % _FOLD else values.numel() // numel
            if whole:
                self._whole_rows(row, values[: whole * numel].view(whole, numel))
            rest = values[whole * numel :].split(numel) if values.numel() > whole * numel else ()
            self._left.extend((row + whole + nth, part) for nth, part in enumerate(rest))
            self._left_numel += values.numel() - whole * numel
            if self._left_numel >= BLOCK_NUMEL:
                self._leftovers()
            row += whole + len(rest)
        return row - first

    def small(self, run: Run, gradients: Gradients) -> None:
        """Measures several slots together."""
        chunks = self._chunks
        rows = _rows_of(run, gradients, chunks)
        if len(rows):
            counts = chunks.rows[rows, 2] - chunks.rows[rows, 1]
            self._carefully(rows, np.cumsum(counts) - counts, counts, _joined(run, gradients, chunks))

    def finish(self) -> None:
        """Measures the remainders, and rows again where fp32 was not enough."""
        self._leftovers()
        if self._whole:
            firsts = np.array([row for row, _ in self._whole])
            counts = np.array([len(values) for _, values in self._whole])
            rows = np.repeat(firsts - np.cumsum(counts) + counts, counts) + np.arange(counts.sum())
            # The root of a rounded square is the number itself, if the square is a normal number.
            self._peaks[rows] = np.sqrt(self._squares.numpy()[rows])
            sums = self._sums[rows]
            for row in rows[~((sums > _LOWEST) & (sums < _HIGHEST))]:
                nth = int(np.searchsorted(firsts, row, side="right")) - 1
                values = self._whole[nth][1][row - firsts[nth]]
                if not values.any():  # common: rows of an embedding that were not looked up
                    continue
                self._carefully(np.array([row]), np.zeros(1, np.int64), np.array([len(values)]), values)

    def _whole_rows(self, row: int, values: torch.Tensor) -> None:
        rows, numel = values.shape
        squares = scratch(torch.float32, values.numel()).view(rows, numel)
        values32 = values if values.dtype is torch.float32 else squares.copy_(values)
        torch.mul(values32, values32, out=squares)
        folded = squares.view(rows, _FOLD, numel // _FOLD).sum(1)
        torch.sum(folded, 1, dtype=torch.float64, out=self._partials.sums[row : row + rows])
        torch.amax(squares, 1, out=self._squares[row : row + rows])
        self._whole.append((row, values))

    def _leftovers(self) -> None:
        if self._left:
            rows = np.array([row for row, _ in self._left])
            counts = np.array([len(part) for _, part in self._left])
            values = torch.cat([part for _, part in self._left])
            self._carefully(rows, np.cumsum(counts) - counts, counts, values)
        self._left, self._left_numel = [], 0

    def _carefully(
        self, rows: npt.NDArray[Any], starts: npt.NDArray[Any], counts: npt.NDArray[Any], values: torch.Tensor
    ) -> None:
        """Measures rows in fp64; `values` are their elements, row after row, `starts` the first element of each."""
        x = scratch(torch.float64, values.numel()).copy_(values).numpy()
        with np.errstate(all="ignore"):
            if values.dtype is torch.float64:  # a square may overflow or underflow, and its root be rounded
                peaks = np.maximum.reduceat(np.abs(x), starts)
                np.multiply(x, x, out=x)
            else:
                np.multiply(x, x, out=x)
                peaks = np.sqrt(np.maximum.reduceat(x, starts))
            self._sums[rows] = sums = np.add.reduceat(x, starts)
        self._peaks[rows] = peaks
        for nth in np.flatnonzero(~np.isfinite(sums)):
            bad = (~values[starts[nth] : starts[nth] + counts[nth]].isfinite()).numpy()
            self._first[rows[nth]] = self._chunks.rows[rows[nth], 1] + np.argmax(bad) if bad.any() else -1


def _rows_of(run: Run, gradients: Gradients, chunks: ChunkTable) -> npt.NDArray[Any]:
    """Numbers of a run's rows, without those of missing gradients."""
    rows = np.arange(chunks.first_rows[run.slots.start], chunks.first_rows[run.slots.stop])
    if type(None) in set(map(type, gradients)):
        absent = [slot for slot, one in zip(run.slots, gradients, strict=True) if one is None]
        rows = rows[~np.isin(chunks.rows[rows, 0], absent)]
    return rows


def _joined(run: Run, gradients: Gradients, chunks: ChunkTable) -> torch.Tensor:
    """The memory of a run's gradients, one after the other, without those that are missing."""
    if run.trailing is not None:
        try:
            return torch.cat(gradients).view(-1).detach()  # type: ignore[arg-type]
        except TypeError:
            pass  # one is None
    present = [(slot, one) for slot, one in zip(run.slots, gradients, strict=True) if one is not None]
    slot, first = present[0]
    if chunks.one_buffer and len(present) == len(run.slots):
        return memory_of(first, chunks.begins[slot], chunks.begins[slot] + run.end - run.begin)
    tensors = [one for _, one in present]
    if not chunks.shared and len(tensors) > 1 and all(map(torch.Tensor.is_contiguous, tensors)):
        flat: torch.Tensor = torch._utils._flatten_dense_tensors(tensors)
        return flat.detach()
    memories = [memory_of(one, chunks.begins[slot], chunks.begins[slot] + chunks.numels[slot]) for slot, one in present]
    return memories[0] if len(memories) == 1 else torch.cat(memories)


def find_faults(gradients: Gradients, chunks: ChunkTable, wire: torch.Tensor, partials: SourcePartials) -> None:
    """Fills the partials of a pack: what is not finite, and what became 0 on the wire.

    The wire tells which runs of slots may have either: a value that is not finite in a gradient is not finite on the
    wire. The gradients of these are searched, row by row.

    Args:
        gradients: P tensors; None: no gradient.
        chunks: the layout's table.
        wire: the packed buffer.
        partials: output [data rows].
    """
    partials.first_non_finite.fill_(-1)
    partials.flushed.zero_()
    for run in runs(chunks):
        members = run.members(gradients)
        if _is_suspicious(run, members, chunks, wire):
            _search(run, members, chunks, wire, partials)


def _search(run: Run, gradients: Gradients, chunks: ChunkTable, wire: torch.Tensor, partials: SourcePartials) -> None:
    """Fills the rows of one run, some rows at a time, which stay in the cache."""
    rows = _rows_of(run, gradients, chunks)
    table = chunks.rows[rows]
    counts = table[:, 2] - table[:, 1]
    ends = np.cumsum(counts)
    sources, packed = _joined(run, gradients, chunks), wire[run.begin : run.end]
    if len(packed) != len(sources):  # there is padding between slots, or a gradient is missing
        packed = torch.cat(
            [wire[at : at + count] for at, count in zip(table[:, 3].tolist(), counts.tolist(), strict=True)]
        )
    narrows = np.array([may_flush(dtype, wire.dtype) for dtype in chunks.dtypes])[table[:, 0]]
    first, flushed = partials.first_non_finite.numpy(), partials.flushed.numpy()
    cuts = np.flatnonzero(np.diff(ends // BLOCK_NUMEL)) + 1
    for part in np.split(np.arange(len(rows)), cuts):
        low, high = ends[part[0]] - counts[part[0]], ends[part[-1]]
        starts = ends[part] - counts[part] - low
        source = sources[low:high]
        bits = _without_sign(packed[low:high]).numpy() if packed.dtype.itemsize == 2 else None
        if bits is None or bits.max() >= _NON_FINITE_BITS[packed.dtype]:
            bad = (~source.isfinite()).numpy()
            for nth in np.flatnonzero(np.logical_or.reduceat(bad, starts)):
                first[rows[part[nth]]] = table[part[nth], 1] + np.argmax(bad[starts[nth] :])
        if bits is not None and narrows[part].any():
            lost = (bits == 0) & (source != 0).numpy()
            flushed[rows[part]] = np.add.reduceat(lost, starts, dtype=np.int64) * narrows[part]


def _is_suspicious(run: Run, gradients: Gradients, chunks: ChunkTable, wire: torch.Tensor) -> bool:
    """Whether a run may have a value that is not finite, or one that became 0 on the wire."""
    flushing = any(may_flush(dtype, wire.dtype) for dtype in run.dtypes)
    present = run.numel
    if type(None) in set(map(type, gradients)):
        present -= sum(chunks.numels[slot] for slot, one in zip(run.slots, gradients, strict=True) if one is None)
    zeros = run.end - run.begin - present  # gaps and missing gradients
    for part in wire[run.begin : run.end].split(_LOOK_NUMEL) if present else ():
        limit = _NON_FINITE_BITS.get(part.dtype)
        if limit is None:
            if not math.isfinite(part.sum().item()):
                return True
        else:
            bits = _without_sign(part)
            lowest, highest = torch.aminmax(bits)
            if highest.item() >= limit:
                return True
            if flushing and lowest.item() == 0:
                zeros -= int(np.count_nonzero(bits.numpy() == 0))
                if zeros < 0:
                    return True
    return False


def reduce_partials(partials: Partials, spans: Spans) -> Totals:
    """Adds partials up per parameter and in total; arguments as for `kernels.dispatch.reduce_partials`."""
    rows = _Rows(spans)
    with np.errstate(all="ignore"):
        sums = rows.reduced(np.add, partials.sums, 0.0)
        peaks = rows.reduced(np.maximum, partials.peaks, 0.0)
        first = rows.lowest(partials.first_non_finite)
        total = [sums.sum(), peaks.max(initial=0.0), (first >= 0).sum()]
    device = partials.sums.device
    return Totals(
        parameter_sums=torch.from_numpy(sums).to(device),
        parameter_peaks=torch.from_numpy(peaks).to(device),
        first_non_finite=torch.from_numpy(first).to(device),
        total=torch.tensor(total, dtype=torch.float64, device=device),
    )


def reduce_source_partials(partials: SourcePartials, spans: Spans) -> SourceTotals:
    """Reduces partials of pack per parameter; arguments as for `kernels.dispatch.reduce_source_partials`."""
    rows = _Rows(spans)
    first = rows.lowest(partials.first_non_finite)
    flushed = rows.reduced(np.add, partials.flushed, 0)
    bad = np.flatnonzero(first >= 0)
    lowest = (int(bad[0]), int(first[bad[0]])) if len(bad) else (-1, -1)
    device = partials.flushed.device
    return SourceTotals(
        first_non_finite=torch.from_numpy(first).to(device),
        flushed=torch.from_numpy(flushed).to(device),
        first=torch.tensor(lowest, dtype=torch.int64, device=device),
    )


class _Rows:
    """Which rows of the partials belong to which parameter, gathered in the order of parameters."""

    def __init__(self, spans: Spans) -> None:
        pairs = spans.cpu().numpy()[1:].reshape(-1, 2)
        lengths = pairs[:, 1] - pairs[:, 0]
        ends = np.cumsum(lengths)
        self._parameters = len(pairs)
        self._present = np.flatnonzero(lengths)
        self._starts = (ends - lengths)[self._present]
        self._index = np.arange(lengths.sum()) + np.repeat(pairs[:, 0] - (ends - lengths), lengths)

    def reduced(self, operation: Any, values: torch.Tensor, empty: float) -> npt.NDArray[Any]:
        """`operation` over each parameter's rows; `empty` for a parameter without rows."""
        gathered = values.cpu().numpy()[self._index]
        found = np.full(self._parameters, empty, dtype=gathered.dtype)
        if len(gathered):
            found[self._present] = operation.reduceat(gathered, self._starts)
        return found

    def lowest(self, first: torch.Tensor) -> npt.NDArray[np.int64]:
        """The lowest index that is not -1 among each parameter's rows, else -1."""
        known = torch.where(first < 0, _NONE_FOUND, first)
        found: npt.NDArray[np.int64] = self.reduced(np.minimum, known, _NONE_FOUND)
        return np.where(found == _NONE_FOUND, -1, found)


def _without_sign(part: torch.Tensor) -> torch.Tensor:
    """The bits of 16-bit numbers, in scratch memory."""
    return torch.bitwise_and(part.view(torch.int16), 0x7FFF, out=scratch(torch.int16, part.numel()))
