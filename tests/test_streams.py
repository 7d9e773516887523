"""Streams, with stand-ins for CUDA's: who waits for whom, and when."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from fusedreduce.streams import Streams

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


@pytest.fixture
def current(monkeypatch: pytest.MonkeyPatch) -> list[FakeStream]:
    """The stack of current streams; its last is current."""
    stack = [FakeStream()]

    @contextmanager
    def use(stream: FakeStream) -> Iterator[None]:
        stack.append(stream)
        try:
            yield
        finally:
            stack.pop()

    monkeypatch.setattr(torch.cuda, "current_stream", lambda _device: stack[-1])
    monkeypatch.setattr(torch.cuda, "Stream", FakeStream)
    monkeypatch.setattr(torch.cuda, "stream", use)
    return stack


def test_pack_waits_for_every_other_stream_that_made_a_gradient(current: list[FakeStream]) -> None:
    streams, backward = Streams(2, DEVICE), current[0]
    one, two, elsewhere = FakeStream(), FakeStream(), FakeStream(torch.device("cuda", 1))
    for stream in (backward, one, two, one, elsewhere):
        current.append(stream)
        streams.record(0, DEVICE)
        current.pop()
    streams.wait_for_gradients(0, DEVICE)
    assert backward.waited_for == [one, two]
    streams.wait_for_gradients(1, DEVICE)
    assert backward.waited_for == [one, two], "nothing was recorded for the other bucket"


def test_the_outer_stream_waits_for_the_side_stream_also_when_unpack_raises(current: list[FakeStream]) -> None:
    streams, backward = Streams(1, DEVICE), current[0]
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


def test_nothing_happens_on_a_cpu() -> None:
    streams = Streams(1, torch.device("cpu"))
    streams.wait_for_gradients(0, torch.device("cpu"))
    with streams.beside(torch.device("cpu")), streams.on(torch.device("cpu")):
        assert not streams.on_cuda


def test_what_reads_all_packs_waits_for_those_on_other_streams_once(current: list[FakeStream]) -> None:
    streams, backward, other = Streams(2, DEVICE), current[0], FakeStream()
    for stream in (backward, other, other):
        current.append(stream)
        streams.packed(DEVICE)
        current.pop()
    streams.wait_for_packs()
    assert backward.waited_for == [other]
    streams.wait_for_packs()
    assert backward.waited_for == [other]


def test_nodes_are_made_anew_on_the_one_stream_that_a_buckets_had(current: list[FakeStream]) -> None:
    streams, other = Streams(3, DEVICE), FakeStream()
    for bucket, stream in [(0, other), (0, other), (1, other), (1, current[0])]:
        current.append(stream)
        streams.record(bucket, DEVICE)
        current.pop()
    assert streams.of_nodes(0) is None, "some may be missing yet"
    streams.settle()
    within = streams.of_nodes(0)
    assert within is not None
    with within:
        assert current[-1] is other
    assert streams.of_nodes(1) is None and streams.of_nodes(2) is None
    on_cpu = Streams(1, torch.device("cpu")).of_nodes(0)
    assert on_cpu is not None
