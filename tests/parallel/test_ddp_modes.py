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

import fusedreduce
from fusedreduce.config import Asynchronous, BoundedStaleness


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
