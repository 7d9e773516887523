"""register and Session: checked collectives among peers that are threads, processes, or threads of several processes.

    def peer(number: int) -> None:                       # in a thread of its own
        with register(number, "cpu", CollectiveConfig(world_size=4), group) as session:
            total = session.all_reduce(torch.ones(3))    # tensor([4., 4., 4.])

Every operation first compares what the peers want, and only then moves data: where they disagree, all of them raise the
same error, and the session goes on with the next operation.
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
from .peer_group import Operation, Room, reset_verdict
from .registration import Lobby, lobby_and_caller
from .verdicts import Description, Kind


class Handle:
    """An operation under way. Several may be, and they may be waited for in any order.

    Over torch.distributed nothing happens behind the caller's back: an operation's collective starts when this peer
    waits for it, or for a later one, or asks whether either is ready; the other peers wait for that. Collectives of
    one's own on the same group must keep their place among these on every rank.
    """

    def __init__(
        self, session: Session, operation: Operation | None, mine: torch.Tensor | None, want: Description
    ) -> None:
        self._session = session
        self._operation = operation
        self._mine = mine
        self._want = want
        self._result: torch.Tensor | None = None
        self._lock = threading.Lock()

    def ready(self) -> bool:
        """Whether `wait` would return, or raise, at once."""
        room, operation = self._session._room, self._operation  # once: another thread's `wait` takes it away
        if operation is None:
            return True
        return room.settle(operation, block=False) and room.ready(operation, self._want.peer)

    def wait(self) -> torch.Tensor | None:
        """The result, on CUDA on the current stream; blocks the host until all peers have called the operation.

        Raises:
            CollectiveSessionError: the verdict on this operation, the same on every peer.
        """
        with self._lock:
            if self._operation is not None:
                operation = self._operation
                self._session._room.settle(operation, block=True)
                self._session._waited.discard(operation.number)
                with torch.no_grad():
                    self._result = self._session._result(operation, self._mine, self._want)
                self._operation = self._mine = None
            return self._result


class Session:
    """One peer's side of what `register` made. Tensors that are given stay as they are; results are new and detached.

    A peer's calls have an order, the same on all peers; where several threads make them, that is up to the caller.
    """

    def __init__(self, room: Room, lobby: Lobby, peer: int, device: torch.device, config: CollectiveConfig) -> None:
        self.peer = peer
        self.device = device
        self.config = config
        self._room = room
        self._lobby = lobby
        self._waited: set[int] = set()  # operations that nobody has waited for yet
        self._finished = False
        self._calls = threading.Lock()

    @property
    def size(self) -> int:
        """Peers of all nodes; they are numbered from 0."""
        return self._room.place.total

    def all_reduce(self, tensor: torch.Tensor, op: str = "sum") -> torch.Tensor:
        """Every peer's `tensor` reduced with `op`; the same bits for all, on the device of each one's own tensor.

        Args:
            tensor: fp16, bf16, fp32, fp64 or integers, of any strides; the same shape and dtype on all peers.
            op: "sum", "mean", "min", "max" or "product". Computed in fp32 (fp64 for fp64) and rounded once; a mean is
                the sum divided once, so infinite where that sum is: of fp16 never, of the others near their largest
                values. A NaN anywhere is one in the result.

        Raises:
            AllReduceShapeMismatch, DTypeMismatch, AllReduceOperationMismatch: on every peer, with who has what.
            UnsupportedDType, InvalidArgument: a peer's arguments cannot be used; on every peer.
            KindMismatch: peers called different operations; on every peer.
            PeerLost: peers did not come in time, died, or called `finish`; on every peer.
            SessionReset: a peer called `reset`.
            RegisterNotFirstOperation: this session is finished, or was reset; on the caller only.
        """
        return _present(self.all_reduce_async(tensor, op).wait())

    def reduce(self, tensor: torch.Tensor, op: str = "sum", root: int = 0) -> torch.Tensor | None:
        """As `all_reduce`, but only peer `root` gets the result, the others None.

        Raises:
            ReduceShapeMismatch, DTypeMismatch, ReduceOperationMismatch, ReduceRootMismatch: on every peer.
            CollectiveSessionError: as of `all_reduce`.
        """
        return self.reduce_async(tensor, op, root).wait()

    def broadcast(self, tensor: torch.Tensor | None, root: int | None = None) -> torch.Tensor:
        """The tensor of the one peer that gives one, on this session's device (that peer's: its tensor's).

        Args:
            tensor: of any dtype; None on all peers but one.
            root: who that must be; None: whoever gives one.

        Raises:
            BroadcastNoTensor, BroadcastMultipleTensors, BroadcastRootMismatch: on every peer.
            CollectiveSessionError: as of `all_reduce`.
        """
        return _present(self.broadcast_async(tensor, root).wait())

    def all_reduce_async(self, tensor: torch.Tensor, op: str = "sum") -> Handle:
        """As `all_reduce`, for a handle; the tensor has been read when this returns."""
        problem = problem_of_reduction(tensor, op)
        return self._call("all_reduce", tensor, op=op, problem=problem)

    def reduce_async(self, tensor: torch.Tensor, op: str = "sum", root: int = 0) -> Handle:
        """As `reduce`, for a handle; the tensor has been read when this returns."""
        problem = problem_of_reduction(tensor, op) or root_problem(root, self.size, needed=True)
        return self._call("reduce", tensor, op=op, root=root, problem=problem)

    def broadcast_async(self, tensor: torch.Tensor | None, root: int | None = None) -> Handle:
        """As `broadcast`, for a handle; the tensor has been read when this returns."""
        problem = None if tensor is None else problem_of_tensor(tensor)
        return self._call(
            "broadcast", tensor, root=root, problem=problem or root_problem(root, self.size, needed=False)
        )

    def finish(self) -> None:
        """Leaves, together with all other peers; blocks until they do. The group can be registered with again.

        Raises:
            PendingOperations: a peer has operations that it never waited for; on every peer, the session goes on.
            PeerLost: others did not finish in time, or go on with operations; on every peer.
            MultipleUnregister: this session is finished already; on the caller only.
            RegisterNotFirstOperation: it was reset; on the caller only.
        """
        if self._finished:
            raise MultipleUnregister(f"peer {self.peer} has finished this session already")
        problem = None
        if self._waited:
            numbers = ", ".join(map(str, sorted(self._waited)))
            problem = "PendingOperations", f"operations {numbers} are under way and were never waited for"
        self._call("finish", None, problem=problem).wait()
        self._room.finish()
        self._lobby.forget(self._room)
        self._finished = True

    def reset(self) -> None:
        """Forgets the session, for all peers: those in an operation raise SessionReset, and all may register again.

        For whatever state it is in; does nothing where it is over already.
        """
        self._room.end(reset_verdict(self.peer))
        self._lobby.forget(self._room)

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Finishes; after an exception, resets."""
        if kind is not None:
            self.reset()
        elif not self._finished:
            self.finish()

    def __repr__(self) -> str:
        state = "open" if self._room.closed is None else "over"
        return f"Session(peer={self.peer} of {self.size}, device={str(self.device)!r}, {state})"

    def _call(
        self,
        kind: Kind,
        tensor: Any,
        op: Any = None,
        root: Any = None,
        problem: tuple[str, str] | None = None,
    ) -> Handle:
        want = Description(self.peer, kind, op, root)
        work = None
        if problem is None and tensor is not None:
            shape, stride = tuple(tensor.shape), tuple(tensor.stride())
            want = Description(self.peer, kind, op, root, shape, stride, dtype_name(tensor.dtype))
            try:
                with torch.no_grad():
                    work = (flat_bytes if kind == "broadcast" else flat)(tensor, self.device)
            except RuntimeError as error:  # no memory, say: the others must not wait for this operation
                problem = "InvalidArgument", f"the tensor cannot be copied: {type(error).__name__}: {error}"
        if problem is not None:
            want = Description(self.peer, kind, problem=problem)
        with self._calls:
            operation = self._room.enter(want, work)
            if kind != "finish":
                self._waited.add(operation.number)
        return Handle(self, operation, tensor, want)

    def _result(self, operation: Operation, mine: torch.Tensor | None, want: Description) -> torch.Tensor | None:
        work = self._room.result(operation, self.peer)
        if work is None or (want.kind == "reduce" and want.root != self.peer):
            return None
        if want.kind == "broadcast":
            assert operation.verdict is not None and operation.verdict.source is not None
            return received(work, operation.verdict.source, self.device if mine is None else mine.device)
        assert mine is not None and want.op is not None
        return reduced(work, mine, want.op, self.size)


