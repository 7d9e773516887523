"""A GPU stood in for, as far as time goes: streams are clocks, and what is enqueued takes as long as a test says.

The host takes no time to enqueue: streams wait for each other, never for the host. Counted in ns.
"""

from __future__ import annotations

import itertools
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch

from support.cuda.stand_in_streams import within

DEVICE = torch.device("cuda", 0)


class FakeStream:
    """When all that was enqueued here has been done."""

    _numbers = itertools.count(1)

    def __init__(self, device: object = DEVICE) -> None:
        self.device = device
        self.cuda_stream = next(FakeStream._numbers)
        self.now_ns = 0

    def wait_stream(self, other: FakeStream) -> None:
        self.wait_until(other.now_ns)

    def wait_event(self, event: FakeEvent) -> None:
        self.wait_until(event._time_ns)

    def wait_until(self, time_ns: int) -> None:
        self.now_ns = max(self.now_ns, time_ns)


class FakeGpu:
    """Takes the place of `torch.cuda` in what is measured. The stream at the end of `streams` is current."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.streams = [FakeStream()]
        stands_in = {
            "Event": self.event,
            "Stream": FakeStream,
            "current_stream": lambda device=None: self.current,
            "device": lambda device: nullcontext(),
            "is_current_stream_capturing": lambda: False,
            "stream": self.on,
        }
        for name, one in stands_in.items():
            patch.setattr(torch.cuda, name, one)

    @property
    def current(self) -> FakeStream:
        return self.streams[-1]

    def work(self, time_ns: int) -> None:
        """A kernel on the current stream."""
        self.current.now_ns += time_ns

    def on(self, stream: FakeStream) -> AbstractContextManager[None]:
        return within(self.streams, stream)

    def event(self, enable_timing: bool = False) -> FakeEvent:
        return FakeEvent(self)


class FakeEvent:
    """When the work in front of it was done."""

    def __init__(self, gpu: FakeGpu) -> None:
        self._gpu = gpu
        self._time_ns = -1

    def record(self, stream: Any = None) -> None:
        self._time_ns = (stream or self._gpu.current).now_ns

    def synchronize(self) -> None:
        """The host takes no time."""

    def query(self) -> bool:
        return True

    def elapsed_time(self, later: FakeEvent) -> float:
        """In ms, as torch counts."""
        return (later._time_ns - self._time_ns) / 1e6
