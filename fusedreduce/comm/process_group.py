"""Communicator over a torch.distributed process group: the only caller of its collectives."""

from __future__ import annotations

import contextlib
import datetime
import json
import re
import time
import uuid
from collections.abc import Callable, Collection, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import DebugLevel, get_debug_level, set_debug_level
from torch.distributed import distributed_c10d as c10d

from ..errors import CollectiveError, UnsupportedWireError
from .protocol import ReduceOp
from .store_exchange import Exchange
from .waiting import collective_failed, wait_for

_ALL_FLOATS = frozenset({torch.float32, torch.float64, torch.float16, torch.bfloat16})
# What each backend can sum, by device type. A backend that is not listed is asked, once, with one element.
_SUMMABLE: dict[tuple[str, str], frozenset[torch.dtype]] = {
    ("gloo", "cpu"): _ALL_FLOATS,
    # It can, but the end of its collectives is not ordered with CUDA streams, on which unpack would run.
    ("gloo", "cuda"): frozenset(),
    ("nccl", "cuda"): _ALL_FLOATS,
    ("mpi", "cpu"): frozenset({torch.float32, torch.float64}),
}
REDUCE_OPS: Mapping[ReduceOp, dist.ReduceOp.RedOpType] = {
    "sum": dist.ReduceOp.SUM,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
    "product": dist.ReduceOp.PRODUCT,
}
_built: MutableMapping[dist.ProcessGroup, int] = WeakKeyDictionary()
_lost: MutableMapping[dist.ProcessGroup, str] = WeakKeyDictionary()  # of a group, whoever has found out
_REFUSAL = re.compile(r"type|dtype|support|implement", re.IGNORECASE)


@dataclass(frozen=True)
class _Work:
    """A torch.distributed Work and the tensors that it reads and writes."""

    work: dist.Work
    tensors: tuple[torch.Tensor, ...]

    def future(self) -> torch.futures.Future[list[torch.Tensor]]:
        future: torch.futures.Future[list[torch.Tensor]] = self.work.get_future()
        return future

    def notify(self, done: Callable[[], None]) -> None:
        """Has `done()` called when the collective ends, by the backend's thread; it must hold nothing of the group's.

        Never, where the backend has no futures.
        """
        with contextlib.suppress(RuntimeError):
            self.work.get_future().add_done_callback(lambda _: done())

    def ready(self) -> bool:
        """Whether the collective has ended, well or not; on CUDA: on the device."""
        return bool(self.work.is_completed())

    def wait(self) -> None:
        """Blocks until the tensor holds the result; on CUDA only orders the current stream behind it."""
        self.work.wait()


