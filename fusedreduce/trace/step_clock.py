"""StepClock: when what happened in a step, on this rank.

In every step: when each bucket was ready and when it was launched. In steps that are looked at closely (profiled, or
traced) also when each bucket was packed, when its collective ended and when it was unpacked; and what the readiness of
a gradient would have been without our own packing, which runs on the thread that makes the next gradients.

Host clock. On CUDA the host only enqueues: there a closely watched step also records timing events, on the streams that
do the work, which are read after the step. Gradients on several devices have host times only: events of two devices
cannot be compared.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import torch

from ..comm.protocol import Pending, Ranks
from ..planning.link_timing import seen
from ..planning.schedule import BucketTimes, StepTimes
from ..planning.timeline import MISSING_NS
from .device_clock import DeviceClock, Watched
from .recorder import StepMarks, stall_ns


@dataclass
class Looked:
    """One step that was looked at closely.

    Args:
        marks: per bucket, host clock.
        ready_ns: per parameter since backward began, without our own packing; MISSING_NS: it did not come.
        packing_ns: per bucket, host time spent on parts of it before it was packed, and on issuing its collective.
        device: timing events, on CUDA.
    """

    marks: StepMarks
    ready_ns: list[int]
    packing_ns: list[int]
    device: DeviceClock | None = None
    watches: bool = True  # see StepClock
    probe_ns: list[int] = field(default_factory=list)  # when a small collective began, and when it ended

    def finest(self) -> StepMarks:
        """The marks, of the device where there are events. On CUDA waits for the step's end there."""
        return self.marks if self.device is None else self.device.read(self.marks)

    def times(self) -> StepTimes:
        """What the schedule is told."""
        marks = self.finest()
        rows: list[BucketTimes | None] = [None] * len(marks.buckets)
        known = [(one.pack_ns, one.launch_ns, one.done_ns, one.end_ns) for one in marks.buckets]
        if MISSING_NS not in {time_ns for times in known for time_ns in times}:
            wires = seen([one.launch_ns for one in marks.buckets], [one.done_ns for one in marks.buckets])
            for index, (one, wire, packing_ns) in enumerate(zip(marks.buckets, wires, self.packing_ns, strict=True)):
                # On CUDA that is no time of the device's, and what it delays there lies between its marks.
                pack_ns = one.launch_ns - one.pack_ns + (packing_ns if self.device is None else 0)
                unpack_ns = one.end_ns - max(one.unpack_ns, one.done_ns)
                rows[index] = BucketTimes(wire, max(pack_ns, 0), max(unpack_ns, 0))
        probe_ns = list(self.probe_ns) if self.device is None else self.device.probe_ns()
        took_ns = probe_ns[1] - probe_ns[0] if len(probe_ns) == 2 else None
        return StepTimes(rows, stall_ns(self.marks.buckets) or 0, max(self.marks.backward_end_ns, 0), took_ns)

    def probe_begins(self) -> None:
        """A small collective is about to be issued, for its latency."""
        self.probe_ns = [time.perf_counter_ns()]
        if self.device is not None:
            self.device.mark("probe")

    def probe_began(self, pending: Pending, communicator: Ranks) -> None:
        """It has been issued."""
        if self.device is not None:
            if self.watches:
                self.device.watch("probe", pending, communicator)
        else:
            times_ns = self.probe_ns
            pending.notify(lambda: times_ns.append(time.perf_counter_ns()))

    def device_ready_ns(self) -> list[int]:
        """Per parameter, of the device; empty where there are no events."""
        return [] if self.device is None else self.device.ready_ns(len(self.ready_ns), self.finest())


