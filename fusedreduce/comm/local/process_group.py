"""LocalProcessGroup: a LocalCommunicator as a torch ProcessGroup, so that DistributedDataParallel takes a LocalGroup.

torch.distributed need not be initialised, and does not register the group. What torch does with a group object works:
`group.rank()`, `size()`, `name()`, its collectives, and functions of `torch.distributed` that are given the group and
ranks within it (`dist.all_reduce(t, group=group)`, `dist.broadcast(t, group_src=0, group=group)`). What looks the group
up in torch's table of groups does not: `get_rank(group)`, `get_backend(group)`, `get_global_rank(group, ...)`.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from ...errors import CollectiveError
from ..process_group import REDUCE_OPS, ProcessGroupCommunicator
from ..protocol import Pending, ReduceOp
from .group import LocalCommunicator


class LocalProcessGroup(dist.ProcessGroup):
    """One rank of a LocalGroup as a torch ProcessGroup. Its collectives are part of the communicator's sequence.

    Args:
        communicator: of this rank.
    """

    def __init__(self, communicator: LocalCommunicator) -> None:
        super().__init__(communicator.rank, communicator.size)  # type: ignore[call-arg]  # not in its stub
        self.communicator = communicator

    # Names that torch calls, from C++ too: of each the overload with options

    def getBackendName(self) -> str:
        """The name that `name()` and DDP's logging data show."""
        return "local"

    def allreduce(self, tensors: Any, opts: Any = None) -> LocalWork:  # type: ignore[override]
        """Reduces each tensor over all ranks, in place; sparse COO tensors are summed."""
        op = _op("all_reduce", opts)
        works = [self._all_reduce(tensor, op) for tensor in _listed(tensors)]
        return LocalWork(self, _listed(tensors), works)

    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> LocalWork:
        """Reduces each tensor over all ranks, in place, one collective each."""
        return self.allreduce(tensors, opts)

    def reduce(self, tensors: Any, opts: Any) -> LocalWork:  # type: ignore[override]
        """Reduces each tensor; only the root's tensors hold the result, the others' contents are undefined."""
        op = _op("reduce", opts)
        works = [(self.communicator.reduce(_flat(one), opts.rootRank, op), None) for one in _listed(tensors)]
        return LocalWork(self, _listed(tensors), works)

    def broadcast(self, tensors: Any, opts: Any) -> LocalWork:  # type: ignore[override]
        """Overwrites each tensor with the root's; blocks until all ranks have called it, also with async_op."""
        for tensor in _listed(tensors):
            self.communicator.broadcast(_flat(tensor), opts.rootRank)
        return LocalWork(self, _listed(tensors), [])

    def allgather(self, output_tensors: Any, input_tensors: Any, opts: Any = None) -> LocalWork:
        """Gathers every rank's tensor into the list of output tensors, in rank order."""
        pairs = list(zip(output_tensors, _listed(input_tensors), strict=True))
        works = [self._all_gather(outputs, one) for outputs, one in pairs]
        tensors = [one for outputs in output_tensors for one in outputs]
        return LocalWork(self, tensors, works, [list(outputs) for outputs in output_tensors])

    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> LocalWork:
        """Gathers every rank's tensor into one output tensor, in rank order."""
        rows = output.detach().view(self.communicator.size, -1).unbind()
        return LocalWork(self, [output], [self._all_gather(rows, input)])

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: Sequence[int] = (),
        input_split_sizes: Sequence[int] = (),
        opts: Any = None,
    ) -> LocalWork:
        """Gets part `rank` of each rank's input; parts must be of equal size."""
        if len({*output_split_sizes}) > 1 or len({*input_split_sizes}) > 1:
            raise NotImplementedError(
                "all_to_all over a LocalGroup exchanges equal parts only: leave the split sizes out, or pad"
            )
        return LocalWork(self, [output], [(self.communicator.all_to_all(_flat(output), _flat(input)), None)])

    def reduce_scatter_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> LocalWork:
        """Reduces every rank's input; this rank's output gets part `rank` of the result."""
        buffer = _flat(input.detach().clone(memory_format=torch.contiguous_format))
        pending, part = self.communicator.reduce_scatter(buffer, _op("reduce_scatter", opts))
        into = _flat(output)
        return LocalWork(self, [output], [(pending, lambda: into.copy_(part.view(into.shape)))])

    def send(self, tensors: Any, dstRank: int, tag: int = 0) -> LocalWork:
        """Sends each tensor to one rank; the n-th send from one rank to another meets the n-th recv there."""
        _check_tag(tag)
        works: list[_Started] = [(self.communicator.send(_flat(one), dstRank), None) for one in _listed(tensors)]
        return LocalWork(self, _listed(tensors), works)

    def recv(self, tensors: Any, srcRank: int, tag: int = 0) -> LocalWork:
        """Overwrites each tensor with what one rank sends; see `send`."""
        _check_tag(tag)
        works: list[_Started] = [(self.communicator.recv(_flat(one), srcRank), None) for one in _listed(tensors)]
        return LocalWork(self, _listed(tensors), works)

    def barrier(self, opts: Any = None) -> LocalWork:
        """Blocks until all ranks have called it."""
        self.communicator.all_gather_bytes(b"", 0, torch.device("cpu"))
        return LocalWork(self, [], [])

    # Older names of torch's
    _allgather_base = all_gather_single
    alltoall_base = all_to_all_single  # type: ignore[assignment]
    _reduce_scatter_base = reduce_scatter_single  # type: ignore[assignment]

    def __reduce__(self) -> NoReturn:
        raise TypeError("a LocalGroup lives in this process only: its process group can be neither pickled nor copied")

    def __repr__(self) -> str:
        return f"LocalProcessGroup(rank {self.communicator.rank} of {self.communicator.size})"

    def _all_reduce(self, tensor: torch.Tensor, op: ReduceOp) -> _Started:
        if tensor.layout is torch.strided:
            return self.communicator.all_reduce(_flat(tensor), op), None
        if op != "sum":
            raise NotImplementedError(f"a LocalGroup can only sum sparse tensors; {op} is not supported")
        pending = self.communicator.all_reduce_sparse(tensor.detach())

        def copy_back() -> None:
            with torch.no_grad():  # not detach(): a detached sparse tensor has values of its own
                tensor.copy_(pending.future().value()[0])

        return pending, copy_back

    def _all_gather(self, outputs: Sequence[torch.Tensor], tensor: torch.Tensor) -> _Started:
        pending, gathered = self.communicator.all_gather(tensor.detach().contiguous().view(-1))

        def copy_rows() -> None:
            for output, row in zip(outputs, gathered, strict=True):
                output.detach().copy_(row.view(output.shape))

        return pending, copy_rows


