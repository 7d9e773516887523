"""What by-products must be, by their definitions, element by element in fp64; and how near sums must come."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fusedreduce.kernels import runs
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
        found.sums[row] = wide.square().sum()
        found.peaks[row] = wide.abs().max()
        found.first_non_finite[row] = _first_non_finite(part, begin)
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
            found.first_non_finite[row] = _first_non_finite(part, begin)
            if may_flush(part.dtype, wire.dtype):
                stored = wire[offset : offset + end - begin]
                found.flushed[row] = ((part != 0) & (stored == 0)).sum()
    return found


def _first_non_finite(part: torch.Tensor, begin: int) -> int:
    bad = part.isfinite().logical_not().nonzero()
    return begin + int(bad[0]) if len(bad) else -1


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


def planted(dtype: torch.dtype, seed: int, most: int) -> tuple[list[torch.Tensor], list[int]]:
    """Six gradients, the last a large one, of finite values whose sums may overflow; half of the time of others too.

    And of each the first value that is not finite; -1: all are.
    """
    generator = torch.Generator().manual_seed(seed)
    numels = [*torch.randint(0, most, (5,), generator=generator).tolist(), runs.LARGE_NUMEL + seed % (3 * most)]
    gradients = [(torch.randn(numel, generator=generator) * 10.0 ** (seed % 9 - 4)).to(dtype) for numel in numels]
    for one in gradients:
        one[: seed % 7] = torch.finfo(dtype).max
    first = [-1] * 6
    for slot in torch.randint(0, 12, (2,), generator=generator).tolist():
        if slot < 6 and numels[slot]:
            index = int(torch.randint(0, numels[slot], (), generator=generator))
            gradients[slot][index] = (float("nan"), float("inf"), -float("inf"))[seed % 3]
            first[slot] = index if first[slot] < 0 else min(index, first[slot])
    return gradients, first


def assert_first(first_non_finite: torch.Tensor, chunks: ChunkTable, expected: Sequence[int]) -> None:
    """The first of a slot's rows that has one says where."""
    for slot, wanted in enumerate(expected):
        found = first_non_finite[chunks.first_rows[slot] : chunks.first_rows[slot + 1]]
        assert min((int(one) for one in found if one >= 0), default=-1) == wanted
