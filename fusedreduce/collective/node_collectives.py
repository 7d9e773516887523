"""NodeCollectives and stores: what a session uses of torch.distributed.

The backend is called directly, because a session's own Gloo group is not one of torch's named groups.
"""

from __future__ import annotations

import datetime
import socket
import time
from collections.abc import MutableMapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from ..comm.process_group import REDUCE_OPS
from ..comm.protocol import ReduceOp
from ..comm.store_exchange import KeyValueStore

_untyped: Any = dist  # for names that torch does not declare as exported
_ASK_EVERY_S = 0.01
_registrations: MutableMapping[dist.ProcessGroup, int] = WeakKeyDictionary()
# Gloo's threads may end the process if a group is destroyed while they work: own groups stay here until `release`.
_open: set[object] = set()


def is_group(value: object) -> bool:
    """Returns whether `value` is a process group of torch.distributed."""
    return dist.is_available() and isinstance(value, dist.ProcessGroup)


def default_group() -> Any | None:
    """Returns torch.distributed's default group, or None if there is none."""
    return dist.group.WORLD if dist.is_initialized() else None


def rank_and_size(group: Any) -> tuple[int, int]:
    """Returns this process's rank within `group`, and the group's size."""
    return group.rank(), group.size()


def store_of(group: Any) -> tuple[KeyValueStore, int]:
    """Returns the group's store, and how often this was called for it before, which is the same on all ranks."""
    number = _registrations[group] = _registrations.get(group, -1) + 1
    return c10d._get_process_group_store(group), number


def listen_or_connect(host: str, port: int, listens: bool, timeout_s: float) -> KeyValueStore:
    """Makes a store at an address, which one process hosts.

    Args:
        host: name or address of that process's machine.
        port: TCP port.
        listens: this process is the host.
        timeout_s: seconds for which the others wait for it.

    Raises:
        RuntimeError: the port is taken, or nobody listens within the timeout.
    """
    until_s = time.monotonic() + timeout_s
    if not listens:
        _wait_for_listener(host, port, until_s)
    timeout = datetime.timedelta(seconds=max(until_s - time.monotonic(), 1.0))
    store: KeyValueStore = _untyped.TCPStore(host, port, None, listens, timeout, wait_for_workers=False)
    return store


def _wait_for_listener(host: str, port: int, until_s: float) -> None:
    """Waits for a listener, because TCPStore itself takes up to three times its timeout, and logs each attempt."""
    problem = "nobody listens"
    while True:
        try:
            with socket.create_connection((host, port), max(until_s - time.monotonic(), 0.05)) as connection:
                # A free port may be given to this very socket.
                if connection.getsockname() != connection.getpeername():
                    return
        except OSError as error:
            problem = str(error)
        if time.monotonic() >= until_s:
            raise RuntimeError(f"nobody answers at {host}:{port} ({problem})")
        time.sleep(_ASK_EVERY_S)


class NodePending:
    """A collective among nodes in flight. Several threads may call `wait`, one after another."""

    def __init__(self, work: dist.Work, sent: torch.Tensor, result: torch.Tensor, timeout_s: float) -> None:
        self._work = work
        self._sent = sent
        self._result = result
        self._timeout = datetime.timedelta(seconds=timeout_s)
        self._finished = False

    def ready(self) -> bool:
        """Returns whether `wait` would return, or raise, without blocking."""
        return self._finished or bool(self._work.is_completed())

    def wait(self) -> torch.Tensor:
        """Waits for the collective, on CUDA on the current stream only; returns the result.

        Raises:
            RuntimeError: a node died, left, or did not answer within the timeout.
        """
        if self._sent.is_cuda:
            self._work.wait()
        elif not self._finished:
            self._work.wait(self._timeout)
        if not self._finished:
            dtype = self._result.dtype
            if self._sent is not self._result:
                self._result.copy_(self._sent if self._sent.dtype is dtype else number_of(self._sent, dtype))
            self._finished = True
        return self._result


