"""measure_collectives: how many collectives a communicator runs, with how many bytes, and how long they take.

    with fusedreduce.measure_collectives(communicator) as metrics:
        train()
    all_reduces = metrics.operations["all_reduce"]
    all_reduces.count, all_reduces.tensor_bytes, all_reduces.time_s, all_reduces.bytes_per_s

While the context is open, attributes of the communicator object hide its methods. Outside, nothing stands in between.
"""

from __future__ import annotations

import functools
import itertools
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from ..comm.protocol import Communicator
from ..comm.waiting import wait_for
from ..errors import FusedReduceError
from .device_clock import DeviceClock

# By operation: what a rank of `n` sends over its link by a ring algorithm, per byte of the tensor (nccl-tests,
# PERFORMANCE.md; of a sparse sum, where every rank gets the entries of all others).
LINK_SHARES: dict[str, Callable[[int], float]] = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "reduce": lambda n: float(n > 1),
    "reduce_scatter": lambda n: (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
    "all_gather_bytes": lambda n: (n - 1) / n,
    "all_to_all": lambda n: (n - 1) / n,
    "all_reduce_sparse": lambda n: float(n - 1),
    "broadcast": lambda n: float(n > 1),
    "send": lambda n: 1.0,
    "recv": lambda n: 1.0,
}
MOST_UNREAD = 256  # operations whose timing events are kept


@dataclass(frozen=True)
class OperationMetrics:
    """What one kind of operation has come to, of those that have ended.

    Attributes:
        count: how many.
        tensor_bytes: of the tensors that were passed; of a gather, of its result.
        link_bytes: what this rank sends by a ring algorithm, computed from `tensor_bytes`; backends may send otherwise.
        time_s: from issue to end, seconds, added up; operations that were in flight together count each.
    """

    count: int = 0
    tensor_bytes: int = 0
    link_bytes: float = 0.0
    time_s: float = 0.0

    @property
    def mean_s(self) -> float:
        """Seconds per operation; 0 without one."""
        return self.time_s / self.count if self.count else 0.0

    @property
    def bytes_per_s(self) -> float:
        """`tensor_bytes` per second of `time_s`, which nccl-tests calls algorithm bandwidth; 0 without an operation."""
        return self.tensor_bytes / self.time_s if self.time_s else 0.0

    def __add__(self, other: OperationMetrics) -> OperationMetrics:
        return OperationMetrics(
            self.count + other.count,
            self.tensor_bytes + other.tensor_bytes,
            self.link_bytes + other.link_bytes,
            self.time_s + other.time_s,
        )


class CollectiveMetrics:
    """The metrics of one communicator's operations; `measure_collectives` makes it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ended: defaultdict[str, OperationMetrics] = defaultdict(OperationMetrics)
        self._unread: list[tuple[str, OperationMetrics, DeviceClock, int]] = []
        self._clocks: dict[torch.device, DeviceClock] = {}
        self._numbers = itertools.count()
        self._within = threading.local()  # an operation that is made of others counts once

    @property
    def operations(self) -> dict[str, OperationMetrics]:
        """By the method's name, what has ended so far; on CUDA waits for the device to end all that was issued."""
        self._read(0)
        with self._lock:
            return dict(self._ended)

    @property
    def total(self) -> OperationMetrics:
        """All operations together."""
        return sum(self.operations.values(), OperationMetrics())

    def _call(
        self, communicator: Communicator, kind: str, method: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        if getattr(self._within, "operation", False):
            return method(*args, **kwargs)
        tensors = [one for one in (*args, *kwargs.values()) if isinstance(one, torch.Tensor)]
        clock = self._clock(communicator, tensors)
        number = next(self._numbers)
        if clock is not None:
            clock.mark(number)
        began_ns = time.perf_counter_ns()
        self._within.operation = True
        try:
            result = method(*args, **kwargs)
        finally:
            self._within.operation = False
        blocked = result is None or isinstance(result, list)
        pending, *made = result if isinstance(result, tuple) else (result,)
        size_bytes = max(map(_size_bytes, [*tensors, *made])) if tensors else sum(map(len, result))
        one = OperationMetrics(1, size_bytes, size_bytes * LINK_SHARES[kind](communicator.size))
        if clock is not None:
            if blocked:
                clock.mark((number, "done_ns"))
            else:
                clock.watch(number, pending)
            with self._lock:
                self._unread.append((kind, one, clock, number))
            self._read(MOST_UNREAD)
        elif blocked:
            self._add(kind, one, began_ns)
        else:
            pending.notify(functools.partial(self._add, kind, one, began_ns))
        return result

    def _add(self, kind: str, one: OperationMetrics, began_ns: int) -> None:
        took = OperationMetrics(time_s=(time.perf_counter_ns() - began_ns) / 1e9)
        with self._lock:
            self._ended[kind] += one + took

    def _clock(self, communicator: Communicator, tensors: Sequence[torch.Tensor]) -> DeviceClock | None:
        """The timing events of a CUDA device; None where its streams may not be made to wait, as in a StepProfile."""
        device = _device_of(tensors)
        if device.type != "cuda" or not communicator.waits_in_backward(device):
            return None
        waits = functools.partial(wait_for, what="timing a collective", communicator=communicator)
        return self._clocks.setdefault(device, DeviceClock(device, waits))

    def _read(self, keep: int) -> None:
        """Adds up the oldest operations that have timing events, unless there are at most `keep`; waits for them."""
        with self._lock:
            unread = self._unread[: len(self._unread) - keep] if len(self._unread) > keep else []
            del self._unread[: len(unread)]
            for kind, one, clock, number in unread:
                self._ended[kind] += one + OperationMetrics(time_s=clock.take_ns(number) / 1e9)


@contextmanager
def measure_collectives(communicator: Communicator) -> Iterator[CollectiveMetrics]:
    """Context in which a communicator's operations are counted and timed; not those of `apart`.

    On CPU a time ends when the backend's thread says so; that of a `send` or `recv` over torch.distributed, when it has
    been waited for. On CUDA it is the device's, from what the issuing stream has queued before, by events; over a
    LocalGroup on CUDA it is the host's, until the last rank has issued the operation.

    Args:
        communicator: is measured wherever it is used, by a `Reducer` too. `DistributedDataParallel.measure_collectives`
            has that of a wrapper.

    Returns:
        The context manager, which gives the metrics; they may be read within, and afterwards.

    Raises:
        FusedReduceError: it is being measured already.
    """
    if "all_reduce" in vars(communicator):
        raise FusedReduceError("this communicator is being measured already: leave that context first")
    metrics = CollectiveMetrics()
    for kind in LINK_SHARES:
        method = getattr(communicator, kind)
        setattr(communicator, kind, functools.partial(metrics._call, communicator, kind, method))
    try:
        yield metrics
    finally:
        for kind in LINK_SHARES:
            delattr(communicator, kind)


def _device_of(tensors: Sequence[torch.Tensor]) -> torch.device:
    return tensors[0].device if tensors else torch.device("cpu")


def _size_bytes(tensor: torch.Tensor) -> int:
    parts: Sequence[torch.Tensor] = [tensor._indices(), tensor._values()] if tensor.is_sparse else [tensor]
    return sum(part.numel() * part.element_size() for part in parts)
