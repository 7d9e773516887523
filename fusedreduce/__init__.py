"""fusedreduce: gradients averaged across ranks with one fused kernel on each side of one collective per bucket."""

from .config import ReduceConfig
from .errors import AgreementError, CollectiveError, FusedReduceError, UnsupportedWireError
from .hook import FusedHookState, fused_hook

__version__ = "0.1.0"
__all__ = [
    "AgreementError",
    "CollectiveError",
    "FusedHookState",
    "FusedReduceError",
    "ReduceConfig",
    "UnsupportedWireError",
    "fused_hook",
]