_Started = tuple[Pending, Callable[[], object] | None]


def _refused(name: str) -> Callable[..., NoReturn]:
    def refuse(self: LocalProcessGroup, *args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(
            f"a LocalGroup has no {name}; it has all_reduce, reduce, broadcast, all_gather, all_to_all and "
            "reduce_scatter_tensor of equal parts, send, recv and barrier"
        )

    return refuse


for _name in (
    "gather",
    "scatter",
    "recv_anysource",
    "alltoall",
    "reduce_scatter",
    "reduce_scatter_single_coalesced",
    "reduce_scatter_tensor_coalesced",
    "all_gather_single_coalesced",
    "allgather_into_tensor_coalesced",
    "allgather_coalesced",
    "monitored_barrier",
    "split_group",
    "merge_remote_group",
):
    setattr(LocalProcessGroup, _name, _refused(_name))


class LocalWork(dist.Work):
    """Collectives in flight, as a torch Work. The group's timeout applies, whatever timeout `wait` is given.

    Args:
        group: that issued them.
        tensors: the results.
        started: each collective, and what copies its result into the caller's tensors, to be called once.
        value: of the future; None: the tensors.
    """

    def __init__(
        self,
        group: LocalProcessGroup,
        tensors: list[torch.Tensor],
        started: Sequence[_Started],
        value: list[Any] | None = None,
    ) -> None:
        super().__init__()
        self._value = tensors if value is None else value
        self._communicator = group.communicator
        self._tensors = tensors
        self._started = started
        self._copied = False
        self._lock = threading.Lock()

    def wait(self, timeout: Any = None) -> bool:
        """Blocks until the tensors hold the result; on CUDA only until all ranks have issued the collectives.

        Args:
            timeout: ignored, since the group's applies.

        Returns:
            True.

        Raises:
            CollectiveError: a rank did not issue them in time, ranks issued different ones, or one gave up.
        """
        self._check_may_wait()
        with self._lock:
            for pending, _ in self._started:
                pending.wait()
            if not self._copied:
                self._copied = True
                for _, copy in self._started:
                    if copy is not None:
                        copy()
        return True

    def synchronize(self) -> None:
        """Waits, as `wait()` does."""
        self.wait()

    def is_completed(self) -> bool:
        """Returns whether `wait` would return, or raise, without blocking."""
        return all(pending.ready() for pending, _ in self._started)

    def is_success(self) -> bool:
        """Returns whether all collectives have ended without an error."""
        return self.is_completed() and self._error() is None

    def exception(self) -> CollectiveError | None:
        """Returns the error of a collective that has ended; None if there is none, or none yet."""
        return self._error() if self.is_completed() else None

    def result(self) -> list[torch.Tensor]:
        """Returns the tensors, which hold the result after `wait`."""
        return self._tensors

    def get_future(self) -> torch.futures.Future[list[Any]]:
        """Returns a completed future: waits for all ranks first.

        Otherwise ranks' threads would run each other's callbacks, and a callback that waits for another collective
        could wait for one that only its own thread would issue. Nor would the timeout apply to C++ that waits for it.
        """
        devices: list[int | str | torch.device] = [*dict.fromkeys(one.device for one in self._tensors if one.is_cuda)]
        future: torch.futures.Future[list[Any]] = torch.futures.Future(devices=devices or None)
        future.set_result(self._value)
        error = self._error()
        return future if error is None else future.then(functools.partial(_fail, error))

    def _error(self) -> CollectiveError | None:
        try:
            self.wait()
        except CollectiveError as error:
            return error
        return None

    def _check_may_wait(self) -> None:
        if torch._C._current_graph_task_id() == -1:  # no backward runs in this thread
            return
        for tensor in self._tensors:
            if not self._communicator.waits_in_backward(tensor.device):
                raise CollectiveError(
                    f"rank {self._communicator.rank}: a rank of a LocalGroup cannot wait for another inside a backward "
                    f"on {tensor.device}, because the other's backward needs the same thread. Use "
                    "fusedreduce.DistributedDataParallel there, without comm hooks"
                )


def communicator_of(group: dist.ProcessGroup | None) -> LocalCommunicator | ProcessGroupCommunicator:
    """The communicator of a process group.

    Args:
        group: one of torch's, or a LocalProcessGroup; None: torch's default group.

    Raises:
        TypeError: `group` is a communicator.
        ValueError: torch.distributed is not initialised, or this process is not a member of `group`.
    """
    if isinstance(group, LocalProcessGroup):
        return group.communicator
    if isinstance(group, LocalCommunicator):
        raise TypeError("process_group is a communicator: give communicator.process_group() instead")
    return ProcessGroupCommunicator(group)


def backend_name(group: dist.ProcessGroup) -> str:
    """torch's name of the group's backend; "local" for a LocalProcessGroup."""
    return group.name() if isinstance(group, LocalProcessGroup) else str(dist.get_backend(group))


def _fail(error: CollectiveError, future: torch.futures.Future[Any]) -> NoReturn:
    """Raises in a callback, since C++ that waits for a future takes an exception set from Python for a result."""
    raise error


def _check_tag(tag: int) -> None:
    if tag:
        raise NotImplementedError(f"a LocalGroup has no tags, it meets sends and receives in order; got tag {tag}")


def _listed(tensors: Any) -> list[torch.Tensor]:
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as a real tensor of one dimension; one that cannot be is refused by the communicator later."""
    tensor = torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()
    return tensor.view(-1) if tensor.is_contiguous() else tensor


def _op(what: str, opts: Any) -> ReduceOp:
    """torch's reduce operation as ours.

    Args:
        what: the collective, for the message.
        opts: its options, an operation, or None (a sum).

    Raises:
        NotImplementedError: ours has no such operation.
    """
    given = dist.ReduceOp.SUM if opts is None else getattr(opts, "reduceOp", opts)
    for op, known in REDUCE_OPS.items():
        if given == known:
            return op
    name = getattr(getattr(given, "op", given), "name", given)
    raise NotImplementedError(
        f"{what} over a LocalGroup: reduce operation {name} is not supported; use one of {', '.join(REDUCE_OPS)}"
    )
