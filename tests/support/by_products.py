"""What by-products must be, by their definitions, element by element in fp64; and how near sums must come."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fusedreduce.kernels.table import (
    ChunkTable,
    Partials,
    SourcePartials,
    Totals,
    may_flush,
    new_partials,
    new_source_partials,
)
from support.buckets import assert_same

CPU = torch.device("cpu")
# fp32 squares and at most 15 fp32 additions after one another, each within 2^-24; fp64 from there on.
SUM_RTOL = 1e-6


def expected_partials(values: Sequence[torch.Tensor | None], chunks: ChunkTable) -> Partials:
    """Of each slot's values, flat, None where it is missing."""
    found = new_partials(chunks.data_rows, CPU)
    for row, (slot, begin, end, _, _) in enumerate(chunks.rows[: chunks.data_rows].tolist()):
        one = values[slot]
        part = torch.zeros(end - begin) if one is None else one[begin - chunks.begins[slot] : end - chunks.begins[slot]]
        wide = part.double()
        bad = [index for index, finite in enumerate(wide.isfinite().tolist()) if not finite]
        found.sums[row] = wide.square().sum()
        found.peaks[row] = wide.abs().max()
        found.first_non_finite[row] = begin + bad[0] if bad else -1
    return found


def expected_source_partials(
    values: Sequence[torch.Tensor | None], wire: torch.Tensor, chunks: ChunkTable
) -> SourcePartials:
    """Of each slot's gradient, flat, None where it is missing, and the wire that was packed."""
    found = new_source_partials(chunks.data_rows, CPU)
    for row, (slot, begin, end, offset, _) in enumerate(chunks.rows[: chunks.data_rows].tolist()):
        one = values[slot]
        found.first_non_finite[row], found.flushed[row] = -1, 0
        if one is not None:
            part = one[begin - chunks.begins[slot] : end - chunks.begins[slot]]
            bad = [index for index, finite in enumerate(part.isfinite().tolist()) if not finite]
            found.first_non_finite[row] = begin + bad[0] if bad else -1
            if may_flush(part.dtype, wire.dtype):
                stored = wire[offset : offset + end - begin]
                found.flushed[row] = ((part != 0) & (stored == 0)).sum()
    return found


def assert_partials(actual: Partials, expected: Partials) -> None:
    """Peaks and indices exactly, sums within SUM_RTOL."""
    assert actual.first_non_finite.tolist() == expected.first_non_finite.tolist()
    assert_same(actual.peaks.cpu(), expected.peaks)
    torch.testing.assert_close(actual.sums.cpu(), expected.sums, rtol=SUM_RTOL, atol=0, equal_nan=True)


def assert_source_partials(actual: SourcePartials, expected: SourcePartials) -> None:
    """Exactly."""
    assert actual.first_non_finite.tolist() == expected.first_non_finite.tolist()
    assert actual.flushed.tolist() == expected.flushed.tolist()


def assert_totals(actual: Totals, expected: Totals) -> None:
    """Peaks, indices and counts exactly, sums to within rounding of fp64."""
    assert actual.first_non_finite.tolist() == expected.first_non_finite.tolist()
    assert_same(actual.parameter_peaks, expected.parameter_peaks)
    assert_same(actual.total[1:], expected.total[1:])
    torch.testing.assert_close(actual.parameter_sums, expected.parameter_sums, rtol=1e-12, atol=0, equal_nan=True)
    torch.testing.assert_close(actual.total[0], expected.total[0], rtol=1e-12, atol=0, equal_nan=True)
