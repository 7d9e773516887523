"""What a collective session needs of torch.distributed: a key-value store, and collectives among nodes.

The backend is called directly, since a session's own Gloo group is none of torch's named groups.
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

_untyped: Any = dist  # names that torch does not say it exports
_ASK_EVERY_S = 0.01
_registrations: MutableMapping[dist.ProcessGroup, int] = WeakKeyDictionary()
# Gloo's threads may end the process if a group is destroyed while they work: own groups stay here until `close`.
_open: set[object] = set()


def is_group(value: object) -> bool:
    """Whether it is a process group of torch.distributed."""
    return dist.is_available() and isinstance(value, dist.ProcessGroup)


def default_group() -> Any | None:
    """The default process group, if there is one."""
    return dist.group.WORLD if dist.is_initialized() else None


def rank_and_size(group: Any) -> tuple[int, int]:
    """This process's rank within `group`, and how many it has."""
    return group.rank(), group.size()


def store_of(group: Any) -> tuple[KeyValueStore, int]:
    """The group's store, and how often it was asked for: the same number on every rank, if they ask equally often."""
    number = _registrations[group] = _registrations.get(group, -1) + 1
    return c10d._get_process_group_store(group), number


def listen_or_connect(host: str, port: int, listens: bool, timeout_s: float) -> KeyValueStore:
    """A store at an address, of which one process is the host.

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
    """TCPStore's own waiting takes up to three times its timeout, and logs each attempt with a stack trace."""
    problem = "nobody listens"
    while True:
        try:
            with socket.create_connection((host, port), max(until_s - time.monotonic(), 0.05)) as held:
                if held.getsockname() != held.getpeername():  # a free port may be given to this very socket
                    return
        except OSError as error:
            problem = str(error)
        if time.monotonic() >= until_s:
            raise RuntimeError(f"nobody answers at {host}:{port} ({problem})")
        time.sleep(_ASK_EVERY_S)


class WidePending:
    """A collective among nodes. `wait` may be called by several threads, one after another."""

    def __init__(self, work: dist.Work, sent: torch.Tensor, result: torch.Tensor, key: bool, timeout_s: float) -> None:
        self._work = work
        self._sent = sent
        self._result = result
        self._key = key
        self._timeout = datetime.timedelta(seconds=timeout_s)
        self._finished = False

    def ready(self) -> bool:
        """Whether `wait` would return or raise at once."""
        return self._finished or bool(self._work.is_completed())

    def wait(self) -> torch.Tensor:
        """The result; on CUDA ordered behind the collective on the current stream.

        Raises:
            RuntimeError: a node died, left, or did not come within the timeout.
        """
        if self._sent.is_cuda:
            self._work.wait()
        elif not self._finished:
            self._work.wait(self._timeout)
        if not self._finished:
            sent = _number(self._sent, self._result.dtype) if self._key else self._sent
            if sent is not self._result:
                self._result.copy_(sent)
            self._finished = True
        return self._result


class Wide:
    """Collectives among nodes.

    Args:
        backend: a process group, or a backend alone.
        own: made by `own_gloo`: only this session uses it.
        timeout_s: how long to wait for the end of a collective on CPU.
    """

    def __init__(self, backend: Any, own: bool, timeout_s: float) -> None:
        self._backend = backend
        self._own = own
        self._timeout_s = timeout_s
        self.lost = ""  # see Ranks
        if own:
            _open.add(backend)
        # Gloo's collectives on CUDA are not ordered with streams.
        self._takes_cuda = not own and any(
            part.partition(":")[::2] == ("cuda", "nccl") for part in str(dist.get_backend_config(backend)).split(",")
        )

    @property
    def rank(self) -> int:
        """This node's rank among them."""
        return int(self._backend.rank())

    def timeout_s(self, device: torch.device | None = None) -> float:
        """Seconds after which a collective fails on CPU."""
        return self._timeout_s

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp) -> WidePending:
        """Starts the reduction of a contiguous `tensor`; only what `wait` returns holds the result."""
        options = c10d.AllreduceOptions()
        options.reduceOp = dist.ReduceOp(REDUCE_OPS[op])
        sent, key = self._sent(tensor, op)
        return self._pending(self._backend.allreduce([sent], options), sent, tensor, key)

    def reduce(self, tensor: torch.Tensor, root: int, op: ReduceOp) -> WidePending:
        """As `all_reduce`; only node `root` has the result."""
        options = c10d.ReduceOptions()
        options.reduceOp = dist.ReduceOp(REDUCE_OPS[op])
        options.rootRank, options.rootTensor = root, 0
        sent, key = self._sent(tensor, op)
        return self._pending(self._backend.reduce([sent], options), sent, tensor, key)

    def broadcast(self, tensor: torch.Tensor, root: int) -> WidePending:
        """Starts overwriting a contiguous `tensor` with node `root`'s."""
        options = c10d.BroadcastOptions()
        options.rootRank, options.rootTensor = root, 0
        sent, _ = self._sent(tensor, "sum")
        return self._pending(self._backend.broadcast([sent], options), sent, tensor, False)

    def close(self) -> None:
        """Every collective has ended on every node: an own group can go. Without this it stays."""
        _open.discard(self._backend)
        self._backend = None

    def _sent(self, tensor: torch.Tensor, op: ReduceOp) -> tuple[torch.Tensor, bool]:
        key = op in ("min", "max") and tensor.is_floating_point()
        sent = _key(tensor, op) if key else tensor
        return (sent if self._takes_cuda else sent.cpu()), key

    def _pending(self, work: dist.Work, sent: torch.Tensor, result: torch.Tensor, key: bool) -> WidePending:
        return WidePending(work, sent, result, key, self._timeout_s)


def own_gloo(store: Any, prefix: str, rank: int, size: int, timeout_s: float) -> Any:
    """A Gloo group of `size` nodes that meet in `store`; blocks until all are there.

    Raises:
        RuntimeError: they did not come within the timeout.
    """
    timeout = datetime.timedelta(seconds=timeout_s)
    return c10d.ProcessGroupGloo(_untyped.PrefixStore(prefix, store), rank, size, timeout)


def _key(tensor: torch.Tensor, op: ReduceOp) -> torch.Tensor:
    """fp32 or fp64 as integers of the same order, a NaN first of a minimum and last of a maximum.

    Backends compare floats as C does, and so may lose a NaN. Example, as fp32: -1.0, -0.0, 0.0 and 1.0 are
    -1065353217, -1, 0 and 1065353216.
    """
    assert tensor.dtype in (torch.float32, torch.float64)
    nan = torch.full((), float("nan"), dtype=tensor.dtype, device=tensor.device)
    nan = torch.copysign(nan, torch.ones_like(nan) if op == "max" else -torch.ones_like(nan))
    return _flipped(torch.where(tensor.isnan(), nan, tensor))


def _number(key: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return _flipped(key.view(dtype)).view(dtype)


def _flipped(tensor: torch.Tensor) -> torch.Tensor:
    """Its bits as integers, of negative ones all but the sign inverted; its own inverse."""
    integer = torch.int32 if tensor.dtype is torch.float32 else torch.int64
    bits = tensor.view(integer)
    return bits ^ ((bits >> (8 * integer.itemsize - 1)) & torch.iinfo(integer).max)
