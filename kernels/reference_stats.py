"""Statistics and their second stage in torch and numpy: how `reference` fills partials, on any device.

Large slots are measured in blocks of whole rows, while a block is in the cache: squares in fp32, added up 16 at a time
in fp32 (with a relative error of 16 times 2^-24 at most) and from there in fp64. Rows whose sums are outside of the
bounds in which fp32 is accurate are measured again in fp64. Small slots, and the remainders of large ones, are measured
together in fp64. No sum is split among threads, so its bits do not depend on their number.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from .table import (
    ChunkTable,
    Partials,
    SourcePartials,
    SourceTotals,
    Spans,
    Totals,
    may_flush,
    new_partials,
    new_source_partials,
)

# Elements of a block: 1 MiB of squares. In smaller blocks the fixed cost of operators shows: 10 million elements take
# 4.0 ms, in blocks of a quarter 5.4 ms.
BLOCK_NUMEL = 262144
_LOOK_NUMEL = BLOCK_NUMEL // 2
# Row sums of fp32 squares are accurate between these bounds: see SUM_LOWEST and SUM_HIGHEST of `kernels.chunk`.
_LOWEST, _HIGHEST = 1e-27, 3e38
# Number of squares that are added up in fp32.
_FOLD = 16
_NONE_FOUND = np.iinfo(np.int64).max
# The bits of a 16-bit number without its sign, from which on it is not finite.
_NON_FINITE_BITS = {torch.bfloat16: 0x7F80, torch.float16: 0x7C00}
_of_thread = threading.local()


class Measured:
    """Fills the partials of one layout; slots that are not measured count as zeros.

    Args:
        chunks: the layout's table.
        partials: [data rows], on any device; filled by `write_partials`. Measured values must not change before that.
    """

    def __init__(self, chunks: ChunkTable, partials: Partials) -> None:
        self._chunks = chunks
        self._partials = partials
        cpu = torch.device("cpu")
        self._host = partials if partials.sums.device == cpu else new_partials(chunks.data_rows, cpu)
        self._sums, self._peaks = self._host.sums.numpy(), self._host.peaks.numpy()
        self._first = self._host.first_non_finite.numpy()
        self._sums[:], self._peaks[:], self._first[:] = 0.0, 0.0, -1
        self._whole: list[tuple[int, torch.Tensor]] = []
        self._squares = torch.empty(chunks.data_rows)
        self._left: list[tuple[int, torch.Tensor]] = []
        self._left_numel = 0
        rows = chunks.chunk_numel
        # As many whole rows as fit into a block, but at least one.
        self.block_numel = max(1, BLOCK_NUMEL // rows) * rows

    def rows(self, slot: int, begin: int, values: torch.Tensor) -> None:
        """Measures `values`, flat: a slot's elements from `begin` on, where a row begins."""
        numel = self._chunks.chunk_numel
        row = int(self._chunks.first_rows[slot]) + begin // numel
        whole = 0 if values.dtype is torch.float64 or numel % _FOLD else values.numel() // numel
        if whole:
            self._whole_rows(row, values[: whole * numel].view(whole, numel))
        rest = values.numel() - whole * numel
        if rest:
            parts = (values[whole * numel :],) if rest < numel else values[whole * numel :].split(numel)
            self._left.extend((row + whole + nth, part) for nth, part in enumerate(parts))
            self._left_numel += rest
            if self._left_numel >= BLOCK_NUMEL:
                self._leftovers()

    def run(self, slots: range, values: torch.Tensor, *, begin: int | None, missing: Sequence[int] = ()) -> None:
        """Measures several slots.

        Args:
            slots: numbers of the slots.
            values: flat, laid out as the wire from its element `begin` on; None: one slot after the other, without gaps
                and without `missing`.
            begin: see `values`.
            missing: slots without a gradient, which are skipped.
        """
        first_rows = self._chunks.first_rows
        rows = np.arange(first_rows[slots.start], first_rows[slots.stop])
        if missing:
            rows = rows[~np.isin(self._chunks.rows[rows, 0], missing)]
        if len(rows):
            table = self._chunks.rows[rows]
            counts = table[:, 2] - table[:, 1]
            self._carefully(rows, np.cumsum(counts) - counts if begin is None else table[:, 3] - begin, counts, values)

    def write_partials(self) -> None:
        """Measures the remainders, and copies the results to the partials' device."""
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
                self._carefully(np.array([row]), np.zeros(1, np.int64), np.array([len(values)]), values)
        if self._host is not self._partials:
            for name, tensor in vars(self._partials).items():
                tensor.copy_(getattr(self._host, name))

    def _whole_rows(self, row: int, values: torch.Tensor) -> None:
        rows, numel = values.shape
        squares = scratch(torch.float32, values.device, values.numel()).view(rows, numel)
        values32 = values if values.dtype is torch.float32 else squares.copy_(values)
        torch.mul(values32, values32, out=squares)
        folded = squares.view(rows, _FOLD, numel // _FOLD).sum(1)
        torch.sum(folded, 1, dtype=torch.float64, out=self._host.sums[row : row + rows])
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
        """Measures rows in fp64; `starts` are the positions of their elements in `values`, ascending."""
        x = scratch(torch.float64, torch.device("cpu"), values.numel()).copy_(values).numpy()
        ends = starts + counts
        gapless = bool((starts[1:] == ends[:-1]).all()) and ends[-1] == len(x)
        places = starts if gapless else np.stack([starts, ends], axis=1).reshape(-1)
        places = places[:-1] if places[-1] == len(x) else places
        step = 1 if gapless else 2
        with np.errstate(all="ignore"):
            if values.dtype is torch.float64:  # a square may overflow or underflow, and its root be rounded
                peaks = np.maximum.reduceat(np.abs(x), places)[::step]
                np.multiply(x, x, out=x)
            else:
                np.multiply(x, x, out=x)
                peaks = np.sqrt(np.maximum.reduceat(x, places)[::step])
            self._sums[rows] = sums = np.add.reduceat(x, places)[::step]
        self._peaks[rows] = peaks
        for nth in np.flatnonzero(~np.isfinite(sums)):
            row = rows[nth]
            part = _numpy(values[starts[nth] : ends[nth]], torch.float64)
            bad = np.flatnonzero(~np.isfinite(part))
            self._first[row] = self._chunks.rows[row, 1] + bad[0] if len(bad) else -1


class Suspicion(NamedTuple):
    """What gradients may contain: NaN or infinity; numbers that became 0 on the wire."""

    non_finite: bool
    flushed: bool


class Sources:
    """Fills the partials of one pack; slots that are not searched count as finite and not flushed.

    Args:
        chunks: the layout's table.
        wire: the packed buffer.
        partials: [data rows], on any device; filled by `write_partials`.
    """

    def __init__(self, chunks: ChunkTable, wire: torch.Tensor, partials: SourcePartials) -> None:
        self._chunks = chunks
        self._wire = wire
        self._partials = partials
        cpu = torch.device("cpu")
        self._host = partials if partials.flushed.device == cpu else new_source_partials(chunks.data_rows, cpu)
        self._first, self._flushed = self._host.first_non_finite.numpy(), self._host.flushed.numpy()
        self._first[:], self._flushed[:] = -1, 0
        self._flushing = {dtype: may_flush(dtype, wire.dtype) for dtype in set(chunks.dtypes)}

    def look(self, dtypes: Collection[torch.dtype], begin: int, end: int, zeros: int) -> Suspicion:
        """Checks the wire's elements [begin, end) for what their gradients have to be searched for.

        It is cheap and misses nothing: a value that is not finite in a gradient is not finite on the wire.

        Args:
            dtypes: of the gradients.
            begin: first element of the wire.
            end: the element after the last one.
            zeros: number of elements that are 0 in any case: gaps and missing gradients.
        """
        flushing = any(self._flushing[dtype] for dtype in dtypes)
        non_finite = flushed = False
        for part in self._wire[begin:end].split(_LOOK_NUMEL) if end > begin else ():
            limit = _NON_FINITE_BITS.get(part.dtype)
            if limit is None:
                non_finite |= not math.isfinite(part.sum().item())
            else:
                bits = _without_sign(part)
                lowest, highest = torch.aminmax(bits)
                non_finite |= highest.item() >= limit
                if flushing and not flushed and lowest.item() == 0:
                    zeros -= int(np.count_nonzero(bits.cpu().numpy() == 0)) if zeros else 1
                    flushed = zeros < 0
        return Suspicion(non_finite, flushed)

    def search(self, begin: int, sources: torch.Tensor, suspicion: Suspicion) -> None:
        """Searches gradients for NaN, infinity and flushed elements.

        Args:
            begin: first element of the wire that they were packed into.
            sources: the gradients, flat, laid out as the wire, with zeros in gaps.
            suspicion: what to search for.
        """
        table = self._chunks.rows[: self._chunks.data_rows]
        for part in sources.split(_LOOK_NUMEL):
            end = begin + part.numel()
            first = max(0, int(np.searchsorted(table[:, 3], begin, side="right")) - 1)
            last = int(np.searchsorted(table[:, 3], end, side="left"))
            if first < last:
                starts = np.maximum(table[first:last, 3] - begin, 0)
                x = _numpy(part, torch.float64 if part.dtype is torch.float64 else torch.float32)
                if suspicion.non_finite:
                    bad = ~np.isfinite(x)
                    for nth in np.flatnonzero(np.logical_or.reduceat(bad, starts)):
                        row = first + nth
                        if self._first[row] < 0:
                            offset = begin + starts[nth] + np.argmax(bad[starts[nth] :])
                            self._first[row] = table[row, 1] + offset - table[row, 3]
                if suspicion.flushed:
                    lost = _without_sign(self._wire[begin:end]).cpu().numpy() == 0
                    lost &= x != 0.0
                    if np.count_nonzero(lost):
                        counted = [self._flushing[self._chunks.dtypes[slot]] for slot in table[first:last, 0]]
                        counts = np.add.reduceat(lost, starts, dtype=np.int64)
                        self._flushed[first:last] += counts * np.array(counted, dtype=np.int64)
            begin = end

    def write_partials(self) -> None:
        """Copies the results to the partials' device."""
        if self._host is not self._partials:
            for name, tensor in vars(self._partials).items():
                tensor.copy_(getattr(self._host, name))


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
    return torch.bitwise_and(part.view(torch.int16), 0x7FFF, out=scratch(torch.int16, part.device, part.numel()))


def _numpy(values: torch.Tensor, dtype: torch.dtype) -> npt.NDArray[Any]:
    """`values` on the host; a copy only if the dtype or device differs."""
    return values.detach().resolve_neg().to(dtype).cpu().numpy()


def scratch(dtype: torch.dtype, device: torch.device, numel: int) -> torch.Tensor:
    """`numel` elements that this thread alone uses, until it asks for them again."""
    kept: dict[object, torch.Tensor] = _of_thread.__dict__.setdefault("scratch", {})
    if (dtype, device) not in kept or kept[dtype, device].numel() < numel:
        kept[dtype, device] = torch.empty(max(numel, BLOCK_NUMEL), dtype=dtype, device=device)
    return kept[dtype, device][:numel]
