"""One bucket's way through a step: launch when its gradients are ready, finish when its collective is done.

    PackedReduction  pack -> all-reduce -> unpack, two launches: the wire is ours
    HookedReduction  copy -> a comm hook (torch's contract) -> copy: the hook owns scale, cast and collective
    SparseReduction  one sparse gradient: divide -> sparse all-reduce (or the hook)

A reduction keeps the tensors it works on until it is finished, and writes gradients in `finish` alone: when a step
fails, a bucket's gradients are all reduced or all still local. (With gradients as views of the wire they are the
wire, and a collective that fails leaves them divided.)
"""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from . import exchange
from .bucket import Bucket, BucketState
from .comm.protocol import Communicator, Pending
from .errors import CollectiveError, FusedReduceError
from .exchange import InFlight
from .grad_bucket import GradBucket
from .kernels import dispatch
from .kernels.checks import is_dense
from .kernels.table import Shape
from .planning.layout import aligned_layout, flat_layout

CommHook = Callable[[Any, Any], torch.futures.Future[torch.Tensor]]
_NAMES_SHOWN = 50
# A backend that times out itself says more than we can: it goes first.
_GRACE_S = 3.0


@dataclass(frozen=True, eq=False)
class Members:
    """The parameters of one bucket.

    Args:
        index: the bucket's place in the launch order.
        numbers: the parameters' numbers within the reducer.
        parameters: themselves.
        names: theirs.
        is_last: whether no bucket follows.
    """

    index: int
    numbers: tuple[int, ...]
    parameters: tuple[torch.Tensor, ...]
    names: tuple[str, ...]
    is_last: bool

    @property
    def label(self) -> str:
        """The bucket and its parameters' names."""
        shown = ", ".join(self.names[:_NAMES_SHOWN])
        more = len(self.names) - _NAMES_SHOWN
        return f"bucket {self.index} ({shown}{f' and {more} more' if more > 0 else ''})"

    @property
    def device(self) -> torch.device:
        """Where all of them live."""
        return self.parameters[0].device


class Reduction(Protocol):
    """What the reducer asks of a bucket."""

    members: Members

    early: frozenset[int]  # parameters, by number, whose gradients want to be taken one by one

    def take(self, number: int, divisor: float) -> None:
        """Takes one gradient of `early`, as it is now, ahead of `launch`."""
        ...

    def launch(self, divisor: float) -> None:
        """Takes the gradients as they are now and starts their reduction."""
        ...

    def finish(self, untouched: Collection[int], *, check: bool = True) -> None:
        """Waits for the reduction and writes every gradient whose parameter's number is not in `untouched`.

        `check`: raises if a gradient is not what it was when it was taken.
        """
        ...

    def zero_views(self) -> bool:
        """Zeroes all gradients at once if each is a view of one buffer; says whether it did."""
        ...

    def drop_views(self) -> None:
        """Sets gradients that are views of a buffer to None: a collective may still write there."""
        ...

    def shadow(self) -> GradBucket:
        """Zeros that a joined rank contributes in place of gradients."""
        ...

    def run_shadow(self, bucket: GradBucket) -> Pending | torch.futures.Future[torch.Tensor]:
        """Issues the collective of `launch` for what `shadow` returned."""
        ...


def dense_shape(parameter: torch.Tensor) -> Shape:
    """Size and strides of `parameter`'s gradient in its slot, a real one: torch's gradient layout contract."""
    template = parameter.detach()
    if not is_dense(template):
        template = torch.empty(template.shape, dtype=template.dtype, device="meta")
    if template.is_complex():
        size = (*template.shape, 2)
        return size, (*(2 * stride for stride in template.stride()), 1)
    return tuple(template.shape), tuple(template.stride())


