"""What can go wrong in a session, one class each; see `operations.judge` for when.

Most are decided by comparing what all peers said, and so have the same class and text on every peer. Those that concern
one peer's own use of its session say so; nobody else hears of them.
"""

from __future__ import annotations

from ..errors import CollectiveError, FusedReduceError


class CollectiveSessionError(FusedReduceError):
    """Base of every error of a session."""


class InvalidConfig(CollectiveSessionError, ValueError):
    """Options that contradict each other, or do not fit the group. From CollectiveConfig itself: on this peer only."""


class MultipleRegister(CollectiveSessionError):
    """A peer is registered already, or two callers claim to be the same peer.

    On every peer while the session is being made. Afterwards on the caller only: the session goes on.
    """


class RegisterParamsMismatch(CollectiveSessionError, ValueError):
    """Peers registered with different options."""


class RegisterNotFirstOperation(CollectiveSessionError):
    """An operation of a session that is finished, or was reset: register again. On the caller only."""


class MultipleUnregister(CollectiveSessionError):
    """`finish` of a session that is finished. On the caller only."""


class PendingOperations(CollectiveSessionError):
    """`finish` while a peer has operations that it never waited for."""


class SessionReset(CollectiveSessionError):
    """A peer called `reset` while this one was in an operation."""


class PeerLost(CollectiveSessionError, CollectiveError):
    """Peers did not come within the timeout, died, or have finished."""


class KindMismatch(CollectiveSessionError):
    """Peers called different operations at the same place."""


class InvalidArgument(CollectiveSessionError, ValueError):
    """A peer's arguments cannot be used, whatever the others'."""


class UnsupportedDType(CollectiveSessionError, TypeError):
    """A peer's tensor is of a dtype that the operation is not defined for."""


class DTypeMismatch(CollectiveSessionError, TypeError):
    """Peers' tensors have different dtypes."""


class AllReduceShapeMismatch(CollectiveSessionError, ValueError):
    """Peers all-reduce tensors of different shapes."""


class AllReduceOperationMismatch(CollectiveSessionError, ValueError):
    """Peers all-reduce with different ops."""


class ReduceShapeMismatch(CollectiveSessionError, ValueError):
    """Peers reduce tensors of different shapes."""


class ReduceOperationMismatch(CollectiveSessionError, ValueError):
    """Peers reduce with different ops."""


class ReduceRootMismatch(CollectiveSessionError, ValueError):
    """Peers name different roots of a reduce."""


class BroadcastRootMismatch(CollectiveSessionError, ValueError):
    """Peers name different roots of a broadcast, or one that brings no tensor."""


class BroadcastNoTensor(CollectiveSessionError, ValueError):
    """No peer brings the tensor of a broadcast."""


class BroadcastMultipleTensors(CollectiveSessionError, ValueError):
    """More than one peer brings the tensor of a broadcast."""


# What a verdict may name when it is read from a peer.
BY_NAME: dict[str, type[CollectiveSessionError]] = {
    one.__name__: one
    for one in (
        InvalidConfig,
        MultipleRegister,
        RegisterParamsMismatch,
        RegisterNotFirstOperation,
        MultipleUnregister,
        PendingOperations,
        SessionReset,
        PeerLost,
        KindMismatch,
        InvalidArgument,
        UnsupportedDType,
        DTypeMismatch,
        AllReduceShapeMismatch,
        AllReduceOperationMismatch,
        ReduceShapeMismatch,
        ReduceOperationMismatch,
        ReduceRootMismatch,
        BroadcastRootMismatch,
        BroadcastNoTensor,
        BroadcastMultipleTensors,
    )
}
