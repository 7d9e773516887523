# ruff: noqa: F403, F405
"""fusedreduce: gradients averaged across ranks with one fused kernel on each side of one collective per bucket."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ._public import *

__version__ = "0.1.0"
__all__ = [
    "AgreementError",
    "Asynchronous",
    "BoundedStaleness",
    "BucketCaps",
    "CastWire",
    "Centralized",
    "CollectiveError",
    "DataParallel",
    "DistributedDataParallel",
    "Encoding",
    "FSDPComms",
    "FlushReport",
    "FusedGradScaler",
    "FusedHookState",
    "FusedReduceError",
    "LocalGroup",
    "NonFiniteGradientError",
    "Packer",
    "ProcessGroupCommunicator",
    "ReduceConfig",
    "Reducer",
    "Ring",
    "SyncServer",
    "Synchronous",
    "TraceError",
    "Tree",
    "UnsupportedWireError",
    "WIRES",
    "all_reduce",
    "clip_grad_norm_",
    "collective",
    "create_data_parallel",
    "create_distributed_data_parallel",
    "fused_hook",
    "init_process_group",
    "install",
    "measure_collectives",
    "reducer_of",
    "set_fsdp_comms",
    "uninstall",
]


if not TYPE_CHECKING:
    # Imported when one of them is asked for, and torch with them: `python -m fusedreduce.run` does without, starts at
    # once, and hands its environment on as it was, where torch would have set variables.
    def __getattr__(name: str) -> object:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        globals().update({one: getattr(import_module("._public", __name__), one) for one in __all__})
        return globals()[name]

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