class NodeCollectives:
    """Collectives among nodes.

    Args:
        backend: a process group, or a backend alone.
        own: it was made by `own_gloo`, for this session only.
        timeout_s: seconds for which the end of a collective on CPU is waited for.
    """

    def __init__(self, backend: Any, own: bool, timeout_s: float) -> None:
        self._backend = backend
        self._own = own
        self._timeout_s = timeout_s
        self.lost = ""
        if own:
            _open.add(backend)
        # Gloo's collectives on CUDA are not ordered with streams.
        self._takes_cuda = not own and any(
            part.partition(":")[::2] == ("cuda", "nccl") for part in str(dist.get_backend_config(backend)).split(",")
        )

    @property
    def rank(self) -> int:
        """This node's rank among the nodes."""
        return int(self._backend.rank())

    def timeout_s(self, device: torch.device | None = None) -> float:
        """Returns the seconds after which a collective fails on CPU."""
        return self._timeout_s

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp) -> NodePending:
        """Starts the reduction of a contiguous `tensor`; only what `wait` returns holds the result."""
        sent = self._sent(tensor, op)
        return NodePending(self._backend.allreduce([sent], REDUCE_OPS[op]), sent, tensor, self._timeout_s)

    def reduce(self, tensor: torch.Tensor, root: int, op: ReduceOp) -> NodePending:
        """Starts the reduction of a contiguous `tensor`; what `wait` returns on node `root` holds the result."""
        sent = self._sent(tensor, op)
        return NodePending(self._backend.reduce(sent, root, REDUCE_OPS[op]), sent, tensor, self._timeout_s)

    def broadcast(self, tensor: torch.Tensor, root: int) -> NodePending:
        """Starts overwriting a contiguous `tensor` with node `root`'s."""
        sent = self._sent(tensor, "sum")
        return NodePending(self._backend.broadcast(sent, root), sent, tensor, self._timeout_s)

    def release(self) -> None:
        """Releases an own group; every collective must have ended on every node. Without this it stays."""
        _open.discard(self._backend)
        self._backend = None

    def _sent(self, tensor: torch.Tensor, op: ReduceOp) -> torch.Tensor:
        """What the backend reduces in place of `tensor`."""
        sent = ordered_key(tensor, op) if op in ("min", "max") and tensor.is_floating_point() else tensor
        return sent if self._takes_cuda else sent.cpu()


def own_gloo(store: Any, prefix: str, rank: int, size: int, timeout_s: float) -> Any:
    """Makes a Gloo group of `size` nodes through `store`; blocks until all have called it.

    Raises:
        RuntimeError: not all nodes called it within the timeout.
    """
    timeout = datetime.timedelta(seconds=timeout_s)
    return c10d.ProcessGroupGloo(_untyped.PrefixStore(prefix, store), rank, size, timeout)


def ordered_key(tensor: torch.Tensor, op: ReduceOp) -> torch.Tensor:
    """Maps fp32 or fp64 to integers of the same order, where a NaN is the least for "min", the greatest for "max".

    Backends compare floats as C does, and so may lose a NaN. Example, as fp32: -1.0, -0.0, 0.0 and 1.0 are
    -1065353217, -1, 0 and 1065353216.
    """
    assert tensor.dtype in (torch.float32, torch.float64)
    nan = torch.full((), float("nan"), dtype=tensor.dtype, device=tensor.device)
    nan = torch.copysign(nan, torch.ones_like(nan) if op == "max" else -torch.ones_like(nan))
    return _flipped(torch.where(tensor.isnan(), nan, tensor))


def number_of(key: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The number of which `ordered_key` has made a key."""
    return _flipped(key.view(dtype)).view(dtype)


def _flipped(tensor: torch.Tensor) -> torch.Tensor:
    """The bits as integers, with all but the sign bit of negative numbers inverted; its own inverse."""
    integer = torch.int32 if tensor.dtype is torch.float32 else torch.int64
    bits = tensor.view(integer)
    return bits ^ ((bits >> (8 * integer.itemsize - 1)) & torch.iinfo(integer).max)
