"""What test_other_groups.py runs on rank processes."""

from __future__ import annotations

import datetime
import pickle
from pathlib import Path

import pytest
import torch.distributed as dist
from parallel.ddp_cases import train_on
from support.ddp_models import batch, loss_of, mlp
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import fusedreduce

_TIMEOUT = datetime.timedelta(seconds=60)


def _join(store: Path, name: str, rank: int, world: int) -> None:
    """Destroys the default group and makes another."""
    dist.destroy_process_group()
    method = f"file://{store / name}"
    dist.init_process_group("gloo", init_method=method, rank=rank, world_size=world, timeout=_TIMEOUT)


def made_anew(rank: int, world: int, store: Path) -> str:
    """The default group is destroyed and made anew, of one rank, then of all in another order, around the same objects.

    Returns:
        The error that ranks agree on when wrappers of other settings are unpickled.
    """
    state = fusedreduce.FusedHookState()
    _join(store, f"alone {rank}", 0, 1)
    ddp = fusedreduce.DistributedDataParallel(mlp())
    train_on(rank, ddp)
    hooked = TorchDDP(mlp())
    hooked.register_comm_hook(state, fusedreduce.fused_hook)
    loss_of(hooked(batch(rank, 0))).backward()
    config = fusedreduce.ReduceConfig(wire="bf16" if rank else "native")
    pickled = pickle.dumps(fusedreduce.DistributedDataParallel(mlp(), reduce=config))
    again = pickle.dumps(ddp)

    turned = world - 1 - rank
    _join(store, "together", turned, world)
    ddp._update_process_group(dist.group.WORLD)
    hooked = TorchDDP(mlp())
    hooked.register_comm_hook(state, fusedreduce.fused_hook)
    for one in (ddp, pickle.loads(again), hooked):
        train_on(turned, one)
    loaded = pickle.loads(pickled)
    with pytest.raises(fusedreduce.AgreementError) as raised:
        loss_of(loaded(batch(rank, 0))).backward()
    _join(store, "as before", rank, world)  # for the next case
    return str(raised.value)
