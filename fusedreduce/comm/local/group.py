"""LocalGroup: ranks that are threads of this process (or several that one thread drives), behind the Communicator.

    group = LocalGroup(2)
    results = group.run(lambda communicator: train(communicator))      # one thread per rank

The n-th collectives of a channel's ranks meet; see `meeting`. A channel is what the n-th communicators of all ranks
share, so several independent sequences of collectives can be under way. There is no thread of the group's own.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Collection
from types import TracebackType
from typing import TYPE_CHECKING, TypeVar

import torch

from ...errors import CollectiveError, UnsupportedWireError
from ..protocol import ReduceOp
from .operations import COMPUTED_WIDE, Workshop
from .rendezvous import Arrival, LocalPending
from .sequence import Channel, Generation
from .strategies import Centralized, Strategy
from .threads import run_in_threads

if TYPE_CHECKING:
    from .process_group import LocalProcessGroup

T = TypeVar("T")
_CENTRALIZED = Centralized()


class LocalGroup:
    """`world_size` ranks in this process.

    Args:
        world_size: how many.
        strategy: the order of additions, and between devices their places.
        timeout_s: how long a rank waits for the others in a collective.
        one_thread: one thread drives all ranks, so none of them may wait for another inside backward.

    Raises:
        ValueError: a world size below 1, a timeout that is not above 0.
        TypeError: something else than a strategy.
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
        # Reentrant: the garbage collector may run someone's abort() inside.
        self.lock = threading.RLock()
        self.workshop = Workshop(strategy, world_size)
        self.unaware: dict[int, Generation] = {}  # ranks that do not know yet that theirs has ended
        self._closed = False
        self._endings = 0
        self._together = 0
        self._generation = Generation(self)

    @property
    def endings(self) -> int:
        """How many generations have ended, by an abort or by `close`: for whoever waits for peers by other means."""
        return self._endings

    def communicator(self, rank: int) -> LocalCommunicator:
        """A new one for `rank`; the n-th of each rank in a generation are one channel.

        A generation ends with an abort. A rank that had a communicator then and has not been told yet (by an error of
        its own, or `rejoin`) is told here, once: what it is about to begin belongs to what the others have given up.

        Raises:
            ValueError: there is no such rank.
            CollectiveError: the group is closed, or a peer has given up and this rank did not know.
        """
        if isinstance(rank, bool) or not isinstance(rank, int) or not 0 <= rank < self.size:
            raise ValueError(f"rank must be one of 0 to {self.size - 1}, not {rank!r}")
        with self.lock:
            self._refuse_closed()
            if rank in self.unaware:
                self.unaware[rank].check(f"rank {rank} cannot make a communicator", rank)
            return LocalCommunicator(self, self._generation.roots.channel(rank), rank)

    def communicators(self) -> list[LocalCommunicator]:
        """One for every rank, on a channel of their own: for who drives them all, or deals them out.

        They do not count among those of `communicator`, and no rank is told later that their generation has ended.

        Raises:
            CollectiveError: the group is closed.
        """
        with self.lock:
            self._refuse_closed()
            channel = Channel(self._generation, f"together {self._together}")
            self._together += 1
            return [LocalCommunicator(self, channel, rank) for rank in range(self.size)]

    def rejoin(self, *ranks: int) -> None:
        """These ranks know of all aborts so far: the communicators that they make next are of the new generation."""
        with self.lock:
            for rank in ranks:
                self.unaware.pop(rank, None)

    def run(self, case: Callable[[LocalCommunicator], T]) -> list[T]:
        """`case(communicator)` in one thread per rank, on a channel of their own; what each returned, in rank order.

        Raises:
            BaseException: the first that a rank raised, after all threads have ended: the others' collectives were
                aborted then. What they raised of their own is added as notes.
        """
        with self.lock:
            communicators = self.communicators()
            communicators[0]._channel.used_by = dict.fromkeys(range(self.size))
            self._generation.ranks.update(range(self.size))
        try:
            return run_in_threads(
                "rank",
                [functools.partial(case, one) for one in communicators],
                lambda rank, error: communicators[rank or 0].abort(error),
            )
        finally:
            self.rejoin(*range(self.size))

    def abort(self, communicator: LocalCommunicator, error: BaseException) -> None:
        """As `communicator.abort(error)`."""
        communicator.abort(error)

    def close(self) -> None:
        """Everything that is under way or comes later raises."""
        with self.lock:
            self._endings += not self._closed
            self._closed = True
            generation = self._generation
        generation.fail("the group is closed", None)

    def __enter__(self) -> LocalGroup:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _renew(self, generation: Generation, rank: int) -> None:
        """`rank` aborts `generation`: what is made from now on belongs to another one."""
        with self.lock:
            if self._generation is generation and not self._closed:
                self._generation = Generation(self)
                self._endings += 1
                self.unaware.update(dict.fromkeys(generation.ranks, generation))
        generation.acknowledge(rank)

    def _refuse_closed(self) -> None:
        if self._closed:
            raise CollectiveError("the LocalGroup is closed")


