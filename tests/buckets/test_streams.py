"""Streams, with stand-ins for CUDA's: who waits for whom, and when."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from support.cuda.stand_in_streams import within
from support.inside import GRADIENT_IS_READY, STREAMS_OF_BUCKETS, WAITS_FOR_GRADIENTS
from support.leaf_steps import clear, given
from support.loopback import Loopback

from fusedreduce import Reducer
from fusedreduce.buckets.streams import Streams, streams_of
from fusedreduce.comm.group import Group
from fusedreduce.kernels import current_stream as module_of_current_stream
from fusedreduce.kernels.current_stream import current_stream
from fusedreduce.planning.bucketing import BucketCaps
from fusedreduce.planning.plan import ParameterKind, Plan
from fusedreduce.planning.schedule import REPORTS, Model
from fusedreduce.reducer.scheduler import Scheduler

DEVICE = torch.device("cuda", 0)


class FakeStream:
    """A stream that writes down whom it waits for."""

    made = 0

    def __init__(self, device: torch.device = DEVICE) -> None:
        FakeStream.made += 1
        self.cuda_stream = FakeStream.made
        self.device = device
        self.waited_for: list[FakeStream] = []

    def wait_stream(self, other: FakeStream) -> None:
        self.waited_for.append(other)

    def wait_event(self, event: FakeEvent) -> None:
        assert event.stream is not None, "an event that was never recorded is no event"
        self.waited_for.append(event.stream)


class FakeEvent:
    """An event that knows where it was recorded."""

    def __init__(self) -> None:
        self.stream: FakeStream | None = None

    def record(self, stream: FakeStream | None = None) -> None:
        current: Any = torch.cuda.current_stream(DEVICE)
        self.stream = stream or current

    def query(self) -> bool:
        return True


@pytest.fixture
def current(monkeypatch: pytest.MonkeyPatch) -> list[FakeStream]:
    """The stack of current streams; its last is current."""
    stack = [FakeStream()]
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _device: stack[-1])
    monkeypatch.setattr(torch.cuda, "Stream", FakeStream)
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "stream", partial(within, stack))
    return stack


def test_pack_waits_for_every_other_stream_that_made_a_gradient(current: list[FakeStream]) -> None:
    streams, backward = Streams([0] * 4 + [1]), current[0]
    one, two, elsewhere = FakeStream(), FakeStream(), FakeStream(torch.device("cuda", 1))
    for parameter, stream in enumerate((backward, one, two, elsewhere)):
        current.append(stream)
        streams.record(parameter, DEVICE)
        current.pop()
    streams.wait_for_gradients(0, DEVICE)
    assert backward.waited_for == [one, two]
    streams.wait_for_gradients(1, DEVICE)
    assert backward.waited_for == [one, two], "nothing was recorded for the other bucket"


def test_the_outer_stream_waits_for_the_side_stream_also_when_unpack_raises(current: list[FakeStream]) -> None:
    streams, backward = Streams([0]), current[0]
    sides: list[Any] = []
    for fails in (False, True):
        try:
            with streams.beside(DEVICE):
                sides.append(current[-1])
                assert sides[-1] is not backward and backward.waited_for == sides[:-1]
                if fails:
                    raise MemoryError
        except MemoryError:
            assert fails
        assert backward.waited_for == sides and current == [backward]
    assert sides[0] is sides[1], "one side stream per device"


def test_a_buckets_event_says_that_it_is_written_until_its_next_step_is(current: list[FakeStream]) -> None:
    """The stall monitor asks that of the last step until it is told of the next."""
    streams = Streams([0, 1])
    with streams.beside(DEVICE) as written:
        first, other, side = written(0), written(1), current[-1]
        assert first is not other
    with streams.beside(DEVICE) as written:
        second = written(0)
    assert second is not first
    for event in (first, other, second):
        assert event.stream is side is not current[0]  # type: ignore[attr-defined]


def test_a_step_waits_for_the_side_stream_once(current: list[FakeStream]) -> None:
    """Of all its buckets: the side stream waits for what came before them, the outer one for the last."""
    streams, backward = Streams([0, 1, 2]), current[0]
    with streams.beside(DEVICE) as written:
        side = current[-1]
        for bucket in range(3):
            written(bucket)
    assert (side.waited_for, backward.waited_for) == ([backward], [side])


def test_an_event_stays_on_the_device_of_its_first_record(current: list[FakeStream]) -> None:
    """A step in flight is written in the buckets of its own plan: one of the same index may be on another device."""
    streams, other = Streams([0]), torch.device("cuda", 1)
    seen = []
    for device in (DEVICE, other, DEVICE, other):
        with streams.beside(device) as written:
            seen.append(written(0))
    assert not {id(one) for one in seen[::2]} & {id(one) for one in seen[1::2]}


def test_the_current_stream_is_the_one_of_its_handle(monkeypatch: pytest.MonkeyPatch) -> None:
    """On each device, whatever was current before; torch is asked for an object once for each stream."""
    handles, asked = {0: 0, 1: 0}, list[tuple[int, int]]()

    def of_torch(device: torch.device) -> tuple[int, int]:
        asked.append((device.index, handles[device.index]))
        return asked[-1]

    monkeypatch.setattr(torch.cuda, "current_stream", of_torch)
    monkeypatch.setattr(module_of_current_stream, "raw_stream", handles.__getitem__)
    monkeypatch.setattr(module_of_current_stream, "_streams", {})
    for index, handle in ((0, 0), (0, 7), (1, 7), (0, 0), (1, 0), (0, 7), (1, 7)):
        handles[index] = handle
        assert current_stream(torch.device("cuda", index)) == (index, handle)
    assert len(asked) == len(set(asked)) == 4


def test_there_are_none_on_a_cpu() -> None:
    assert streams_of([0], torch.device("cpu")) is None
    assert isinstance(streams_of([0], DEVICE), Streams)


def test_what_reads_all_packs_waits_for_those_on_other_streams_once(
    current: list[FakeStream], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    streams, backward, other = Streams([0, 1]), current[0], FakeStream()
    for stream in (backward, other, other):
        current.append(stream)
        streams.wait_for_gradients(0, DEVICE)
        current.pop()
    streams.wait_for_packs()
    assert backward.waited_for == [other]
    streams.wait_for_packs()
    assert backward.waited_for == [other]


def test_what_ranks_agree_on_is_read_behind_the_stream_that_waited_for_it(
    current: list[FakeStream], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The forward that reads it may run on another stream than the one that backward was called on."""
    model = Model(
        kinds=[ParameterKind(4, 0, 0)],
        wire_bytes=[4],
        caps=BucketCaps(),
        cap_policy="c10d",
        share=False,
        policy="ready",
        link=None,
        least_bytes=0,
    )
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    monkeypatch.setattr(torch.Tensor, "to", lambda tensor, *_, **__: tensor)
    tolist, read_on = torch.Tensor.tolist, list[tuple[FakeStream, list[FakeStream]]]()

    def read(tensor: torch.Tensor) -> Any:
        read_on.append((current[-1], list(current[-1].waited_for)))
        return tolist(tensor)

    plan: Plan = ((0,),)
    scheduler = Scheduler(model, 0, Group(Loopback()), DEVICE)
    scheduler.readiness.add([1], [])
    for _ in range(REPORTS[0]):
        scheduler.close_round(None)
    assert scheduler.decide(plan) == plan, "it prepares the numbers"
    backward, forward = current[0], FakeStream()
    for collective in ("the report", "the comparison"):
        assert scheduler.report() == 1, collective
        scheduler.complete()
        scheduler.close_round(None)
        current.append(forward)
        with monkeypatch.context() as patched:
            patched.setattr(torch.Tensor, "tolist", read)
            plan = scheduler.decide(plan)
        current.pop()
        assert read_on.pop() == (forward, [backward]), collective
        assert not read_on
        forward.waited_for.clear()


