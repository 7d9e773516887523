"""StepClock and DeviceClock: whose time is counted where. CUDA's events are stood in for, on a clock of their own."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from loopback import Loopback

from fusedreduce.planning.channel import Seen
from fusedreduce.planning.timeline import MISSING_NS
from fusedreduce.step_clock import StepClock
from fusedreduce.trace import StepMarks, stall_ns

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


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The host clock, in ns; tests move it."""
    clock = [1_000_000]
    monkeypatch.setattr(time, "perf_counter_ns", lambda: clock[0])
    return clock


def test_a_step_that_nobody_looks_at_closely_knows_its_buckets_only(now: list[int]) -> None:
    clock = StepClock(2, CPU)
    clock.arm(2, closely=False, forward_ns=0)
    now[0] += 100
    clock.begin()
    for bucket in (0, 1):
        now[0] += 10
        clock.enter()
        clock.arrive(bucket)
        clock.bucket_ready(bucket)
        clock.pack(bucket)
        now[0] += 5
        clock.launched(bucket, Collective(), None, Loopback())
        clock.leave()
    assert clock.ready_ns == [10, 25] and clock.launched_ns == [15, 30]
    assert clock.arrived_ns == [110, 125], "torch counts from the end of forward"
    assert clock.looks is None and clock.taken() is None


def test_what_we_do_on_autograds_thread_does_not_count_as_backward(now: list[int]) -> None:
    clock = StepClock(3, CPU)
    clock.arm(2, closely=True, forward_ns=7)
    now[0] += 50
    clock.begin()
    collectives = [Collective(), Collective()]
    for index in (2, 1, 0):
        now[0] += 100  # backward
        clock.enter()
        clock.arrive(index)
        bucket = 0 if index else 1
        if index != 2:
            clock.bucket_ready(bucket)
            clock.pack(bucket)
            now[0] += 30  # packing
            clock.launched(bucket, collectives[bucket], now[0], Loopback())
        now[0] += 3  # the rest of a hook
        clock.leave()
    clock.backward_ended()
    now[0] += 40
    for bucket in (0, 1):
        clock.unpack(bucket)
        now[0] += 10
        collectives[bucket].end()
        now[0] += 20
        clock.unpacked(bucket)
    look = clock.taken()
    assert look is not None and clock.taken() is None
    assert look.ready_ns == [300, 200, 100], "as if there were no reducer"
    first, second = look.marks.buckets
    assert (first.ready_ns, first.pack_ns, first.launch_ns) == (203, 203, 233)
    assert look.marks.backward_end_ns == 369 and look.marks.forward_ns == 7
    assert (first.done_ns, first.unpack_ns, first.end_ns) == (419, 419, 439), "unpacking begins when there is something"
    times = look.times()
    assert [one and one.pack_ns for one in times.buckets] == [30, 30]
    assert [one and one.unpack_ns for one in times.buckets] == [20, 20]
    assert times.backward_ns == 369 and times.probe_ns is None
    assert second.end_ns == 469


def test_a_collective_whose_end_nobody_told_tells_nothing(now: list[int]) -> None:
    clock = StepClock(1, CPU)
    clock.arm(1, closely=True, forward_ns=MISSING_NS)
    clock.enter()
    clock.arrive(0)
    clock.bucket_ready(0)
    clock.pack(0)
    clock.launched(0, Collective(), None, Loopback())
    clock.backward_ended()
    clock.unpack(0)
    clock.unpacked(0)
    look = clock.taken()
    assert look is not None and look.times().buckets == [None]


def test_a_bucket_that_issues_nothing_ends_as_it_begins(now: list[int]) -> None:
    # Of a sparse gradient that no rank has ever had: others of the step are to be learned from all the same.
    clock = StepClock(1, CPU)
    clock.arm(2, closely=True, forward_ns=0)
    clock.begin()
    for bucket, collective in enumerate((Collective(), None)):
        now[0] += 100
        clock.pack(bucket)
        now[0] += 10
        clock.launched(bucket, collective, None, Loopback())
        if collective is not None:
            now[0] += 40
            collective.end()
    for bucket in (0, 1):
        clock.unpack(bucket)
        clock.unpacked(bucket)
    looked = clock.taken()
    assert looked is not None and [one.done_ns for one in looked.marks.buckets] == [150, 260]
    rows = looked.times().buckets
    assert [None if row is None else row.wire for row in rows] == [Seen(150 - 110, 0), Seen(260 - 110, 150 - 260)]