def real_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of the real pairs that a gradient of `dtype` is reduced as."""
    return dtype.to_real() if dtype.is_complex else dtype


def _as_real(tensor: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def _like_parameter(view: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """A view of a buffer as a gradient: complex again, with a version counter of its own."""
    return (torch.view_as_complex(view) if parameter.is_complex() else view).data


class PackedReduction:
    """A dense bucket on our own wire.

    Args:
        members: its parameters.
        communicator: the ranks to average over.
        wire_dtype: what travels.
        as_views: gradients become views of the wire buffer, which has their dtype.
    """

    def __init__(
        self, members: Members, communicator: Communicator, wire_dtype: torch.dtype, *, as_views: bool = False
    ) -> None:
        self.members = members
        self._communicator = communicator
        self._shapes = [dense_shape(parameter) for parameter in members.parameters]
        self._dtypes = [parameter.dtype for parameter in members.parameters]
        numels = [parameter.numel() * (2 if parameter.is_complex() else 1) for parameter in members.parameters]
        layout = aligned_layout(numels, wire_itemsize_bytes=wire_dtype.itemsize)
        real = [real_dtype(dtype) for dtype in self._dtypes]
        self.bucket = Bucket(layout, real, wire_dtype, members.device, members.label, self._shapes)
        self._complex = any(dtype.is_complex for dtype in self._dtypes)
        self._strides = [
            tuple(stride // 2 for stride in strides[:-1]) if dtype.is_complex else strides
            for (_, strides), dtype in zip(self._shapes, self._dtypes, strict=True)
        ]
        self.restrided = 0
        self._as_views = as_views
        self._views: list[_View] = []
        self._flat: Bucket | None = None
        self._in_flight: InFlight | None = None
        self._packed: list[torch.Tensor | None] = []
        self._versions: list[int] = []
        self._staged: dict[int, torch.Tensor] = {}
        early = dispatch.packs_early(self.bucket.chunks, wire_dtype, members.device)
        self.early = frozenset(members.numbers[slot] for slot in early)
        self._slot_of = {members.numbers[slot]: slot for slot in early}
        self._taken: dict[int, tuple[torch.Tensor, int]] = {}

    def take(self, number: int, divisor: float) -> None:
        """Packs one large gradient while it is in the cache."""
        slot = self._slot_of[number]
        gradient = self.members.parameters[slot].grad
        if gradient is None or (self._as_views and slot < len(self._views) and self._views[slot].is_held_by(gradient)):
            return
        if self._fits(slot, gradient):
            exchange.start_early(self.bucket, slot, _as_real(gradient), divisor)
            self._taken[slot] = gradient, gradient._version

    def launch(self, divisor: float) -> None:
        """Packs and starts the all-reduce; remembers which tensors at which version."""
        gradients = [parameter.grad for parameter in self.members.parameters]
        taken, self._taken = self._taken, {}
        for slot, (gradient, version) in taken.items():
            if gradients[slot] is not gradient or gradient._version != version:
                raise FusedReduceError(self._changed(slot, gradients[slot] is not gradient))
        own = _which_are(gradients, self._views)
        if own and all(own):
            self._in_flight = self._start_in_place(divisor)
        else:
            # A step in which only some are views is rare: those are copied out of the wire before pack writes there.
            apart: Sequence[torch.Tensor | None] = gradients
            if any(own):
                apart = [g.clone() if g is not None and o else g for g, o in zip(gradients, own, strict=True)]
            packed = self._checked(apart)
            self._in_flight = exchange.start(
                self.bucket, packed, self._communicator, divisor=divisor, vouched=True, done=taken
            )
        self._packed = gradients
        self._versions = [-1 if gradient is None else gradient._version for gradient in gradients]

    def finish(self, untouched: Collection[int], *, check: bool = True) -> None:
        """Unpacks into the tensors that were packed, or makes the views the gradients."""
        in_flight, self._in_flight = self._in_flight, None
        assert in_flight is not None
        wait(in_flight.pending, self.members, self._communicator.rank)
        if check:
            self._check_unchanged()
        if self._as_views:
            self._install_views(untouched)
            return
        packed: Sequence[torch.Tensor | None] = in_flight.gradients
        fresh: dict[int, torch.Tensor] = {}
        if untouched or type(None) in set(map(type, self._packed)):
            into = list(packed)
            for slot, (number, parameter) in enumerate(zip(self.members.numbers, self.members.parameters, strict=True)):
                if number in untouched:
                    into[slot] = None
                elif self._packed[slot] is None:
                    fresh[slot] = _new_gradient(parameter, self._strides[slot])
                    into[slot] = _as_real(fresh[slot])
            packed = into
        exchange.finish(in_flight, packed, vouched=True)
        for slot, staged in self._staged.items():
            if packed[slot] is not None:
                gradient = self._packed[slot]
                assert gradient is not None
                _as_real_view(gradient).copy_(staged)
        for slot, gradient in fresh.items():
            self.members.parameters[slot].grad = gradient
        self._packed, self._staged = [], {}

    def shadow(self) -> GradBucket:
        """A wire of zeros."""
        wire = torch.zeros(self.bucket.layout.numel, dtype=self.bucket.wire_dtype, device=self.members.device)
        return GradBucket(self.members.index, wire, [], self.members.parameters, self.members.is_last)

    def run_shadow(self, bucket: GradBucket) -> Pending:
        """Sums the zeros with what the others pack."""
        return self._communicator.all_reduce(bucket.buffer())

    def zero_views(self) -> bool:
        """Zeroes all gradients at once if every one is a view of the wire; says whether it did."""
        own = _which_are([parameter.grad for parameter in self.members.parameters], self._views)
        if not own or not all(own):
            return False
        self.bucket.wire().zero_()
        return True

    def drop_views(self) -> None:
        """Sets gradients that are views of the wire to None: a collective may still write there."""
        for parameter, view in zip(self.members.parameters, self._views, strict=False):
            if parameter.grad is view.tensor:
                parameter.grad = None

    def _start_in_place(self, divisor: float) -> InFlight:
        wire = self.bucket.wire()
        if self._flat is None:
            layout = flat_layout(self.bucket.layout.numel)
            self._flat = Bucket(layout, [wire.dtype], wire.dtype, wire.device, self.bucket.label)
        return exchange.start(self._flat, [wire], self._communicator, divisor=divisor, in_place=True, vouched=True)

    def _fits(self, slot: int, gradient: torch.Tensor) -> bool:
        """Whether the kernels may take `gradient` as it is."""
        return (
            gradient.dtype is self._dtypes[slot]
            and gradient.layout is torch.strided
            and gradient.stride() == self._strides[slot]
            and not (gradient.is_conj() or gradient.is_neg())
        )

    def _checked(self, gradients: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """The gradients as the kernels take them: strided as their slots are, real, of the slot's dtype."""
        if not self._complex:
            # One comparison of lists, for all of them: 0.1 us each.
            try:
                strides = [own if g is None else g.stride() for g, own in zip(gradients, self._strides, strict=True)]
                dtypes = [own if g is None else g.dtype for g, own in zip(gradients, self._dtypes, strict=True)]
            except RuntimeError:  # a sparse tensor has no strides; it is named below
                strides, dtypes = [], []
            # torch's operators know lazily negated tensors; kernels see memory.
            plain = self.members.device.type == "cpu" or not any(g is not None and g.is_neg() for g in gradients)
            if plain and strides == self._strides and dtypes == self._dtypes:
                return list(gradients)
        return [None if one is None else self._fitted(slot, one) for slot, one in enumerate(gradients)]

    def _fitted(self, slot: int, gradient: torch.Tensor) -> torch.Tensor:
        name = self.members.names[slot]
        if gradient.layout is not torch.strided:
            raise TypeError(
                f"the gradient of {name} has layout {gradient.layout}, but a dense one was expected: embeddings with "
                "sparse=True are found by DDP; a Reducer of your own takes sparse=[...]"
            )
        if gradient.dtype is not self._dtypes[slot]:
            raise TypeError(
                f"the gradient of {name} is {gradient.dtype}, its bucket was laid out for {self._dtypes[slot]}"
            )
        if self._fits(slot, gradient) or gradient.numel() == 0:
            return _as_real(gradient)
        size, strides = self._shapes[slot]
        staged = torch.empty_strided(size, strides, dtype=real_dtype(gradient.dtype), device=gradient.device)
        staged.copy_(_as_real(gradient))
        self._staged[slot] = staged
        self.restrided += 1
        return staged

    def _check_unchanged(self) -> None:
        now = [parameter.grad for parameter in self.members.parameters]
        same = all(map(operator.is_, now, self._packed))
        if same and [-1 if one is None else one._version for one in now] == self._versions:
            return
        for slot, (gradient, version) in enumerate(zip(self._packed, self._versions, strict=True)):
            replaced = now[slot] is not gradient
            if replaced or (gradient is not None and gradient._version != version):
                raise FusedReduceError(self._changed(slot, replaced))

    def _changed(self, slot: int, replaced: bool) -> str:
        return (
            f"rank {self._communicator.rank}: the gradient of {self.members.names[slot]} (parameter "
            f"{self.members.numbers[slot]}) was {'replaced' if replaced else 'written to'} after it had been packed "
            f"into bucket {self.members.index}, so its reduction lacks what was added. A hook of yours, or a second "
            "backward through the same parameter (reentrant checkpoints that share it, use outside of forward), came "
            "after the reducer: use static_graph=True, or register the hook on the parameter itself"
        )

    def _install_views(self, untouched: Collection[int]) -> None:
        wire = self.bucket.wire()
        if not self._views:
            slots = zip(self._shapes, self.bucket.layout.offsets, self.members.parameters, strict=True)
            self._views = [
                _View(_like_parameter(wire.as_strided(size, strides, offset), parameter))
                for (size, strides), offset, parameter in slots
            ]
        for number, parameter, view in zip(self.members.numbers, self.members.parameters, self._views, strict=True):
            if number not in untouched and parameter.grad is not view.tensor:
                parameter.grad = view.restored()
        self._packed, self._staged = [], {}
        self.bucket.state = BucketState.IDLE
        if self._flat is not None:
            self._flat.state = BucketState.IDLE


