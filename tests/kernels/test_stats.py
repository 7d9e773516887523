"""The second stage of by-products, on both paths: parameters in the caller's order, whatever rows are theirs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import triton
from hypothesis import given
from hypothesis import strategies as st
from support.by_products import CPU, assert_totals
from support.sweep import sweep

from fusedreduce.kernels import cpu_stats, dispatch, reference, stats
from fusedreduce.kernels.table import ChunkTable, Partials, SourcePartials, Totals

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
interpreted = pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="needs TRITON_INTERPRET=1")
MODULES = [
    pytest.param(reference, id="reference"),
    pytest.param(cpu_stats, id="cpu"),
    pytest.param(stats, id="kernel", marks=interpreted),
]


def _spans(pairs: list[tuple[int, int]]) -> torch.Tensor:
    return torch.tensor([len(pairs), *[end for pair in pairs for end in pair]])


@st.composite
def tables(draw: st.DrawFn) -> tuple[Partials, SourcePartials, list[tuple[int, int]]]:
    """Up to 40 parameters of 0 to 600 rows, which lie in any order, not all of them anybody's."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**20)))
    lengths = draw(st.lists(st.sampled_from([0, 1, 1, 2, 5, 300, 600]), max_size=40))
    gaps = torch.randint(0, 3, (len(lengths),), generator=generator).tolist()
    begins = np.cumsum([gap + length for gap, length in zip(gaps, lengths, strict=True)]) - lengths
    order = torch.randperm(len(lengths), generator=generator).tolist()
    pairs = [(int(begins[nth]), int(begins[nth]) + lengths[nth]) for nth in order]
    rows = sum(lengths) + sum(gaps) + 1
    sums = torch.rand(rows, generator=generator, dtype=torch.float64) * 10.0 ** draw(st.integers(-200, 200))
    peaks = torch.rand(rows, generator=generator, dtype=torch.float64)
    first = torch.where(
        torch.rand(rows, generator=generator) < draw(st.sampled_from([0.0, 0.01, 0.5])), torch.arange(rows) * 8192, -1
    )
    bad = torch.nonzero(first >= 0).flatten()
    peaks[bad[::2]], peaks[bad[1::2]] = -torch.tensor(float("nan"), dtype=torch.float64), float("inf")
    sums[bad] = peaks[bad]
    flushed = torch.randint(0, 2**40, (rows,), generator=generator)
    return Partials(sums, peaks, first), SourcePartials(first, flushed), pairs


def _expected(partials: Partials, pairs: list[tuple[int, int]]) -> Totals:
    sums = torch.zeros(len(pairs), dtype=torch.float64)
    peaks, first = torch.zeros_like(sums), torch.full((len(pairs),), -1)
    for parameter, (begin, end) in enumerate(pairs):
        if end > begin:
            part = partials.part(begin, end)
            sums[parameter], peaks[parameter] = part.sums.sum(), part.peaks.max()
            found = part.first_non_finite[part.first_non_finite >= 0]
            first[parameter] = found.min() if len(found) else -1
    largest = peaks.max() if len(pairs) else torch.tensor(0.0, dtype=torch.float64)
    return Totals(sums, peaks, first, torch.stack([sums.sum(), largest, (first >= 0).sum().double()]))


@given(tables())
@sweep(150)
def test_torch_path_brings_partials_together(table: tuple[Partials, SourcePartials, list[tuple[int, int]]]) -> None:
    _check(cpu_stats, *table)


@interpreted
@given(tables())
@sweep(50)
def test_kernels_bring_partials_together(table: tuple[Partials, SourcePartials, list[tuple[int, int]]]) -> None:
    _check(stats, *table)


def _check(module: Any, partials: Partials, sources: SourcePartials, pairs: list[tuple[int, int]]) -> None:
    spans = _spans(pairs)
    expected = _expected(partials, pairs)
    assert_totals(module.reduce_partials(partials, spans), expected)
    found = module.reduce_source_partials(sources, spans)
    assert found.first_non_finite.tolist() == expected.first_non_finite.tolist()
    assert found.flushed.tolist() == [int(sources.flushed[begin:end].sum()) for begin, end in pairs]
    bad = [(nth, int(index)) for nth, index in enumerate(expected.first_non_finite) if index >= 0]
    assert found.first.tolist() == list(bad[0] if bad else (-1, -1))