def test_the_probe_is_timed_from_its_issue(now: list[int]) -> None:
    clock, probe = StepClock(1, CPU), Collective()
    clock.arm(1, closely=True, forward_ns=MISSING_NS)
    look = clock.looks
    assert look is not None
    look.probe_begins()
    now[0] += 3
    look.probe_began(probe, Loopback())
    now[0] += 4
    probe.end()
    assert look.times().probe_ns == 7


def test_stall_is_the_union_of_what_waited() -> None:
    marks = StepMarks(4, 0)
    for bucket, (ready, pack) in zip(marks.buckets, [(50, 50), (10, 51), (20, 60), (70, 75)], strict=True):
        bucket.ready_ns, bucket.pack_ns = ready, pack
    assert stall_ns(marks.buckets) == 40, "from 10 to 50: then the first was ready, and what followed was our packing"
    marks.buckets[1].ready_ns = MISSING_NS
    assert stall_ns(marks.buckets) == 30


class Event:
    """A timing event on streams that are counters: it holds where its stream stood."""

    streams: list[str] = ["main"]
    at_ms: dict[str, float] = {}

    def __init__(self, enable_timing: bool = False) -> None:
        assert enable_timing
        self.time_ms = -1.0

    def record(self, stream: object) -> None:
        self.time_ms = Event.at_ms[Event.streams[-1]]

    def synchronize(self) -> None:
        """Host and device are one here."""

    def elapsed_time(self, later: Event) -> float:
        return later.time_ms - self.time_ms


def test_on_a_device_times_are_those_of_its_streams(monkeypatch: pytest.MonkeyPatch, now: list[int]) -> None:
    Event.streams, Event.at_ms = ["main"], {"main": 5.0, "watch": 0.0}

    @contextmanager
    def stream(one: str) -> Iterator[None]:
        Event.streams.append(one)
        yield
        Event.streams.pop()

    fakes: dict[str, Any] = {
        "Event": Event,
        "Stream": lambda device: "watch",
        "stream": stream,
        "current_stream": lambda device: Event.streams[-1],
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)

    class Enqueued(Collective):
        def wait(self) -> None:
            assert Event.streams[-1] == "watch", "only a stream of its own may wait before the end of backward"
            Event.at_ms["watch"] = 5.0 + 9.0

    clock = StepClock(2, torch.device("cuda", 0))
    clock.arm(1, closely=True, forward_ns=MISSING_NS)
    clock.begin()
    for index in (1, 0):
        now[0] += 1000  # the host is far ahead
        Event.at_ms["main"] += 2.0
        clock.enter()
        clock.arrive(index)
        clock.leave()
    clock.bucket_ready(0)
    clock.pack(0)
    Event.at_ms["main"] += 0.5
    clock.launched(0, Enqueued(), None, Loopback())
    clock.backward_ended()
    clock.unpack(0)
    Event.at_ms["main"] = 5.0 + 11.0
    clock.unpacked(0)
    look = clock.taken()
    assert look is not None
    assert look.ready_ns == [2000, 1000], "the host's, kept apart"
    assert look.device_ready_ns() == [4_000_000, 2_000_000]
    (bucket,) = look.finest().buckets
    assert (bucket.pack_ns, bucket.launch_ns, bucket.done_ns) == (4_000_000, 4_500_000, 9_000_000)
    assert (bucket.unpack_ns, bucket.end_ns) == (9_000_000, 11_000_000)
    (times,) = look.times().buckets
    assert times is not None
    assert (times.wire.since_first_ns, times.pack_ns, times.unpack_ns) == (4_500_000, 500_000, 2_000_000)


def test_packing_on_the_device_is_taken_out_of_later_gradients_times(monkeypatch: pytest.MonkeyPatch) -> None:
    Event.streams, Event.at_ms = ["main"], {"main": 0.0, "watch": 1.0}
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "main")
    clock = StepClock(2, torch.device("cuda", 0))
    clock.arm(2, closely=True, forward_ns=MISSING_NS)
    clock.begin()
    for index in (1, 0):
        Event.at_ms["main"] += 3.0
        clock.enter()
        clock.arrive(index)
        clock.bucket_ready(1 - index)
        clock.pack(1 - index)
        Event.at_ms["main"] += 1.0
        clock.launched(1 - index, None, None, Loopback())
        clock.leave()
    look = clock.taken()
    assert look is not None and look.device_ready_ns() == [6_000_000, 3_000_000]


def test_gradients_on_several_devices_have_host_times_only(now: list[int]) -> None:
    clock = StepClock(2, None)
    clock.arm(1, closely=True, forward_ns=MISSING_NS)
    clock.enter()
    clock.arrive(0)
    look = clock.taken()
    assert look is not None and look.device is None and look.device_ready_ns() == []
    assert look.ready_ns == [0, MISSING_NS]
