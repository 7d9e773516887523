"""SparseReduction: one parameter whose gradient is a sparse COO tensor, which torch's collective sums."""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch

from ..comm.group import Group
from ..comm.protocol import Pending
from ..comm.waiting import wait_for
from .comm_hook import CommHook, call_hook, reduced_value
from .grad_bucket import GradBucket
from .gradient_table import summary, write_summary
from .loss_scale import LossScale
from .reduction import Members, Reduction, StartedCollective
from .sparse_kinds import KindsOfStep, SparseKinds, kind_of
from .tensors import as_real, real_dtype, taken_over, versions_of, writable_values


@dataclass(frozen=True)
class SparseFlight:
    """A sparse sum in flight.

    Args:
        pending: the collective; None: there is none, or it is a comm hook's.
        future: holds the sum; None: no rank has ever had a gradient.
        kinds: the kinds of the ranks' gradients in that step.
    """

    pending: Pending | None
    future: torch.futures.Future[Any] | None
    kinds: KindsOfStep


class SparseReduction(Reduction):
    """One parameter whose gradient is a sparse COO tensor, which torch's collective sums.

    Args:
        members: the one parameter.
        group: the ranks to average over.
        kinds: the agreed kinds of the sparse gradients.
        state: the hook's first argument.
        hook: a comm hook, called with the sparse gradient as its bucket's buffer; None: divide and sum.
    """

    def __init__(
        self,
        members: Members,
        group: Group,
        kinds: SparseKinds,
        state: object = None,
        hook: CommHook | None = None,
    ) -> None:
        super().__init__(members, group)
        (self._parameter,) = members.parameters
        (self._number,) = members.numbers
        self._kinds = kinds
        self._state = state
        self._hook = hook
        self._divisor = 1.0
        self._pending: Pending | None = None
        self._future: torch.futures.Future[Any] | None = None

    def launch(self, divisor: float) -> StartedCollective:
        """Starts the sum of the divided gradient, if all ranks know its kind; else `launch_late` will."""
        self._packed = (gradient,) = taken_over([self._parameter])
        self._versions = versions_of([gradient]) if self._hook is None else None
        self._kinds.note(self._number, gradient)
        if self.source is not None:
            self.source.flushed.zero_()
            self.source.first_non_finite[0] = -1 if gradient is None else summary(as_real(_values(gradient)))[2]
        self._divisor = divisor
        if self._number in self._kinds.known:
            self.launch_late()
        return StartedCollective(self._future, time.perf_counter_ns())

    def launch_late(self) -> None:
        """Starts the sum; where it had to wait until all ranks know the gradient's kind, behind all other buckets."""
        kind, (gradient,) = self._kinds.known[self._number], self._packed
        if gradient is None or kind_of(gradient) != kind:
            gradient = kind.empty(self._parameter)  # of another kind: every rank raises in `finish`
        if self._hook is None:
            self._pending = self._group.communicator.all_reduce_sparse(gradient.detach() / self._divisor)
            self._future = self._pending.future()
            return
        unchanged = self._parameter.grad is self._packed[0]
        members = self.members
        shown = GradBucket(members.index, gradient, [gradient], members.parameters, members.is_last)
        self._future = call_hook(self._hook, self._state, shown)
        if unchanged:  # else `check_unchanged` raises
            self._packed = [self._parameter.grad]

    def finish(self, unused: Collection[int], scale: LossScale | None) -> None:
        """Makes the sum the gradient; if no rank has one, `.grad` stays as it is."""
        self._write(self.detach_flight(), unused, scale)

    def detach_flight(self) -> SparseFlight:
        """Hands over what `launch` has started, so that another step may be launched before it is done."""
        flight = SparseFlight(self._pending, self._future, self._kinds.of_step)
        self._pending, self._future, self._packed = None, None, []
        return flight

    def rotate_wire(self) -> None:
        """Does nothing: a sparse sum has no wire buffer."""

    def apply(self, flight: SparseFlight, unused: Collection[int], scale: LossScale | None) -> None:
        """Makes the sum of an earlier step the gradient; None if no rank had one."""
        if not self._write(flight, unused, scale):
            self._parameter.grad = None

    def _write(self, flight: SparseFlight, unused: Collection[int], scale: LossScale | None) -> bool:
        """Waits for the sum and makes it the gradient; returns whether it did: not if no rank had one."""
        kind = flight.kinds.agreed_kind(self._number)
        if flight.pending is not None:
            # It raises more errors than its future does.
            wait_for(flight.pending, self.members.all_reduce_text, self._group.communicator)
        value = None if flight.future is None else reduced_value(flight.future, self.members, self._group.communicator)
        if kind is None or value is None or self._number in unused:
            self.skip()
            return False
        if scale is not None:
            compute = torch.float64 if real_dtype(value.dtype) is torch.float64 else torch.float32
            value = value * scale.factor(compute, value.device)[0]
        self._parameter.grad = value
        if self.result is not None:
            write_summary(self.result, writable_values(self._parameter))
        return True

    def spans(self) -> list[tuple[int, int]]:
        """The one row, of its values."""
        return [(0, 1)]


def _values(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.detach()._values() if gradient.layout is torch.sparse_coo else gradient.detach()