class ProcessGroupCommunicator:
    """Communicator over `group` (None: the default group, which must exist by then).

    Raises:
        ValueError: torch.distributed is not initialised, or this process is not a member of `group`.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        if not dist.is_initialized():
            raise ValueError("torch.distributed is not initialised: call init_process_group before the first backward")
        known = group if group is not None else dist.group.WORLD
        assert known is not None
        self.group: dist.ProcessGroup = known
        self._rank = dist.get_rank(self.group)
        if self._rank < 0:
            raise ValueError(f"rank {dist.get_rank()} is not a member of the process group it was given")
        self._size = dist.get_world_size(self.group)
        # Ranks build their communicators in the same order, so the n-th of a group is the same one everywhere.
        self._serial = _built[self.group] = _built.get(self.group, 0) + 1
        self._prefix = ""
        self._own = False
        self._parted = 0
        self._refusals: dict[tuple[torch.dtype, torch.device], str | None] = {}

    @property
    def rank(self) -> int:
        """This process's rank within the group."""
        return self._rank

    @property
    def size(self) -> int:
        """Ranks in the group."""
        return self._size

    @property
    def lost(self) -> str:
        """Why no collective of the group can be relied on any more; empty while none has failed."""
        return _lost.get(self.group, "")

    @lost.setter
    def lost(self, why: str) -> None:
        _lost[self.group] = why

    def timeout_s(self, device: torch.device | None = None) -> float:
        """Seconds after which the backend fails a collective on `device` (None: on one that it has a backend for)."""
        # There is no public way to read it; every backend of torch keeps it in its options.
        options = getattr(self.group._get_backend(device or self._device()), "options", None)
        timeout = getattr(options, "_timeout", None)
        return float((timeout or dist.default_pg_timeout).total_seconds())

    def check_wire(self, dtype: torch.dtype, device: torch.device) -> None:
        """Raises UnsupportedWireError, on every rank alike, if the backend cannot sum `dtype` on `device`."""
        if (dtype, device) not in self._refusals:
            self._refusals[dtype, device] = self._refusal(dtype, device)
        reason = self._refusals[dtype, device]
        if reason is not None:
            raise UnsupportedWireError(
                f"backend {self._backend_name(device)!r} cannot all-reduce {dtype} on {device.type} ({reason}); "
                "choose another wire, or another backend for this device"
            )

    def waits_in_backward(self, device: torch.device) -> bool:
        """Always: no other rank needs this process's autograd threads."""
        return True

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp = "sum") -> _Work:
        """Starts the reduction of `tensor` over all ranks, elementwise and in place."""
        work = dist.all_reduce(tensor, op=REDUCE_OPS[op], group=self.group, async_op=True)
        assert work is not None
        return _Work(work, (tensor,))

    def reduce(self, tensor: torch.Tensor, root: int, op: ReduceOp = "sum") -> _Work:
        """As `all_reduce`, but only rank `root`'s tensor holds the result; the others' hold anything."""
        source = dist.get_global_rank(self.group, root)
        work = dist.reduce(tensor, dst=source, op=REDUCE_OPS[op], group=self.group, async_op=True)
        assert work is not None
        return _Work(work, (tensor,))

    def all_to_all(self, output: torch.Tensor, input: torch.Tensor) -> _Work:
        """Starts the exchange of equal parts: `output`, [ranks * n], gets part `rank` of each rank's `input`."""
        work = dist.all_to_all_single(output, input, group=self.group, async_op=True)
        assert work is not None
        return _Work(work, (output, input))

    def all_reduce_sparse(self, tensor: torch.Tensor) -> _Work:
        """Starts the sum of a sparse COO tensor over all ranks; the future's value holds the result."""
        return self.all_reduce(tensor)

    def all_gather(self, tensor: torch.Tensor) -> tuple[_Work, torch.Tensor]:
        """Starts gathering `tensor`, [n], from all ranks; the tensor that will hold it: [ranks, n]."""
        gathered = torch.empty((self._size, tensor.numel()), dtype=tensor.dtype, device=tensor.device)
        # Rows of one tensor: torch renames what gathers into it, from version to version.
        work = dist.all_gather(list(gathered.unbind()), tensor, group=self.group, async_op=True)
        assert work is not None
        return _Work(work, (tensor, gathered)), gathered

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        """Overwrites `tensor` on every rank with that of rank `source`; blocks."""
        dist.broadcast(tensor, src=dist.get_global_rank(self.group, source), group=self.group)

    def all_gather_bytes(self, payload: bytes, capacity_bytes: int, device: torch.device) -> list[bytes]:
        """Every rank's payload, in rank order; blocks. One collective of `capacity_bytes` + 8 bytes per rank."""
        if len(payload) > capacity_bytes:
            raise ValueError(f"a payload of {len(payload)} bytes does not fit into {capacity_bytes}")
        message = len(payload).to_bytes(8, "little") + payload.ljust(capacity_bytes, b"\0")
        mine = torch.frombuffer(bytearray(message), dtype=torch.uint8).to(device)
        gathered = [torch.empty_like(mine) for _ in range(self._size)]
        dist.all_gather(gathered, mine, group=self.group)
        received = []
        for tensor in gathered:
            raw = bytes(tensor.cpu().numpy())
            length = int.from_bytes(raw[:8], "little")
            received.append(raw[8 : 8 + length])
        return received

    def apart(self, devices: Collection[torch.device] = ()) -> ProcessGroupCommunicator:
        """A communicator on a new group of the same ranks and backends, with this one's timeout.

        Its ranks issue collectives each at its own pace. Under `TORCH_DISTRIBUTED_DEBUG=DETAIL` torch has each wait for
        the peers' before it starts, and so the group is made without that.

        One element of each of `devices` is summed on it: NCCL connects the ranks at a device's first collective, and
        the thread that issues that waits for all of them.

        Not `dist.new_group`: it names a group by its ranks and by what else this process has, and so fails where ranks
        have other groups than their peers, or where a group of that name has been destroyed.
        """
        self._parted += 1
        mine = uuid.uuid4().hex
        name = "fusedreduce " + self.compare_aside(f"apart {self._parted}", mine, self._device())[0]
        members = dist.get_process_group_ranks(self.group)
        timeout = datetime.timedelta(seconds=self.timeout_s())
        backend, store, make = c10d._world.pg_map[self.group][0], self._store(), c10d._new_process_group_helper
        debug_level = get_debug_level()
        set_debug_level(DebugLevel.OFF)
        try:
            group, _ = make(self._size, self._rank, members, backend, store, c10d.GroupName(name), timeout=timeout)
        finally:
            set_debug_level(debug_level)
        c10d._world.pg_group_ranks[group] = {member: rank for rank, member in enumerate(members)}
        communicator = ProcessGroupCommunicator(group)
        communicator._own = True
        try:
            for device in devices:
                pending = communicator.all_reduce(torch.zeros(1, device=device))
                wait_for(pending, f"connecting the ranks on {device}", communicator)
        except BaseException:
            communicator.close()
            raise
        return communicator

    def close(self) -> None:
        """Destroys the group that `apart` made; nothing where the group is the user's."""
        if self._own and dist.is_initialized():
            self._own = False
            dist.destroy_process_group(self.group)

    def compare_aside(self, key: str, text: str, device: torch.device) -> list[str]:
        """Every rank's `text`, in rank order, through the group's key-value store.

        Raises:
            CollectiveError: not all came in time; on those that come late too.
        """
        if self._size == 1:
            return [text]
        exchange = Exchange(self._store(), f"{self._keys()}/aside", self._rank, self._size)
        timeout_s = self.timeout_s(device)
        until_s = time.monotonic() + timeout_s
        verdict = exchange.post(key, text, False, _in_rank_order) or exchange.wait(key, until_s)
        if verdict is None:
            missing = sorted(set(range(self._size)).difference(exchange.present(key)))
            verdict = exchange.propose(key, json.dumps(f"ranks {missing} did not come within {timeout_s:g} s"))
        exchange.take(key)
        held = json.loads(verdict)
        if isinstance(held, str):
            raise CollectiveError(f"exchange {key!r} among {self._size} ranks: {held}")
        return [str(one) for one in held]

    def _store(self) -> Any:
        return c10d._get_process_group_store(self.group)

    def _keys(self) -> str:
        """What this communicator's keys in the store begin with.

        A group that is made anew may have the store of one before it, and what was written there: so each rank counts
        there how often it has had a communicator of this number.
        """
        if not self._prefix:
            times = self._store().add(f"fusedreduce/{self._serial}/{self._rank}", 1)
            self._prefix = f"fusedreduce/{self._serial}/{times}"
        return self._prefix

    def _device(self) -> torch.device:
        """One that the group has a backend for."""
        return next(iter(self.group._device_types))

    def _backend_name(self, device: torch.device) -> str:
        # "cpu:gloo,cuda:nccl" for a group of several backends, else one name.
        config = dist.get_backend_config(self.group)
        for part in str(config).split(","):
            kind, _, name = part.partition(":")
            if kind == device.type and name:
                return name
        return str(dist.get_backend(self.group))

    def _refusal(self, dtype: torch.dtype, device: torch.device) -> str | None:
        """Why the backend cannot sum `dtype`, or None; the same on every rank, since the cause is."""
        summable = _SUMMABLE.get((self._backend_name(device), device.type))
        if summable is not None:
            names = ", ".join(sorted(map(str, summable))) or "nothing that fusedreduce could use"
            return None if dtype in summable else f"there it sums {names}"
        try:
            dist.all_reduce(torch.zeros(1, dtype=dtype, device=device), group=self.group)
        except (RuntimeError, TypeError, ValueError) as error:
            if isinstance(error, RuntimeError) and not _REFUSAL.search(str(error)):  # a peer that died, not a dtype
                what = f"trying whether {self._backend_name(device)} can sum {dtype} failed"
                raise collective_failed(what, self, error) from error
            return f"{type(error).__name__}: {error}"
        return None


def _in_rank_order(held: Mapping[int, str]) -> str:
    return json.dumps([held[rank] for rank in sorted(held)])
