"""What autograd's engine does with CUDA streams, done around a backward that runs on the CPU.

A node runs on the stream that was current when it was made, behind the nodes that give it gradients. When all are done,
the streams that the backward was called on wait for those of the leaves; then come the callbacks. torch's own
DistributedDataParallel waits there for the futures of its comm hook.
"""

from __future__ import annotations

import bisect
import contextlib
import functools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

import torch
from torch.autograd.graph import Node, get_gradient_edge

_MADE_ON = "order: the stream it was made on"


class Cuda(Protocol):
    """What is asked of CUDA here. A stream is current on a device, and one device is."""

    index: int

    def switch(self, stream: Any) -> None:
        """Makes a stream the current one of its device, and that device the current one."""
        ...

    def home_stream(self) -> Any:
        """The current stream of the device that the model is on."""
        ...

    def keep(self, tensor: torch.Tensor, stream: Any) -> None:
        """As Tensor.record_stream."""
        ...


class Backward:
    """Streams of the nodes of one backward after another.

    Args:
        cuda: that.
    """

    def __init__(self, cuda: Cuda) -> None:
        self._cuda = cuda
        self._switched: list[tuple[int, Any]] = []  # from which node on nodes are made on which stream
        self._caller: Any = None
        self._node: Node | None = None
        self._givers: dict[Node, list[Node]] = {}
        self._done: dict[Node, Any] = {}  # events, of nodes whose gradients another stream takes
        self._leaves: list[Any] = []
        self.futures: list[torch.futures.Future[Any]] = []
        self.runs = self._ended = self._calls_back = False
        self.inner = torch.autograd.Variable._execution_engine

    def switched(self) -> None:
        """Another stream is current than before."""
        self._switched.append((torch._C._autograd._get_sequence_nr(), self._cuda.home_stream()))

    def made(self, node: Node) -> Node:
        """An AccumulateGrad node, which has no number, has been made or seen."""
        node.metadata.setdefault(_MADE_ON, self._cuda.home_stream())  # type: ignore[attr-defined]
        return node

    # In the engine's place

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def run_backward(self, tensors: Iterable[torch.Tensor], *given: Any, **options: Any) -> Any:
        """Called by torch for every backward."""
        if self.runs:
            return self.inner.run_backward(tensors, *given, **options)
        with self._around([get_gradient_edge(one).node for one in tensors]):
            return self.inner.run_backward(tensors, *given, **options)

    def queue_callback(self, callback: Callable[[], None]) -> None:
        """Called by whoever wants to be told of the end of a backward; torch's own wrapper comes behind the first."""
        after_ddp = self._ended

        def run() -> None:
            self.end_of_nodes()
            if after_ddp:
                self._wait_for_futures()
            self._calls_back = True
            try:
                callback()
            finally:
                self._calls_back = False

        self.inner.queue_callback(run)

    def before_use(self) -> None:
        """Something is about to be enqueued on the current stream: whose is it?"""
        if self.runs and torch._C._current_autograd_node() is None:
            self.end_of_nodes()
            if not self._calls_back:
                self._wait_for_futures()

    def end_of_nodes(self) -> None:
        """All nodes are done, and the streams of the caller go on."""
        if self._node is not None and not self._ended:
            self._ended = True
            self._leave()
            self._cuda.switch(self._caller)
            for stream in self._leaves:
                if stream != self._caller:
                    self._caller.wait_stream(stream)

    # Within

    @contextlib.contextmanager
    def _around(self, roots: list[Node]) -> Iterator[None]:
        index, self._caller = self._cuda.index, self._cuda.home_stream()
        self._node, self._ended, self.runs = None, False, True
        self._givers, self._done, self._leaves = defaultdict(list), {}, []
        for root in roots:  # whose gradients the caller's stream has made
            if self._stream(root) != self._caller:
                self._stream(root).wait_stream(self._caller)
        todo, seen, handles = [*roots], set(roots), []
        while todo:
            node = todo.pop()
            handles.append(node.register_prehook(functools.partial(self._enter, node)))
            for following, _ in node.next_functions:
                if following is not None:
                    self._givers[following].append(node)
                    if following not in seen:
                        seen.add(following)
                        todo.append(following)
        try:
            yield
            self.end_of_nodes()
            self._wait_for_futures()
        finally:
            self.runs = False
            for handle in handles:
                handle.remove()
            self._givers, self._done, self._node = {}, {}, None
            self._cuda.switch(self._caller)
            self._cuda.index = index

    def _enter(self, node: Node, gradients: Iterable[torch.Tensor | None]) -> None:
        self._leave()
        self._node = node
        stream = self._stream(node)
        self._cuda.switch(stream)
        for giver in self._givers[node]:
            if giver in self._done and self._stream(giver) != stream:
                stream.wait_event(self._done[giver])
        for gradient in gradients:
            if gradient is not None:
                self._cuda.keep(gradient, stream)
        if not node.next_functions and stream not in self._leaves:
            self._leaves.append(stream)

    def _leave(self) -> None:
        node = self._node
        if node is None:
            return
        stream = self._stream(node)
        if any(self._stream(one) != stream for one, _ in node.next_functions if one is not None):
            self._done[node] = stream.record_event()

    def _stream(self, node: Node) -> Any:
        made_on = node.metadata.get(_MADE_ON)  # type: ignore[attr-defined]
        if made_on is None and node.next_functions:
            index = bisect.bisect_right(self._switched, node._sequence_nr(), key=lambda switch: switch[0])
            made_on = self._switched[index - 1][1] if index else None
        return self._caller if made_on is None else made_on

    def _wait_for_futures(self) -> None:
        futures, self.futures = self.futures, []
        for future in futures:
            future.wait()
