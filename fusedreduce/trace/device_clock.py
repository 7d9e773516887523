"""DeviceClock: times of one step on a CUDA device, from timing events on the streams that do the work.

Recording costs the host a few us per event and the device nothing that it would wait for. Reading waits until the step
is done there, so it happens after the step, and only in steps that are looked at closely.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from ..comm.protocol import Pending, Ranks
from ..comm.waiting import wait_for
from ..planning.timeline import MISSING_NS
from .recorder import StepMarks

Watched = Pending | torch.futures.Future[torch.Tensor]


@dataclass
class DeviceClock:
    """Timing events of one step, on one CUDA device.

    Args:
        device: the one.
    """

    device: torch.device
    _events: dict[object, torch.cuda.Event] = field(default_factory=dict)
    _watching: torch.cuda.Stream | None = None

    def begin(self) -> None:
        """Time 0 is where the current stream is now."""
        self.mark("base")

    def mark(self, what: object) -> None:
        """Time of `what` is where the current stream is now."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        self._events[what] = event

    def watch(self, bucket: object, watched: Watched, communicator: Ranks) -> None:
        """Time `done` of a bucket, or of the probe, is when its collective ends: a stream of its own waits for that."""
        if isinstance(watched, torch._C.Future):
            return  # a comm hook's: waiting for it may block this thread, until a bucket that is not launched yet
        if self._watching is None:
            self._watching = torch.cuda.Stream(self.device)
        with torch.cuda.stream(self._watching):
            wait_for(watched, "the collective whose end is timed", communicator)
            self.mark((bucket, "done_ns"))

    def read(self, host: StepMarks) -> StepMarks:
        """Marks of the device, where there are any; waits until the step is done there."""
        found = StepMarks(len(host.buckets), host.began_ns)
        found.forward_ns = host.forward_ns
        found.backward_end_ns = self._since_base("backward_end_ns", host.backward_end_ns)
        for number, (ours, theirs) in enumerate(zip(found.buckets, host.buckets, strict=True)):
            ours.ready_ns = self._since_base((number, "pack_ns"), theirs.ready_ns)
            for name in ("pack_ns", "launch_ns", "done_ns", "unpack_ns", "end_ns"):
                setattr(ours, name, self._since_base((number, name), getattr(theirs, name)))
            # Marked where its stream begins to wait for the collective, behind all that it waits for besides.
            ours.unpack_ns = max(ours.unpack_ns, ours.done_ns)
        return found

    def ready_ns(self, parameters: int, marks: StepMarks) -> list[int]:
        """Per parameter since backward began, less the packing before it; MISSING_NS where it was not seen.

        Args:
            parameters: how many.
            marks: what `read` returned.
        """
        packs = sorted((one.launch_ns, one.launch_ns - one.pack_ns) for one in marks.buckets if one.pack_ns >= 0)
        found = []
        for index in range(parameters):
            ready_ns = self._since_base(index, MISSING_NS)
            before_ns = sum(took_ns for end_ns, took_ns in packs if end_ns <= ready_ns)
            found.append(ready_ns if ready_ns == MISSING_NS else max(ready_ns - before_ns, 0))
        return found

    def probe_ns(self) -> list[int]:
        """When the probe was issued and when it ended; empty without one."""
        found = [self._since_base("probe", MISSING_NS), self._since_base(("probe", "done_ns"), MISSING_NS)]
        return [] if MISSING_NS in found else found

    def _since_base(self, what: object, otherwise_ns: int) -> int:
        base, event = self._events.get("base"), self._events.get(what)
        if base is None or event is None:
            return otherwise_ns
        event.synchronize()
        elapsed_ms: float = base.elapsed_time(event)
        return max(round(elapsed_ms * 1e6), 0)
