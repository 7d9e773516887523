"""fusedreduce: gradients averaged across ranks with one fused kernel on each side of one collective per bucket."""

from .amp import FusedGradScaler
from .clip import clip_grad_norm_
from .config import ReduceConfig
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
from .planning.assignment import BucketCaps
from .reducer import Reducer

__version__ = "0.1.0"
__all__ = [
    "AgreementError",
    "BucketCaps",
    "CollectiveError",
    "DistributedDataParallel",
    "FusedGradScaler",
    "FusedHookState",
    "FusedReduceError",
    "NonFiniteGradientError",
    "ReduceConfig",
    "Reducer",
    "TraceError",
    "UnsupportedWireError",
    "clip_grad_norm_",
    "fused_hook",
    "init_process_group",
]