@pytest.mark.parametrize("from_step", [0, 1, 4])
def test_a_parameter_first_used_in_a_later_step_has_its_stream_waited_for(
    from_step: int, current: list[FakeStream], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With find_unused_parameters a plan's first step need not show every gradient."""
    backward, other = current[0], FakeStream()
    on_accumulated, wait = GRADIENT_IS_READY.present, WAITS_FOR_GRADIENTS.present
    waited: list[list[FakeStream]] = []

    def accumulated(engine: Any, index: int, *others: object) -> None:
        if index == 1:
            current.append(other)
        on_accumulated(engine, index, *others)
        if index == 1:
            current.pop()

    def waits(streams: Streams, bucket: int, _: torch.device) -> None:
        backward.waited_for.clear()
        wait(streams, bucket, DEVICE)
        waited.append(list(backward.waited_for))

    GRADIENT_IS_READY.replace(monkeypatch, accumulated)
    WAITS_FOR_GRADIENTS.replace(monkeypatch, waits)
    STREAMS_OF_BUCKETS.replace(monkeypatch, lambda bucket_of, _: Streams(bucket_of))
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    parameters = [torch.zeros(3, requires_grad=True) for _ in range(2)]
    with Reducer(parameters, Loopback(), find_unused_parameters=True) as reducer:
        for step in range(6):
            clear(parameters)
            both = step >= from_step
            loss = given(parameters, [torch.ones(3), torch.ones(3) if both else None], [1, 0])
            reducer.prepare_for_backward(loss)
            loss.backward()
    assert waited == [[]] * from_step + [[other]] * (6 - from_step)
