"""LocalGroup: ranks that are threads of this process, or that one thread drives, behind the Communicator protocol.

    group = LocalGroup(2)
    results = group.run(lambda communicator: train(communicator))      # one thread per rank

The n-th collective that each rank issues on a channel is one rendezvous (rendezvous.py). The n-th communicators of all
ranks share a channel, so several independent sequences of collectives can be in flight. The group has no thread of its
own: the last rank to arrive performs the collective.
"""

from __future__ import annotations

import functools
import threading
import time
import weakref
from collections.abc import Callable, Collection, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, TypeVar

import torch

from ...errors import CollectiveError, UnsupportedWireError
from ..protocol import ReduceOp, check_peer
from .operations import COMPUTED_WIDE, Resources, dense_problem, parts_problem
from .rendezvous import Arrival, LocalPending
from .sequence import Channel, Epoch, OwnerT
from .strategies import Centralized, Strategy
from .threads import run_in_threads

if TYPE_CHECKING:
    from .process_group import LocalProcessGroup

T = TypeVar("T")
_CENTRALIZED = Centralized()
_CLOSED = "the LocalGroup is closed"


class LocalGroup:
    """`world_size` ranks in this process.

    An *epoch* of the group ends when a rank gives up (`LocalCommunicator.abort`, or an exception under `run`): every
    collective of it raises on every rank, and communicators that are made afterwards belong to the next epoch.

    Args:
        world_size: number of ranks.
        strategy: the order of the additions, and between devices where they are done.
        timeout_s: seconds for which a rank waits for the others in a collective.
        one_thread: one thread drives all ranks, so none of them may wait for another inside backward.

    Raises:
        ValueError: `world_size` is below 1, or `timeout_s` is not above 0.
        TypeError: `strategy` is not Centralized, Tree or Ring.
    """

    def __init__(
        self,
        world_size: int,
        *,
        strategy: Strategy = _CENTRALIZED,
        timeout_s: float = 300.0,
        one_thread: bool = False,
    ) -> None:
        if isinstance(world_size, bool) or not isinstance(world_size, int) or world_size < 1:
            raise ValueError(f"LocalGroup: world_size must be an integer of at least 1, not {world_size!r}")
        if not isinstance(strategy, Strategy):
            raise TypeError(f"LocalGroup: strategy must be Centralized(), Tree(arity) or Ring(), not {strategy!r}")
        if not timeout_s > 0:
            raise ValueError(f"LocalGroup: timeout_s must be above 0, not {timeout_s!r}")
        self.size = world_size
        self.strategy = strategy
        self.timeout_s = float(timeout_s)
        self.one_thread = one_thread
        # Reentrant: the garbage collector may run a finalizer that aborts while this thread holds it.
        self.lock = threading.RLock()
        self.resources = Resources(strategy, world_size)
        self.unaware: dict[int, Epoch] = {}  # by rank, the epoch that has ended without the rank having been told
        self._closed = False
        self._together = 0
        self._epoch = Epoch(self)
        self._apart: weakref.WeakSet[Epoch] = weakref.WeakSet()  # beside that one

    def communicator(self, rank: int) -> LocalCommunicator:
        """A new communicator for `rank`; the n-th that each rank makes in an epoch share a channel.

        A rank that had a communicator when an epoch ended, and has not been told (by an error of a collective, or
        `rejoin`), is told here, once: what it is about to begin belongs to what the others have given up.

        Args:
            rank: from 0.

        Returns:
            The communicator.

        Raises:
            ValueError: there is no such rank.
            CollectiveError: the group is closed, or a rank has given up and this one had not been told.
        """
        if isinstance(rank, bool) or not isinstance(rank, int) or not 0 <= rank < self.size:
            raise ValueError(f"rank must be one of 0 to {self.size - 1}, not {rank!r}")
        with self.lock:
            self._refuse_closed()
            if rank in self.unaware:
                self.unaware[rank].check(f"rank {rank} cannot make a communicator", rank)
            return LocalCommunicator(self, self._epoch.roots.next_of(rank, tuple(range(self.size))), rank)

    def communicators(self, *, apart: bool = False) -> list[LocalCommunicator]:
        """A communicator for every rank, on a channel of their own: for a caller that drives or hands out all ranks.

        They do not count among those of `communicator`, and no rank is told by `communicator` that their epoch ended.

        Args:
            apart: in an epoch of their own, which no abort of others ends, and whose end no others notice.

        Returns:
            The communicators, in rank order.

        Raises:
            CollectiveError: the group is closed.
        """
        with self.lock:
            self._refuse_closed()
            epoch = self._epoch
            if apart:
                epoch = Epoch(self)
                self._apart.add(epoch)
            channel = Channel(epoch, f"together {self._together}", tuple(range(self.size)))
            self._together += 1
            return [LocalCommunicator(self, channel, rank) for rank in range(self.size)]

    def rejoin(self, *ranks: int) -> None:
        """Says that ranks know of all aborts so far, so that `communicator` does not raise for them.

        Args:
            ranks: their numbers.
        """
        with self.lock:
            for rank in ranks:
                self.unaware.pop(rank, None)

    def run(self, case: Callable[[LocalCommunicator], T]) -> list[T]:
        """Runs `case(communicator)` in one thread per rank, on a channel of their own.

        Args:
            case: what each rank does.

        Returns:
            What each rank's call returned, in rank order.

        Raises:
            BaseException: the first error that a rank raised of its own, once all threads have ended: it ends the
                epoch, so no other rank waits for that one. Errors that others raised of their own are added as notes.
        """
        with self.lock:
            communicators = self.communicators()
            communicators[0]._channel.used_by = dict.fromkeys(range(self.size))
            self._epoch.ranks.update(range(self.size))
        try:
            return run_in_threads(
                "rank",
                [functools.partial(case, communicator) for communicator in communicators],
                lambda rank, error: communicators[rank or 0].abort(error),
            )
        finally:
            self.rejoin(*range(self.size))

    def abort(self, communicator: LocalCommunicator, error: BaseException) -> None:
        """Calls `communicator.abort(error)`.

        Args:
            communicator: of the rank that gives up.
            error: why.
        """
        communicator.abort(error)

    def on_epoch_end(self, owner: OwnerT, call: Callable[[OwnerT, str], None]) -> None:
        """Has `call(owner, why)` called once when this epoch ends, in the thread that aborts it or closes the group.

        For code that waits for ranks by other means than collectives.

        Args:
            owner: any object that can be referenced weakly: nothing is called once it is gone. One call per owner
                and epoch.
            call: must not reference `owner`; what it raises is logged.

        Raises:
            CollectiveError: the group is closed.
        """
        with self.lock:
            self._refuse_closed()
            self._epoch.call_at_end(owner, call)

    def close(self) -> None:
        """Closes the group: every collective in flight, and whatever is asked of it later, raises CollectiveError."""
        with self.lock:
            self._closed = True
            calls = [call for epoch in (self._epoch, *self._apart) for call in epoch.end(_CLOSED, None)]
        for call in calls:
            call()

    def __enter__(self) -> LocalGroup:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _end_epoch(self, epoch: Epoch, rank: int, error: BaseException) -> None:
        """`rank` gives up: ends `epoch`, and communicators that are made from now on belong to another one."""
        with self.lock:  # for both: a rank that has not been told must find no new epoch while this one goes on
            calls = epoch.end(f"rank {rank} gave up: {type(error).__name__}: {error}", error)
            if self._epoch is epoch and not self._closed:
                self._epoch = Epoch(self)
                self.unaware.update(dict.fromkeys(epoch.ranks, epoch))
            epoch.acknowledge(rank)
        for call in calls:
            call()

    def _refuse_closed(self) -> None:
        if self._closed:
            raise CollectiveError(_CLOSED)


