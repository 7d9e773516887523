"""Second stage of the statistics: per-chunk partials to per-parameter and total results, in a fixed order.

    parameter_sums[p] = sum of sums[c] over the chunks c of p;  total[0] = sum of parameter_sums, in order of p

and likewise largest values, lowest indices and counts. Two launches, over 24 bytes per chunk: for 8,192-element chunks
0.003 bytes per element. fp64 throughout, no atomics: the same partials and spans give the same bits.

Example: partials [1, 2, 4] of parameters with 2 and 1 chunks -> parameter_sums [3, 4], total 7.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .table import Partials, SourcePartials, SourceTotals, Spans, Totals
from .variants import STATS_POINTERS, Variant

NONE_FOUND = tl.constexpr(0x7FFFFFFFFFFFFFFF)
# One program reads all rows of a parameter in a loop, an iteration of which takes as long as a trip to memory: so
# iterations are wide. The largest tensor of GPT-2 takes 5.
_BLOCK = 1024
_NUM_WARPS = 8


@triton.jit
def as_ordered(value):
    """Absolute values in fp64 as integers of their order, NaN above infinity: a GPU's maximum of floats drops NaN."""
    return value.to(tl.int64, bitcast=True) & 0x7FFFFFFFFFFFFFFF


@triton.jit(do_not_specialize=STATS_POINTERS)
def _parameter_totals_kernel(
    spans,
    sums,
    peaks,
    first_non_finite,
    parameter_sums,
    parameter_peaks,
    parameter_first,
    BLOCK: tl.constexpr,
):
    """One program per parameter brings its chunks together, BLOCK at a time, in order."""
    parameter = tl.program_id(0).to(tl.int64)
    begin = tl.load(spans + 1 + 2 * parameter)
    end = tl.load(spans + 2 + 2 * parameter)
    lane = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float64)
    highest = tl.zeros((BLOCK,), tl.int64)
    lowest = tl.full((BLOCK,), NONE_FOUND, tl.int64)
    for start in tl.range(begin, end, BLOCK):
        row = start + lane
        inside = row < end
        total += tl.load(sums + row, mask=inside, other=0.0)
        highest = tl.maximum(highest, as_ordered(tl.load(peaks + row, mask=inside, other=0.0)))
        found = tl.load(first_non_finite + row, mask=inside, other=-1)
        lowest = tl.minimum(lowest, tl.where(found < 0, NONE_FOUND, found))
    first = tl.min(lowest, axis=0)
    tl.store(parameter_sums + parameter, tl.sum(total, axis=0))
    tl.store(parameter_peaks + parameter, tl.max(highest, axis=0).to(tl.float64, bitcast=True))
    tl.store(parameter_first + parameter, tl.where(first == NONE_FOUND, -1, first))


@triton.jit(do_not_specialize=STATS_POINTERS)
def _total_kernel(spans, parameter_sums, parameter_peaks, parameter_first, total, BLOCK: tl.constexpr):
    """One program brings the parameters together, BLOCK at a time, in order."""
    parameters = tl.load(spans)
    lane = tl.arange(0, BLOCK)
    partial = tl.zeros((BLOCK,), tl.float64)
    highest = tl.zeros((BLOCK,), tl.int64)
    bad = tl.zeros((BLOCK,), tl.int32)
    for start in tl.range(0, parameters, BLOCK):
        index = start + lane
        inside = index < parameters
        partial += tl.load(parameter_sums + index, mask=inside, other=0.0)
        highest = tl.maximum(highest, as_ordered(tl.load(parameter_peaks + index, mask=inside, other=0.0)))
        bad += (tl.load(parameter_first + index, mask=inside, other=-1) >= 0).to(tl.int32)
    tl.store(total, tl.sum(partial, axis=0))
    tl.store(total + 1, tl.max(highest, axis=0).to(tl.float64, bitcast=True))
    tl.store(total + 2, tl.sum(bad, axis=0).to(tl.float64))


@triton.jit(do_not_specialize=STATS_POINTERS)
def _parameter_sources_kernel(
    spans, first_non_finite, flushed, parameter_first, parameter_flushed, BLOCK: tl.constexpr
):
    """One program per parameter brings its chunks together, BLOCK at a time."""
    parameter = tl.program_id(0).to(tl.int64)
    begin = tl.load(spans + 1 + 2 * parameter)
    end = tl.load(spans + 2 + 2 * parameter)
    lane = tl.arange(0, BLOCK)
    count = tl.zeros((BLOCK,), tl.int64)
    lowest = tl.full((BLOCK,), NONE_FOUND, tl.int64)
    for start in tl.range(begin, end, BLOCK):
        row = start + lane
        inside = row < end
        count += tl.load(flushed + row, mask=inside, other=0)
        found = tl.load(first_non_finite + row, mask=inside, other=-1)
        lowest = tl.minimum(lowest, tl.where(found < 0, NONE_FOUND, found))
    first = tl.min(lowest, axis=0)
    tl.store(parameter_flushed + parameter, tl.sum(count, axis=0))
    tl.store(parameter_first + parameter, tl.where(first == NONE_FOUND, -1, first))


