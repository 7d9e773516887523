"""StepProfile and DeviceClock: whose time is counted where. CUDA's events are stood in for, on a clock of their own."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch
from support.cuda.device_time import DEVICE, FakeGpu, FakeStream

from fusedreduce.planning.link_timing import CollectiveTimes
from fusedreduce.planning.timeline import MISSING_NS
from fusedreduce.trace.recorder import StepMarks, stall_ns
from fusedreduce.trace.step_profile import StepProfile

CPU = torch.device("cpu")


class Collective:
    """Ends when it is told to."""

    def __init__(self) -> None:
        self._told: list[Callable[[], None]] = []

    def notify(self, done: Callable[[], None]) -> None:
        self._told.append(done)

    def end(self) -> None:
        for done in self._told:
            done()

    def ready(self) -> bool:
        return True

    def wait(self) -> None:
        """Nothing to wait for."""

    def future(self) -> torch.futures.Future[list[torch.Tensor]]:
        raise AssertionError("not asked for")


def wait(collective: Collective) -> None:
    collective.wait()


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The host clock, in ns; tests move it."""
    clock = [1_000_000]
    monkeypatch.setattr(time, "perf_counter_ns", lambda: clock[0])
    return clock


def test_what_we_do_on_autograds_thread_does_not_count_as_backward(now: list[int]) -> None:
    """Whatever it is and wherever: each part takes another time."""
    look = StepProfile(3, 2, CPU, wait, forward_ns=7)
    now[0] += 50
    look.backward_began()
    collectives = [Collective(), Collective()]
    for index, backward_ns, hook_ns in ((2, 100, 3), (1, 130, 5), (0, 170, 9)):
        now[0] += backward_ns
        look.enter()
        look.gradient_ready(index)
        bucket = 0 if index else 1
        if index != 2:
            look.bucket_ready(bucket)
            look.pack(bucket)
            now[0] += (30, 47)[bucket]
            look.launched(bucket, collectives[bucket], now[0])
        now[0] += hook_ns  # the rest of it
        look.leave()
    look.backward_ended()
    now[0] += 40
    for bucket, (waits_ns, unpack_ns) in enumerate(((10, 20), (13, 26))):
        look.unpack(bucket)
        now[0] += waits_ns
        collectives[bucket].end()
        now[0] += unpack_ns
        look.unpacked(bucket)
    assert look.ready_ns == [400, 230, 100], "as if there were no reducer"
    first, second = look.marks.buckets
    assert (first.ready_ns, first.pack_ns, first.launch_ns) == (233, 233, 263)
    assert (second.ready_ns, second.pack_ns, second.launch_ns) == (438, 438, 485)
    assert look.marks.backward_end_ns == 494 and look.marks.forward_ns == 7
    assert (first.done_ns, first.unpack_ns, first.end_ns) == (544, 544, 564), "unpacking begins when there is something"
    assert (second.done_ns, second.unpack_ns, second.end_ns) == (577, 577, 603)
    times = look.step_times()
    assert [one and one.pack_ns for one in times.buckets] == [30, 47]
    assert [one and one.unpack_ns for one in times.buckets] == [20, 26]
    assert times.backward_ns == 494 and times.probe_ns is None


def test_what_we_did_in_one_step_does_not_count_in_the_next(now: list[int]) -> None:
    for step in range(3):
        look = StepProfile(1, 1, CPU)
        look.backward_began()
        now[0] += 100 + step  # backward
        look.enter()
        look.gradient_ready(0)
        now[0] += 1000 - step  # packing
        look.leave()
        assert look.ready_ns == [100 + step], step


def test_a_collective_whose_end_nobody_told_tells_nothing(now: list[int]) -> None:
    look = StepProfile(1, 1, CPU, wait)
    look.enter()
    look.gradient_ready(0)
    look.bucket_ready(0)
    look.pack(0)
    look.launched(0, Collective(), time.perf_counter_ns())
    look.backward_ended()
    look.unpack(0)
    look.unpacked(0)
    assert look.step_times().buckets == [None]


def test_a_bucket_that_issues_nothing_ends_as_it_begins(now: list[int]) -> None:
    # Of a sparse gradient that no rank has ever had: others of the step are to be learned from all the same.
    look = StepProfile(1, 2, CPU, wait, forward_ns=0)
    look.backward_began()
    for bucket, collective in enumerate((Collective(), None)):
        now[0] += 100
        look.pack(bucket)
        now[0] += 10
        look.launched(bucket, collective, time.perf_counter_ns())
        if collective is not None:
            now[0] += 40
            collective.end()
    for bucket in (0, 1):
        look.unpack(bucket)
        look.unpacked(bucket)
    assert [one.done_ns for one in look.marks.buckets] == [150, 260]
    rows = look.step_times().buckets
    assert [None if row is None else row.wire for row in rows] == [
        CollectiveTimes(150 - 110, 0),
        CollectiveTimes(260 - 110, 150 - 260),
    ]


def test_the_probe_is_timed_from_its_issue(now: list[int]) -> None:
    look, probe = StepProfile(1, 1, CPU), Collective()
    look.probe_issuing()
    now[0] += 3
    look.probe_issued(probe)
    now[0] += 4
    probe.end()
    assert look.step_times().probe_ns == 7


def test_stall_is_the_union_of_what_waited() -> None:
    marks = StepMarks(4, 0)
    for bucket, (ready, pack) in zip(marks.buckets, [(50, 50), (10, 51), (20, 60), (70, 75)], strict=True):
        bucket.ready_ns, bucket.pack_ns = ready, pack
    assert stall_ns(marks.buckets) == 40, "from 10 to 50: then the first was ready, and what followed was our packing"
    marks.buckets[1].ready_ns = MISSING_NS
    assert stall_ns(marks.buckets) == 30


