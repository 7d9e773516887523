"""fusedreduce: gradients averaged across ranks with one fused kernel on each side of one collective per bucket."""

from .config import ReduceConfig
from .ddp import DistributedDataParallel
from .errors import AgreementError, CollectiveError, FusedReduceError, UnsupportedWireError
from .hook import FusedHookState, fused_hook
from .planning.assignment import BucketCaps
from .reducer import Reducer

__version__ = "0.1.0"
__all__ = [
    "AgreementError",
    "BucketCaps",
    "CollectiveError",
    "DistributedDataParallel",
    "FusedHookState",
    "FusedReduceError",
    "ReduceConfig",
    "Reducer",
    "UnsupportedWireError",
    "fused_hook",
]
