"""ProcessGroupCommunicator: a torch.distributed process group as a Communicator; nothing else calls its collectives."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import time
import uuid
from collections.abc import Callable, Collection, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import DebugLevel, get_debug_level, set_debug_level
from torch.distributed import distributed_c10d as c10d

from ..errors import CollectiveError, FusedReduceError
from .backend_support import BackendSupport
from .nodes import agreed_per_node
from .protocol import Pending, Pieces, ReduceOp, check_peer
from .store_exchange import KeyPrefixes, StoreExchange
from .waiting import naming_failure, wait_for

REDUCE_OPS: dict[ReduceOp, dist.ReduceOp.RedOpType] = {
    "sum": dist.ReduceOp.SUM,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
    "product": dist.ReduceOp.PRODUCT,
}
_OF_ALL_REDUCE = REDUCE_OPS | {"avg": dist.ReduceOp.AVG}
# Shared by all communicators of a group, as ranks may have different ones.
_prefixes: MutableMapping[dist.ProcessGroup, KeyPrefixes] = WeakKeyDictionary()
_lost: MutableMapping[dist.ProcessGroup, str] = WeakKeyDictionary()
_INHERITED = "This process was forked from the one that made the group, in which the group's threads have stayed."
_supports: MutableMapping[dist.ProcessGroup, BackendSupport] = WeakKeyDictionary()
# Gloo's two threads assign the name of the collective that has ended to one std::string without a lock (torch 2.13,
# ProcessGroupGloo::runLoop). That of a sparse sum is too long for the string's own buffer, so that two that end at once
# corrupt the heap: sparse sums run in a Gloo group of one thread, by the user's group.
_sparse: MutableMapping[dist.ProcessGroup, Any] = WeakKeyDictionary()
# Gathers into one tensor: into a list NCCL copies row by row, a small kernel per rank. torch 2.13 has renamed it.
ALL_GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
REDUCE_SCATTER = "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"
# Gloo's all-gather sends a rank's whole tensor as one message, and now and then reads nothing while it writes that:
# 8 MiB over 300 Mbit/s took 267 ms in the median and up to 361, in pieces 234, as an all-reduce of as many bytes.
_PIECE_BYTES = 256 * 1024


@dataclass(frozen=True)
class Work:
    """A torch Work, with the tensors that it reads and writes."""

    work: dist.Work
    tensors: tuple[torch.Tensor, ...]

    def future(self) -> torch.futures.Future[list[torch.Tensor]]:
        future: torch.futures.Future[list[torch.Tensor]] = self.work.get_future()
        return future

    def notify(self, done: Callable[[], None]) -> None:
        """Has `done()` called when the collective ends, by the backend's thread; `done` must not reference the group.

        It is never called where the backend has no futures.
        """
        with contextlib.suppress(RuntimeError):
            self.work.get_future().add_done_callback(lambda _: done())

    def ready(self) -> bool:
        """Returns whether the collective has ended, or failed; on CUDA, on the device."""
        return bool(self.work.is_completed())

    def wait(self) -> None:
        """Blocks until the tensor holds the result; on CUDA only orders the current stream behind it."""
        self.work.wait()


@dataclass(frozen=True)
class _Transfer(Work):
    """A send or receive, whose end Gloo tells only those who wait."""

    _waiting: list[Callable[[], None]] = field(default_factory=list)

    def notify(self, done: Callable[[], None]) -> None:
        """Has `done()` called when `wait` has returned."""
        self._waiting.append(done)

    def wait(self) -> None:
        """Blocks until the tensor was sent, or holds what was received; on CUDA only orders the current stream."""
        self.work.wait()
        while self._waiting:
            self._waiting.pop()()


class ProcessGroupCommunicator:
    """A process group as a Communicator.

    Args:
        group: a process group of torch.distributed; None: the default group.

    Attributes:
        group: the process group.
        rank: this process's rank within it.
        size: number of its ranks.

    Raises:
        ValueError: torch.distributed is not initialised, or this process is not a member of `group`.
        FusedReduceError: `group` was made before this process was forked.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        if not dist.is_initialized():
            raise ValueError(
                # as torch begins
                "Default process group has not been initialized, please make sure to call init_process_group. Start "
                "the program with torchrun, and before a model is wrapped write fusedreduce.init_process_group(), "
                "which takes what torchrun has set, or torch.distributed.init_process_group(...)"
            )
        known = group if group is not None else dist.group.WORLD
        assert known is not None
        self.group: dist.ProcessGroup = known
        self.rank = dist.get_rank(self.group)
        if self.rank < 0:
            raise ValueError(
                f"rank {dist.get_rank()} is not a member of the process group that it was given: only its members may "
                "reduce over it"
            )
        self.size = dist.get_world_size(self.group)
        if self.lost == _INHERITED:
            raise FusedReduceError(f"rank {self.rank}: make a process group in this process. {_INHERITED}")
        self._prefix = ""
        self._whole: ProcessGroupCommunicator | None = None  # from whose ranks `apart` made this one's group
        self._support = _supports.setdefault(self.group, BackendSupport())

    @property
    def lost(self) -> str:
        """Why no collective of the group can be relied on any more; empty while none has failed."""
        return _lost.get(self.group, "")

    @lost.setter
    def lost(self, why: str) -> None:
        _lost[self.group] = why

    def timeout_s(self, device: torch.device | None = None) -> float:
        """The timeout of the backend for `device`, else torch's default."""
        # There is no public way to read it; every torch backend keeps it in its options.
        options = getattr(self.group._get_backend(device or self._device()), "options", None)
        timeout = getattr(options, "_timeout", None)
        return float((timeout or dist.default_pg_timeout).total_seconds())

    def check_wire(self, dtype: torch.dtype, device: torch.device) -> None:
        """Raises UnsupportedWireError, on every rank, if the backend cannot sum tensors of `dtype` on `device`."""

        def add() -> None:
            dist.all_reduce(torch.zeros(1, dtype=dtype, device=device), group=self.group)

        self._support.check(self, self._backend_name(device), f"all-reduce {dtype}", dtype, device, add)

    def check_exchange(self, device: torch.device) -> None:
        """Raises UnsupportedWireError, on every rank, if the backend has no all-to-all on `device`."""

        def exchange() -> None:
            sent = torch.zeros(self.size, dtype=torch.uint8, device=device)
            dist.all_to_all_single(torch.empty_like(sent), sent, group=self.group)

        verb, advice = "exchange bytes (all-to-all)", "choose another wire and accumulation='wire'"
        self._support.check(self, self._backend_name(device), verb, torch.uint8, device, exchange, advice)

    def waits_in_backward(self, device: torch.device) -> bool:
        """Returns True: no other rank needs this process's autograd threads."""
        return True

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp | Literal["avg"] = "sum") -> Work:
        """The backend's all-reduce, started asynchronously; "avg" is the backend's own average."""
        work = dist.all_reduce(tensor, op=_OF_ALL_REDUCE[op], group=self.group, async_op=True)
        assert work is not None
        return Work(work, (tensor,))

    def all_reduce_coalesced(self, tensors: Sequence[torch.Tensor], op: Literal["avg", "sum"]) -> Work:
        """One all-reduce of tensors of one dtype on one device, one at least, started asynchronously; Gloo copies them.

        torch's function of that name warns that it will go; the group's method is what it calls.
        """
        if len(tensors) == 1:
            return self.all_reduce(tensors[0], op)
        options: Any = dist.AllreduceCoalescedOptions()
        options.reduceOp = _OF_ALL_REDUCE[op]
        return Work(self.group.allreduce_coalesced(list(tensors), options), tuple(tensors))

    def reduce(self, tensor: torch.Tensor, root: int, op: ReduceOp = "sum") -> Work:
        """The backend's reduce, started asynchronously."""
        source = dist.get_global_rank(self.group, root)
        work = dist.reduce(tensor, dst=source, op=REDUCE_OPS[op], group=self.group, async_op=True)
        assert work is not None
        return Work(work, (tensor,))

    def reduce_scatter(self, tensor: torch.Tensor, op: ReduceOp = "sum") -> tuple[Work, torch.Tensor]:
        """The backend's reduce-scatter, started asynchronously. Over Gloo it is an all-reduce, as torch's own is there.

        Raises:
            ValueError: the elements cannot be divided among the ranks.
        """
        if tensor.numel() % self.size:
            raise ValueError(f"{tensor.numel()} elements cannot be divided among {self.size} ranks")
        part = tensor.view(self.size, tensor.numel() // self.size)[self.rank]
        if self._backend_name(tensor.device) == "gloo":
            return self.all_reduce(tensor, op), part
        scatter = getattr(dist, REDUCE_SCATTER)
        work = scatter(part, tensor.view(-1), op=REDUCE_OPS[op], group=self.group, async_op=True)
        assert work is not None
        return Work(work, (tensor,)), part

    def all_to_all(self, output: torch.Tensor, input: torch.Tensor) -> Work:
        """The backend's all-to-all, started asynchronously."""
        work = dist.all_to_all_single(output, input, group=self.group, async_op=True)
        assert work is not None
        return Work(work, (output, input))

    def all_reduce_sparse(self, tensor: torch.Tensor) -> Work:
        """All-reduces over the group, or, with Gloo, over a backend of one thread beside it.

        Raises:
            CollectiveError: the first sum of a group connects its ranks, and one did not come within the timeout.
        """
        if self._backend_name(tensor.device) != "gloo":
            return self.all_reduce(tensor)
        if self.group not in _sparse:
            what = "connecting the ranks for sums of sparse gradients"
            if self.lost:  # a second attempt would meet ranks of the first
                raise CollectiveError(f"rank {self.rank}: {what}: the group is lost. {self.lost}")
            with naming_failure(what, self):
                _sparse[self.group] = self._gloo_of_one_thread()
        return Work(_sparse[self.group].allreduce([tensor]), (tensor,))

    def all_gather(self, tensor: torch.Tensor, into: torch.Tensor | None = None) -> tuple[Pending, torch.Tensor]:
        """The backend's all-gather, started asynchronously; over Gloo in pieces of `_PIECE_BYTES` at most."""
        gathered = tensor.new_empty(self.size * tensor.numel()) if into is None else into
        rows = gathered.view(self.size, tensor.numel())
        if tensor.nbytes > _PIECE_BYTES and self._backend_name(tensor.device) == "gloo":
            numel = _PIECE_BYTES // tensor.itemsize
            parts = zip(rows.split(numel, dim=1), tensor.split(numel), strict=True)
            works = [dist.all_gather([*into], part, group=self.group, async_op=True) for into, part in parts]
            pieces = [Work(work, (tensor, gathered)) for work in works if work is not None]
            return Pieces(pieces, tensor.device), rows
        work = getattr(dist, ALL_GATHER)(gathered, tensor, group=self.group, async_op=True)
        assert work is not None
        return Work(work, (tensor, gathered)), rows

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        """The backend's broadcast, which blocks."""
        dist.broadcast(tensor, src=dist.get_global_rank(self.group, source), group=self.group)

    def send(self, tensor: torch.Tensor, destination: int) -> Work:
        """The backend's isend. Over Gloo its end is known to `wait` only."""
        check_peer("destination", destination, self.rank, self.size)
        work = dist.isend(tensor, group=self.group, group_dst=destination)
        assert work is not None
        return _Transfer(work, (tensor,))

    def recv(self, tensor: torch.Tensor, source: int) -> Work:
        """The backend's irecv.

        Gloo does not compare dtypes, writes only what has come if that is less, and ends the process if it is more.
        """
        check_peer("source", source, self.rank, self.size)
        work = dist.irecv(tensor, group=self.group, group_src=source)
        assert work is not None
        return _Transfer(work, (tensor,))

    def all_gather_bytes(self, payload: bytes, capacity_bytes: int, device: torch.device) -> list[bytes]:
        """One collective, with `capacity_bytes` + 8 bytes per rank."""
        if len(payload) > capacity_bytes:
            raise ValueError(f"a payload of {len(payload)} bytes does not fit into {capacity_bytes}")
        message = len(payload).to_bytes(8, "little") + payload.ljust(capacity_bytes, b"\0")
        mine = torch.frombuffer(bytearray(message), dtype=torch.uint8).to(device)
        pending, gathered = self.all_gather(mine)
        pending.wait()
        rows = map(bytes, gathered.cpu().numpy())
        return [row[8 : 8 + int.from_bytes(row[:8], "little")] for row in rows]

    def ranks_per_node(self, device: torch.device) -> int:
        """Returns how many consecutive ranks each node has, by every rank's environment; see `nodes`. A collective."""
        return agreed_per_node(self, dist.get_process_group_ranks(self.group), dist.get_rank(), device)

    def apart(
        self, devices: Collection[torch.device] = (), ranks: Sequence[int] | None = None
    ) -> ProcessGroupCommunicator:
        """A communicator on a new group of some or all of its ranks, with its backends and timeout.

        Its ranks may issue collectives each at its own pace. Under `TORCH_DISTRIBUTED_DEBUG=DETAIL` torch has each
        collective wait until all ranks have issued it, so the group is made without that.

        One element per device of `devices` is summed on it, because NCCL connects the ranks at a device's first
        collective, where the thread that issues it waits for all of them.

        `dist.new_group` would not do: it names a group by its ranks and by the other groups of this process, and so
        fails where ranks have different groups, or where a group of that name has been destroyed.

        Args:
            devices: of the tensors that the communicator is for.
            ranks: see `Communicator.apart`.

        Raises:
            CollectiveError: a rank did not call it within the timeout, or the ranks could not be connected.
        """
        name = uuid.uuid4().hex
        if self.size > 1:
            name = self._compare(self._next_prefix("apart"), "apart", name, self._device())[0]
        everyone = dist.get_process_group_ranks(self.group)
        members = everyone if ranks is None else [everyone[rank] for rank in ranks]
        name, place = f"fusedreduce {name} from {members[0]}", members.index(everyone[self.rank])
        timeout = datetime.timedelta(seconds=self.timeout_s())
        backend, store, make = c10d._world.pg_map[self.group][0], self._store(), c10d._new_process_group_helper
        world, debug_level = c10d._get_default_group(), get_debug_level()
        bound = world.bound_device_id
        if self.size < world.size():
            world.bound_device_id = None  # else torch splits its communicator, in which all of its ranks take part
        set_debug_level(DebugLevel.OFF)
        try:
            group, _ = make(len(members), place, members, backend, store, c10d.GroupName(name), timeout=timeout)
        finally:
            set_debug_level(debug_level)
            world.bound_device_id = bound
        c10d._world.pg_group_ranks[group] = {member: rank for rank, member in enumerate(members)}
        communicator = ProcessGroupCommunicator(group)
        communicator._whole = self
        try:
            for device in devices:
                pending = communicator.all_reduce(torch.zeros(1, dtype=torch.float32, device=device))
                wait_for(pending, f"connecting the ranks on {device}", communicator)
        except BaseException:
            communicator.close()
            raise
        return communicator

    def close(self) -> None:
        """Destroys the group that `apart` made; does nothing where the group is the user's.

        Where this group is lost, or the one that it was made from, NCCL's part is aborted first: to destroy it would
        wait for its kernels, and their peers may never come.
        """
        whole, self._whole = self._whole, None
        if whole is None or self.group not in c10d._world.pg_map:  # its user has destroyed all groups
            return
        cuda = torch.device("cuda")
        if (self.lost or whole.lost) and self._backend_name(cuda) == "nccl":
            self.group._get_backend(cuda).abort()
        dist.destroy_process_group(self.group)

    def compare_aside(self, key: str, text: str, device: torch.device) -> list[str]:
        """Compares through the group's key-value store."""
        if self.size == 1:
            return [text]
        # The n-th communicator of a group that compares is the same on all ranks, whatever others each has made.
        self._prefix = self._prefix or self._next_prefix("communicator")
        return self._compare(self._prefix, key, text, device)

    def _compare(self, prefix: str, key: str, text: str, device: torch.device) -> list[str]:
        """Exchanges the texts through the store, with keys under `prefix`."""
        exchange = StoreExchange(self._store(), prefix, self.rank, self.size)
        timeout_s = self.timeout_s(device)
        until_s = time.monotonic() + timeout_s
        verdict = exchange.post(key, text, False, _in_rank_order) or exchange.wait_for_verdict(key, until_s)
        if verdict is None:
            missing = sorted(set(range(self.size)).difference(exchange.present(key)))
            verdict = exchange.propose(key, json.dumps(f"ranks {missing} did not reach it within {timeout_s:g} s"))
        exchange.acknowledge(key)
        texts = json.loads(verdict)
        if isinstance(texts, str):
            raise CollectiveError(f"exchange {key!r} among {self.size} ranks: {texts}")
        return [str(text) for text in texts]

    def _store(self) -> Any:
        return c10d._get_process_group_store(self.group)

    def _next_prefix(self, what: str) -> str:
        """A new prefix of keys in the store; see `KeyPrefixes`."""
        if self.group not in _prefixes:
            _prefixes[self.group] = KeyPrefixes(self._store(), self.rank)
        return _prefixes[self.group].next(what)

    def _gloo_of_one_thread(self) -> Any:
        """A Gloo backend of the same ranks, interfaces and timeout; blocks until all have called it."""
        backend: Any = self.group._get_backend(torch.device("cpu"))
        theirs = getattr(backend, "wrapped_pg", backend).options  # of TORCH_DISTRIBUTED_DEBUG=DETAIL's wrapper
        gloo: Any = c10d.ProcessGroupGloo  # torch's stubs name the options otherwise
        options = gloo._Options()
        options._devices, options._timeout, options._threads = theirs._devices, theirs._timeout, 1
        store = c10d.PrefixStore(self._next_prefix("sparse"), self._store())
        return gloo(store, self.rank, self.size, options)

    def _device(self) -> torch.device:
        """A device that the group has a backend for."""
        return next(iter(self.group._device_types))

    def _backend_name(self, device: torch.device) -> str:
        # "cpu:gloo,cuda:nccl" for a group of several backends, else one name.
        config = dist.get_backend_config(self.group)
        for part in str(config).split(","):
            kind, _, name = part.partition(":")
            if kind == device.type and name:
                return name
        return str(dist.get_backend(self.group))


def _in_rank_order(texts: Mapping[int, str]) -> str:
    return json.dumps([texts[rank] for rank in sorted(texts)])


def _lose_groups() -> None:
    """In a process that was just forked: has its steps raise, where they would wait for threads that are not there."""
    _lost.update(dict.fromkeys([*_supports, *c10d._world.pg_map], _INHERITED))


os.register_at_fork(after_in_child=_lose_groups)
