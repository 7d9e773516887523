"""fusedreduce: gradients averaged across ranks with one fused kernel on each side of one collective per bucket."""

from . import collective
from .amp import FusedGradScaler
from .clip import clip_grad_norm_
from .comm.local import LocalGroup
from .comm.strategies import Centralized, Ring, Tree
from .config import ReduceConfig
from .data_parallel import DataParallel
from .ddp import DistributedDataParallel
from .environment import init_process_group
from .errors import (
    AgreementError,
    CollectiveError,
    FusedReduceError,
    NonFiniteGradientError,
    TraceError,
    UnsupportedWireError,
)
from .hook import FusedHookState, fused_hook
from .installed import install, uninstall
from .modes import Asynchronous, BoundedStaleness, FlushReport, Synchronous
from .planning.assignment import BucketCaps
from .reducer import Reducer
from .sync_server import SyncServer

__version__ = "0.1.0"
__all__ = [
    "AgreementError",
    "Asynchronous",
    "BoundedStaleness",
    "BucketCaps",
    "Centralized",
    "CollectiveError",
    "DataParallel",
    "DistributedDataParallel",
    "FlushReport",
    "FusedGradScaler",
    "FusedHookState",
    "FusedReduceError",
    "LocalGroup",
    "NonFiniteGradientError",
    "ReduceConfig",
    "Reducer",
    "Ring",
    "SyncServer",
    "Synchronous",
    "TraceError",
    "Tree",
    "UnsupportedWireError",
    "clip_grad_norm_",
    "collective",
    "fused_hook",
    "init_process_group",
    "install",
    "uninstall",
]