class LocalCommunicator:
    """One rank of a LocalGroup (comm.protocol.Communicator). Several threads may use it, one at a time."""

    def __init__(self, group: LocalGroup, channel: Channel, rank: int) -> None:
        self.group = group
        self._channel = channel
        self._rank = rank
        self._issued = 0
        self.lost = ""  # see Ranks

    @property
    def rank(self) -> int:
        """This peer's rank within the group."""
        return self._rank

    @property
    def size(self) -> int:
        """Ranks in the group."""
        return self.group.size

    def apart(self, devices: Collection[torch.device] = ()) -> LocalCommunicator:
        """A communicator of the same ranks with a sequence of its own; the n-th that each rank makes here meet.

        Nobody waits for another here: there is nothing to connect.
        """
        return LocalCommunicator(self.group, self._channel.siblings.channel(self._rank), self._rank)

    def process_group(self) -> LocalProcessGroup:
        """This rank for torch: `DistributedDataParallel(model, process_group=communicator.process_group())`.

        A new object each time; they share this communicator's sequence of collectives.
        """
        from .process_group import LocalProcessGroup

        return LocalProcessGroup(self)

    def close(self) -> None:
        """Nothing: a channel is forgotten with its communicators."""

    def abort(self, error: BaseException) -> None:
        """Gives up, for all: every collective of this generation, under way or later, raises on every rank.

        Communicators that the group makes afterwards are of the next generation. Only the first abort of one counts.
        """
        generation = self._channel.generation
        self.group._renew(generation, self._rank)
        generation.fail(f"rank {self._rank} gave up: {type(error).__name__}: {error}", error)

    def timeout_s(self, device: torch.device | None = None) -> float:
        """How long a rank waits for the others."""
        return self.group.timeout_s

    def waits_in_backward(self, device: torch.device) -> bool:
        """On CPU, where each rank's backward has a thread of its own."""
        return device.type == "cpu" and not self.group.one_thread

    def check_wire(self, dtype: torch.dtype, device: torch.device) -> None:
        """Raises UnsupportedWireError, on every rank alike, if `dtype` cannot be summed on `device`.

        On CUDA the kernel is compiled here, ahead of the first step.
        """
        if device.type not in ("cpu", "cuda") or dtype not in COMPUTED_WIDE:
            names = ", ".join(sorted(map(str, COMPUTED_WIDE)))
            raise UnsupportedWireError(
                f"a LocalGroup cannot all-reduce {dtype} on {device.type} (on cpu and cuda it sums {names}); choose "
                "another wire"
            )
        self.group.workshop.prepare(dtype, device)

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp = "sum") -> LocalPending:
        """Starts the reduction of `tensor` over all ranks, elementwise and in place.

        A sum has one rounding: it is computed in fp32 (fp64 for fp64), in the order that the strategy says.
        """
        return self._issue("all_reduce", tensor, op=op, problem=_dense(tensor))

    def reduce(self, tensor: torch.Tensor, root: int, op: ReduceOp = "sum") -> LocalPending:
        """As `all_reduce`, but only rank `root`'s tensor holds the result; the others' hold anything."""
        return self._issue("reduce", tensor, op=op, root=root, problem=_dense(tensor) or self._root(root))

    def all_to_all(self, output: torch.Tensor, input: torch.Tensor) -> LocalPending:
        """Starts the exchange of equal parts: `output`, [ranks * n], gets part `rank` of each rank's `input`."""
        problem = _dense(input) or _dense(output)
        if not problem and (output.numel() != input.numel() or output.dtype is not input.dtype):
            problem = f"output and input of an all_to_all differ: {output.numel()} {output.dtype}, {input.numel()} "
            problem += str(input.dtype)
        if not problem and input.numel() % self.size:
            problem = f"{input.numel()} elements cannot be dealt out to {self.size} ranks"
        return self._issue("all_to_all", input, output, problem=problem)

    def all_reduce_sparse(self, tensor: torch.Tensor) -> LocalPending:
        """Starts the sum of a sparse COO tensor over all ranks; the future's value holds the result."""
        problem = "" if tensor.is_sparse else f"a tensor of layout {tensor.layout} is not sparse COO"
        return self._issue("all_reduce_sparse", tensor, problem=problem)

    def all_gather(self, tensor: torch.Tensor) -> tuple[LocalPending, torch.Tensor]:
        """Starts gathering `tensor`, [n], from all ranks; the tensor that will hold it: [ranks, n]."""
        gathered = torch.empty((self.size, tensor.numel()), dtype=tensor.dtype, device=tensor.device)
        return self._issue("all_gather", tensor, gathered, problem=_dense(tensor)), gathered

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        """Overwrites `tensor` on every rank with that of rank `source`; blocks until all ranks have come."""
        pending = self._issue("broadcast", tensor, root=source, problem=_dense(tensor) or self._root(source))
        pending.wait()

    def all_gather_bytes(self, payload: bytes, capacity_bytes: int, device: torch.device) -> list[bytes]:
        """Every rank's payload, in rank order; blocks. They go from host to host."""
        if len(payload) > capacity_bytes:
            raise ValueError(f"a payload of {len(payload)} bytes does not fit into {capacity_bytes}")
        gathered = self._issue("all_gather_bytes", payload=payload).gathered()
        return [one for one in gathered if isinstance(one, bytes)]

    def compare_aside(self, key: str, text: str, device: torch.device) -> list[str]:
        """Every rank's `text`, in rank order; blocks. The ranks meet by `key`, whatever else they have issued."""
        arrival = Arrival("compare_aside", payload=text, due_s=self._due_s(), thread=threading.get_ident())
        gathered = self._channel.arrive(self._rank, key, arrival).gathered()
        return [one for one in gathered if isinstance(one, str)]

    def _issue(
        self,
        kind: str,
        *tensors: torch.Tensor,
        op: ReduceOp | None = None,
        root: int | None = None,
        payload: bytes = b"",
        problem: str = "",
    ) -> LocalPending:
        devices = dict.fromkeys(tensor.device for tensor in tensors if tensor.is_cuda)
        arrival = Arrival(
            kind,
            tensors,
            op,
            root,
            payload,
            tuple(torch.cuda.current_stream(device).record_event() for device in devices),
            problem,
            self._due_s(),
            threading.get_ident(),
        )
        place, self._issued = self._issued, self._issued + 1
        return self._channel.arrive(self._rank, place, arrival)

    def _due_s(self) -> float:
        return time.monotonic() + self.group.timeout_s

    def _root(self, root: int) -> str:
        return "" if isinstance(root, int) and 0 <= root < self.size else f"there is no rank {root!r}"


def _dense(tensor: torch.Tensor) -> str:
    """Why a tensor cannot be reduced as it lies in memory; "" if it can."""
    if tensor.layout is not torch.strided:
        return f"a tensor of layout {tensor.layout} is not dense"
    if tensor.device.type not in ("cpu", "cuda"):
        return f"tensors on {tensor.device.type} cannot be used"
    return "" if tensor.is_contiguous() else f"a tensor of strides {tensor.stride()} is not contiguous"
