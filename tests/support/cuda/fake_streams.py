"""Stand-ins for torch.cuda's streams and events and for futures on a device: everything has run when it is asked for.

What they would order is recorded by `order_trace`, which patches their methods as it does CUDA's.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from typing import Any

import torch

from support.cuda.order_trace import tensors_of

_FUTURE: Any = torch.futures.Future


def index_of(device: Any) -> int:
    """A device's number: of the current one where it says none."""
    if isinstance(device, int):
        return device
    number = None if device is None else torch.device(device).index
    return torch.cuda.current_device() if number is None else number


class FakeStream:
    """As torch.cuda.Stream, as far as it is used."""

    _numbers = itertools.count(1)

    def __init__(self, device: Any = None, **_: Any) -> None:
        self.device = torch.device("cuda", index_of(device))
        self.cuda_stream = self.stream_id = next(FakeStream._numbers)
        self.device_index, self.device_type = self.device.index, 1  # c10::DeviceType::CUDA

    def wait_stream(self, other: Any) -> None:
        self.wait_event(other.record_event())

    def wait_event(self, event: Any) -> None:
        event.wait(self)

    def record_event(self) -> Any:
        event = torch.cuda.Event()
        event.record(self)  # type: ignore[arg-type]
        return event

    def synchronize(self) -> None:
        """There is nothing to wait for."""


class FakeEvent:
    """As torch.cuda.Event, as far as it is used. Time goes on by 10 us from one record to the next."""

    comes = True  # when it is asked for
    _clock = itertools.count()

    def __init__(self, **_: Any) -> None:
        self._at = 0

    def record(self, stream: Any = None) -> None:
        self._at = next(FakeEvent._clock)

    def wait(self, stream: Any = None) -> None:
        """There is nothing to wait for."""

    def query(self) -> bool:
        return FakeEvent.comes

    def synchronize(self) -> None:
        """There is nothing to wait for."""

    def elapsed_time(self, end: FakeEvent) -> float:
        return (end._at - self._at) * 0.01


class FakeFuture(_FUTURE):  # type: ignore[misc]
    """As torch.futures.Future with devices. Who waits has its current streams wait."""

    keep: Callable[[torch.Tensor, Any], None]  # as Tensor.record_stream

    def __new__(cls, *, devices: Any = None) -> FakeFuture:
        made: FakeFuture = super().__new__(cls)
        return made

    def __class_getitem__(cls, value: Any) -> Any:
        return _FUTURE[value]

    def __init__(self, *, devices: Any = None) -> None:
        super().__init__()
        self.devices = [torch.device(one) for one in devices or ()]
        self._events: list[Any] = []
        self._order: Callable[[], None] | None = None

    @classmethod
    def of(cls, device: torch.device, value: Any, order: Callable[[], None]) -> FakeFuture:
        """One whose value is there once what `order` has the current stream wait for is done."""
        future = cls(devices=[device])
        future._order = order
        _FUTURE.set_result(future, value)
        return future

    def set_result(self, result: Any) -> None:
        self._events = [torch.cuda.current_stream(device).record_event() for device in self.devices]
        super().set_result(result)

    def wait(self) -> Any:
        self._wait()
        return super().wait()

    def then(self, callback: Callable[[Any], Any]) -> FakeFuture:
        """Calls it on streams from the pool; what it returns is there once these have come so far."""
        child = FakeFuture(devices=self.devices)

        def call(_: Any) -> None:
            with contextlib.ExitStack() as streams:
                for device in self.devices:
                    streams.enter_context(torch.cuda.stream(torch.cuda.Stream(device)))
                with contextlib.suppress(RuntimeError):  # one that has failed orders nothing
                    self._wait()
                try:
                    child.set_result(callback(self))
                except Exception as error:
                    child.set_exception(error)

        super().add_done_callback(call)
        return child

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        self.then(callback)

    def _wait(self) -> None:
        if self._order is not None:
            self._order()
        for device, event in zip(self.devices, self._events, strict=False):
            torch.cuda.current_stream(device).wait_event(event)
        for one in tensors_of(self.value()):
            if one.is_cuda:
                self.keep(one, torch.cuda.current_stream(one.device))


class FakeWork:
    """As torch.distributed.Work, of a collective that has been done at once."""

    def __init__(self, result: list[torch.Tensor]) -> None:
        self._result = result

    def wait(self, *timeout: Any) -> bool:
        return True

    def is_completed(self) -> bool:
        return FakeEvent.comes

    def result(self) -> list[torch.Tensor]:
        return self._result
