"""DeviceClock: times of one step on a CUDA device, from timing events on the streams that do the work.

Recording an event costs the host a few us, and the device does not wait for it. Reading waits until the step is done on
the device, so it happens after the step, and only for profiled steps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

import torch

from ..planning.timeline import MISSING_NS
from .recorder import StepMarks


class Ends(Protocol):
    """A collective in flight."""

    def notify(self, done: Callable[[], None]) -> None:
        """Calls `done`, on any thread, when it has ended."""
        ...


# A collective whose end is timed, or the future of a comm hook.
Watched: TypeAlias = Ends | torch.futures.Future[Any]


@dataclass
class DeviceClock:
    """Timing events of one step, on one CUDA device.

    Args:
        device: that device.
        stream_waits: see `StepProfile`.
    """

    device: torch.device
    stream_waits: Callable[[Any], object] | None
    _events: dict[object, torch.cuda.Event] = field(default_factory=dict)
    _watching: torch.cuda.Stream | None = None

    def mark_base(self) -> None:
        """Records time 0 on the current stream."""
        self.mark("base")

    def mark(self, what: object) -> None:
        """Records the time of `what` on the current stream."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        self._events[what] = event

    def watch(self, bucket: object, watched: Watched) -> None:
        """Records when the collective of a bucket, or the probe, ends, on a stream of its own that waits for it."""
        if self.stream_waits is None or isinstance(watched, torch._C.Future):
            return  # of a comm hook: waiting may block this thread until a bucket that has not been launched
        if self._watching is None:
            self._watching = torch.cuda.Stream(self.device)
        with torch.cuda.stream(self._watching):
            self.stream_waits(watched)
            self.mark((bucket, "done_ns"))

    def read(self, host: StepMarks) -> StepMarks:
        """Returns the host's marks with those of the device where there are any; waits until the step is done there."""
        marks = StepMarks(len(host.buckets), host.began_ns)
        marks.forward_ns = host.forward_ns
        marks.backward_end_ns = self._since_base("backward_end_ns", host.backward_end_ns)
        for number, (ours, theirs) in enumerate(zip(marks.buckets, host.buckets, strict=True)):
            ours.ready_ns = self._since_base((number, "pack_ns"), theirs.ready_ns)
            for name in ("pack_ns", "launch_ns", "done_ns", "unpack_ns", "end_ns"):
                setattr(ours, name, self._since_base((number, name), getattr(theirs, name)))
            # Marked before its stream waits for the collective, but behind everything else that it waits for.
            ours.unpack_ns = max(ours.unpack_ns, ours.done_ns)
        return marks

    def ready_ns(self, parameters: int, marks: StepMarks) -> list[int]:
        """Returns per parameter when it was ready since backward began, less earlier packing, in ns; or MISSING_NS.

        Args:
            parameters: how many.
            marks: what `read` returned.
        """
        packs = sorted((one.launch_ns, one.launch_ns - one.pack_ns) for one in marks.buckets if one.pack_ns >= 0)
        times_ns: list[int] = []
        for index in range(parameters):
            ready_ns = self._since_base(index, MISSING_NS)
            before_ns = sum(took_ns for end_ns, took_ns in packs if end_ns <= ready_ns)
            times_ns.append(ready_ns if ready_ns == MISSING_NS else max(ready_ns - before_ns, 0))
        return times_ns

    def probe_ns(self) -> list[int]:
        """Returns when the probe was issued and when it ended, in ns; empty without one."""
        times_ns = [self._since_base("probe", MISSING_NS), self._since_base(("probe", "done_ns"), MISSING_NS)]
        return [] if MISSING_NS in times_ns else times_ns

    def take_ns(self, watched: object) -> int:
        """Returns the ns from the mark of what was watched to its end, and forgets both; waits for the end."""
        begin, end = self._events.pop(watched), self._events.pop((watched, "done_ns"))
        end.synchronize()
        elapsed_ms: float = begin.elapsed_time(end)
        return round(elapsed_ms * 1e6)

    def _since_base(self, what: object, otherwise_ns: int) -> int:
        base, event = self._events.get("base"), self._events.get(what)
        if base is None or event is None:
            return otherwise_ns
        event.synchronize()
        elapsed_ms: float = base.elapsed_time(event)
        return max(round(elapsed_ms * 1e6), 0)
