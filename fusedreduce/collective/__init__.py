"""Checked collectives among peers that are threads, processes, or both: see `session.register`."""

from ..comm.local.group import LocalGroup
from ..comm.local.strategies import Centralized, Ring, Tree
from .config import CollectiveConfig
from .errors import (
    AllReduceOperationMismatch,
    AllReduceShapeMismatch,
    BroadcastMultipleTensors,
    BroadcastNoTensor,
    BroadcastRootMismatch,
    CollectiveSessionError,
    DTypeMismatch,
    InvalidArgument,
    InvalidConfig,
    KindMismatch,
    MultipleRegister,
    MultipleUnregister,
    PeerLost,
    PendingOperations,
    ReduceOperationMismatch,
    ReduceRootMismatch,
    ReduceShapeMismatch,
    RegisterNotFirstOperation,
    RegisterParamsMismatch,
    SessionReset,
    UnsupportedDType,
)
from .registration import reset
from .session import Handle, Session, register

__all__ = [
    "AllReduceOperationMismatch",
    "AllReduceShapeMismatch",
    "BroadcastMultipleTensors",
    "BroadcastNoTensor",
    "BroadcastRootMismatch",
    "Centralized",
    "CollectiveConfig",
    "CollectiveSessionError",
    "DTypeMismatch",
    "Handle",
    "InvalidArgument",
    "InvalidConfig",
    "KindMismatch",
    "LocalGroup",
    "MultipleRegister",
    "MultipleUnregister",
    "PeerLost",
    "PendingOperations",
    "ReduceOperationMismatch",
    "ReduceRootMismatch",
    "ReduceShapeMismatch",
    "RegisterNotFirstOperation",
    "RegisterParamsMismatch",
    "Ring",
    "Session",
    "SessionReset",
    "Tree",
    "UnsupportedDType",
    "register",
    "reset",
]
