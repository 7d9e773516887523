"""The wrapper where averages come later than their own step, and where they are sums; on 2 Gloo ranks.

What lands when: grid/test_averages.py.
"""

from __future__ import annotations

import pickle
import warnings

import pytest
import torch
import torch.distributed as dist
from support.ddp_models import batch, loss_of, mlp, wrapped
from support.ranks import on_ranks
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import fusedreduce
from fusedreduce.config import Asynchronous, BoundedStaleness, Synchronous


@on_ranks(2)
def test_what_excludes_stale_gradients_is_refused_on_every_rank(rank: int, world: int) -> None:
    """One ValueError on every rank, before anything is hooked; the same modules can be wrapped afterwards."""
    model = mlp()
    for options in (
        {"gradient_as_bucket_view": True},
        {"skip_all_reduce_unused_params": True},
        {"mixed_precision": _Precision()},
        {"delay_all_reduce_named_params": [("0.weight", next(model.parameters()))]},
    ):
        with pytest.raises(ValueError, match=f"{next(iter(options))} exclude each other"):
            wrapped(model, sync_mode=BoundedStaleness(1), **options)
    assert not any(one._post_accumulate_grad_hooks for one in model.parameters())
    ddp = wrapped(model, sync_mode=BoundedStaleness(1))
    with pytest.raises(ValueError, match="a comm hook exclude"):
        ddp.register_comm_hook(None, default_hooks.allreduce_hook)
    with pytest.raises(ValueError, match="an optimizer in backward exclude"):
        ddp._register_fused_optim(torch.optim.SGD, lr=0.1)
    with pytest.raises(ValueError, match="join exclude"):
        ddp.join()
    with pytest.raises(ValueError, match="join exclude"):
        Join([ddp])
    loss_of(ddp(batch(rank, 0))).backward()
    ddp.flush()
    ddp.set_sync_mode(Synchronous())
    with ddp.join():
        ddp.zero_grad()
        loss_of(ddp(batch(rank, 1))).backward()
    viewed = fusedreduce.DistributedDataParallel(mlp(), gradient_as_bucket_view=True)
    with pytest.raises(ValueError, match="gradient_as_bucket_view"):
        viewed.set_sync_mode(BoundedStaleness(1))
    assert viewed.sync_mode == Synchronous() and isinstance(viewed, TorchDDP)


class _Precision:
    """Stands for torch's mixed precision, which is refused before anybody looks into it."""

    param_dtype = torch.bfloat16


@on_ranks(2)
def test_a_copy_says_that_it_has_nothing_of_what_is_under_way(rank: int, world: int) -> None:
    """A copy has nothing of what is under way, and says so."""
    torch.manual_seed(0)
    for mode in (BoundedStaleness(1), Asynchronous()):
        config = fusedreduce.ReduceConfig(sync_mode=mode)
        ddp = fusedreduce.DistributedDataParallel(mlp(), reduce=config)
        loss_of(ddp(batch(rank, 0))).backward()
        with pytest.warns(UserWarning, match="the copy has none of that"):
            pickle.dumps(ddp)
        ddp.flush()
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            pickle.dumps(ddp)


@on_ranks(2)
def test_different_modes_are_an_error_on_every_rank(rank: int, world: int) -> None:
    """Ranks that are built with different modes all learn of it."""
    with pytest.raises(fusedreduce.AgreementError, match="sync_mode"):
        wrapped(mlp(), sync_mode=BoundedStaleness(1 + rank))
    dist.barrier()


@pytest.mark.parametrize("wire", ["native", "fp16"])
@on_ranks(2)
def test_a_sum_counts_no_ranks(rank: int, world: int, wire: str) -> None:
    """op="sum" under the wrapper, join included: never divided by the ranks that are left."""
    torch.manual_seed(0)
    layer = nn.Linear(4, 1, bias=False)
    config = fusedreduce.ReduceConfig(op="sum", wire=wire)
    ddp = fusedreduce.DistributedDataParallel(layer, reduce=config)
    with ddp.join(divide_by_initial_world_size=False):
        for step in range(3 + 2 * rank):
            ddp.zero_grad()
            ddp(torch.full((1, 4), 2.0)).sum().backward()
            there = sum(step < 3 + 2 * one for one in range(world))
            assert layer.weight.grad is not None and layer.weight.grad.tolist() == [[2.0 * there] * 4], step