class LocalCommunicator:
    """One rank of a LocalGroup (a comm.protocol.Communicator). Several threads may use it, one at a time."""

    def __init__(self, group: LocalGroup, channel: Channel, rank: int) -> None:
        self.group = group
        self._channel = channel
        self._rank = rank  # within the group: of a communicator of some ranks not its own number
        self._issued = 0
        self.lost = ""

    @property
    def rank(self) -> int:
        """This communicator's rank among its ranks."""
        return self._channel.ranks.index(self._rank)

    @property
    def size(self) -> int:
        """Number of its ranks."""
        return len(self._channel.ranks)

    def ranks_per_node(self, device: torch.device) -> int:
        """Returns the number of ranks: they are one process."""
        return self.size

    def apart(self, devices: Collection[torch.device] = (), ranks: Sequence[int] | None = None) -> LocalCommunicator:
        """The n-th that each rank makes here share a sequence of collectives of their own.

        There is nothing to connect for `devices`, and it does not block.

        Raises:
            CollectiveError: the group is closed, or a rank has given up.
        """
        members = self._channel.ranks if ranks is None else tuple(self._channel.ranks[rank] for rank in ranks)
        return LocalCommunicator(self.group, self._channel.children.next_of(self._rank, members), self._rank)

    def process_group(self) -> LocalProcessGroup:
        """This rank as a process group: `DistributedDataParallel(model, process_group=communicator.process_group())`.

        Returns:
            A new object each time; all of them share this communicator's sequence of collectives.
        """
        from .process_group import LocalProcessGroup

        return LocalProcessGroup(self)

    def close(self) -> None:
        """Does nothing: a channel lives as long as its communicators."""

    def abort(self, error: BaseException) -> None:
        """Ends the epoch for all ranks: every collective of it, in flight or issued later, raises on every rank.

        Communicators that the group makes afterwards belong to the next epoch. Only the first abort of an epoch counts.

        Args:
            error: why; the ranks' CollectiveErrors name it, and have it as their cause.
        """
        self.group._end_epoch(self._channel.epoch, self._rank, error)

    def timeout_s(self, device: torch.device | None = None) -> float:
        """Seconds for which a rank waits for the others in a collective, on any device."""
        return self.group.timeout_s

    def waits_in_backward(self, device: torch.device) -> bool:
        """Returns whether `device` is a CPU and each rank has a thread, which then runs its backward."""
        return device.type == "cpu" and not self.group.one_thread

    def check_wire(self, dtype: torch.dtype, device: torch.device) -> None:
        """Raises UnsupportedWireError, on every rank, if tensors of `dtype` cannot be summed on `device`.

        On CUDA the kernel is compiled here, ahead of the first step.
        """
        if device.type not in ("cpu", "cuda") or dtype not in COMPUTED_WIDE:
            names = ", ".join(sorted(map(str, COMPUTED_WIDE)))
            raise UnsupportedWireError(
                f"a LocalGroup cannot all-reduce {dtype} on {device.type}: on cpu and cuda it sums {names}. Choose "
                "another wire"
            )
        self.group.resources.prepare(dtype, device)

    def check_exchange(self, device: torch.device) -> None:
        """Does nothing: a LocalGroup has an all-to-all on every device that it can sum on."""

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp = "sum") -> LocalPending:
        """Issues a reduction that runs once all ranks have issued it.

        A sum is computed in fp32 (fp64 for fp64), in the strategy's order of additions, and rounded once.
        """
        return self._issue("all_reduce", tensor, op=op, problem=dense_problem(tensor))

    def reduce(self, tensor: torch.Tensor, root: int, op: ReduceOp = "sum") -> LocalPending:
        """As `all_reduce`, but writes only rank `root`'s tensor."""
        return self._issue(
            "reduce", tensor, op=op, root=root, problem=dense_problem(tensor) or self._root_problem(root)
        )

    def reduce_scatter(self, tensor: torch.Tensor, op: ReduceOp = "sum") -> tuple[LocalPending, torch.Tensor]:
        """As `all_reduce`, but writes only this rank's part; other parts of `tensor` keep what they hold."""
        problem = parts_problem(tensor, self.size)
        part = tensor if problem else tensor.view(self.size, tensor.numel() // self.size)[self.rank]
        return self._issue("reduce_scatter", tensor, op=op, problem=problem), part

    def all_to_all(self, output: torch.Tensor, input: torch.Tensor) -> LocalPending:
        """Copies the parts of the ranks' `input` to `output`, once all ranks have issued this."""
        problem = parts_problem(input, self.size) or dense_problem(output)
        if not problem and (output.numel() != input.numel() or output.dtype is not input.dtype):
            problem = f"output and input of an all_to_all differ: {output.numel()} {output.dtype}, {input.numel()} "
            problem += str(input.dtype)
        return self._issue("all_to_all", input, output, problem=problem)

    def all_reduce_sparse(self, tensor: torch.Tensor) -> LocalPending:
        """Adds the ranks' sparse tensors up, once all ranks have issued this."""
        problem = "" if tensor.is_sparse else f"a tensor of layout {tensor.layout} is not sparse COO"
        return self._issue("all_reduce_sparse", tensor, problem=problem)

    def all_gather(self, tensor: torch.Tensor, into: torch.Tensor | None = None) -> tuple[LocalPending, torch.Tensor]:
        """Copies every rank's `tensor` to `into`, once all ranks have issued this."""
        gathered = tensor.new_empty(self.size * tensor.numel()) if into is None else into
        gathered = gathered.view(self.size, tensor.numel())
        return self._issue("all_gather", tensor, gathered, problem=dense_problem(tensor)), gathered

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        """Copies rank `source`'s tensor to `tensor`; blocks until all ranks have called it."""
        pending = self._issue(
            "broadcast", tensor, root=source, problem=dense_problem(tensor) or self._root_problem(source)
        )
        pending.wait()

    def send(self, tensor: torch.Tensor, destination: int) -> LocalPending:
        """Starts a transfer that ends when rank `destination` has called `recv`."""
        check_peer("destination", destination, self.rank, self.size)
        return self._transfer(tensor, self._rank, self._channel.ranks[destination])

    def recv(self, tensor: torch.Tensor, source: int) -> LocalPending:
        """Starts a transfer that ends when rank `source` has called `send`."""
        check_peer("source", source, self.rank, self.size)
        return self._transfer(tensor, self._channel.ranks[source], self._rank)

    def all_gather_bytes(self, payload: bytes, capacity_bytes: int, device: torch.device) -> list[bytes]:
        """Hands payloads over as objects: they stay on the host, so `device` is not used."""
        if len(payload) > capacity_bytes:
            raise ValueError(f"a payload of {len(payload)} bytes does not fit into {capacity_bytes}")
        gathered = self._issue("all_gather_bytes", payload=payload).gathered()
        return [payload for payload in gathered if isinstance(payload, bytes)]

    def compare_aside(self, key: str, text: str, device: torch.device) -> list[str]:
        """A rendezvous by `key`, whatever else ranks have issued."""
        arrival = Arrival("compare_aside", payload=text, due_s=self._due_s(), thread=threading.get_ident())
        gathered = self._channel.issue(self._rank, key, arrival).gathered()
        return [text for text in gathered if isinstance(text, str)]

    def _issue(
        self,
        kind: str,
        *tensors: torch.Tensor,
        op: ReduceOp | None = None,
        root: int | None = None,
        payload: bytes = b"",
        problem: str = "",
    ) -> LocalPending:
        arrival = self._arrival(kind, tensors, op, root, payload, problem)
        place, self._issued = self._issued, self._issued + 1
        return self._channel.issue(self._rank, place, arrival)

    def _transfer(self, tensor: torch.Tensor, source: int, destination: int) -> LocalPending:
        arrival = self._arrival("transfer", (tensor,), problem=dense_problem(tensor))
        return self._channel.transfer(self._rank, source, destination, arrival)

    def _arrival(
        self,
        kind: str,
        tensors: tuple[torch.Tensor, ...],
        op: ReduceOp | None = None,
        root: int | None = None,
        payload: bytes = b"",
        problem: str = "",
    ) -> Arrival:
        devices = dict.fromkeys(tensor.device for tensor in tensors if tensor.is_cuda)
        events = tuple(torch.cuda.current_stream(device).record_event() for device in devices)
        return Arrival(kind, tensors, op, root, payload, events, problem, self._due_s(), threading.get_ident())

    def _due_s(self) -> float:
        return time.monotonic() + self.group.timeout_s

    def _root_problem(self, root: int) -> str:
        return "" if isinstance(root, int) and 0 <= root < self.size else f"there is no rank {root!r}"