class Enqueued(Collective):
    """Ends on a stream of its own, 300 ns behind what is enqueued now."""

    def __init__(self, gpu: FakeGpu, channel: FakeStream) -> None:
        super().__init__()
        self._gpu, self.waited = gpu, list[FakeStream]()
        channel.wait_stream(gpu.current)
        with gpu.on(channel):
            gpu.work(300)
        self._ends_ns = channel.now_ns

    def wait(self) -> None:
        self.waited.append(self._gpu.current)
        self._gpu.current.wait_until(self._ends_ns)


def test_on_a_device_times_are_those_of_its_streams(monkeypatch: pytest.MonkeyPatch, now: list[int]) -> None:
    gpu = FakeGpu(monkeypatch)
    gpu.work(5000)
    look = StepProfile(2, 1, DEVICE, wait)
    look.backward_began()
    for index, host_ns, device_ns in ((1, 1000, 2000), (0, 1400, 2600)):
        now[0] += host_ns  # far ahead
        gpu.work(device_ns)
        look.enter()
        look.gradient_ready(index)
        look.leave()
    look.bucket_ready(0)
    look.pack(0)
    gpu.work(100)
    pending = Enqueued(gpu, FakeStream())
    look.launched(0, pending, time.perf_counter_ns())
    assert pending.waited and gpu.current not in pending.waited, "backward must not wait for a collective"
    look.backward_ended()
    look.unpack(0)
    pending.wait()
    gpu.work(40)
    look.unpacked(0)
    assert look.ready_ns == [2400, 1000], "the host's, kept apart"
    assert look.device_ready_times_ns() == [4600, 2000]
    (bucket,) = look.best_marks().buckets
    assert (bucket.pack_ns, bucket.launch_ns, bucket.done_ns) == (4600, 4700, 5000)
    assert (bucket.unpack_ns, bucket.end_ns) == (5000, 5040)
    (times,) = look.step_times().buckets
    assert times is not None
    assert (times.wire.since_first_ns, times.pack_ns, times.unpack_ns) == (300, 100, 40)


def test_waiting_for_the_end_of_backward_is_no_unpacking(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two buckets whose collectives end during backward; and the second waits for the first one's unpacking."""
    gpu = FakeGpu(monkeypatch)
    side, channel = FakeStream(), FakeStream()
    look = StepProfile(2, 2, DEVICE, wait)
    look.backward_began()
    pending = []
    for bucket, (backward_ns, pack_ns) in enumerate(((2000, 100), (2500, 130))):
        gpu.work(backward_ns)
        look.enter()
        look.gradient_ready(1 - bucket)
        look.bucket_ready(bucket)
        look.pack(bucket)
        gpu.work(pack_ns)
        pending.append(Enqueued(gpu, channel))
        look.launched(bucket, pending[-1], time.perf_counter_ns())
        look.leave()
    gpu.work(5000)
    look.backward_ended()
    gpu.work(70)  # a user's hook, or what the reducer itself enqueues at the end of backward
    side.wait_stream(gpu.current)
    with gpu.on(side):
        for bucket, one in enumerate(pending):
            look.unpack(bucket)
            one.wait()
            gpu.work((40, 55)[bucket])
            look.unpacked(bucket)
    marks = look.best_marks()
    assert [one.done_ns for one in marks.buckets] == [2400, 5030] and marks.backward_end_ns == 9730
    assert [(one.unpack_ns, one.end_ns) for one in marks.buckets] == [(9800, 9840), (9840, 9895)]
    assert [one and (one.pack_ns, one.unpack_ns) for one in look.step_times().buckets] == [(100, 40), (130, 55)]


def test_packing_on_the_device_is_taken_out_of_later_gradients_times(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = FakeGpu(monkeypatch)
    look = StepProfile(2, 2, DEVICE, wait)
    look.backward_began()
    for index, backward_ns, pack_ns in ((1, 3000, 1000), (0, 3500, 400)):
        gpu.work(backward_ns)
        look.enter()
        look.gradient_ready(index)
        look.bucket_ready(1 - index)
        look.pack(1 - index)
        gpu.work(pack_ns)
        look.launched(1 - index, None, time.perf_counter_ns())
        look.leave()
    assert look.device_ready_times_ns() == [6500, 3000]


def test_issuing_takes_the_hosts_time_and_not_the_devices(monkeypatch: pytest.MonkeyPatch, now: list[int]) -> None:
    packed_ns = []
    for device in (CPU, DEVICE):
        gpu = FakeGpu(monkeypatch)
        look = StepProfile(1, 1, device, wait)
        look.enter()
        look.gradient_ready(0)
        look.bucket_ready(0)
        look.pack(0)
        gpu.work(100)
        now[0] += 30
        issued_ns = now[0]
        now[0] += 50
        collective = Enqueued(gpu, FakeStream())
        look.launched(0, collective, issued_ns)
        collective.end()
        look.unpack(0)
        look.unpacked(0)
        (times,) = look.step_times().buckets
        assert times is not None
        packed_ns.append(times.pack_ns)
    assert packed_ns == [30 + 50, 100]


def test_gradients_on_several_devices_have_host_times_only(now: list[int]) -> None:
    look = StepProfile(2, 1, None, wait)
    look.enter()
    look.gradient_ready(0)
    assert look.device is None and look.device_ready_times_ns() == []
    assert look.ready_ns == [0, MISSING_NS]
