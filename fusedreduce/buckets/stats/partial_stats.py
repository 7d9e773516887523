"""PartialStats: the statistics that pack and unpack write for their buckets, and their totals over a plan.

    pack      first NaN or Inf of each gradient before it is reduced, and how many elements the wire flushes to zero
    unpack    sum of squares, largest value, and first NaN or Inf of each reduced gradient

The kernels write them per chunk, every bucket into its own rows of one buffer per device. The totals per parameter, in
order of registration, take two small launches per step, and only on request.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch

from ...kernels import dispatch
from ...kernels.table import Partials, SourcePartials, SourceTotals, Spans, Totals, new_partials, new_source_partials
from ..gradient_table import all_totals, complex_gradients, index_of
from ..parameters import Parameters
from ..reduction import Reduction
from ..tensors import writable_values


class PartialStats:
    """Statistics of one set of buckets.

    Args:
        reductions: of the buckets.
        parameters: all parameters of the reducer.
        source: collect those of pack too.
    """

    def __init__(self, reductions: Sequence[Reduction], parameters: Parameters, *, source: bool) -> None:
        self._parameters = parameters
        self._complex = any(parameter.is_complex() for parameter in parameters.tensors)
        self._left: list[int] = []
        self._totals: Totals | None = None
        self._source_totals: SourceTotals | None = None
        devices: dict[torch.device, list[Reduction]] = {}
        for reduction in reductions:
            devices.setdefault(reduction.members.device, []).append(reduction)
        self._parts = [_placed(device, some, source) for device, some in devices.items()]

    def begin_step(self) -> None:
        """Called before rows are written: of a new step, or those of unpack for an earlier one."""
        self._totals = self._source_totals = None

    def end_step(self, left: Collection[int]) -> None:
        """Called when all rows are written; `left`: numbers of the parameters whose gradients were not written."""
        self._left = [number for number in left if self._parameters.tensors[number].grad is not None] if left else []
        if self._complex or self._left:
            self.totals()  # reads gradients, which the user may change from now on

    def totals(self) -> Totals:
        """Totals of the latest step's reduced gradients, in order of registration, on the first parameter's device."""
        if self._totals is None:
            parameters = self._parameters
            # They count for the norm, because an optimizer steps with them; non-finite ones were reported in their own
            # step, on every rank alike.
            left = [(number, writable_values(parameters.tensors[number]), False) for number in self._left]
            self._totals = all_totals(
                result_totals(self._parts),
                len(parameters.tensors),
                parameters.device,
                ones=left,
                peaks=complex_gradients(parameters) if self._complex else (),
            )
        return self._totals

    def source_totals(self) -> SourceTotals:
        """Totals of this rank's gradients of the latest step, before the reduction."""
        if self._source_totals is None:
            self._source_totals = source_totals(self._parts, len(self._parameters.tensors), self._parameters.device)
        return self._source_totals


class DeviceRows:
    """The rows of one device's buckets, next to each other, so that one launch adds them up.

    Args:
        spans: by the parameter's number its rows, [begin, end).
        device: of the rows.
        source: the rows of pack; None: none.
        result: the rows of unpack; None: none (yet).
    """

    def __init__(
        self,
        spans: Mapping[int, tuple[int, int]],
        device: torch.device,
        source: SourcePartials | None,
        result: Partials | None,
    ) -> None:
        self.numbers = sorted(spans)
        flat = [row for number in self.numbers for row in spans[number]]
        self.spans: Spans = torch.tensor([len(self.numbers), *flat], dtype=torch.int64, device="cpu").to(device)
        self.source = source
        self.result = result


def _placed(device: torch.device, reductions: Sequence[Reduction], wants_source: bool) -> DeviceRows:
    """The rows of one device's reductions, which are told where they are."""
    spans: dict[int, tuple[int, int]] = {}
    places: list[tuple[int, int]] = []
    end = 0
    for reduction in reductions:
        begin = end
        for number, (low, high) in zip(reduction.members.numbers, reduction.spans(), strict=True):
            spans[number] = begin + low, (end := begin + high)
        places.append((begin, end))
    result, source = new_partials(end, device), new_source_partials(end, device) if wants_source else None
    for reduction, (begin, end) in zip(reductions, places, strict=True):
        reduction.collect(None if source is None else source.part(begin, end), result.part(begin, end))
    return DeviceRows(spans, device, source, result)


def result_totals(parts: Sequence[DeviceRows]) -> list[tuple[Sequence[int], Totals]]:
    """The totals of the rows of unpack, for `all_totals`."""
    found: list[tuple[Sequence[int], Totals]] = []
    for part in parts:
        assert part.result is not None
        found.append((part.numbers, dispatch.reduce_partials(part.result, part.spans)))
    return found


def source_totals(parts: Sequence[DeviceRows], count: int, device: torch.device) -> SourceTotals:
    """Adds up the rows of pack; `count` and `device` as of `all_totals`."""
    found = []
    for part in parts:
        assert part.source is not None
        found.append((part.numbers, dispatch.reduce_source_partials(part.source, part.spans)))
    if len(found) == 1 and len(found[0][0]) == count:
        return found[0][1]
    first = torch.full((count,), -1, dtype=torch.int64, device=device)
    flushed = torch.zeros_like(first)
    for numbers, totals in found:
        index = index_of(tuple(numbers), device)
        first[index] = totals.first_non_finite.to(device)
        flushed[index] = totals.flushed.to(device)
    bad = first >= 0
    lowest = bad.to(torch.int64).argmax()
    none = torch.full_like(lowest, -1)
    which = torch.stack([torch.where(bad.any(), lowest, none), torch.where(bad.any(), first[lowest], none)])
    return SourceTotals(first_non_finite=first, flushed=flushed, first=which)
