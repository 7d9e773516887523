"""The errors of a session, one class each; `verdicts.judge` decides which is raised when.

Most follow from comparing all peers' calls, and so have the same class and text on every peer. Those that concern one
peer's own use of its session are raised on the caller only, as their docstrings say.
"""

from __future__ import annotations

from ..errors import CollectiveError, FusedReduceError


class CollectiveSessionError(FusedReduceError):
    """Base of every error of a session."""


class InvalidConfig(CollectiveSessionError, ValueError):
    """Options that contradict each other, or do not fit the group. On this peer only if CollectiveConfig raises it."""


class MultipleRegister(CollectiveSessionError):
    """A peer is registered already, or two callers claim to be the same peer.

    On every peer while the session is being made; afterwards on the caller only, and the session goes on.
    """


class RegisterParamsMismatch(CollectiveSessionError, ValueError):
    """Peers registered with different options."""


class RegisterNotFirstOperation(CollectiveSessionError):
    """An operation on a session that is finished: register again. On the caller only."""


class MultipleUnregister(CollectiveSessionError):
    """`finish` was called on a session that is finished already. On the caller only."""


class PendingOperations(CollectiveSessionError):
    """`finish` was called while a peer has operations in flight that it never waited for."""


class SessionReset(CollectiveSessionError):
    """A peer, or `collective.reset`, ended the session, or the registration that this peer waits in: register again."""


class PeerLost(CollectiveSessionError, CollectiveError):
    """Peers did not call the operation within the timeout, died, or have finished."""


class KindMismatch(CollectiveSessionError):
    """Peers called different operations as their n-th call."""


class InvalidArgument(CollectiveSessionError, ValueError):
    """A peer's arguments cannot be used, whatever the other peers' are."""


class UnsupportedDType(CollectiveSessionError, TypeError):
    """A peer's tensor is of a dtype that the operation is not defined for."""


class DTypeMismatch(CollectiveSessionError, TypeError):
    """Peers' tensors have different dtypes."""


class AllReduceShapeMismatch(CollectiveSessionError, ValueError):
    """Peers gave tensors of different shapes to an all-reduce."""


class AllReduceOperationMismatch(CollectiveSessionError, ValueError):
    """Peers gave different ops to an all-reduce."""


class ReduceShapeMismatch(CollectiveSessionError, ValueError):
    """Peers gave tensors of different shapes to a reduce."""


class ReduceOperationMismatch(CollectiveSessionError, ValueError):
    """Peers gave different ops to a reduce."""


class ReduceRootMismatch(CollectiveSessionError, ValueError):
    """Peers gave different roots to a reduce."""


class BroadcastRootMismatch(CollectiveSessionError, ValueError):
    """Peers gave different roots to a broadcast, or a root that gave no tensor."""


class BroadcastNoTensor(CollectiveSessionError, ValueError):
    """No peer gave a tensor to a broadcast."""


class BroadcastMultipleTensors(CollectiveSessionError, ValueError):
    """More than one peer gave a tensor to a broadcast."""


# The classes that a verdict from another peer may name.
BY_NAME: dict[str, type[CollectiveSessionError]] = {
    one.__name__: one for one in CollectiveSessionError.__subclasses__()
}
