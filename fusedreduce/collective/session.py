"""register and Session: checked collectives among peers that are threads, processes, or threads of several processes.

    def peer(number: int) -> None:                       # in a thread of its own
        with register(number, "cpu", CollectiveConfig(world_size=4), group) as session:
            total = session.all_reduce(torch.ones(3))    # tensor([4., 4., 4.])

Every operation first compares the peers' calls, and only then moves data: where they disagree, all peers raise the same
error, and the session goes on with the next operation.
"""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Any

import torch

from .config import CollectiveConfig
from .errors import InvalidConfig, MultipleUnregister
from .payload import (
    dtype_name,
    flat,
    flat_bytes,
    problem_of_reduction,
    problem_of_tensor,
    received,
    reduced,
    root_problem,
)
from .peer_group import Operation, PeerGroup
from .registration import registry_and_caller
from .verdicts import Description, Kind, failed


class Handle:
    """An operation in flight. There may be several, and they may be waited for in any order.

    Over torch.distributed no thread works in the background: an operation's collective starts when this peer calls
    `wait` or `ready` of it or of a later operation; the other peers wait for that. If you issue collectives of your own
    on the same group, issue them at the same place among these on every rank.
    """

    def __init__(
        self, session: Session, operation: Operation | None, mine: torch.Tensor | None, call: Description
    ) -> None:
        self._session = session
        self._operation = operation
        self._mine = mine
        self._description = call
        self._result: torch.Tensor | None = None
        self._lock = threading.Lock()

    def ready(self) -> bool:
        """Returns whether `wait` would return, or raise, without blocking."""
        # Read once, because another thread's `wait` clears it.
        peer_group, operation = self._session._peer_group, self._operation
        if operation is None:
            return True
        return peer_group.try_start(operation, block=False) and peer_group.is_complete(
            operation, self._description.peer
        )

    def wait(self) -> torch.Tensor | None:
        """Waits for the operation; blocks the host until all peers have called it, on CUDA not for the device.

        Returns:
            A new tensor, on CUDA ready on the current stream; None on peers that are not the root of a reduce.

        Raises:
            CollectiveSessionError: the verdict on this operation, the same on every peer.
        """
        with self._lock:
            if self._operation is not None:
                operation = self._operation
                self._session._peer_group.try_start(operation, block=True)
                self._session._waited.discard(operation.number)
                with torch.no_grad():
                    self._result = self._session._result(operation, self._mine, self._description)
                self._operation = self._mine = None
            return self._result


