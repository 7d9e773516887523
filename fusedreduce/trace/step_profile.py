"""StepProfile: the times of one step on this rank, for the schedule or a trace; most steps have none.

It records when each bucket was ready, packed and launched, when its collective ended and when it was unpacked, and when
each gradient would have been ready without our own packing, which runs on the thread that computes the next gradients.

Times are of the host's clock. On CUDA the host only enqueues, so timing events are also recorded on the streams that do
the work, and read after the step. Gradients on several devices have host times only, because events of two devices
cannot be compared.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from ..planning.link_timing import collective_times
from ..planning.schedule import BucketTimes, StepTimes
from ..planning.timeline import MISSING_NS
from .device_clock import DeviceClock, Ends, Watched
from .recorder import StepMarks, stall_ns


class StepProfile:
    """The times of one profiled step, marked by who runs it.

    Args:
        parameters: how many.
        buckets: how many the plan has.
        device: where the gradients live; None: on several.
        stream_waits: has the current stream wait for a collective, so that its end can be timed there; None: it may
            not, because ranks share an autograd thread, which would block until the others have issued theirs.
        forward_ns: time.perf_counter_ns() when forward began.

    Attributes:
        marks: per bucket, host clock; time 0 is `backward_began`, or this call.
        ready_ns: per parameter since time 0, without our own packing; MISSING_NS: it had no gradient.
        packing_ns: per bucket, host time spent on issuing its collective.
        device: timing events; None on CPU.
        probe_ns: when the probe, a small collective, was issued, and when it ended.
    """

    def __init__(
        self,
        parameters: int,
        buckets: int,
        device: torch.device | None,
        stream_waits: Callable[[Any], object] | None = None,
        *,
        forward_ns: int = MISSING_NS,
    ) -> None:
        self.marks = StepMarks(buckets, time.perf_counter_ns())
        self.marks.forward_ns = forward_ns
        self.ready_ns = [MISSING_NS] * parameters
        self.packing_ns = [0] * buckets
        on_cuda = device is not None and device.type == "cuda"
        self.device = DeviceClock(device, stream_waits) if device is not None and on_cuda else None
        self.probe_ns: list[int] = []
        self._entered_ns = 0
        self._own_ns = 0
        if self.device is not None:
            self.device.mark_base()

    # Marks, in the order of a step

    def probe_issuing(self) -> None:
        """The probe, a small collective whose latency is measured, is about to be issued."""
        self.probe_ns = [time.perf_counter_ns()]
        if self.device is not None:
            self.device.mark("probe")

    def probe_issued(self, probe: Ends) -> None:
        """The probe has been issued."""
        if self.device is not None:
            self.device.watch("probe", probe)
        else:
            times_ns = self.probe_ns
            probe.notify(lambda: times_ns.append(time.perf_counter_ns()))

    def backward_began(self) -> None:
        """Backward begins now. Without this call, times count from the end of forward."""
        self.marks.began_ns = time.perf_counter_ns()
        if self.device is not None:
            self.device.mark_base()

    def enter(self, now_ns: int | None = None) -> None:
        """Autograd has called a hook: gradients of this call are ready now. Until `leave` its thread runs our code."""
        self._entered_ns = now_ns or time.perf_counter_ns()

    def gradient_ready(self, index: int) -> None:
        """A parameter's gradient is ready, as of `enter`, so that times keep the order in which gradients came."""
        self.ready_ns[index] = max(self._entered_ns - self.marks.began_ns - self._own_ns, 0)
        if self.device is not None:
            self.device.mark(index)

    def bucket_ready(self, bucket: int) -> None:
        """A bucket's last gradient is ready."""
        self.marks.buckets[bucket].ready_ns = time.perf_counter_ns() - self.marks.began_ns

    def pack(self, bucket: int) -> None:
        """A bucket's packing begins."""
        self.marks.buckets[bucket].pack_ns = time.perf_counter_ns() - self.marks.began_ns
        if self.device is not None:
            self.device.mark((bucket, "pack_ns"))

    def launched(self, bucket: int, watched: Watched | None, issued_ns: int) -> None:
        """A bucket's collective has been issued.

        Args:
            bucket: which.
            watched: the collective; None: there was nothing to issue.
            issued_ns: time.perf_counter_ns() when it was issued.
        """
        launched_ns = issued_ns - self.marks.began_ns
        self.marks.buckets[bucket].launch_ns = launched_ns
        # Issuing takes this thread's time too; with few cores, much of it goes to the threads that it wakes.
        self.packing_ns[bucket] += time.perf_counter_ns() - issued_ns
        if self.device is not None:
            self.device.mark((bucket, "launch_ns"))
            if watched is None:
                self.device.mark((bucket, "done_ns"))
            else:
                self.device.watch(bucket, watched)
        elif watched is None:
            self.marks.buckets[bucket].done_ns = launched_ns
        else:
            _record_end(watched, self.marks, bucket)

    def leave(self) -> None:
        """The hook returns to autograd."""
        self._own_ns += time.perf_counter_ns() - self._entered_ns

    def backward_ended(self) -> None:
        """The last gradient is ready, and all buckets have been launched."""
        self.marks.backward_end_ns = time.perf_counter_ns() - self.marks.began_ns
        if self.device is not None:
            self.device.mark("backward_end_ns")

    def unpack(self, bucket: int) -> None:
        """A bucket is about to be waited for and unpacked, on CUDA on the current stream."""
        self.marks.buckets[bucket].unpack_ns = time.perf_counter_ns() - self.marks.began_ns
        if self.device is not None:
            self.device.mark((bucket, "unpack_ns"))

    def unpacked(self, bucket: int) -> None:
        """A bucket has been unpacked, or on CUDA that has been enqueued on the current stream."""
        if self.device is not None:
            self.device.mark((bucket, "end_ns"))
        marks = self.marks.buckets[bucket]
        marks.end_ns = time.perf_counter_ns() - self.marks.began_ns
        # A collective's callback has run before its wait returns; where it ended unseen, nothing is known.
        marks.done_ns = min(marks.done_ns, marks.end_ns)
        marks.unpack_ns = max(marks.unpack_ns, marks.done_ns)

    # Results

    def best_marks(self) -> StepMarks:
        """Returns the marks, from device events where there are any; on CUDA waits for the step's end on the device."""
        return self.marks if self.device is None else self.device.read(self.marks)

    def step_times(self) -> StepTimes:
        """Returns what the schedule needs of this step; on CUDA waits as `best_marks` does."""
        marks = self.best_marks()
        rows: list[BucketTimes | None] = [None] * len(marks.buckets)
        known = [(one.pack_ns, one.launch_ns, one.done_ns, one.end_ns) for one in marks.buckets]
        if MISSING_NS not in {time_ns for times in known for time_ns in times}:
            wires = collective_times([one.launch_ns for one in marks.buckets], [one.done_ns for one in marks.buckets])
            for index, (one, wire, packing_ns) in enumerate(zip(marks.buckets, wires, self.packing_ns, strict=True)):
                # On CUDA, packing_ns is host time; what it delays on the device lies between the device's marks.
                pack_ns = one.launch_ns - one.pack_ns + (packing_ns if self.device is None else 0)
                unpack_ns = one.end_ns - max(one.unpack_ns, one.done_ns)
                rows[index] = BucketTimes(wire, max(pack_ns, 0), max(unpack_ns, 0))
        probe_ns = list(self.probe_ns) if self.device is None else self.device.probe_ns()
        took_ns = probe_ns[1] - probe_ns[0] if len(probe_ns) == 2 else None
        return StepTimes(rows, stall_ns(self.marks.buckets) or 0, max(self.marks.backward_end_ns, 0), took_ns)

    def device_ready_times_ns(self) -> list[int]:
        """Returns per parameter when it was ready on the device, in ns; empty where there are no events."""
        return [] if self.device is None else self.device.ready_ns(len(self.ready_ns), self.best_marks())


def _record_end(watched: Watched, marks: StepMarks, bucket: int) -> None:
    """Has the end of a collective recorded, by a callback that references the marks only: no group, no tensor."""

    def done(_: object = None) -> None:
        marks.buckets[bucket].done_ns = time.perf_counter_ns() - marks.began_ns

    if isinstance(watched, torch._C.Future):
        watched.add_done_callback(done)
    else:
        watched.notify(done)
