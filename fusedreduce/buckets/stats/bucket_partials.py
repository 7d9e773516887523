"""BucketPartials: rows of statistics of one bucket of torch's DDP, parameter by parameter.

DDP's bucket is a flat buffer of its gradients without gaps; so all slots are parts of one tensor, and an index counts
from the buffer's beginning. A sparse bucket has one row.

JoinedPartials: the rows of all buckets of a step, next to each other.
"""

from __future__ import annotations

import dataclasses
import itertools
import operator
import weakref
from collections.abc import Sequence

import torch

from ...kernels import dispatch
from ...kernels.table import ChunkTable, Partials, PointerTable, SourcePartials, new_partials, new_source_partials
from ..gradient_table import summary
from ..tensors import as_real, real_dtype, real_numel


class BucketPartials:
    """Where one bucket's statistics go, each parameter's in rows of its own.

    Callbacks of collectives reference this, so it references neither the process group nor, strongly, the parameters.

    Args:
        index: DDP's number of the bucket.
        parameters: in the order in which they lie in the bucket.
        device: of the bucket.
        sparse: it holds one sparse gradient.
    """

    def __init__(self, index: int, parameters: Sequence[torch.Tensor], device: torch.device, *, sparse: bool) -> None:
        self.index = index
        self.device = device
        self.shapes = [tuple(one.shape) for one in parameters]
        self.complex_ = [one.is_complex() for one in parameters]
        self.numels = [real_numel(one) for one in parameters]
        self.dtypes = [real_dtype(one.dtype) for one in parameters]
        self._parameters = [weakref.ref(one) for one in parameters]
        if sparse:
            self.chunks, self.begins, self.spans = None, [0], [(0, 1)]
        else:
            *self.begins, end = itertools.accumulate(self.numels, initial=0)
            self.chunks = ChunkTable(self.numels, self.begins, self.dtypes, end, begins=self.begins)
            self.spans = list(itertools.pairwise(self.chunks.first_rows.tolist()))
        self.rows = self.spans[-1][1]
        self.result = new_partials(self.rows, device)
        self.source = new_source_partials(self.rows, device)
        # The rows that no launch writes on this wire say: nothing is non-finite, nothing is flushed.
        self.source.first_non_finite.fill_(-1)
        self.source.flushed.zero_()
        self.together: JoinedPartials | None = None
        self._unused: Partials | None = None
        self._pointers = PointerTable()

    def __len__(self) -> int:
        """Number of parameters."""
        return len(self._parameters)

    def parameter(self, slot: int) -> torch.Tensor | None:
        """The parameter of a slot, if it still lives."""
        return self._parameters[slot]()

    def gone(self) -> bool:
        """Whether none of the parameters lives."""
        return all(one() is None for one in self._parameters)

    def holds(self, parameters: Sequence[torch.Tensor]) -> bool:
        """Whether these are the parameters, in this order."""
        return len(parameters) == len(self._parameters) and all(
            map(operator.is_, parameters, (one() for one in self._parameters))
        )

    def place(self, source: SourcePartials, result: Partials) -> None:
        """Sets where the rows are, from the next step on."""
        self.source, self.result = source, result

    def measure_source(self, flat: torch.Tensor) -> None:
        """Finds non-finite values in the buffer before it is reduced, by one launch (on other wires pack does so)."""
        if self._unused is None:
            self._unused = new_partials(self.rows, self.device)
        into = Partials(self._unused.sums, self._unused.peaks, self.source.first_non_finite)
        self._measure(flat, into)

    def measure_result(self, flat: torch.Tensor) -> None:
        """Writes the statistics of the reduced buffer, by one launch (on other wires unpack does so)."""
        self._measure(flat, self.result)

    def measure_sparse_source(self, gradient: torch.Tensor) -> None:
        """`measure_source` for a sparse gradient; an index counts its values."""
        self.source.first_non_finite[0] = summary(as_real(gradient.detach()._values()))[2]

    def measure_sparse_result(self, reduced: torch.Tensor) -> None:
        """Writes the statistics of a reduced sparse gradient."""
        values = reduced.detach().coalesce().values()
        sums, peak, first = summary(as_real(values))
        if values.is_complex():
            peak = values.abs().amax() if values.numel() else peak
        self.result.sums[0], self.result.peaks[0], self.result.first_non_finite[0] = sums, peak, first

    def _measure(self, flat: torch.Tensor, partials: Partials) -> None:
        assert self.chunks is not None
        dispatch.measure([flat] * len(self), self.chunks, self._pointers, partials, vouched=True)


class JoinedPartials:
    """The rows of one device's buckets, next to each other, so that one launch adds them up.

    Args:
        buckets: (number of the first parameter, rows) of each. Pack has written the rows; unpack may not have.
    """

    def __init__(self, buckets: Sequence[tuple[int, BucketPartials]]) -> None:
        self.buckets = list(buckets)
        self.device = buckets[0][1].device
        self.numbers = [number + slot for number, rows in buckets for slot in range(len(rows))]
        begins = itertools.accumulate((rows.rows for _, rows in buckets), initial=0)
        spans = [
            begin + row
            for begin, (_, rows) in zip(begins, buckets, strict=False)
            for span in rows.spans
            for row in span
        ]
        self.spans = torch.tensor([len(self.numbers), *spans], dtype=torch.int64).to(self.device)
        self.source = SourcePartials(**_joined([rows.source for _, rows in buckets]))
        self.result: Partials | None = None

    def serves(self, buckets: Sequence[tuple[int, BucketPartials]]) -> bool:
        """Whether these are the buckets, and their rows still lie here."""
        return self.buckets == buckets and all(rows.together is self for _, rows in buckets)

    def place(self) -> None:
        """Makes unpack write here from the next step on; called once it has written the buckets' own rows."""
        if self.result is not None:
            return
        self.result = Partials(**_joined([rows.result for _, rows in self.buckets]))
        begin = 0
        for _, rows in self.buckets:
            end = begin + rows.rows
            rows.place(self.source.part(begin, end), self.result.part(begin, end))
            rows.together = self
            begin = end


def _joined(parts: Sequence[Partials] | Sequence[SourcePartials]) -> dict[str, torch.Tensor]:
    names = [one.name for one in dataclasses.fields(parts[0])]
    return {name: torch.cat([getattr(part, name) for part in parts]) for name in names}