@triton.jit(do_not_specialize=STATS_POINTERS)
def _first_source_kernel(spans, parameter_first, first, BLOCK: tl.constexpr):
    """One program finds the lowest parameter with a non-finite value."""
    parameters = tl.load(spans)
    lane = tl.arange(0, BLOCK)
    lowest = tl.full((BLOCK,), NONE_FOUND, tl.int64)
    for start in tl.range(0, parameters, BLOCK):
        index = (start + lane).to(tl.int64)
        found = tl.load(parameter_first + index, mask=index < parameters, other=-1)
        lowest = tl.minimum(lowest, tl.where(found < 0, NONE_FOUND, index))
    parameter = tl.min(lowest, axis=0)
    exists = parameter != NONE_FOUND
    index = tl.load(parameter_first + parameter, mask=exists, other=-1)
    tl.store(first, tl.where(exists, parameter, -1))
    tl.store(first + 1, index)


def _variant(kernel: object, label: str, **pointers: str) -> Variant:
    return Variant(
        kernel=kernel,
        signature={"spans": "*i64", **pointers, "BLOCK": "constexpr"},
        constexprs={"BLOCK": _BLOCK},
        num_warps=_NUM_WARPS,
        branches=(),
        label=label,
    )


PARAMETER_TOTALS = _variant(
    _parameter_totals_kernel,
    "parameter_totals",
    sums="*fp64",
    peaks="*fp64",
    first_non_finite="*i64",
    parameter_sums="*fp64",
    parameter_peaks="*fp64",
    parameter_first="*i64",
)
TOTAL = _variant(
    _total_kernel, "total", parameter_sums="*fp64", parameter_peaks="*fp64", parameter_first="*i64", total="*fp64"
)
PARAMETER_SOURCES = _variant(
    _parameter_sources_kernel,
    "parameter_sources",
    first_non_finite="*i64",
    flushed="*i64",
    parameter_first="*i64",
    parameter_flushed="*i64",
)
FIRST_SOURCE = _variant(_first_source_kernel, "first_source", parameter_first="*i64", first="*i64")


def reduce_partials(partials: Partials, spans: Spans) -> Totals:
    """Adds partials up per parameter and in total, in two launches; as `kernels.dispatch.reduce_partials`."""
    parameters, device = spans.numel() // 2, partials.sums.device
    totals = Totals(
        parameter_sums=torch.empty(parameters, dtype=torch.float64, device=device),
        parameter_peaks=torch.empty(parameters, dtype=torch.float64, device=device),
        first_non_finite=torch.empty(parameters, dtype=torch.int64, device=device),
        total=torch.empty(3, dtype=torch.float64, device=device),
    )
    each = (totals.parameter_sums, totals.parameter_peaks, totals.first_non_finite)
    if parameters:
        rows = (partials.sums, partials.peaks, partials.first_non_finite)
        PARAMETER_TOTALS.launch(parameters, (spans, *rows, *each))
    TOTAL.launch(1, (spans, *each, totals.total))
    return totals


def reduce_source_partials(partials: SourcePartials, spans: Spans) -> SourceTotals:
    """Reduces partials of pack, in two launches; as `kernels.dispatch.reduce_source_partials`."""
    parameters, device = spans.numel() // 2, partials.flushed.device
    totals = SourceTotals(
        first_non_finite=torch.empty(parameters, dtype=torch.int64, device=device),
        flushed=torch.empty(parameters, dtype=torch.int64, device=device),
        first=torch.empty(2, dtype=torch.int64, device=device),
    )
    if parameters:
        rows = (partials.first_non_finite, partials.flushed)
        PARAMETER_SOURCES.launch(parameters, (spans, *rows, totals.first_non_finite, totals.flushed))
    FIRST_SOURCE.launch(1, (spans, totals.first_non_finite, totals.first))
    return totals


def variants() -> tuple[Variant, ...]:
    """All variants that this file can launch."""
    return PARAMETER_TOTALS, TOTAL, PARAMETER_SOURCES, FIRST_SOURCE
