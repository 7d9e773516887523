"""Records what the package enqueues on CUDA streams, as entries for `order_check`.

Patched are the few places that all of it goes through: the methods of torch.cuda's events and streams, `Variant.launch`
and torch.distributed's collectives; operators are seen by a dispatch mode. On a GPU the recorder only looks on: it
knows which work is on which stream and what orders it, not which memory it uses. `fake_cuda` puts stand-ins in CUDA's
place, and knows that too.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

import fusedreduce
from fusedreduce.comm.process_group import ALL_GATHER, REDUCE_SCATTER
from fusedreduce.comm.stall_monitor import StallMonitor
from fusedreduce.kernels.counting import does_work
from fusedreduce.kernels.variants import Variant
from support.cuda.order_check import HOST, Access, Entry, Kind, Stream

_PACKAGE = str(Path(fusedreduce.__file__).parent)
_COLLECTIVES = ("all_reduce", "reduce", ALL_GATHER, REDUCE_SCATTER, "all_to_all_single", "broadcast")
_COPIES = ("copy_", "_to_copy")
# What the host cannot go on without the result of.
_HOST_WAITS = ("_local_scalar_dense", "equal", "nonzero", "masked_select", "_unique2", "_coalesce")


class Recorder(TorchDispatchMode):
    """A trace of what is enqueued while `recording`, by this thread and by autograd's.

    Args:
        patch: undone by whoever gave it.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.trace: list[Entry] = []
        self._patch = patch
        self._streams: dict[tuple[str, int], Stream] = {}
        self._numbers = 0
        self._under_way: set[Awaited] = set()
        self._open = False

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Within: what is enqueued is recorded. The stall monitor's thread, which enqueues nothing, is left out."""
        self._patch_streams()
        self._patch.setattr(StallMonitor, "watch", lambda *_: None)
        self._patch.setattr(Variant, "launch", self._launch(Variant.launch))
        for name in _COLLECTIVES:
            self._patch.setattr(dist, name, self._collective(name, getattr(dist, name)))
        several, name = dist.ProcessGroup.allreduce_coalesced, "allreduce_coalesced"  # which dist's function warns of
        collective = self._collective(name, lambda *given, async_op: several(*given))
        self._patch.setattr(dist.ProcessGroup, name, lambda *given: collective(*given, async_op=True))
        self._open = True
        try:
            with self:
                yield
        finally:
            self._open = False

    def steady(self) -> None:
        """From here on the host may not wait."""
        self.emit("steady", HOST)

    def outline(self) -> list[tuple[str, str, int]]:
        """What the package did since `steady`: kind, name, and which stream, in the order of their use.

        Left out is what depends on the run: queries, and what is done where a gradient has moved.
        """
        begin = next(index for index, entry in enumerate(self.trace) if entry.kind == "steady")
        seen: dict[Stream, int] = {}
        return [
            (entry.kind, entry.what, seen.setdefault(entry.stream, len(seen)))
            for entry in self.trace[begin:]
            if entry.kind not in ("allocate", "free", "keep", "query")
            and entry.where not in ("", "table.py: _uploaded")
            and not entry.what.startswith("operator")
            and not (entry.kind == "work" and entry.stream == HOST)
        ]

    def emit(
        self,
        kind: Kind,
        stream: Stream,
        what: str = "",
        accesses: Sequence[Access] = (),
        *,
        number: int = -1,
        beside: Stream = HOST,
    ) -> None:
        """One more entry."""
        if self._open:
            self.trace.append(Entry(kind, stream, what, tuple(accesses), number, beside, _where()))

    def number(self) -> int:
        """One that no event, collective or memory has."""
        self._numbers += 1
        return self._numbers

    def stream(self, stream: Any) -> Stream:
        """Which one this is."""
        device, _ = key = str(stream.device), stream.cuda_stream
        if key not in self._streams:
            self._streams[key] = Stream(device, sum(one == device for one, _ in self._streams))
        return self._streams[key]

    def current(self, device: torch.device | None = None) -> Stream:
        """The current stream of a device, or of the current one."""
        return self.stream(torch.cuda.current_stream(device))

    # What a stand-in knows better

    def accumulator(self, parameter: torch.Tensor) -> Any:
        """The parameter's AccumulateGrad node, made on the current stream if there was none."""
        function = parameter.view_as(parameter).grad_fn
        assert function is not None
        return function.next_functions[0][0]

    def comm_hook(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        """One for torch's own wrapper."""
        return hook

    def place(self, given: Sequence[torch.Tensor], made: Sequence[torch.Tensor]) -> None:
        """An operator is given tensors, and has made others."""

    def uses(self, tensor: torch.Tensor, *, write: bool) -> Sequence[Access]:
        """The bytes of a tensor."""
        return ()

    def kernel(self, variant: Variant, arguments: Sequence[torch.Tensor | float | None]) -> Sequence[Access]:
        """What a launch uses."""
        return ()

    def run_kernel(
        self, kernel: Callable[..., None], arguments: Sequence[torch.Tensor | float | None], constants: Any
    ) -> None:
        """Launches it."""
        kernel(*arguments, **constants)

    def backend(self, device: torch.device) -> Stream:
        """Where collectives run."""
        return Stream(str(device), -1)

    def released(self, awaited: Awaited) -> None:
        """Only the backend keeps a collective's tensors now."""

    def future(self, awaited: Awaited) -> Any:
        """A collective's future."""
        return awaited.work.get_future()

    # Within

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        self._operator(func, args, kwargs or {}, result)
        return result

    def _operator(self, func: Any, args: tuple[Any, ...], named: dict[str, Any], result: Any) -> None:
        name, arguments = _schema(func)
        read: list[torch.Tensor] = []
        written: list[torch.Tensor] = []
        for place, (argument, changed) in enumerate(arguments):
            value = args[place] if place < len(args) else named.get(argument)
            (written if changed else read).extend(tensors_of(value))
        given = [*read, *written]
        old = {one.untyped_storage()._cdata for one in given}
        made = [one for one in tensors_of(result) if one.untyped_storage()._cdata not in old]
        self.place(given, made)
        if not does_work(func):
            return
        uses = [use for one in read for use in self.uses(one, write=False)]
        uses += [use for one in (*written, *made) for use in self.uses(one, write=True)]
        devices = list(dict.fromkeys(one.device for one in (*given, *made)))
        cuda = next((device for device in devices if device.type == "cuda"), None)
        if name in _COPIES and len(devices) > 1:
            to, source = (made or written)[0], read[0]
            self._copy(to, source, bool(named.get("non_blocking", len(args) > 2 and args[2])), uses)
        elif cuda is not None:
            self.emit("work", self.current(cuda), f"operator {name}", uses)
            if name in _HOST_WAITS:
                self.emit("block", self.current(cuda), f"operator {name}")
        elif uses:
            self.emit("work", HOST, f"operator {name}", uses)

    def _copy(self, to: torch.Tensor, source: torch.Tensor, non_blocking: bool, uses: Sequence[Access]) -> None:
        host = next((one for one in (to, source) if not one.is_cuda), None)
        on = self.current(source.device if source.is_cuda else to.device)
        if host is None:  # torch has both streams wait for each other
            one, other = (torch.cuda.current_stream(tensor.device) for tensor in (to, source))
            other.wait_stream(one)
            self.emit("copy", on, "copy between devices", uses)
            one.wait_stream(other)
            return
        what = "copy to the host" if host is to else "copy from the host"
        self.emit("copy", on, what, uses)
        if not host.is_pinned():
            self.emit("pageable", on, what)
        elif not non_blocking:
            self.emit("block", on, what)

    def _patch_streams(self) -> None:
        def around(owner: Any, name: str, kind: Kind) -> None:
            inner = getattr(owner, name)

            @functools.wraps(inner)
            def method(one: Any, stream: Any = None) -> Any:
                if kind in ("record", "wait") and stream is None:
                    stream = torch.cuda.current_stream()
                result = inner(one) if stream is None else inner(one, stream)
                if owner is torch.cuda.Stream:
                    self.emit(kind, self.stream(one), f"Stream.{name}")
                elif self._open and (kind != "query" or result):
                    if not hasattr(one, "order_number"):
                        one.order_number = self.number()
                    on = HOST if stream is None else self.stream(stream)
                    self.emit(kind, on, f"Event.{name}", number=one.order_number)
                return result

            self._patch.setattr(owner, name, method)

        around(torch.cuda.Event, "record", "record")
        around(torch.cuda.Event, "wait", "wait")
        around(torch.cuda.Event, "query", "query")
        around(torch.cuda.Event, "synchronize", "block")
        around(torch.cuda.Stream, "synchronize", "block")

    def _launch(self, inner: Callable[..., None]) -> Callable[..., None]:
        def launch(variant: Variant, programs: int, arguments: Sequence[torch.Tensor | float | None]) -> None:
            inner(dataclasses.replace(variant, kernel=_Kernel(self, variant)), programs, arguments)

        return launch

    def _collective(self, name: str, inner: Callable[..., Any]) -> Callable[..., Any]:
        def collective(*given: Any, async_op: bool = False, **options: Any) -> Any:
            tensors, number = tensors_of(given), self.number()
            device = tensors[0].device
            uses = [use for one in tensors for write in (False, True) for use in self.uses(one, write=write)]
            self.emit("issue", self.current(device), name, uses, number=number, beside=self.backend(device))
            with _disable_current_modes():
                work = inner(*given, async_op=True, **options)
            awaited = Awaited(self, name, number, work, tensors)
            if async_op:
                return awaited
            awaited.wait()
            return None

        return collective


@dataclasses.dataclass(frozen=True)
class _Kernel:
    """In the place of a variant's kernel: is told where it is launched."""

    recorder: Recorder
    variant: Variant

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def run(*arguments: torch.Tensor | float | None, **constants: Any) -> None:
            uses = self.recorder.kernel(self.variant, arguments)
            self.recorder.emit("work", self.recorder.current(), self.variant.label, uses)
            with _disable_current_modes():
                self.recorder.run_kernel(self.variant.kernel[grid], arguments, constants)

        return run


class Awaited:
    """The Work of a collective, whose waits are recorded; as torch's, kept with its tensors until then."""

    def __init__(self, recorder: Recorder, name: str, number: int, work: Any, tensors: Sequence[torch.Tensor]) -> None:
        self._recorder, self._name, self._number = recorder, name, number
        self.work = work
        self.tensors = tensors
        self.device = tensors[0].device
        recorder._under_way.add(self)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.work, name)

    def is_completed(self) -> bool:
        """Whether the host has been told so; it is behind the collective then."""
        told: bool = self.work.is_completed()
        if told:
            self._recorder.emit("query", HOST, self._name, number=self._number)
        return told

    def get_future(self) -> Any:
        """Of its tensors."""
        return self._recorder.future(self)

    def wait(self, *timeout: Any) -> bool:
        """Has the current stream wait."""
        result: bool = self.work.wait(*timeout)
        self._recorder.emit("wait", self._recorder.current(self.device), self._name, number=self._number)
        self._recorder._under_way.discard(self)
        return result

    def order(self) -> None:
        """As `wait`, by its future: torch's watchdog then keeps the tensors until the collective is done."""
        self._recorder.released(self)
        self.wait()


def tensors_of(value: object) -> list[torch.Tensor]:
    """The tensors in an argument or a result, as they lie in memory: of a sparse one its indices and its values."""
    if isinstance(value, torch.Tensor):
        if value.layout is torch.strided:
            return [value]
        with _disable_current_modes():
            return [value._indices(), value._values()]
    return [one for each in value for one in tensors_of(each)] if isinstance(value, list | tuple) else []


@functools.cache
def _schema(func: Any) -> tuple[str, list[tuple[str, bool]]]:
    """An operator's name, and of each argument its name and whether it is written."""
    arguments = [(one.name, one.alias_info is not None and one.alias_info.is_write) for one in func._schema.arguments]
    return func._schema.name.partition("::")[2], arguments


def _where() -> str:
    """The innermost function of the package that is running."""
    frame = sys._getframe(2)
    while frame is not None:
        if name := _name_in_package(frame.f_code.co_filename):
            return f"{name}: {frame.f_code.co_name}"
        frame = frame.f_back  # type: ignore[assignment]
    return ""


@functools.cache
def _name_in_package(file: str) -> str:
    """A file's name; empty: the package has it not."""
    return Path(file).name if file.startswith(_PACKAGE) else ""