def register(
    peer: int,
    device: torch.device | str = "cpu",
    config: CollectiveConfig | None = None,
    group: Any | None = None,
) -> Session:
    """Announces a peer, and waits until all peers of the group have done so.

    Args:
        peer: its number, from 0. In a LocalGroup its rank there; in a torch.distributed group its rank; with several
            nodes counted through: node * world_size + local rank.
        device: where its results are computed; all peers' must be of one kind.
        config: None: `CollectiveConfig()`.
        group: a LocalGroup, whose threads register as its peers; or a torch.distributed group, of which each rank does.
            None: the default group of torch.distributed; with a global group, or alone, a node of one peer.

    Returns:
        This peer's session; `finish()` ends it.

    Raises:
        RegisterParamsMismatch: peers' options differ; on every peer, with the options, the peers and their values.
        MultipleRegister: two callers claim to be the same peer, on every peer; or this one is registered already, on
            the caller only: the session that there is goes on.
        InvalidConfig: the options do not fit the group, on every peer; or there is no such peer or group, on the
            caller only.
        PeerLost: not all peers came within the timeout; on every peer, with who is missing.
    """
    config = CollectiveConfig() if config is None else config
    if not isinstance(config, CollectiveConfig):
        raise InvalidConfig(f"config must be a CollectiveConfig, got {type(config).__name__}")
    where = torch.device(device)
    if where.type not in ("cpu", "cuda"):
        raise InvalidConfig(f"device must be on cpu or cuda, got {str(where)!r}")
    if where.type == "cuda" and where.index is None:
        where = torch.device("cuda", torch.cuda.current_device())
    lobby, caller, problem = lobby_and_caller(group, config, where)
    place = caller.place
    if isinstance(peer, bool) or not isinstance(peer, int) or peer not in place.peers:
        first, last = place.peers[0], place.peers[-1]
        raise InvalidConfig(f"there is no peer {peer!r} here: the group's are {first} to {last}")
    settings = (*config.agreed().items(), ("device", where.type))
    want = Description(peer, "register", settings=settings, problem=problem)
    return Session(lobby.register(want, caller), lobby, peer, where, config)


def _present(tensor: torch.Tensor | None) -> torch.Tensor:
    assert tensor is not None
    return tensor