class Session:
    """One peer's side of a session, made by `register`.

    Tensors that are passed in are not written to; results are new tensors, detached from autograd. A peer's calls must
    have the same order as the other peers'; where several threads make them, the caller must see to that.

    Attributes:
        peer: this peer's number.
        device: where its results are computed.
        config: the options.
    """

    def __init__(self, peer_group: PeerGroup, peer: int, device: torch.device, config: CollectiveConfig) -> None:
        self.peer = peer
        self.device = device
        self.config = config
        self._peer_group = peer_group
        self._waited: set[int] = set()  # operations in flight that have not been waited for
        self._finished = False
        self._calls = threading.Lock()

    @property
    def size(self) -> int:
        """Number of peers of all nodes; they are numbered from 0."""
        return self._peer_group.layout.total

    def all_reduce(self, tensor: torch.Tensor, op: str = "sum") -> torch.Tensor:
        """Reduces every peer's `tensor`, and blocks until the result is known.

        Args:
            tensor: fp16, bf16, fp32, fp64 or integers, of any strides; the same shape and dtype on all peers.
            op: "sum", "mean", "min", "max" or "product". Computed in fp32 (fp64 for fp64) and rounded once; a mean is
                the sum divided once, so infinite where that sum is: of fp16 never, of the others near their largest
                values. A NaN anywhere is one in the result.

        Returns:
            A new tensor with `tensor`'s shape, dtype, strides and device; the same bits on all peers.

        Raises:
            AllReduceShapeMismatch, DTypeMismatch, AllReduceOperationMismatch: on every peer, with which peer has what.
            UnsupportedDType, InvalidArgument: a peer's arguments cannot be used; on every peer.
            KindMismatch: peers called different operations; on every peer.
            PeerLost: peers did not call it in time, died, or called `finish`; on every peer.
            SessionReset: a peer called `reset`, at whatever moment; on every peer, now and in later operations.
            RegisterNotFirstOperation: this session is finished; on the caller only.
        """
        return _present(self.all_reduce_async(tensor, op).wait())

    def reduce(self, tensor: torch.Tensor, op: str = "sum", root: int = 0) -> torch.Tensor | None:
        """Reduces every peer's `tensor` for one peer, and blocks until the result is known.

        Args:
            tensor: as for `all_reduce`.
            op: as for `all_reduce`.
            root: the peer that gets the result; the same on all peers.

        Returns:
            On peer `root` a new tensor, as from `all_reduce`; None on the others.

        Raises:
            ReduceShapeMismatch, DTypeMismatch, ReduceOperationMismatch, ReduceRootMismatch: on every peer.
            CollectiveSessionError: as `all_reduce` does.
        """
        return self.reduce_async(tensor, op, root).wait()

    def broadcast(self, tensor: torch.Tensor | None, root: int | None = None) -> torch.Tensor:
        """Sends the tensor of one peer to all, and blocks until it has arrived.

        Args:
            tensor: of any dtype and shape; None on all peers but one.
            root: the peer that must give the tensor; None: whichever does.

        Returns:
            A new tensor with the values, shape and dtype of the one that was given, on this session's device (on the
            peer that gave it, on that tensor's).

        Raises:
            BroadcastNoTensor, BroadcastMultipleTensors, BroadcastRootMismatch: on every peer.
            CollectiveSessionError: as `all_reduce` does.
        """
        return _present(self.broadcast_async(tensor, root).wait())

    def all_reduce_async(self, tensor: torch.Tensor, op: str = "sum") -> Handle:
        """Starts `all_reduce`, with its arguments; returns a handle. `tensor` has been read when this returns."""
        problem = problem_of_reduction(tensor, op)
        return self._call("all_reduce", tensor, op=op, problem=problem)

    def reduce_async(self, tensor: torch.Tensor, op: str = "sum", root: int = 0) -> Handle:
        """Starts `reduce`, with its arguments; returns a handle. `tensor` has been read when this returns."""
        problem = problem_of_reduction(tensor, op) or root_problem(root, self.size, needed=True)
        return self._call("reduce", tensor, op=op, root=root, problem=problem)

    def broadcast_async(self, tensor: torch.Tensor | None, root: int | None = None) -> Handle:
        """Starts `broadcast`, with its arguments; returns a handle. `tensor` has been read when this returns."""
        problem = None if tensor is None else problem_of_tensor(tensor)
        return self._call(
            "broadcast", tensor, root=root, problem=problem or root_problem(root, self.size, needed=False)
        )

    def finish(self) -> None:
        """Ends the session together with all other peers; blocks until all have called it. `register` works again then.

        Raises:
            PendingOperations: a peer has operations that it never waited for; on every peer, and the session goes on.
            PeerLost: peers did not call it in time, or called other operations; on every peer.
            MultipleUnregister: this session is finished already; on the caller only.
            SessionReset: a peer called `reset`.
        """
        if self._finished:
            raise MultipleUnregister(f"peer {self.peer} has finished this session already")
        problem = None
        if self._waited:
            numbers = ", ".join(map(str, sorted(self._waited)))
            problem = (
                "PendingOperations",
                f"operations {numbers} are in flight: wait() for their handles before finish()",
            )
        self._call("finish", None, problem=problem).wait()
        self._peer_group.finish()
        self._finished = True

    def reset(self) -> None:
        """Ends the session for all peers, whatever its state; does nothing if it has ended already.

        Whatever peers are in, or call later, raises SessionReset, and all peers may register again.
        """
        self._peer_group.abort(
            failed("SessionReset", f"peer {self.peer} called reset(): the session is over, register again")
        )

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Calls `finish`, or `reset` after an exception."""
        if kind is not None:
            self.reset()
        elif not self._finished:
            self.finish()

    def __repr__(self) -> str:
        state = "open" if self._peer_group.closed is None else "over"
        return f"Session(peer={self.peer} of {self.size}, device={str(self.device)!r}, {state})"

    def _call(
        self,
        kind: Kind,
        tensor: Any,
        op: Any = None,
        root: Any = None,
        problem: tuple[str, str] | None = None,
    ) -> Handle:
        call = Description(self.peer, kind, op, root)
        work = None
        if problem is None and tensor is not None:
            shape, stride = tuple(tensor.shape), tuple(tensor.stride())
            call = Description(self.peer, kind, op, root, shape, stride, dtype_name(tensor.dtype))
            try:
                with torch.no_grad():
                    work = (flat_bytes if kind == "broadcast" else flat)(tensor, self.device)
            except RuntimeError as error:  # out of memory, say; the other peers must not wait for this operation
                problem = "InvalidArgument", f"the tensor cannot be copied: {type(error).__name__}: {error}"
        if problem is not None:
            call = Description(self.peer, kind, problem=problem)
        with self._calls:
            operation = self._peer_group.add_call(call, work)
            if kind != "finish":
                self._waited.add(operation.number)
        return Handle(self, operation, tensor, call)

    def _result(self, operation: Operation, mine: torch.Tensor | None, call: Description) -> torch.Tensor | None:
        work = self._peer_group.result(operation, self.peer)
        if work is None or (call.kind == "reduce" and call.root != self.peer):
            return None
        if call.kind == "broadcast":
            assert operation.verdict is not None and operation.verdict.source is not None
            return received(work, operation.verdict.source, self.device if mine is None else mine.device)
        assert mine is not None and call.op is not None
        return reduced(work, mine, call.op, self.size)


def register(
    peer: int,
    device: torch.device | str = "cpu",
    config: CollectiveConfig | None = None,
    group: Any | None = None,
) -> Session:
    """Registers a peer of a new session, and blocks until all peers of the group have registered.

    Args:
        peer: its number, from 0: its rank in the LocalGroup or torch.distributed group; with several nodes
            node * world_size + local rank.
        device: where its results are computed; the same type on all peers.
        config: the options; None: `CollectiveConfig()`.
        group: a LocalGroup, of which each thread registers as a peer, or a torch.distributed group, of which each rank
            does. None: torch.distributed's default group; with a global group or address, or alone, a node of one peer.

    Returns:
        This peer's session; `finish()` ends it.

    Raises:
        RegisterParamsMismatch: peers' options differ; on every peer, with the options, the peers and their values.
        MultipleRegister: two callers claim to be the same peer, on every peer; or this peer is registered already, on
            the caller only, and the existing session goes on.
        InvalidConfig: the options do not fit the group, on every peer; or there is no such peer or group, on the
            caller only.
        PeerLost: not all peers registered within the timeout, with those that are missing, or the LocalGroup was closed
            or a rank of it gave up; on every peer.
    """
    config = CollectiveConfig() if config is None else config
    if not isinstance(config, CollectiveConfig):
        raise InvalidConfig(f"config must be a CollectiveConfig, got {type(config).__name__}")
    where = torch.device(device)
    if where.type not in ("cpu", "cuda"):
        raise InvalidConfig(f"device must be on cpu or cuda, got {str(where)!r}")
    if where.type == "cuda" and where.index is None:
        where = torch.device("cuda", torch.cuda.current_device())
    registry, caller, local_group = registry_and_caller(group, config, where)
    layout = caller.layout
    if isinstance(peer, bool) or not isinstance(peer, int) or peer not in layout.peers:
        first, last = layout.peers[0], layout.peers[-1]
        raise InvalidConfig(f"there is no peer {peer!r} on this node: its peers are {first} to {last}")
    settings = (*config.agreed().items(), ("device", where.type))
    call = Description(peer, "register", settings=settings, problem=caller.problem)
    return Session(registry.register(call, caller, local_group), peer, where, config)


def _present(tensor: torch.Tensor | None) -> torch.Tensor:
    assert tensor is not None
    return tensor
