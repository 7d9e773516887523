"""create_data_parallel, create_distributed_data_parallel: a wrapper on the devices that this machine has, in one call.

dp = fusedreduce.create_data_parallel(model)                  # one process, all of its CUDA devices, else the CPU
ddp = fusedreduce.create_distributed_data_parallel(model)     # one process per device, started by torchrun
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..comm.init_process_group import started_device
from ..comm.local.process_group import LocalProcessGroup
from ..config import ReduceConfig
from .data_parallel import DataParallel
from .ddp import DistributedDataParallel


def create_data_parallel(module: nn.Module, **options: Any) -> DataParallel:
    """Makes a `DataParallel` over all CUDA devices of this process, or over the CPU where there are none.

    Args:
        module: is moved to the first device.
        options: of `DataParallel`, except `devices`.

    Returns:
        The wrapper; on a CPU it has one replica.

    Raises:
        ValueError, TypeError: as `DataParallel`.
    """
    return DataParallel(module, range(torch.cuda.device_count()) or ["cpu"], **options)


def create_distributed_data_parallel(
    module: nn.Module,
    *,
    backend: str = "auto",
    rank: int | None = None,
    world_size: int | None = None,
    reduce: ReduceConfig | None = None,
    **options: Any,
) -> DistributedDataParallel:
    """Starts torch.distributed if it is not, moves `module` to this rank's device and wraps it.

    The device is the current CUDA device where the process group has NCCL, else the CPU. `init_process_group` makes
    each rank's own device the current one; who starts torch.distributed otherwise calls `torch.cuda.set_device` first.

    Args:
        module: the model.
        backend: see `init_process_group`; without effect once torch.distributed is started.
        rank: see `init_process_group`.
        world_size: see `init_process_group`.
        reduce: how gradients are reduced.
        options: further arguments of `DistributedDataParallel`, by name. With a `process_group` of a LocalGroup's rank
            torch.distributed is not started.

    Returns:
        The wrapper.

    Raises:
        ValueError: as `init_process_group`; or torch.distributed has been started with another rank or world_size.
        AgreementError, RuntimeError, TypeError, ValueError: as `DistributedDataParallel`.
    """
    if isinstance(options.get("process_group"), LocalProcessGroup):
        return DistributedDataParallel(module, reduce=reduce, **options)
    device = started_device(backend, rank, world_size, options.get("process_group"))
    if device.type == "cuda":
        options.setdefault("device_ids", [device])
    return DistributedDataParallel(module.to(device), reduce=reduce, **options)
