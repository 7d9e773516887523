"""CommHookReduction: a dense bucket that a comm hook reduces, by torch's contract."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch

from ..comm.group import Group
from ..comm.protocol import Communicator
from ..comm.waiting import wait_for
from ..errors import FusedReduceError
from ..kernels import dispatch
from ..kernels.table import ChunkTable, Partials, PointerTable
from .grad_bucket import GradBucket
from .gradient_views import GradientViews
from .loss_scale import LossScale
from .reduction import Members, Reduction, StartedCollective
from .tensors import as_real, like_parameter, real_dtype, real_numel, taken_over, versions_of

CommHook = Callable[[Any, Any], torch.futures.Future[torch.Tensor]]


class CommHookReduction(Reduction):
    """A dense bucket that a comm hook reduces: one dtype, no padding, gradients not yet divided.

    Args:
        members: the bucket's parameters.
        state: the hook's first argument.
        hook: called as hook(state, bucket); returns a future of one tensor with the bucket's elements.
        group: the ranks.
        as_views: gradients become views of the buffer.
        keeps_gradients: the hook writes `.grad` itself, or steps the optimizer: nothing is copied out.
        lazy: release the buffer at the end of each step.
    """

    def __init__(
        self,
        members: Members,
        state: object,
        hook: CommHook,
        group: Group,
        *,
        as_views: bool = False,
        keeps_gradients: bool = False,
        lazy: bool = False,
    ) -> None:
        super().__init__(members, group)
        self._state = state
        self._hook = hook
        self._as_views = as_views
        self._lazy = lazy
        # The dtype between steps: torch's mixed precision puts other data behind the parameters during a step.
        self._dtype = real_dtype(members.parameters[0].dtype)
        self._future: torch.futures.Future[torch.Tensor] | None = None
        self._keeps_gradients = keeps_gradients
        self._shown: list[torch.Tensor] = []
        self._chunks: ChunkTable | None = None
        self._pointers = PointerTable()

    def launch(self, divisor: float) -> StartedCollective:
        """Copies the gradients into the buffer and calls the hook."""
        views = self._allocated()
        present, into = [], []
        gradients = taken_over(self.members.parameters)
        for slot, (gradient, view) in enumerate(zip(gradients, views.slots, strict=True)):
            if gradient is None:
                view.zero_()
            elif not views.hold(slot, gradient):
                if gradient.layout is not torch.strided:
                    raise TypeError(
                        f"rank {self._group.communicator.rank}: the gradient of {self.members.names[slot]} in "
                        f"{self.members.label} has layout {gradient.layout}, expected a dense one. To a Reducer give "
                        "sparse=[...] for sparse gradients"
                    )
                present.append(as_real(gradient))
                into.append(view)
        if present:
            torch._foreach_copy_(into, present)
        if self.source is not None:
            self.source.flushed.zero_()
            self._measure(views.slots, self._first_non_finite())
        if self._as_views:
            # Before the hook is called: one that steps the optimizer reads the result from `.grad`.
            for slot, parameter in enumerate(self.members.parameters):
                # (With mixed precision the hook itself makes both fp32 before it returns.)
                if parameter.grad is not None and parameter.dtype is views.dtypes[slot]:
                    parameter.grad = views.restored(slot)
        shown = GradBucket(self.members.index, views.buffer, self._shown, self.members.parameters, self.members.is_last)
        self._future = call_hook(self._hook, self._state, shown)
        self._packed = taken_over(self.members.parameters)
        self._versions = versions_of(self._packed)
        return StartedCollective(self._future, time.perf_counter_ns())

    def check_unchanged(self) -> None:
        """Compares, unless the hook writes `.grad` itself or steps the optimizer."""
        if not self._keeps_gradients:
            super().check_unchanged()

    def spans(self) -> list[tuple[int, int]]:
        """Per parameter its rows, [begin, end)."""
        return self._table().row_spans()

    def finish(self, unused: Collection[int], scale: LossScale | None) -> None:
        """Waits for the hook's future and copies its value into the gradients.

        Raises:
            CollectiveError: the future failed.
            TypeError, ValueError: it holds no tensor, or one of another size.
            FusedReduceError: a loss scale is to be removed, and the hook writes gradients itself.
        """
        future, self._future = self._future, None
        assert future is not None
        value = reduced_value(future, self.members, self._group.communicator)
        if self._keeps_gradients:
            if scale is not None:
                raise FusedReduceError(
                    f"rank {self._group.communicator.rank}: the comm hook of {self.members.label} writes gradients "
                    "itself, or steps the optimizer, so FusedGradScaler cannot remove the loss scale after it. Use a "
                    "hook that returns the reduced bucket, or torch.amp.GradScaler"
                )
            if self.result is not None:
                self.skip()
            return
        views = self._allocated()
        buffer, slots = views.buffer, views.slots
        numel = buffer.numel()
        if value.numel() != numel:
            raise ValueError(
                f"rank {self._group.communicator.rank}: the comm hook's future for {self.members.label} holds "
                f"{value.numel()} elements, expected the bucket's {numel}"
            )
        compute = torch.float64 if self._dtype is torch.float64 else torch.float32
        inverse = None if scale is None else scale.factor(compute, self.members.device)
        own = value.data_ptr() == buffer.data_ptr() and value.dtype is buffer.dtype
        if own and inverse is not None:
            buffer.mul_(inverse[0])
        if not own:
            value = value.reshape(-1)
            if inverse is not None:
                value = value.to(self._dtype) * inverse[0]
            if self._as_views:
                buffer.copy_(value)
            else:
                begin = value.storage_offset()
                slots = [value.as_strided(one.shape, one.stride(), begin + one.storage_offset()) for one in slots]
        if self.result is not None:
            self._measure([one.to(self._dtype) for one in slots], self.result)
        into, reduced = [], []
        members = zip(self.members.numbers, self.members.parameters, slots, strict=True)
        for slot, (number, parameter, view) in enumerate(members):
            if number in unused:
                continue
            if self._as_views:
                parameter.grad = views.restored(slot)
                continue
            if parameter.grad is None or parameter.grad.is_conj():
                parameter.grad = torch.empty_like(views.restored(slot))
            into.append(as_real(parameter.grad))
            reduced.append(view)
        if into:
            torch._foreach_copy_(into, reduced)

    def release(self) -> None:
        """Drops the views' buffer if allocation is lazy; it is reused behind the current stream's work."""
        if self._lazy:
            if self._views is not None and self._views.buffer.is_cuda:
                self._views.buffer.record_stream(torch.cuda.current_stream(self.members.device))
            self._views, self._shown = None, []

    def _table(self) -> ChunkTable:
        if self._chunks is None:
            numels = [real_numel(one) for one in self.members.parameters]
            offsets = list(itertools.accumulate(numels, initial=0))
            self._chunks = ChunkTable(numels, offsets[:-1], [self._dtype] * len(numels), offsets[-1])
        return self._chunks

    def _measure(self, views: Sequence[torch.Tensor], partials: Partials) -> None:
        dispatch.unchecked(views[0].device, (self._dtype,)).measure(views, self._table(), self._pointers, partials)

    def _allocated(self) -> GradientViews:
        if self._views is None:
            parameters = self.members.parameters
            *offsets, numel = itertools.accumulate(map(real_numel, parameters), initial=0)
            buffer = torch.empty(numel, dtype=self._dtype, device=self.members.device)
            self._views = GradientViews(buffer, parameters, offsets)
            # The hook gets tensors of its own, because it may write to them at any time.
            self._shown = list(map(like_parameter, self._views.slots, parameters))
        return self._views


def call_hook(hook: CommHook, state: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Calls a comm hook and returns its future.

    Args:
        hook: called as hook(state, bucket).
        state: its first argument.
        bucket: what it is to reduce.

    Raises:
        TypeError: it returned something else.
    """
    future = hook(state, bucket)
    if not isinstance(future, torch._C.Future):
        raise TypeError(
            f"Communication hook: return value should be a torch.futures.Future, got {type(future).__name__}"
        )
    return future


def reduced_value(future: torch.futures.Future[Any], members: Members, communicator: Communicator) -> torch.Tensor:
    """Waits for the future of a comm hook, or of a sum of sparse gradients, and returns its tensor.

    Args:
        future: holds a tensor, or a list of one.
        members: the bucket, for messages.
        communicator: the ranks, whose timeout holds.

    Raises:
        CollectiveError: it failed, or was not done in time.
        TypeError: it holds no tensor.
    """
    value = wait_for(future, lambda: f"the reduction of {members.label}", communicator)
    if isinstance(value, list | tuple) and len(value) == 1:
        (value,) = value
    if not isinstance(value, torch.Tensor):
        raise TypeError(
            f"rank {communicator.rank}: the comm hook's future for {members.label} holds {type(value).__name__}, "
            "expected one tensor"
        )
    return value
