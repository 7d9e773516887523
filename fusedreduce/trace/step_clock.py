"""StepClock: the times of a step on this rank.

Every step records when each bucket was ready and when it was launched. A profiled step (for the schedule, or a trace)
also records when each bucket was packed, when its collective ended and when it was unpacked, and when each gradient
would have been ready without our own packing, which runs on the thread that computes the next gradients.

Times are of the host's clock. On CUDA the host only enqueues, so a profiled step also records timing events on the
streams that do the work; they are read after the step. Gradients on several devices have host times only, because
events of two devices cannot be compared.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import torch

from ..comm.protocol import Pending, Ranks
from ..planning.link_timing import collective_times
from ..planning.schedule import BucketTimes, StepTimes
from ..planning.timeline import MISSING_NS
from .device_clock import DeviceClock, Watched
from .recorder import StepMarks, stall_ns


@dataclass
class StepProfile:
    """The times of one profiled step.

    Args:
        marks: per bucket, host clock.
        ready_ns: per parameter since backward began, without our own packing; MISSING_NS: it had no gradient.
        packing_ns: per bucket, host time spent on packing parts of it ahead, and on issuing its collective.
        device: timing events; None on CPU.
        watches: see `StepClock`.
        probe_ns: when the probe, a small collective, was issued, and when it ended.
    """

    marks: StepMarks
    ready_ns: list[int]
    packing_ns: list[int]
    device: DeviceClock | None = None
    watches: bool = True
    probe_ns: list[int] = field(default_factory=list)

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

    def probe_issuing(self) -> None:
        """The probe, a small collective whose latency is measured, is about to be issued."""
        self.probe_ns = [time.perf_counter_ns()]
        if self.device is not None:
            self.device.mark("probe")

    def probe_issued(self, pending: Pending, communicator: Ranks) -> None:
        """The probe has been issued."""
        if self.device is not None:
            if self.watches:
                self.device.watch("probe", pending, communicator)
        else:
            times_ns = self.probe_ns
            pending.notify(lambda: times_ns.append(time.perf_counter_ns()))

    def device_ready_times_ns(self) -> list[int]:
        """Returns per parameter when it was ready on the device, in ns; empty where there are no events."""
        return [] if self.device is None else self.device.ready_ns(len(self.ready_ns), self.best_marks())


class StepClock:
    """Times of a reducer's steps.

    Args:
        parameters: how many.
        device: where they live; None: on several.

    Attributes:
        watches: on CUDA, the end of a collective may be waited for on a stream of its own. Not where ranks share an
            autograd thread, which would block until the other ranks have issued the collective.
        arrived_ns: per parameter, when its gradient was ready in the latest step, since forward ended, as torch has it.
        ready_ns: per bucket, when it was ready, since backward began.
        launched_ns: per bucket, when it was launched, since backward began.
    """

    def __init__(self, parameters: int, device: torch.device | None) -> None:
        self._count = parameters
        self._device = device
        self._base_ns = 0
        self._armed_ns = 0
        self._entered_ns = 0
        self._own_ns = 0
        self._profile: StepProfile | None = None
        self.watches = True
        self.arrived_ns = [0] * parameters
        self.ready_ns: list[int] = []
        self.launched_ns: list[int] = []

    def arm(self, buckets: int, *, profiled: bool, forward_ns: int) -> None:
        """Forward has ended: clears the times of the last step.

        Args:
            buckets: how many the plan has.
            profiled: whether the step is profiled.
            forward_ns: when forward began, time.perf_counter_ns().
        """
        self.ready_ns = [MISSING_NS] * buckets
        self.launched_ns = [MISSING_NS] * buckets
        self._armed_ns = self._base_ns = time.perf_counter_ns()
        self._own_ns = 0
        self._profile = None
        if profiled:
            marks = StepMarks(buckets, self._base_ns)
            marks.forward_ns = forward_ns
            on_cuda = self._device is not None and self._device.type == "cuda"
            device = DeviceClock(self._device) if self._device is not None and on_cuda else None
            if device is not None:
                device.mark_base()
            self._profile = StepProfile(marks, [MISSING_NS] * self._count, [0] * buckets, device, self.watches)

    def backward_began(self) -> None:
        """Backward begins now. Without this call, times count from the end of forward."""
        self._base_ns = time.perf_counter_ns()
        if self._profile is not None:
            self._profile.marks.began_ns = self._base_ns
            if self._profile.device is not None:
                self._profile.device.mark_base()

    @property
    def profile(self) -> StepProfile | None:
        """The profile of the step that runs; None if it is not profiled."""
        return self._profile

    def enter(self) -> None:
        """Autograd has called a hook: gradients of this call are ready now. Until `leave` its thread runs our code."""
        self._entered_ns = time.perf_counter_ns()

    def leave(self) -> None:
        """The hook returns to autograd."""
        self._own_ns += time.perf_counter_ns() - self._entered_ns

    def gradient_ready(self, index: int) -> None:
        """A parameter's gradient is ready, as of `enter`, so that times keep the order in which gradients came."""
        now_ns = self._entered_ns
        self.arrived_ns[index] = now_ns - self._armed_ns
        profile = self._profile
        if profile is not None:
            profile.ready_ns[index] = max(now_ns - self._base_ns - self._own_ns, 0)
            if profile.device is not None:
                profile.device.mark(index)

    def is_gradient_ready(self, index: int) -> bool:
        """Returns whether a parameter's gradient was ready in this step; False if it is not profiled."""
        return self._profile is not None and self._profile.ready_ns[index] != MISSING_NS

    def bucket_ready(self, bucket: int) -> None:
        """A bucket's last gradient is ready."""
        now_ns = time.perf_counter_ns() - self._base_ns
        self.ready_ns[bucket] = now_ns
        if self._profile is not None:
            self._profile.marks.buckets[bucket].ready_ns = now_ns

    def pack(self, bucket: int) -> None:
        """A bucket's packing begins."""
        if self._profile is not None:
            self._profile.marks.buckets[bucket].pack_ns = time.perf_counter_ns() - self._base_ns
            if self._profile.device is not None:
                self._profile.device.mark((bucket, "pack_ns"))

    def packed_part(self, bucket: int, began_ns: int) -> None:
        """A part of a bucket has been packed ahead of its launch.

        Args:
            bucket: which.
            began_ns: when that began, time.perf_counter_ns().
        """
        if self._profile is not None:
            self._profile.packing_ns[bucket] += time.perf_counter_ns() - began_ns

    def launched(self, bucket: int, watched: Watched | None, issued_ns: int | None, communicator: Ranks) -> None:
        """A bucket's collective has been issued.

        Args:
            bucket: which.
            watched: the collective; None: there was nothing to issue.
            issued_ns: time.perf_counter_ns() when it was issued; None: now.
            communicator: that issued it.
        """
        returned_ns = time.perf_counter_ns()
        now_ns = issued_ns or returned_ns
        self.launched_ns[bucket] = now_ns - self._base_ns
        profile = self._profile
        if profile is None:
            return
        profile.marks.buckets[bucket].launch_ns = now_ns - self._base_ns
        # Issuing takes this thread's time too; with few cores, much of it goes to the threads that it wakes.
        profile.packing_ns[bucket] += returned_ns - now_ns
        if profile.device is not None:
            profile.device.mark((bucket, "launch_ns"))
            if watched is None:
                profile.device.mark((bucket, "done_ns"))
            elif self.watches:
                profile.device.watch(bucket, watched, communicator)
        elif watched is None:
            profile.marks.buckets[bucket].done_ns = now_ns - self._base_ns
        else:
            _record_end(watched, profile.marks, bucket, self._base_ns)

    def backward_ended(self) -> None:
        """The last gradient is ready, and all buckets have been launched."""
        if self._profile is not None:
            self._profile.marks.backward_end_ns = time.perf_counter_ns() - self._base_ns
            if self._profile.device is not None:
                self._profile.device.mark("backward_end_ns")

    def unpack(self, bucket: int) -> None:
        """A bucket is about to be waited for and unpacked, on CUDA on the current stream."""
        if self._profile is not None:
            self._profile.marks.buckets[bucket].unpack_ns = time.perf_counter_ns() - self._base_ns
            if self._profile.device is not None:
                self._profile.device.mark((bucket, "unpack_ns"))

    def unpacked(self, bucket: int) -> None:
        """A bucket has been unpacked, or on CUDA that has been enqueued on the current stream."""
        if self._profile is None:
            return
        if self._profile.device is not None:
            self._profile.device.mark((bucket, "end_ns"))
        marks = self._profile.marks.buckets[bucket]
        marks.end_ns = time.perf_counter_ns() - self._base_ns
        # A collective's callback has run before its wait returns; where it ended unseen, nothing is known.
        marks.done_ns = min(marks.done_ns, marks.end_ns)
        marks.unpack_ns = max(marks.unpack_ns, marks.done_ns)

    def pop_profile(self) -> StepProfile | None:
        """Returns and removes the profile of the step that has ended; None if it was not profiled."""
        profile, self._profile = self._profile, None
        return profile


def _record_end(watched: Watched, marks: StepMarks, bucket: int, base_ns: int) -> None:
    """Has the end of a collective recorded, by a callback that references the marks only: no group, no tensor."""

    def done(_: object = None) -> None:
        marks.buckets[bucket].done_ns = time.perf_counter_ns() - base_ns

    if isinstance(watched, torch._C.Future):
        watched.add_done_callback(done)
    else:
        watched.notify(done)