@pytest.mark.parametrize("module", MODULES)
def test_more_chunks_and_parameters_than_one_block(module: Any) -> None:
    numels = [600] + [1] * 299
    offsets = np.cumsum([0, *numels[:-1]]).tolist()
    chunks = ChunkTable(numels, offsets, [torch.float32] * 300, sum(numels), chunk_numel=2)
    assert chunks.data_rows == 300 + 299
    rows = torch.arange(1.0, 600.0, dtype=torch.float64)
    first = torch.full((599,), -1)
    first[598] = 0
    totals = module.reduce_partials(Partials(rows, rows, first), chunks.spans(CPU))
    assert totals.parameter_sums.tolist() == [float(sum(range(1, 301))), *map(float, range(301, 600))]
    assert totals.parameter_peaks.tolist() == [300.0, *map(float, range(301, 600))]
    assert totals.total.tolist() == [float(sum(range(1, 600))), 599.0, 1.0]
    assert totals.first_non_finite.tolist() == [-1] * 299 + [0]


@pytest.mark.parametrize("module", MODULES)
def test_nothing_at_all(module: Any) -> None:
    chunks = ChunkTable([], [], [], 0)
    spans = chunks.spans(CPU)
    assert spans.tolist() == [0]
    assert module.reduce_partials(chunks.new_partials(CPU), spans).total.tolist() == [0.0, 0.0, 0.0]
    assert module.reduce_source_partials(chunks.new_source_partials(CPU), spans).first.tolist() == [-1, -1]


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("module", MODULES)
def test_a_nan_of_either_sign_is_the_largest(module: Any, sign: float) -> None:
    """x86 sets the sign of the NaN that it makes of infinity minus infinity."""
    nan = torch.tensor(float("nan"), dtype=torch.float64).copysign(torch.tensor(sign))
    peaks = torch.tensor([2.0, float("inf"), 0.0, 1.0], dtype=torch.float64)
    peaks[2] = nan
    assert peaks[2].signbit().item() is (sign < 0)
    totals = module.reduce_partials(Partials(peaks, peaks, torch.tensor([-1, 0, 0, -1])), _spans([(0, 3), (3, 4)]))
    assert totals.parameter_peaks[0].isnan() and totals.parameter_peaks[1] == 1.0
    assert totals.total[1].isnan(), "and of all parameters"


def test_the_same_sums_wherever_the_rows_lie() -> None:
    generator = torch.Generator().manual_seed(5)
    rows = torch.rand(2000, generator=generator, dtype=torch.float64)
    first = torch.full((2000,), -1)
    expected = dispatch.reduce_partials(Partials(rows, rows, first), _spans([(0, 700), (700, 2000)]))
    moved = torch.cat([rows[700:], torch.full((13,), float("nan"), dtype=torch.float64), rows[:700]])
    more = Partials(moved, moved, torch.full((2013,), -1))
    found = dispatch.reduce_partials(more, _spans([(1313, 2013), (0, 1300)]))
    assert torch.equal(found.parameter_sums, expected.parameter_sums) and torch.equal(found.total, expected.total)


def test_arithmetic_names_what_decides_the_last_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fusedreduce.kernels.variants.interpreted", lambda: False)
    assert torch.__version__ in dispatch.arithmetic(CPU) and np.__version__ in dispatch.arithmetic(CPU)
    monkeypatch.setattr(dispatch, "without_kernels", lambda device: "")
    monkeypatch.setattr("fusedreduce.kernels.variants.current_target", lambda device: ("cuda", 90))
    hopper = dispatch.arithmetic(torch.device("cuda", 0))
    assert triton.__version__ in hopper and "cuda 90" in hopper
    monkeypatch.setattr("fusedreduce.kernels.variants.current_target", lambda device: ("cuda", 80))
    assert dispatch.arithmetic(torch.device("cuda", 0)) != hopper