class StepClock:
    """Times of a reducer's steps.

    Args:
        parameters: how many.
        device: where they live; None: on several.

    `watches`: the end of a collective may be waited for on a stream of its own (CUDA). Not where ranks share an
    autograd thread: with no peer there yet that stops the thread.
    """

    def __init__(self, parameters: int, device: torch.device | None) -> None:
        self._count = parameters
        self._device = device
        self._base_ns = 0
        self._armed_ns = 0
        self._entered_ns = 0
        self._own_ns = 0
        self._look: Looked | None = None
        self.watches = True
        self.arrived_ns = [0] * parameters  # since forward ended, as torch counts; the latest step
        self.ready_ns: list[int] = []  # by bucket, since backward began
        self.launched_ns: list[int] = []

    def arm(self, buckets: int, *, closely: bool, forward_ns: int) -> None:
        """Forward has ended.

        Args:
            buckets: of the plan.
            closely: profiled or traced.
            forward_ns: when forward began, time.perf_counter_ns().
        """
        self.ready_ns = [MISSING_NS] * buckets
        self.launched_ns = [MISSING_NS] * buckets
        self._armed_ns = self._base_ns = time.perf_counter_ns()
        self._own_ns = 0
        self._look = None
        if closely:
            marks = StepMarks(buckets, self._base_ns)
            marks.forward_ns = forward_ns
            on_cuda = self._device is not None and self._device.type == "cuda"
            device = DeviceClock(self._device) if self._device is not None and on_cuda else None
            if device is not None:
                device.begin()
            self._look = Looked(marks, [MISSING_NS] * self._count, [0] * buckets, device, self.watches)

    def begin(self) -> None:
        """Backward begins. (Without this call: when forward ended.)"""
        self._base_ns = time.perf_counter_ns()
        if self._look is not None:
            self._look.marks.began_ns = self._base_ns
            if self._look.device is not None:
                self._look.device.begin()

    @property
    def looks(self) -> Looked | None:
        """The step that runs, if it is looked at closely."""
        return self._look

    def enter(self) -> None:
        """Autograd calls us: what arrives in this call is ready now. Until `leave` its thread is busy with us."""
        self._entered_ns = time.perf_counter_ns()

    def leave(self) -> None:
        """Back to autograd."""
        self._own_ns += time.perf_counter_ns() - self._entered_ns

    def arrive(self, index: int) -> None:
        """A parameter is ready, since `enter`: so the times keep the order in which gradients came."""
        now_ns = self._entered_ns
        self.arrived_ns[index] = now_ns - self._armed_ns
        look = self._look
        if look is not None:
            look.ready_ns[index] = max(now_ns - self._base_ns - self._own_ns, 0)
            if look.device is not None:
                look.device.mark(index)

    def has_arrived(self, index: int) -> bool:
        """Whether a parameter has become ready in this step, which is looked at closely."""
        return self._look is not None and self._look.ready_ns[index] != MISSING_NS

    def bucket_ready(self, bucket: int) -> None:
        """A bucket's last parameter is."""
        now_ns = time.perf_counter_ns() - self._base_ns
        self.ready_ns[bucket] = now_ns
        if self._look is not None:
            self._look.marks.buckets[bucket].ready_ns = now_ns

    def pack(self, bucket: int) -> None:
        """Packing begins."""
        if self._look is not None:
            self._look.marks.buckets[bucket].pack_ns = time.perf_counter_ns() - self._base_ns
            if self._look.device is not None:
                self._look.device.mark((bucket, "pack_ns"))

    def packed_part(self, bucket: int, began_ns: int) -> None:
        """A part of a bucket has been packed ahead of its launch."""
        if self._look is not None:
            self._look.packing_ns[bucket] += time.perf_counter_ns() - began_ns

    def launched(self, bucket: int, watched: Watched | None, issued_ns: int | None, communicator: Ranks) -> None:
        """A bucket's collective has been issued, at `issued_ns` or just now; `watched` tells when it ends.

        Args:
            bucket: which.
            watched: None: there was nothing to issue.
            issued_ns: time.perf_counter_ns() then.
            communicator: whose it is.
        """
        returned_ns = time.perf_counter_ns()
        now_ns = issued_ns or returned_ns
        self.launched_ns[bucket] = now_ns - self._base_ns
        look = self._look
        if look is None:
            return
        look.marks.buckets[bucket].launch_ns = now_ns - self._base_ns
        # Issuing takes this thread's time too: with few cores, much of it goes to those that it wakes.
        look.packing_ns[bucket] += returned_ns - now_ns
        if look.device is not None:
            look.device.mark((bucket, "launch_ns"))
            if watched is None:
                look.device.mark((bucket, "done_ns"))
            elif self.watches:
                look.device.watch(bucket, watched, communicator)
        elif watched is None:
            look.marks.buckets[bucket].done_ns = now_ns - self._base_ns
        else:
            _tell(watched, look.marks, bucket, self._base_ns)

    def backward_ended(self) -> None:
        """The last gradient is there, and all buckets have been launched."""
        if self._look is not None:
            self._look.marks.backward_end_ns = time.perf_counter_ns() - self._base_ns
            if self._look.device is not None:
                self._look.device.mark("backward_end_ns")

    def unpack(self, bucket: int) -> None:
        """A bucket is about to be waited for and unpacked, on CUDA by the current stream."""
        if self._look is not None:
            self._look.marks.buckets[bucket].unpack_ns = time.perf_counter_ns() - self._base_ns
            if self._look.device is not None:
                self._look.device.mark((bucket, "unpack_ns"))

    def unpacked(self, bucket: int) -> None:
        """A bucket has been unpacked, or that was enqueued on the current stream."""
        if self._look is None:
            return
        if self._look.device is not None:
            self._look.device.mark((bucket, "end_ns"))
        marks = self._look.marks.buckets[bucket]
        marks.end_ns = time.perf_counter_ns() - self._base_ns
        # A collective's callback has run before its wait returns; where it ended unseen, nothing is known.
        marks.done_ns = min(marks.done_ns, marks.end_ns)
        marks.unpack_ns = max(marks.unpack_ns, marks.done_ns)

    def taken(self) -> Looked | None:
        """The step that has ended, if it was looked at closely; once."""
        look, self._look = self._look, None
        return look


def _tell(watched: Watched, marks: StepMarks, bucket: int, base_ns: int) -> None:
    """Has the end of a collective noted. What is called then holds the marks alone: no group, no tensor."""

    def done(_: object = None) -> None:
        marks.buckets[bucket].done_ns = time.perf_counter_ns() - base_ns

    if isinstance(watched, torch._C.Future):
        watched.add_done_callback(done)
    else:
        watched.notify(done)
