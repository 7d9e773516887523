"""SparseReduction: one parameter whose gradient is a sparse COO tensor; torch sums it."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch

from ..comm.protocol import Communicator, Pending
from ..grad_bucket import GradBucket
from ..gradients import real_dtype, summary, values_of
from ..units import Unscaling
from .hooked import CommHook, call_hook, wait_future
from .members import Members, TakenAtOnce, UnderWay, as_real, changed_error


class SparseReduction(TakenAtOnce):
    """One parameter whose gradient is a sparse COO tensor; torch sums it.

    Args:
        members: the one parameter.
        communicator: the ranks to average over.
        state: of the hook.
        hook: a comm hook, shown the sparse gradient as its buffer; None: divide and sum.
    """

    def __init__(
        self, members: Members, communicator: Communicator, state: object = None, hook: CommHook | None = None
    ) -> None:
        self.members = members
        self._communicator = communicator
        self._state = state
        self._hook = hook
        self._future: torch.futures.Future[Any] | None = None
        self._taken: tuple[torch.Tensor | None, int] = (None, -1)

    def launch(self, divisor: float) -> None:
        """Starts the sum of the divided gradient."""
        (parameter,) = self.members.parameters
        gradient = parameter.grad
        if gradient is None:
            gradient = _no_elements(parameter)
        if gradient.layout is not torch.sparse_coo:
            raise TypeError(
                f"the gradient of {self.members.names[0]} is dense, but its module has sparse=True: reduce it as dense "
                "(sparse=False), or leave it sparse"
            )
        if self._hook is not None:
            self._future = call_hook(self._hook, self._state, self._shown(gradient))
        else:
            self._future = self._communicator.all_reduce_sparse(gradient.detach() / divisor).future()
        if self.source is not None:
            self.source.flushed.zero_()
            self.source.first_non_finite[0] = summary(as_real(gradient.detach()._values()))[2]
        now = parameter.grad
        self._taken = now, -1 if now is None else now._version

    def under_way(self) -> UnderWay | None:
        """What `launch` started and `finish` will wait for."""
        return None if self._future is None else UnderWay(self._future, None)

    def check_unchanged(self) -> None:
        """Raises if the gradient is not the tensor that was taken, at the same version (a hook may write to it)."""
        now = self.members.parameters[0].grad
        gradient, version = self._taken
        written = self._hook is None and now is not None and now._version != version
        if now is not gradient or written:
            raise changed_error(self.members, 0, now is not gradient, self._communicator.rank)

    def finish(self, untouched: Collection[int], unscaling: Unscaling) -> None:
        """Makes the sum the gradient."""
        self.land(self.part(), untouched, unscaling)

    def part(self) -> torch.futures.Future[Any]:
        """Hands over what `launch` has started: another step may be launched before it is done."""
        future, self._future = self._future, None
        assert future is not None
        self._taken = (None, -1)
        return future

    def ready(self) -> None:
        """There is nothing to make ready for a step behind one that was parted with."""

    def land(self, future: torch.futures.Future[Any], untouched: Collection[int], unscaling: Unscaling) -> None:
        """Makes the sum that was parted with the gradient."""
        timeout_s = self._communicator.timeout_s(self.members.device)
        value = wait_future(future, self.members, self._communicator.rank, timeout_s)
        if self.members.numbers[0] in untouched:
            self.pass_over()
            return
        compute = torch.float64 if real_dtype(value.dtype) is torch.float64 else torch.float32
        inverse = unscaling.factor(compute, value.device, 1.0)
        if inverse is not None:
            value = value * inverse[0]
        self.members.parameters[0].grad = value
        if self.result is not None:
            sums, peaks, first = summary(values_of(self.members.parameters[0]))
            self.result.sums[0], self.result.peaks[0], self.result.first_non_finite[0] = sums, peaks, first

    @property
    def rows(self) -> int:
        """One, of its values."""
        return 1

    def spans(self) -> list[tuple[int, int]]:
        """The one row."""
        return [(0, 1)]

    def shadow(self) -> GradBucket:
        """A sparse gradient without elements."""
        (parameter,) = self.members.parameters
        return self._shown(_no_elements(parameter))

    def run_shadow(self, bucket: GradBucket) -> Pending | torch.futures.Future[torch.Tensor]:
        """Takes part in the sum with nothing."""
        if self._hook is not None:
            return call_hook(self._hook, self._state, bucket)
        return self._communicator.all_reduce_sparse(bucket.buffer())

    def zero_views(self) -> bool:
        """A sparse gradient is never a view."""
        return False

    def drop_views(self) -> None:
        """A sparse gradient is never a view."""

    def _shown(self, gradient: torch.Tensor) -> GradBucket:
        return GradBucket(self.members.index, gradient, [gradient], self.members.parameters, self.members.is_last)


def _no_elements(parameter: torch.Tensor) -> torch.Tensor:
    return torch.zeros(parameter.shape, dtype=parameter.dtype, device=parameter.device, layout=torch.sparse_coo)
