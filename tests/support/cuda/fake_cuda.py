"""CUDA without a GPU: tensors in this process's memory that say that they are on a device, and streams that record.

The package's own code runs as it would on CUDA, and its results are right: operators and collectives run at once, on
the CPU, and after a kernel's launch its torch reference does what that would do. (Triton's own way from the launch to
the driver is `fake_driver`'s.) What is not at once on a GPU is written down for `order_check`: which stream each would
be on, which bytes it reads and writes, and when memory is given back.

As on a GPU: an operator is on the current stream of its tensors' device; a copy has the host wait unless it is
non_blocking and the host's memory pinned; the streams of a backward are those of `fake_backward`; a collective runs on
a stream of its backend's, a future's callback on one from a pool. Every peer has the gradients that this rank has.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from fusedreduce.buckets import data_path
from fusedreduce.buckets import gradient_table as gradients
from fusedreduce.buckets.streams import AsideStreams
from fusedreduce.comm.process_group import ALL_GATHER, REDUCE_SCATTER
from fusedreduce.kernels import cpu_stats, dispatch, encoded, launchers, reference, reference_encoded, variants
from fusedreduce.kernels.table import PointerTable
from support.cuda.fake_backward import Backward
from support.cuda.fake_memory import FakeMemory
from support.cuda.fake_streams import FakeEvent, FakeFuture, FakeStream, FakeWork, index_of
from support.cuda.order_check import HOST
from support.cuda.order_trace import Awaited, tensors_of
from support.inside import ACCUMULATOR_OF, LATER_PHASES_JOIN, STORES_PREFIX, TEXTS_ARE_COMPARED, forget_devices

_CPU = torch.device("cpu")
_MADE_HOST_FIRST = ("tensor", "as_tensor")  # then copied to their device
_MADE_LIKE = ("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like")
_MADE = ("empty", "empty_strided", "zeros", "ones", "full", "arange", "rand", "randn", "randint", "scalar_tensor")
_MADE_OF_HOSTS = ("from_numpy", "frombuffer")


def _forget_devices() -> None:
    """Clears what is kept by device."""
    forget_devices()
    of_dispatch = dispatch.warm_up, dispatch.warm_up_combine, dispatch.unchecked, encoded.unchecked
    for cached in (data_path.scalar, gradients.index_of, variants._target_of, variants.variant_on, *of_dispatch):
        cached.cache_clear()


class FakeCuda(FakeMemory):
    """Stand-ins for CUDA, two devices of it, and a recorder of what is done with them.

    Args:
        patch: undone by whoever gave it.
        ranks: in the default process group, which is there within `recording`.
        home: number of the device that models are put on; device 0 is current.
        comes: whether an event has come when it is asked for, or never does.
        users: how many peers use each of the parameters, where that is asked.
    """

    def __init__(
        self, patch: pytest.MonkeyPatch, *, ranks: int = 2, home: int = 0, comes: bool = True, users: int = 1
    ) -> None:
        super().__init__(patch)
        self.device = torch.device("cuda", home)
        self.index = 0
        self._ranks = ranks
        self._comes = comes
        self._users = users
        self._currents: dict[int, Any] = {}
        self._backward = Backward(self)

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        _forget_devices()  # a test before may have used a real one of that name
        self._patch_cuda()
        self._patch_tensors()
        self._patch_kernels()
        self._patch_collectives()
        dist.init_process_group("fake", rank=0, world_size=self._ranks, store=FakeStore())
        try:
            with super().recording():
                yield
        finally:
            dist.destroy_process_group()
            _forget_devices()

    def switch(self, stream: Any) -> None:
        """Makes a stream the current one of its device, and that device the current one."""
        self.index = stream.device.index
        self._currents[self.index] = stream
        self._backward.switched()

    def home_stream(self) -> Any:
        """The current stream of the device that models are on."""
        return self._stream_of(self.device.index)

    # As a recorder

    def accumulator(self, parameter: torch.Tensor) -> Any:
        return self._backward.made(super().accumulator(parameter))

    def comm_hook(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        """torch's own wrapper, for which these are CPU tensors, waits for its futures as on CUDA."""

        @functools.wraps(hook)
        def shown(state: Any, bucket: Any) -> Any:
            for one in tensors_of(bucket.buffer()):
                self.add(one, self.device)
            future = hook(state, bucket)
            self._backward.futures.append(future)
            return future

        return shown

    def run_kernel(
        self, kernel: Callable[..., None], arguments: Sequence[torch.Tensor | float | None], constants: Any
    ) -> None:
        """Its reference does that, when the launcher is done."""

    def future(self, awaited: Awaited) -> Any:
        return FakeFuture.of(awaited.device, awaited.work.result(), awaited.order)

    # Patches

    def _stream_of(self, index: int) -> Any:
        if index not in self._currents:
            self._currents[index] = FakeStream(index)
        return self._currents[index]

    def _patch_cuda(self) -> None:
        def current_stream(device: Any = None) -> Any:
            self._backward.before_use()
            return self._stream_of(index_of(device))

        @contextlib.contextmanager
        def within(stream: Any) -> Iterator[None]:
            if stream is None:
                yield
                return
            index, outer = self.index, current_stream(stream.device)
            self.switch(stream)
            try:
                yield
            finally:
                self.switch(outer)
                self.index = index

        @contextlib.contextmanager
        def on_device(device: Any) -> Iterator[None]:
            index, self.index = self.index, index_of(device)
            try:
                yield
            finally:
                self.index = index

        join = LATER_PHASES_JOIN.present

        def joined(one: AsideStreams) -> None:
            """Called by the collector too, maybe when these stand-ins are gone."""
            made: Any = torch.cuda.Stream
            if made is FakeStream:
                join(one)

        fakes: dict[str, Any] = {
            "Stream": FakeStream,
            "Event": FakeEvent,
            "current_stream": current_stream,
            "stream": within,
            "device": on_device,
            "current_device": lambda: self.index,
            "device_count": lambda: 2,
            "is_available": lambda: True,
            "is_initialized": lambda: True,
            "is_current_stream_capturing": lambda: False,
            "get_device_name": lambda device=None: "a stand-in",
            "memory_reserved": lambda device=None: int(index_of(device) == self.device.index),
            "get_device_capability": lambda device=None: (9, 0),
        }
        for name, fake in fakes.items():
            self._patch.setattr(torch.cuda, name, fake)
        # As in a build for CPU: others ask it for a driver, such as Adam, which looks for a capture.
        self._patch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: None)
        LATER_PHASES_JOIN.replace(self._patch, joined)
        self._patch.setattr(FakeEvent, "comes", self._comes)
        self._patch.setattr(FakeFuture, "keep", staticmethod(self.keep), raising=False)
        self._patch.setattr(torch.futures, "Future", FakeFuture)
        self._patch.setattr(torch.autograd.Variable, "_execution_engine", self._backward)
        # A dispatch mode looks on, under which the package would not make them anew.
        accumulator = ACCUMULATOR_OF.present
        ACCUMULATOR_OF.replace(self._patch, lambda one: self._backward.made(accumulator(one)))

    def _patch_tensors(self) -> None:
        tensor: Any = torch.Tensor
        plain_to, plain_group = tensor.to, torch._C._group_tensors_by_device_and_dtype

        def to(one: torch.Tensor, *args: Any, copy: bool = False, **options: Any) -> torch.Tensor:
            if args and isinstance(args[0], torch.Tensor):
                like: torch.Tensor = args[0]
                args = (like.device, like.dtype, *args[1:])
            device, dtype, non_blocking, _ = torch._C._nn._parse_to(*args, **options)
            same: torch.Tensor = one if dtype is None else plain_to(one, dtype=dtype)
            if device is None or _full(device) == one.device:
                return same.clone() if copy and same is one else same
            return torch.empty_like(same, device=device).copy_(same.detach(), non_blocking=non_blocking)

        def pin_memory(one: torch.Tensor) -> torch.Tensor:
            with self.making(_CPU, pinned=True):
                return one.clone()

        def group(lists: Any, with_indices: bool = False) -> Any:
            grouped: dict[Any, Any] = plain_group(lists, with_indices)
            return {(of[0][0][0].device, kind): of for (_, kind), of in grouped.items()}

        def to_host(name: str) -> Callable[..., Any]:
            inner = getattr(tensor, name)

            def method(one: torch.Tensor, **options: Any) -> Any:
                on = self.current(one.device) if one.is_cuda else HOST
                self.emit("work", on, f"Tensor.{name}", self.uses(one, write=False))
                if one.is_cuda:
                    self.emit("block", on, f"Tensor.{name}")
                return inner(one, **options)

            return method

        fakes = {
            "device": property(self.device_of),
            "is_cuda": property(lambda one: one.device.type == "cuda"),
            "is_pinned": lambda one: self.is_pinned(one),
            "get_device": lambda one: -1 if one.device.index is None else one.device.index,
            "to": to,
            "cuda": lambda one, device="cuda", non_blocking=False: one.to(device, non_blocking=non_blocking),
            "cpu": lambda one: one.to("cpu"),
            "pin_memory": pin_memory,
            "record_stream": lambda one, stream: self.keep(one, stream),
            "tolist": to_host("tolist"),
            "numpy": to_host("numpy"),
        }
        for name, fake in fakes.items():
            self._patch.setattr(tensor, name, fake, raising=False)
        self._patch.setattr(torch._C, "_group_tensors_by_device_and_dtype", group)
        for name in (*_MADE, *_MADE_LIKE, *_MADE_HOST_FIRST, *_MADE_OF_HOSTS):
            self._patch.setattr(torch, name, self._maker(name, getattr(torch, name)))

    def _maker(self, name: str, inner: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def make(*args: Any, device: Any = None, pin_memory: bool = False, **options: Any) -> torch.Tensor:
            if device is not None and name in _MADE_HOST_FIRST:
                return make(*args, **options).to(device)
            where = None if name in _MADE_LIKE and device is None else _full(device or _CPU)
            with self.making(where, pinned=pin_memory):
                made = inner(*args, **options)
            if where is not None and made.layout is torch.strided:
                self.add(made, where, pinned=pin_memory)
            return made

        return make

    def _patch_kernels(self) -> None:
        self._patch.setattr(variants, "interpreted", lambda: False)
        for same, names in (
            (reference, ("pack", "unpack", "measure", "scale", "combine")),
            (reference_encoded, ("encode", "combine_encoded", "decode")),
            (cpu_stats, ("reduce_partials", "reduce_source_partials")),
        ):
            for name in names:
                self._patch.setattr(launchers, name, self._launcher(getattr(launchers, name), getattr(same, name)))

    def _launcher(self, inner: Callable[..., Any], same: Callable[..., Any]) -> Callable[..., Any]:
        """Around a function that launches a kernel, which only says so: `same` then does what that would do."""

        def launcher(*given: Any, **options: Any) -> Any:
            self.dangles = False
            results = inner(*given, **options)
            if not self.dangles:  # else it would write where something else lies by now
                with self.on_cpu():
                    tables = [PointerTable() if isinstance(one, PointerTable) else one for one in given]
                    values = same(*(one for one in tables if not isinstance(one, launchers.CombineTables)), **options)
                    for one, value in zip(_fields(results), _fields(values), strict=True):
                        one.copy_(value)
            return results

        return launcher

    def _patch_collectives(self) -> None:
        def reduced(tensor: torch.Tensor, *_: Any, op: Any = dist.ReduceOp.SUM, **__: Any) -> FakeWork:
            if tensor.dtype is torch.int32:
                tensor.add_(self._users)
            elif op == dist.ReduceOp.SUM:
                (tensor if tensor.layout is torch.strided else tensor._values()).mul_(self._ranks)
            return FakeWork([tensor])

        def gathered(output: torch.Tensor, tensor: torch.Tensor, **_: Any) -> FakeWork:
            output.view(-1, tensor.numel()).copy_(tensor.clone().view(1, -1))  # it may lie in the output
            return FakeWork([output])

        def exchanged(output: torch.Tensor, tensor: torch.Tensor, *, group: Any, **_: Any) -> FakeWork:
            ranks = dist.get_world_size(group)
            output.view(ranks, -1).copy_(tensor.view(ranks, -1)[dist.get_rank(group)])
            return FakeWork([output])

        def scattered(output: torch.Tensor, tensor: torch.Tensor, *, group: Any, **_: Any) -> FakeWork:
            ranks = dist.get_world_size(group)
            return FakeWork([output.copy_(tensor.view(ranks, -1)[dist.get_rank(group)]).mul_(ranks)])

        fakes: dict[str, Callable[..., FakeWork]] = {
            "all_reduce": reduced,
            "reduce": reduced,
            ALL_GATHER: gathered,
            REDUCE_SCATTER: scattered,
            "all_to_all_single": exchanged,
            "broadcast": lambda tensor, *_, **__: FakeWork([tensor]),
        }
        for name, fake in fakes.items():
            self._patch.setattr(dist, name, fake)

        def several(_: dist.ProcessGroup, tensors: Sequence[torch.Tensor], options: Any) -> FakeWork:
            for tensor in tensors:
                reduced(tensor, op=options.reduceOp)
            return FakeWork(list(tensors))

        self._patch.setattr(dist.ProcessGroup, "allreduce_coalesced", several)
        TEXTS_ARE_COMPARED.replace(self._patch, lambda one, prefix, key, text, device: [text] * self._ranks)
        STORES_PREFIX.replace(self._patch, lambda one, what: what)


def _fields(totals: object) -> list[torch.Tensor]:
    return [] if totals is None else list(vars(totals).values())


def _full(device: Any) -> torch.device:
    found = torch.device(device)
    return torch.device("cuda", index_of(found)) if found.type == "cuda" else found