class _View:
    """A gradient that is a view of a buffer. Others may put other data behind the tensor (`grad.data = ...`)."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.dtype = tensor.dtype
        self._address = tensor.data_ptr()
        self._data = tensor.data

    def is_held_by(self, gradient: torch.Tensor | None) -> bool:
        """Whether `gradient` is this view, still with its own data."""
        return gradient is self.tensor and self.tensor.data_ptr() == self._address

    def restored(self) -> torch.Tensor:
        """The view with its own data."""
        if self.tensor.data_ptr() != self._address:
            self.tensor = self._data.data
        return self.tensor


def _which_are(gradients: Sequence[torch.Tensor | None], views: Sequence[_View]) -> list[bool]:
    """Per gradient whether it is its view; empty where there are no views yet."""
    return [view.is_held_by(gradient) for gradient, view in zip(gradients, views, strict=False)]


def _no_elements(parameter: torch.Tensor) -> torch.Tensor:
    return torch.zeros(parameter.shape, dtype=parameter.dtype, device=parameter.device, layout=torch.sparse_coo)


def _as_real_view(gradient: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(gradient) if gradient.is_complex() else gradient


def _new_gradient(parameter: torch.Tensor, strides: Sequence[int]) -> torch.Tensor:
    return torch.empty_strided(parameter.shape, strides, dtype=parameter.dtype, device=parameter.device)


class HookedReduction:
    """A dense bucket handed to a comm hook: one dtype, no padding, gradients not yet divided.

    Args:
        members: its parameters.
        state: the hook's first argument.
        hook: called as hook(state, bucket); returns a future of one tensor with the bucket's elements.
        rank: for messages.
        timeout_s: how long its future may take.
        as_views: gradients become views of the buffer.
        keeps_gradients: the hook writes `.grad` itself, or steps the optimizer: nothing is copied out.
    """

    early: frozenset[int] = frozenset()

    def __init__(
        self,
        members: Members,
        state: object,
        hook: CommHook,
        rank: int,
        timeout_s: float,
        *,
        as_views: bool = False,
        keeps_gradients: bool = False,
    ) -> None:
        self.members = members
        self._state = state
        self._hook = hook
        self._rank = rank
        self._timeout_s = timeout_s
        self._as_views = as_views
        # As it is now: torch's mixed precision puts other data behind the parameters during a step.
        self._dtype = real_dtype(members.parameters[0].dtype)
        self._buffer: torch.Tensor | None = None
        self._views: list[torch.Tensor] = []
        self._gradients: list[_View] = []
        self._future: torch.futures.Future[torch.Tensor] | None = None
        self._keeps_gradients = keeps_gradients

    def take(self, number: int, divisor: float) -> None:
        """Never called: nothing is taken early."""

    def launch(self, divisor: float) -> None:
        """Copies the gradients into the buffer and calls the hook."""
        buffer = self._allocated()
        present, into = [], []
        for parameter, view, alias in zip(self.members.parameters, self._views, self._gradients, strict=True):
            gradient = parameter.grad
            if gradient is None:
                view.zero_()
            elif not alias.is_held_by(gradient):
                if gradient.layout is not torch.strided:
                    raise TypeError(f"a {gradient.layout} gradient in {self.members.label}: a dense one was expected")
                present.append(_as_real(gradient))
                into.append(view)
        if present:
            torch._foreach_copy_(into, present)
        if self._as_views:
            # Before the hook runs: one that steps the optimizer reads the result from .grad.
            for parameter, alias in zip(self.members.parameters, self._gradients, strict=True):
                # (Mixed precision: the hook itself makes both fp32 before it returns.)
                if parameter.grad is not None and parameter.dtype is alias.dtype:
                    parameter.grad = alias.restored()
        gradients = [one.restored() for one in self._gradients]
        shown = GradBucket(self.members.index, buffer, gradients, self.members.parameters, self.members.is_last)
        self._future = call_hook(self._hook, self._state, shown)

    def finish(self, untouched: Collection[int], *, check: bool = True) -> None:
        """Copies the future's value into the gradients."""
        future, self._future = self._future, None
        assert future is not None and self._buffer is not None
        value = wait_future(future, self.members, self._rank, self._timeout_s)
        if self._keeps_gradients:
            return
        numel = self._buffer.numel()
        if value.numel() != numel:
            raise ValueError(
                f"the comm hook's future for {self.members.label} holds {value.numel()} elements, the bucket {numel}"
            )
        own = value.data_ptr() == self._buffer.data_ptr() and value.dtype is self._buffer.dtype
        if not own:
            value = value.reshape(-1)
            if self._as_views:
                self._buffer.copy_(value)
        into, views = [], []
        offset = 0
        members = zip(self.members.numbers, self.members.parameters, self._views, self._gradients, strict=True)
        for number, parameter, view, alias in members:
            begin, offset = offset, offset + view.numel()
            if number in untouched:
                continue
            if self._as_views:
                parameter.grad = alias.restored()
                continue
            if not own:
                view = value.as_strided(view.shape, view.stride(), value.storage_offset() + begin)
            if parameter.grad is None:
                parameter.grad = torch.empty_like(alias.tensor)
            into.append(_as_real_view(parameter.grad))
            views.append(view)
        if into:
            torch._foreach_copy_(into, views)

    def shadow(self) -> GradBucket:
        """A bucket of zeros."""
        buffer = torch.zeros_like(self._allocated())
        views = self._cut(buffer)
        return GradBucket(self.members.index, buffer, views, self.members.parameters, self.members.is_last)

    def run_shadow(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Calls the hook with zeros."""
        return call_hook(self._hook, self._state, bucket)

    def zero_views(self) -> bool:
        """Zeroes all gradients at once if every one is a view of the buffer; says whether it did."""
        own = _which_are([parameter.grad for parameter in self.members.parameters], self._gradients)
        if self._buffer is None or not own or not all(own):
            return False
        self._buffer.zero_()
        return True

    def drop_views(self) -> None:
        """Sets gradients that are views of the buffer to None: a collective may still write there."""
        for parameter, view in zip(self.members.parameters, self._gradients, strict=False):
            if parameter.grad is view.tensor:
                parameter.grad = None

    def _allocated(self) -> torch.Tensor:
        if self._buffer is None:
            first = self.members.parameters[0]
            numel = sum(p.numel() * (2 if p.is_complex() else 1) for p in self.members.parameters)
            self._buffer = torch.empty(numel, dtype=self._dtype, device=first.device)
            self._views = self._cut(self._buffer)
            pairs = zip(self._views, self.members.parameters, strict=True)
            self._gradients = [_View(_like_parameter(view, parameter)) for view, parameter in pairs]
        return self._buffer

    def _cut(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        views = []
        offset = 0
        for parameter in self.members.parameters:
            size, strides = dense_shape(parameter)
            views.append(buffer.as_strided(size, strides, offset))
            offset += views[-1].numel()
        return views


class SparseReduction:
    """One parameter whose gradient is a sparse COO tensor; torch sums it.

    Args:
        members: the one parameter.
        communicator: the ranks to average over.
        state: of the hook.
        hook: a comm hook, shown the sparse gradient as its buffer; None: divide and sum.
    """

    early: frozenset[int] = frozenset()

    def __init__(
        self, members: Members, communicator: Communicator, state: object = None, hook: CommHook | None = None
    ) -> None:
        self.members = members
        self._communicator = communicator
        self._state = state
        self._hook = hook
        self._future: torch.futures.Future[Any] | None = None

    def take(self, number: int, divisor: float) -> None:
        """Never called: nothing is taken early."""

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

    def finish(self, untouched: Collection[int], *, check: bool = True) -> None:
        """Makes the sum the gradient."""
        future, self._future = self._future, None
        assert future is not None
        timeout_s = self._communicator.timeout_s(self.members.device)
        value = wait_future(future, self.members, self._communicator.rank, timeout_s)
        if self.members.numbers[0] not in untouched:
            self.members.parameters[0].grad = value

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


def call_hook(hook: CommHook, state: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Calls a comm hook.

    Raises:
        TypeError: it returned no future.
    """
    future = hook(state, bucket)
    if not isinstance(future, torch._C.Future):
        raise TypeError(
            f"Communication hook: return value should be a torch.futures.Future, got {type(future).__name__}"
        )
    return future


def wait_future(future: torch.futures.Future[Any], members: Members, rank: int, timeout_s: float) -> torch.Tensor:
    """A comm hook's result, waited for no longer than `timeout_s`.

    Raises:
        CollectiveError: it failed with a RuntimeError, or did not come in time.
        TypeError: it holds no tensor.
    """
    if not future.done():
        came = threading.Event()
        future.add_done_callback(lambda _: came.set())
        if not came.wait(timeout_s + _GRACE_S):
            raise CollectiveError(
                f"rank {rank}: the comm hook's future for {members.label} was not completed within {timeout_s:.0f} s, "
                "the process group's timeout"
            )
    try:
        value = future.wait()
    except FusedReduceError:
        raise
    except RuntimeError as error:
        raise exchange.collective_error(f"the reduction of {members.label} failed", rank, error) from error
    if isinstance(value, list | tuple) and len(value) == 1:
        (value,) = value
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"the comm hook's future for {members.label} holds {type(value).__name__}, not one tensor")
    return value


def wait(pending: Pending, members: Members, rank: int) -> None:
    """Waits for a collective; what it raises names the bucket."""
    try:
        pending.wait()
    except RuntimeError as error:
        what = f"the all-reduce of {members.label} failed; its gradients are still this rank's own"
        raise exchange.collective_error(what, rank, error) from error
