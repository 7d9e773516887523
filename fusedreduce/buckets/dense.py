"""DenseReduction: a dense bucket on our own wire: pack -> all-reduce -> unpack."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Collection, Sequence

import torch

from ..comm.group import Group
from ..comm.waiting import wait_for
from ..kernels import dispatch
from ..kernels.runs import is_contiguous
from ..kernels.table import Partials, PointerTable, SourcePartials
from ..planning.layout import flat_layout
from . import data_path
from .bucket import Bucket, BucketState
from .data_path import InFlight
from .gradient_views import GradientViews
from .loss_scale import LossScale
from .phases import Exchange
from .reduction import Members, Reduction, StartedCollective
from .tensors import as_real, dense_shape, none_missing, real_dtype, taken_over, versions_of


class DenseReduction(Reduction):
    """A dense bucket on our own wire.

    Args:
        members: the bucket's parameters.
        group: the ranks to average over.
        bucket: what travels, and how contributions are added up.
        as_views: gradients become views of the wire buffer, which has their dtype.
    """

    def __init__(self, members: Members, group: Group, bucket: Bucket, *, as_views: bool = False) -> None:
        assert bucket.split == 1.0 or not as_views, "a view of the wire is never unpacked, so the split would stay"
        super().__init__(members, group)
        self.bucket = bucket
        self._shapes = [dense_shape(parameter) for parameter in members.parameters]
        self._dtypes = [parameter.dtype for parameter in members.parameters]
        self._strides = [
            tuple(stride // 2 for stride in strides[:-1]) if dtype.is_complex else strides
            for (_, strides), dtype in zip(self._shapes, self._dtypes, strict=True)
        ]
        data_path.prepare(self.bucket)
        self.restrided = 0
        self._as_views = as_views
        if as_views:
            self._view_pointers = PointerTable()  # for `dispatch.measure` and for unpacking in place
        self._flat: Bucket | None = None
        self._in_flight: InFlight | None = None
        self._others: list[Bucket] = []  # bounded staleness, which refuses views: other wires of the same layout
        self._staged: dict[int, torch.Tensor] = {}
        self._real = not any(dtype.is_complex for dtype in self._dtypes)
        self._contiguous = all(is_contiguous(size, strides) for size, strides in self._shapes)

    def launch(self, divisor: float) -> StartedCollective:
        """Packs the gradients and starts the all-reduce; keeps which tensors these were, and at which versions."""
        divisor /= self.bucket.sent_split
        self._staged = {}  # those of the last step: on CUDA a side stream may have read them until now
        gradients = taken_over(self.members.parameters)
        if self._views is not None and self._views.hold_all(gradients):
            self._in_flight = self._start_in_place(divisor)
        else:
            fit = self._all_fit(gradients)
            self._in_flight = data_path.start(
                self.bucket,
                gradients if fit else [self._fitted(slot, gradient) for slot, gradient in enumerate(gradients)],
                self._group.communicator,
                divisor=divisor,
                partials=self.source,
            )
        self._packed, self._versions = gradients, versions_of(gradients)
        pending = self._in_flight.pending
        if isinstance(pending, Exchange) and self.bucket.on_cuda:
            pending = pending.issued[0]  # a stream may wait for it, on this rank alone: the others are not issued yet
        return StartedCollective(pending, self._in_flight.issued_ns)

    def packed(self) -> Sequence[torch.Tensor | None]:
        """Of a launched bucket the real memory of each gradient as it was packed; None where it is missing."""
        assert self._in_flight is not None
        return self._in_flight.gradients

    def spans(self) -> list[tuple[int, int]]:
        """Per parameter its rows, [begin, end)."""
        return self.bucket.spans()

    def collect(self, source: SourcePartials | None, result: Partials) -> None:
        """Sets where statistics of packed and of unpacked gradients go, from the next step on."""
        super().collect(source, result)
        data_path.prepare(self.bucket, stats=True)

    def finish(self, unused: Collection[int], scale: LossScale | None) -> None:
        """Unpacks into the tensors that were packed, or makes the views the gradients."""
        in_flight, self._in_flight = self._in_flight, None
        assert in_flight is not None
        wait_for(in_flight.pending, self.members.all_reduce_text, self._group.communicator)
        if self._as_views:
            self._finish_views(self._factor(scale), unused)
            self._install_views(unused)
            return
        gradients, self._packed = self._packed, []
        self._unpack(in_flight, gradients, in_flight.gradients, unused, self._factor(scale))
        if unused:
            self.bucket.not_written([slot for slot, number in enumerate(self.members.numbers) if number in unused])

    def release(self) -> None:
        """Drops the buffers of all wires but those of steps in flight."""
        for bucket in (self.bucket, *self._others):
            if bucket.state is BucketState.IDLE:
                bucket.release()

    def skip(self) -> None:
        """Also tells the bucket that none of its gradients was written."""
        super().skip()
        self.bucket.not_written(range(len(self.members.numbers)))

    def detach_flight(self) -> InFlight:
        """Hands over what `launch` has started, with its wire; `rotate_wire` must follow before the next step."""
        in_flight, self._in_flight = self._in_flight, None
        assert in_flight is not None and not self._as_views
        self._packed, self._staged = [], {}
        return dataclasses.replace(in_flight, gradients=())

    def rotate_wire(self) -> None:
        """Makes a free wire the next step's: another one, while that of the latest step is in flight."""
        if self.bucket.state is BucketState.IDLE:
            return
        self._others.append(self.bucket)
        for place, bucket in enumerate(self._others):
            if bucket.state is BucketState.IDLE:
                self.bucket = self._others.pop(place)
                return
        self.bucket = self.bucket.twin()

    def apply(self, flight: InFlight, unused: Collection[int], scale: LossScale | None) -> None:
        """Unpacks the sum of an earlier step into the gradients that are there by now, and new ones."""
        wait_for(flight.pending, self.members.all_reduce_text, self._group.communicator)
        gradients = [parameter.grad for parameter in self.members.parameters]
        self._staged = {}
        into = gradients
        if not self._all_fit(gradients):
            into = [None if one is None else self._memory(slot, one) for slot, one in enumerate(gradients)]
        self._unpack(flight, gradients, into, unused, self._factor(scale))

    def _unpack(
        self,
        flight: InFlight,
        gradients: Sequence[torch.Tensor | None],
        into: Sequence[torch.Tensor | None],
        unused: Collection[int],
        scale: torch.Tensor | None,
    ) -> None:
        """Unpacks a sum that has been waited for.

        Args:
            flight: its wire.
            gradients: per slot the gradient that it becomes; None: a new one is made.
            into: per slot the real memory of that gradient, or what is staged for it.
            unused: numbers of the parameters to be left alone.
            scale: what to multiply by; None: one.
        """
        fresh: dict[int, torch.Tensor] = {}
        if unused or not none_missing(gradients):
            into = list(into)
            for slot, (number, parameter) in enumerate(zip(self.members.numbers, self.members.parameters, strict=True)):
                if number in unused:
                    into[slot] = None
                elif gradients[slot] is None:
                    shape, strides, device = parameter.shape, self._strides[slot], parameter.device
                    fresh[slot] = torch.empty_strided(shape, strides, dtype=parameter.dtype, device=device)
                    into[slot] = as_real(fresh[slot])
        data_path.finish(flight, into, scale=scale, partials=self.result)
        for slot, staged in self._staged.items():
            if into[slot] is not None:
                gradient = gradients[slot]
                assert gradient is not None
                gradient.copy_(torch.view_as_complex(staged) if gradient.is_complex() else staged)
        for slot, gradient in fresh.items():
            self.members.parameters[slot].grad = gradient

    def _factor(self, scale: LossScale | None) -> torch.Tensor | None:
        """What unpacking multiplies by, for the loss scale and for the bucket's split; None: one."""
        dtype, device, split = self.bucket.compute_dtype, self.bucket.device, self.bucket.split
        if scale is not None:
            return scale.factor(dtype, device, split)
        return None if split == 1.0 else data_path.scalar(1.0 / split, dtype, device)

    @property
    def allocations(self) -> int:
        """Wire buffers allocated so far."""
        return self.bucket.allocations + sum(bucket.allocations for bucket in self._others)

    def _start_in_place(self, divisor: float) -> InFlight:
        wire = self.bucket.wire()
        if self._flat is None:
            layout = flat_layout(self.bucket.layout.numel)
            self._flat = Bucket(layout, [wire.dtype], wire.dtype, wire.device, self.bucket.label)
        if self.source is not None:
            self.source.flushed.zero_()
            dispatch.unchecked(wire.device, self.bucket.chunks.dtype_set).measure(
                self._real_views(), self.bucket.chunks, self._view_pointers, self._first_non_finite()
            )
        return data_path.start(self._flat, [wire], self._group.communicator, divisor=divisor, in_place=True)

    def _all_fit(self, gradients: Sequence[torch.Tensor | None]) -> bool:
        """Whether each gradient is there and `_memory` would be its own, in a fifth of the time; not if complex."""
        try:
            if self._contiguous:
                fit = all(map(torch.Tensor.is_contiguous, gradients))  # type: ignore[arg-type]
            else:
                fit = list(map(torch.Tensor.stride, gradients)) == self._strides  # type: ignore[arg-type]
        except (RuntimeError, TypeError):  # a sparse gradient has none, nor has None
            return False
        same = fit and self._real and list(map(_dtype, gradients)) == self._dtypes
        return same and not any(map(torch.Tensor.is_neg, gradients))  # type: ignore[arg-type]

    def _fitted(self, slot: int, gradient: torch.Tensor | None) -> torch.Tensor | None:
        """A gradient as pack reads it: with the strides of its slot, real, of the slot's dtype.

        Raises:
            TypeError: it is sparse, or of another dtype than its slot.
        """
        if gradient is None:
            return None
        name = self.members.names[slot]
        if gradient.layout is not torch.strided:
            raise TypeError(
                f"rank {self._group.communicator.rank}: the gradient of {name} (bucket {self.members.index}) has "
                f"layout {gradient.layout}, expected a dense one. DistributedDataParallel expects sparse ones of "
                "nn.Embedding and nn.EmbeddingBag with sparse=True; to a Reducer give sparse=[...]"
            )
        if gradient.dtype is not self._dtypes[slot]:
            raise TypeError(
                f"rank {self._group.communicator.rank}: the gradient of {name} is {gradient.dtype}, but bucket "
                f"{self.members.index} was built for {self._dtypes[slot]}. Convert a model before you wrap it"
            )
        memory = self._memory(slot, gradient)
        if slot in self._staged:
            memory.copy_(as_real(gradient))
            self.restrided += 1
        return memory

    def _memory(self, slot: int, gradient: torch.Tensor) -> torch.Tensor:
        """What the kernels walk for a gradient, as real numbers: its own memory, or staged memory."""
        fits = (
            gradient.dtype is self._dtypes[slot]
            and gradient.layout is torch.strided
            and gradient.stride() == self._strides[slot]
            and not (gradient.is_conj() or gradient.is_neg())
        )
        if fits or gradient.numel() == 0:
            return as_real(gradient).resolve_neg()
        size, strides = self._shapes[slot]
        staged = torch.empty_strided(size, strides, dtype=real_dtype(gradient.dtype), device=gradient.device)
        self._staged[slot] = staged
        return staged

    def check_unchanged(self) -> None:
        """Compares objects and versions of the gradients with what was packed, and asks closely only if one differs."""
        now = list(map(_grad, self.members.parameters))
        if not (all(map(operator.is_, now, self._packed)) and versions_of(now) == self._versions):
            super().check_unchanged()

    def _made_views(self) -> GradientViews:
        if self._views is None:
            self._views = GradientViews(self.bucket.wire(), self.members.parameters, self.bucket.layout.offsets)
        return self._views

    def _real_views(self) -> list[torch.Tensor]:
        return self._made_views().slots

    def _finish_views(self, scale: torch.Tensor | None, unused: Collection[int]) -> None:
        """Removes the loss scale from the wire in place, and writes statistics."""
        bucket = self.bucket
        if scale is not None:
            views: list[torch.Tensor | None] = list(self._real_views())
            for slot, number in enumerate(self.members.numbers):
                if number in unused:
                    views[slot] = None
            dispatch.unchecked(bucket.device, bucket.chunks.dtype_set).unpack(
                views, bucket.chunks, self._view_pointers, bucket.wire(), scale, self.result
            )
        elif self.result is not None:
            dispatch.unchecked(bucket.device, bucket.chunks.dtype_set).measure(
                self._real_views(), bucket.chunks, self._view_pointers, self.result
            )

    def _install_views(self, unused: Collection[int]) -> None:
        views = self._made_views()
        if not unused and not views.hold_all(self._packed):
            for parameter, view in zip(self.members.parameters, views.all_restored(), strict=True):
                parameter.grad = view
        elif unused:
            for slot, (number, parameter) in enumerate(zip(self.members.numbers, self.members.parameters, strict=True)):
                # As torch does also for a gradient that was kept from before and that no rank has used.
                wanted = number not in unused or self._packed[slot] is not None
                if wanted and not views.hold(slot, parameter.grad):
                    parameter.grad = views.restored(slot)
        self._packed = []
        self.bucket.state = BucketState.IDLE
        if self._flat is not None:
            self._flat.state = BucketState.IDLE


_grad = operator.attrgetter("grad")
_dtype = operator.attrgetter("dtype")
