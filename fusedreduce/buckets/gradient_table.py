"""GradientTable: measures or multiplies all gradients of some parameters, as they are now, in one launch.

    measure()          reads every gradient once: 4 bytes per element of fp32
    multiply(factor)   gradient = round(gradient * factor), in place: 8 bytes

One launch per device and kind (fp64 goes alone), whatever the number of parameters. Gradients that the kernels cannot
walk (sparse, with gaps or repeats in memory, of another dtype than their parameter) go through torch, one by one.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from ..kernels import dispatch
from ..kernels.checks import is_dense
from ..kernels.table import DTYPE_CODES, ChunkTable, Partials, PointerTable, Totals
from .parameters import Parameters
from .tensors import real_dtype, real_numel, walkable_memory, writable_values


@dataclass(frozen=True)
class _Group:
    """Parameters whose gradients one launch can read."""

    numbers: tuple[int, ...]
    chunks: ChunkTable
    pointers: PointerTable
    partials: Partials
    spans: torch.Tensor
    dtypes: tuple[torch.dtype, ...]


class GradientTable:
    """The gradients of some parameters, whichever tensors they are at each call.

    Args:
        parameters: the leaves. Tables are built by the first call.
    """

    def __init__(self, parameters: Parameters) -> None:
        self._parameters = parameters

    @classmethod
    def of(cls, tensors: Iterable[torch.Tensor]) -> GradientTable:
        """That of leaves that are no reducer's."""
        return cls(Parameters(tuple(tensors)))

    @functools.cached_property
    def _groups(self) -> list[_Group]:
        kinds: dict[tuple[torch.device, bool], list[int]] = {}
        for number, parameter in enumerate(self._parameters.tensors):
            if real_dtype(parameter.dtype) in DTYPE_CODES:
                kinds.setdefault((parameter.device, real_dtype(parameter.dtype) is torch.float64), []).append(number)
        return [self._group(numbers, device) for (device, _), numbers in kinds.items()]

    def measure(self) -> Totals:
        """Sums of squares, largest values and first non-finite indices, per parameter and in all.

        A missing gradient counts as zeros. The largest value of a complex gradient is that of its absolute values.

        Returns:
            Totals on the first parameter's device, parameters in the order given.
        """
        parts: list[tuple[Sequence[int], Totals]] = []
        ones: list[tuple[int, torch.Tensor, bool]] = []
        for group in self._groups:
            gradients, others = self._gathered(group)
            dispatch.unchecked(group.partials.sums.device, group.chunks.dtype_set).measure(
                gradients, group.chunks, group.pointers, group.partials
            )
            parts.append((group.numbers, dispatch.reduce_partials(group.partials, group.spans)))
            ones += [(number, values, True) for number, values in others]
        count, device = len(self._parameters.tensors), self._parameters.device
        return all_totals(parts, count, device, ones=ones, peaks=complex_gradients(self._parameters))

    def multiply(self, factor: torch.Tensor) -> None:
        """Multiplies every gradient in place, in fp32 (fp64 for fp64).

        Args:
            factor: one element, on any device.
        """
        factor = factor.detach().reshape(1)
        with torch.no_grad():
            for group in self._groups:
                compute = group.chunks.compute_dtype
                by = factor.to(group.partials.sums.device, compute)
                gradients, others = self._gathered(group)
                dispatch.unchecked(by.device, group.chunks.dtype_set).scale(gradients, group.chunks, group.pointers, by)
                for _, values in others:
                    values.mul_(by[0])

    def _group(self, numbers: Sequence[int], device: torch.device) -> _Group:
        parameters = [self._parameters.tensors[number] for number in numbers]
        numels = [real_numel(one) for one in parameters]
        # No wire is involved, so offsets are free: each gradient begins at a multiple of a vector.
        offsets, end = [], 0
        for numel in numels:
            offsets.append(end)
            end += -(-numel // 16) * 16
        dtypes = tuple(real_dtype(one.dtype) for one in parameters)
        chunks = ChunkTable(numels, offsets, dtypes, end)
        return _Group(tuple(numbers), chunks, PointerTable(), chunks.new_partials(device), chunks.spans(device), dtypes)

    def _gathered(self, group: _Group) -> tuple[list[torch.Tensor | None], list[tuple[int, torch.Tensor]]]:
        """The gradients that the kernels can read, and (number, values) of those that they cannot."""
        gradients: list[torch.Tensor | None] = [self._parameters.tensors[number].grad for number in group.numbers]
        others: list[tuple[int, torch.Tensor]] = []
        for slot, (gradient, dtype) in enumerate(zip(gradients, group.dtypes, strict=True)):
            if gradient is None:
                continue
            if gradient.dtype is dtype and gradient.is_contiguous() and not gradient.is_neg():
                continue
            gradients[slot] = real = walkable_memory(gradient)
            if real is None or real.dtype is not dtype or not is_dense(real):
                gradients[slot] = None
                others.append((group.numbers[slot], writable_values(self._parameters.tensors[group.numbers[slot]])))
        return gradients, others


def all_totals(
    parts: Sequence[tuple[Sequence[int], Totals]],
    count: int,
    device: torch.device,
    *,
    ones: Sequence[tuple[int, torch.Tensor, bool]] = (),
    peaks: Sequence[tuple[int, torch.Tensor]] = (),
) -> Totals:
    """The totals of several launches and devices on one device.

    Args:
        parts: by launch the numbers of its parameters, ascending, and their totals.
        count: number of parameters.
        device: of the result.
        ones: parameters that no launch has read: number, values, and whether non-finite ones are reported.
        peaks: number and gradient of complex ones, whose largest absolute value is not that of its real and imaginary
            parts.
    """
    if len(parts) == 1 and not ones and not peaks:
        numbers, only = parts[0]
        if len(numbers) == count:
            return only
    sums = torch.zeros(count, dtype=torch.float64, device=device)
    largest = torch.zeros_like(sums)
    first = torch.full((count,), -1, dtype=torch.int64, device=device)
    for numbers, part in parts:
        index = index_of(tuple(numbers), device)
        sums[index] = part.parameter_sums.to(device)
        largest[index] = part.parameter_peaks.to(device)
        first[index] = part.first_non_finite.to(device)
    for number, values, judged in ones:
        sums[number], largest[number], where = summary(values)
        if judged:
            first[number] = where
    for number, gradient in peaks:
        dense = gradient.coalesce().values() if gradient.layout is not torch.strided else gradient
        largest[number] = dense.detach().abs().amax() if dense.numel() else 0.0
    return Totals(
        parameter_sums=sums,
        parameter_peaks=largest,
        first_non_finite=first,
        total=torch.stack([sums.sum(), largest.amax(), (first >= 0).sum().to(torch.float64)]),
    )


def complex_gradients(parameters: Parameters) -> list[tuple[int, torch.Tensor]]:
    """Number and gradient of each complex parameter that has one."""
    numbered = enumerate(parameters.tensors)
    return [(number, one.grad) for number, one in numbered if one.is_complex() and one.grad is not None]


@functools.lru_cache(maxsize=256)
def index_of(numbers: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """`numbers` as an int64 index on `device`; uploaded once, because the host waits for an upload."""
    return torch.tensor(numbers, dtype=torch.int64, device=device)


def summary(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Statistics of real `values` by torch's operators.

    Returns:
        Sum of squares (fp64), largest absolute value (fp64), index of the first non-finite value or -1; all 0-dim.
    """
    flat = values.detach().reshape(-1).to(torch.float64)
    index = torch.arange(flat.numel() + 1, dtype=torch.int64, device=flat.device)
    bad = torch.cat([~flat.isfinite(), torch.ones(1, dtype=torch.bool, device=flat.device)])
    first = torch.where(bad, index, flat.numel()).amin()
    peak = torch.cat([flat.abs(), flat.new_zeros(1)]).amax()
    return flat.square().sum(), peak, torch.where(first < flat.numel(), first, -1)


def write_summary(partials: Partials, values: torch.Tensor) -> None:
    """Writes the `summary` of a sparse gradient's real values into its one row."""
    partials.sums[0], partials.peaks[0], partials.first_non_finite[0] = summary(values)
