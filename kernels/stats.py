"""Second stage of the by-products: per-chunk partials to per-parameter and total sums, in a fixed order.

    parameter_sums[p] = sum of sums[c] over the chunks c of p;  total = sum of parameter_sums, in slot order

Two launches per step at most, over 16 bytes per chunk: for 8,192-element chunks 0.002 bytes per element. fp64
throughout, no atomics: the same partials give the same bits.

Example: partials [1, 2, 4] of parameters with 2 and 1 chunks -> parameter_sums [3, 4], total 7.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .table import ChunkTable, Partials, Totals
from .variants import STATS_POINTERS, Variant

NONE_FOUND = tl.constexpr(0x7FFFFFFFFFFFFFFF)
_BLOCK = 256
_NUM_WARPS = 4


@triton.jit(do_not_specialize=STATS_POINTERS)
def _parameter_sums_kernel(starts, sums, first_non_finite, parameter_sums, parameter_first, BLOCK: tl.constexpr):
    """One program per parameter adds its chunks up, BLOCK at a time, in order."""
    parameter = tl.program_id(0).to(tl.int64)
    begin = tl.load(starts + 1 + parameter)
    end = tl.load(starts + 2 + parameter)
    lane = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float64)
    first = tl.full((BLOCK,), NONE_FOUND, tl.int64)
    for start in tl.range(begin, end, BLOCK):
        row = start + lane
        inside = row < end
        total += tl.load(sums + row, mask=inside, other=0.0)
        found = tl.load(first_non_finite + row, mask=inside, other=-1)
        first = tl.minimum(first, tl.where(found < 0, NONE_FOUND, found))
    lowest = tl.min(first, axis=0)
    tl.store(parameter_sums + parameter, tl.sum(total, axis=0))
    tl.store(parameter_first + parameter, tl.where(lowest == NONE_FOUND, -1, lowest))


@triton.jit(do_not_specialize=STATS_POINTERS)
def _total_kernel(starts, parameter_sums, total, BLOCK: tl.constexpr):
    """One program adds the parameters up, BLOCK at a time, in order."""
    parameters = tl.load(starts)
    lane = tl.arange(0, BLOCK)
    partial = tl.zeros((BLOCK,), tl.float64)
    for start in tl.range(0, parameters, BLOCK):
        index = start + lane
        partial += tl.load(parameter_sums + index, mask=index < parameters, other=0.0)
    tl.store(total, tl.sum(partial, axis=0))


PARAMETER_SUMS = Variant(
    kernel=_parameter_sums_kernel,
    signature={
        "starts": "*i64",
        "sums": "*fp64",
        "first_non_finite": "*i64",
        "parameter_sums": "*fp64",
        "parameter_first": "*i64",
        "BLOCK": "constexpr",
    },
    constexprs={"BLOCK": _BLOCK},
    num_warps=_NUM_WARPS,
    branches=(),
    label="parameter_sums",
)
TOTAL = Variant(
    kernel=_total_kernel,
    signature={"starts": "*i64", "parameter_sums": "*fp64", "total": "*fp64", "BLOCK": "constexpr"},
    constexprs={"BLOCK": _BLOCK},
    num_warps=_NUM_WARPS,
    branches=(),
    label="total",
)


def reduce_partials(partials: Partials, chunks: ChunkTable) -> Totals:
    """Adds the partials of one launch up.

    Args:
        partials: what pack or unpack filled: fp64 and int64 [data rows].
        chunks: the table of that launch.

    Returns:
        Totals: parameter_sums fp64 [P], first_non_finite int64 [P] (-1: none), total fp64 [1].
    """
    device = partials.sums.device
    starts = chunks.on(device).starts
    totals = Totals(
        parameter_sums=torch.empty(len(chunks), dtype=torch.float64, device=device),
        first_non_finite=torch.empty(len(chunks), dtype=torch.int64, device=device),
        total=torch.empty(1, dtype=torch.float64, device=device),
    )
    if len(chunks):
        pointers = (starts, partials.sums, partials.first_non_finite, totals.parameter_sums, totals.first_non_finite)
        PARAMETER_SUMS.launch(len(chunks), pointers)
    TOTAL.launch(1, (starts, totals.parameter_sums, totals.total))
    return totals


def variants() -> tuple[Variant, ...]:
    """Everything this file can launch."""
    return PARAMETER_SUMS, TOTAL
