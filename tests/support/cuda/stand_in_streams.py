"""Stand-ins for CUDA's streams, under which gradients on CPU are accumulated on several of them, as on a GPU.

An AccumulateGrad node has the stream that was current when it was made, and autograd makes that current for it. What
is computed on a stream that sleeps is there when another stream has waited for it: until then it is NaN. Whatever else
is done is done at once; a kernel of ours is behind what its own stream has to do before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, TypeVar

import pytest
import torch
from torch.autograd import Variable
from torch.autograd.graph import Node

from fusedreduce.buckets import streams
from support import raw_calls
from support.inside import ACCUMULATOR_OF, STREAMS_OF_BUCKETS

T = TypeVar("T")
CUDA = torch.device("cuda", 0)
_STREAM = "stand-in stream"


class Stream:
    """What it has yet to do."""

    def __init__(self) -> None:
        self.cuda_stream = id(self)
        self.device = CUDA
        self.sleeps = False
        self.queue: list[Callable[[], object]] = []

    def wait_stream(self, other: Stream) -> None:
        other.run()

    def wait_event(self, event: Event) -> None:
        if event.stream is not None:
            event.stream.run()

    def run(self) -> None:
        """Does it."""
        self.sleeps = False
        queue, self.queue = self.queue, []
        for call in queue:
            call()


class Event:
    """Where it was recorded."""

    stream: Stream | None = None

    def record(self, stream: Stream | None = None) -> None:
        self.stream = stream

    def query(self) -> bool:
        return True


@contextmanager
def within(stack: list[T], stream: T) -> Iterator[None]:
    """Within: the stream is the last of the stack, which is the current one."""
    stack.append(stream)
    try:
        yield
    finally:
        stack.pop()


@contextmanager
def stand_in_streams() -> Iterator[None]:
    """Within: torch.cuda has them, and a reduction takes the ways that it takes on CUDA."""
    stack = [Stream()]
    made: list[Stream] = []

    def make(device: torch.device = CUDA) -> Stream:
        made.append(Stream())
        return made[-1]

    def sleep(cycles: int) -> None:
        stack[-1].sleeps |= cycles > 0

    def synchronize(device: torch.device) -> None:
        for stream in made:
            stream.run()

    def view_as(self: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        """Torch's; a leaf's node that it has made remembers the current stream."""
        view = torch_view_as(self, other)
        if self.is_leaf and view.grad_fn is not None:
            notes_of(view.grad_fn.next_functions[0][0]).setdefault(_STREAM, stack[-1])
        return view

    def accumulator(parameter: torch.Tensor) -> Node:
        """Ours; when autograd comes to that node it makes the node's stream current."""
        node: Node = our_accumulator(parameter)
        node.register_prehook(lambda gradients: enter(node, parameter, gradients[0]))
        return node

    def enter(node: Node, parameter: torch.Tensor, gradient: torch.Tensor) -> tuple[torch.Tensor] | None:
        stream: Any = notes_of(node)[_STREAM]
        del stack[1:]
        stack.append(stream)
        Variable._execution_engine.queue_callback(leave)
        if not stream.sleeps:
            return None

        def come() -> None:
            assert parameter.grad is not None
            parameter.grad.detach().copy_(gradient)

        stream.queue.append(come)
        return (torch.full_like(gradient, float("nan")),)

    def leave() -> None:
        del stack[1:]

    def packing(pack: Callable[..., None]) -> Callable[..., None]:
        def run_and_pack(*arguments: Any) -> None:
            stack[-1].run()
            pack(*arguments)

        return run_and_pack

    torch_view_as, our_accumulator = torch.Tensor.view_as, ACCUMULATOR_OF.present
    with pytest.MonkeyPatch.context() as patch:
        for name, stand_in in (
            ("Stream", make),
            ("Event", Event),
            ("stream", partial(within, stack)),
            ("current_stream", lambda *_: stack[-1]),
            ("_sleep", sleep),
            ("synchronize", synchronize),
            ("device", lambda *_: nullcontext()),
            ("is_current_stream_capturing", lambda: False),
        ):
            patch.setattr(torch.cuda, name, stand_in)
        patch.setattr(torch.Tensor, "view_as", view_as)
        ACCUMULATOR_OF.replace(patch, accumulator)
        raw_calls.wrap(patch, "pack", packing)
        STREAMS_OF_BUCKETS.replace(patch, lambda buckets, _device: streams.Streams(buckets))
        yield


def notes_of(node: Any) -> dict[str, object]:
    """What lives as long as the node."""
    notes: dict[str, object] = node.metadata
    return notes
