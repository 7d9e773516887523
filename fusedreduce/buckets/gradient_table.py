"""GradientTable: all gradients of some parameters at once, as they are now: measured or multiplied in one launch.

    measure()          reads every gradient once: 4 bytes per element of fp32
    multiply(factor)   gradient = round(gradient * factor), in place: 8 bytes

One launch per device and kind (fp64 goes alone), whatever the number of parameters. Gradients that the kernels cannot
walk (sparse, with gaps or repeats in memory, of another dtype than their parameter) go through torch, one by one.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..kernels import dispatch
from ..kernels.checks import is_dense
from ..kernels.table import DTYPE_CODES, ChunkTable, Partials, PointerTable, Totals
from .tensors import real_dtype, real_numel, walkable_memory, writable_values


@dataclass(frozen=True)
class _Group:
    """Parameters whose gradients one launch can walk."""

    numbers: tuple[int, ...]
    chunks: ChunkTable
    pointers: PointerTable
    partials: Partials
    spans: torch.Tensor
    dtypes: tuple[torch.dtype, ...]


class GradientTable:
    """The gradients of `parameters`, whatever tensors they are at the time.

    Args:
        parameters: leaves. Nothing is built before the first call.
    """

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self._parameters = tuple(parameters)
        self._device = self._parameters[0].device

    @functools.cached_property
    def _groups(self) -> list[_Group]:
        kinds: dict[tuple[torch.device, bool], list[int]] = {}
        for number, parameter in enumerate(self._parameters):
            if real_dtype(parameter.dtype) in DTYPE_CODES:
                kinds.setdefault((parameter.device, real_dtype(parameter.dtype) is torch.float64), []).append(number)
        return [self._group(numbers, device) for (device, _), numbers in kinds.items()]

    def measure(self) -> Totals:
        """Sums of squares, largest values and first non-finite indices, per parameter and in all.

        A missing gradient counts as zeros. The largest value of a complex gradient is that of its absolute values.

        Returns:
            Totals on the first parameter's device, parameters in the order given.
        """
        found = Gathered(len(self._parameters), self._device)
        for group in self._groups:
            gradients, others = self._gathered(group)
            dispatch.measure(gradients, group.chunks, group.pointers, group.partials, vouched=True)
            found.put(group.numbers, dispatch.reduce_partials(group.partials, group.spans))
            for number, values in others:
                found.put_one(number, values)
        for number, parameter in enumerate(self._parameters):
            if parameter.is_complex() and parameter.grad is not None:
                found.put_peak(number, parameter.grad)
        return found.totals(whole=len(self._groups) == 1)

    def multiply(self, factor: torch.Tensor) -> None:
        """Multiplies every gradient that is there by `factor`, one element on a device, in fp32 (fp64 for fp64)."""
        factor = factor.detach().reshape(1)
        with torch.no_grad():
            for group in self._groups:
                compute = torch.float64 if group.chunks.fp64 else torch.float32
                by = factor.to(group.partials.sums.device, compute)
                gradients, others = self._gathered(group)
                dispatch.scale(gradients, group.chunks, group.pointers, by, vouched=True)
                for _, values in others:
                    values.mul_(by[0])

    def _group(self, numbers: Sequence[int], device: torch.device) -> _Group:
        parameters = [self._parameters[number] for number in numbers]
        numels = [real_numel(one) for one in parameters]
        # In a table of their own a gradient's place on a wire means nothing: each begins on a vector of its own.
        offsets, end = [], 0
        for numel in numels:
            offsets.append(end)
            end += -(-numel // 16) * 16
        dtypes = tuple(real_dtype(one.dtype) for one in parameters)
        chunks = ChunkTable(numels, offsets, dtypes, end)
        return _Group(tuple(numbers), chunks, PointerTable(), chunks.new_partials(device), chunks.spans(device), dtypes)

    def _gathered(self, group: _Group) -> tuple[list[torch.Tensor | None], list[tuple[int, torch.Tensor]]]:
        """What the kernels can walk, and by number the values of what they cannot."""
        gradients: list[torch.Tensor | None] = [self._parameters[number].grad for number in group.numbers]
        others: list[tuple[int, torch.Tensor]] = []
        for slot, (gradient, dtype) in enumerate(zip(gradients, group.dtypes, strict=True)):
            if gradient is None:
                continue
            if gradient.dtype is dtype and gradient.is_contiguous() and not gradient.is_neg():
                continue
            gradients[slot] = real = walkable_memory(gradient)
            if real is None or real.dtype is not dtype or not is_dense(real):
                gradients[slot] = None
                others.append((group.numbers[slot], writable_values(self._parameters[group.numbers[slot]])))
        return gradients, others


class Gathered:
    """Totals of several launches and devices, brought together on one.

    Args:
        count: number of parameters.
        device: where to.
    """

    def __init__(self, count: int, device: torch.device) -> None:
        self._count = count
        self._device = device
        self._parts: list[tuple[Sequence[int], Totals]] = []
        self._ones: list[tuple[int, torch.Tensor, bool]] = []
        self._peaks: list[tuple[int, torch.Tensor]] = []

    def put(self, numbers: Sequence[int], totals: Totals) -> None:
        """The totals of one launch, and which parameters they are of."""
        self._parts.append((numbers, totals))

    def put_one(self, number: int, values: torch.Tensor, *, judged: bool = True) -> None:
        """One parameter's values; `judged`: also whether they are finite."""
        self._ones.append((number, values, judged))

    def put_peak(self, number: int, gradient: torch.Tensor) -> None:
        """A complex gradient, whose largest value is not that of its parts."""
        self._peaks.append((number, gradient))

    def totals(self, *, whole: bool) -> Totals:
        """All of them. `whole`: one launch had every parameter, in order, so that its totals are the totals."""
        if whole and len(self._parts) == 1 and not self._ones and not self._peaks:
            numbers, only = self._parts[0]
            if len(numbers) == self._count:
                return only
        sums = torch.zeros(self._count, dtype=torch.float64, device=self._device)
        peaks = torch.zeros_like(sums)
        first = torch.full((self._count,), -1, dtype=torch.int64, device=self._device)
        for numbers, part in self._parts:
            index = index_of(tuple(numbers), self._device)
            sums[index] = part.parameter_sums.to(self._device)
            peaks[index] = part.parameter_peaks.to(self._device)
            first[index] = part.first_non_finite.to(self._device)
        for number, values, judged in self._ones:
            sums[number], peaks[number], where = summary(values)
            if judged:
                first[number] = where
        for number, gradient in self._peaks:
            dense = gradient.coalesce().values() if gradient.layout is not torch.strided else gradient
            peaks[number] = dense.detach().abs().amax() if dense.numel() else 0.0
        return Totals(
            parameter_sums=sums,
            parameter_peaks=peaks,
            first_non_finite=first,
            total=torch.stack([sums.sum(), peaks.amax(), (first >= 0).sum().to(torch.float64)]),
        )


@functools.lru_cache(maxsize=256)
def index_of(numbers: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """`numbers` as an index on `device`; uploaded once, for the host waits for an upload."""
    return torch.tensor(numbers, dtype=torch.int64, device=device)


def summary(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """By-products of real `values` by torch's operators: sum of squares, largest absolute value, first non-finite."""
    flat = values.detach().reshape(-1).to(torch.float64)
    index = torch.arange(flat.numel() + 1, device=flat.device)
    bad = torch.cat([~flat.isfinite(), torch.ones(1, dtype=torch.bool, device=flat.device)])
    first = torch.where(bad, index, flat.numel()).amin()
    peak = torch.cat([flat.abs(), flat.new_zeros(1)]).amax()
    return flat.square().sum(), peak, torch.where(first < flat.numel(), first, -1)
