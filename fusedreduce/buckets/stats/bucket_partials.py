"""BucketPartials: rows of statistics of one bucket of torch's DDP, parameter by parameter.

DDP's bucket is a flat buffer of its gradients without gaps; so all slots are parts of one tensor, and an index counts
from the buffer's beginning. On an exchanged wire each gradient has a slot of its own, from which an index counts. A
sparse bucket has one row.

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
from ...kernels.cast import CastWire
from ...kernels.table import ChunkTable, Partials, PointerTable, SourcePartials, new_partials, new_source_partials
from ..gradient_table import summary, write_summary
from ..tensors import as_real, real_dtype, real_numel
from .partial_stats import DeviceRows


class BucketPartials:
    """Where one bucket's statistics go, each parameter's in rows of its own.

    Callbacks of collectives reference this, so it references neither the process group nor, strongly, the parameters.

    Args:
        index: DDP's number of the bucket.
        parameters: in the order in which they lie in the bucket.
        device: of the bucket.
        sparse: it holds one sparse gradient.
        spans: per parameter its rows in the tables of an exchanged wire, [begin, end); None: the wire is no such one.
    """

    def __init__(
        self,
        index: int,
        parameters: Sequence[torch.Tensor],
        device: torch.device,
        *,
        sparse: bool,
        spans: Sequence[tuple[int, int]] | None = None,
        cast: CastWire | None = None,
    ) -> None:
        self.index = index
        self.device = device
        self._sparse = sparse
        self.shapes = [tuple(one.shape) for one in parameters]
        self.complex_ = [one.is_complex() for one in parameters]
        self.numels = [real_numel(one) for one in parameters]
        self.dtypes = [real_dtype(one.dtype) for one in parameters]
        self._parameters = [weakref.ref(one) for one in parameters]
        *self.begins, end = itertools.accumulate(self.numels, initial=0)
        self.origins = [0] * len(parameters)  # what indices count from
        self.chunks, self.spans = None, spans or [(0, 1)]
        if not sparse and spans is None:
            self.origins = self.begins
            self.chunks = ChunkTable(self.numels, self.begins, self.dtypes, end, begins=self.begins, cast=cast)
            self.spans = self.chunks.row_spans()
        self.rows = max(end for _, end in self.spans)
        self.result = new_partials(self.rows, device)
        self.source = new_source_partials(self.rows, device)
        # The rows that no launch writes on this wire say: nothing is non-finite, nothing is flushed.
        self.source.first_non_finite.fill_(-1)
        self.source.flushed.zero_()
        self.together: JoinedPartials | None = None
        self._pointers = PointerTable()

    def __len__(self) -> int:
        """Number of parameters."""
        return len(self._parameters)

    def parameter(self, slot: int) -> torch.Tensor | None:
        """The parameter of a slot, if it still lives."""
        return self._parameters[slot]()

    def are_of(self, index: int, parameters: Sequence[torch.Tensor], device: torch.device, *, sparse: bool) -> bool:
        """Whether these are the arguments that the rows were made with."""
        return (index, device, sparse, len(parameters)) == (self.index, self.device, self._sparse, len(self)) and all(
            map(operator.is_, parameters, (one() for one in self._parameters))
        )

    def measure_source(self, flat: torch.Tensor) -> None:
        """Finds non-finite values in the buffer before it is reduced, by one launch (on other wires pack does so).

        What else it writes, `measure_result` overwrites.
        """
        self._measure(flat, Partials(self.result.sums, self.result.peaks, self.source.first_non_finite))

    def measure_result(self, flat: torch.Tensor) -> None:
        """Writes the statistics of the reduced buffer, by one launch (on other wires unpack does so)."""
        self._measure(flat, self.result)

    def measure_sparse_source(self, gradient: torch.Tensor) -> None:
        """`measure_source` for a sparse gradient; an index counts its values."""
        self.source.first_non_finite[0] = summary(as_real(gradient.detach()._values()))[2]

    def measure_sparse_result(self, reduced: torch.Tensor) -> None:
        """Writes the statistics of a reduced sparse gradient."""
        values = reduced.detach().coalesce().values()
        write_summary(self.result, as_real(values))
        if values.is_complex() and values.numel():
            self.result.peaks[0] = values.abs().amax()

    def _measure(self, flat: torch.Tensor, partials: Partials) -> None:
        assert self.chunks is not None
        dispatch.unchecked(flat.device, self.chunks.dtype_set).measure(
            [flat] * len(self), self.chunks, self._pointers, partials
        )


class JoinedPartials(DeviceRows):
    """The rows of all buckets of one device.

    Args:
        buckets: (number of the first parameter, rows) of each. Pack has written the rows; unpack may not have.
    """

    def __init__(self, buckets: Sequence[tuple[int, BucketPartials]]) -> None:
        self.buckets = list(buckets)
        spans: dict[int, tuple[int, int]] = {}
        begin = 0
        for number, rows in buckets:
            for slot, (low, high) in enumerate(rows.spans):
                spans[number + slot] = begin + low, begin + high
            begin += rows.rows
        source = SourcePartials(**_joined([rows.source for _, rows in buckets]))
        super().__init__(spans, buckets[0][1].device, source, None)

    def serves(self, buckets: Sequence[tuple[int, BucketPartials]]) -> bool:
        """Whether these are the buckets, and their rows still lie here."""
        return self.buckets == buckets and all(rows.together is self for _, rows in buckets)

    def place(self) -> None:
        """Makes unpack write here from the next step on; called once it has written the buckets' own rows."""
        if self.result is not None:
            return
        assert self.source is not None
        self.result = Partials(**_joined([rows.result for _, rows in self.buckets]))
        begin = 0
        for _, rows in self.buckets:
            end = begin + rows.rows
            rows.source, rows.result = self.source.part(begin, end), self.result.part(begin, end)
            rows.together = self
            begin = end


def _joined(parts: Sequence[Partials] | Sequence[SourcePartials]) -> dict[str, torch.Tensor]:
    names = [one.name for one in dataclasses.fields(parts[0])]
    return {name: torch.cat([getattr(part, name) for part in parts]) for name in names}
