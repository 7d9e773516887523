"""The wrapper where averages come later than their own step, and where they are sums; on 2 Gloo ranks."""

from __future__ import annotations

import copy
import pickle
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.ddp_models import Branches, batch, loss_of, mlp, wrapped
from support.leaf_steps import assert_same, copies
from support.ranks import on_ranks
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import fusedreduce
from fusedreduce.config import Asynchronous, BoundedStaleness, FlushReport, Synchronous


@pytest.mark.parametrize(
    ("k", "wire", "find_unused"), [(1, "native", False), (3, "bf16", False), (2, "fp16", True), (1, "native", True)]
)
@on_ranks(2)
def test_gradients_are_those_of_the_synchronous_mode_k_steps_later(
    rank: int, world: int, k: int, wire: str, find_unused: bool
) -> None:
    """Two wrappers over the same weights, which stay: one's gradients are the other's of k steps before, to the bit."""
    torch.manual_seed(0)
    model = Branches() if find_unused else mlp()
    now, later = (
        wrapped(copy.deepcopy(model), wire, policy="static", find_unused_parameters=find_unused, sync_mode=mode)
        for mode in (Synchronous(), BoundedStaleness(k))
    )
    assert later.sync_mode == BoundedStaleness(k)
    averages = []
    for step in range(8):
        for ddp in (now, later):
            ddp.zero_grad()
            if step % 3 == 1:
                with ddp.no_sync():
                    _loss(ddp, rank, 100 + step).backward()
            _loss(ddp, rank, step).backward()
        averages.append(copies(now.module.parameters()))
        nothing: list[torch.Tensor | None] = [None] * len(averages[0])
        assert_same(copies(later.module.parameters()), averages[step - k] if step >= k else nothing, step)
    later.zero_grad()
    total: list[torch.Tensor | None] = [None] * len(averages[0])
    for average in averages[8 - k :]:
        for index, one in enumerate(average):
            if one is not None:
                had = total[index]
                total[index] = one.clone() if had is None else had + one
    assert later.flush() == FlushReport(steps=k)
    assert_same(copies(later.module.parameters()), total, "flush")


def _loss(ddp: nn.Module, rank: int, step: int) -> torch.Tensor:
    module: Any = ddp.module
    if isinstance(module, Branches):
        return loss_of(ddp((batch(rank, step), (rank + step) % 2)))
    return loss_of(ddp(batch(rank, step)))


@pytest.mark.parametrize("k", [1, 3])
@on_ranks(2)
def test_training_goes_on_from_a_checkpoint_of_any_step(rank: int, world: int, k: int) -> None:
    """A checkpoint at any step, into a wrapper with other buckets, goes on to the same weights, to the bit."""

    def train(until: int, saved_at: int | None) -> list[torch.Tensor]:
        torch.manual_seed(0)
        ddp = wrapped(mlp(), sync_mode=BoundedStaleness(k))
        optimizer = torch.optim.Adam(ddp.parameters(), lr=0.01)
        for step in range(until):
            if step == saved_at:
                kept = [
                    copy.deepcopy(one) for one in (ddp.state_dict(), optimizer.state_dict(), ddp.reduce_state_dict())
                ]
                ddp = wrapped(mlp(), sync_mode=BoundedStaleness(k), bucket_cap_mb=None)
                optimizer = torch.optim.Adam(ddp.parameters(), lr=0.01)
                ddp.load_state_dict(kept[0])
                optimizer.load_state_dict(kept[1])
                ddp.load_reduce_state_dict(kept[2])
            optimizer.zero_grad()
            loss_of(ddp(batch(rank, step))).backward()
            optimizer.step()
        optimizer.zero_grad()
        ddp.flush(optimizer)
        return [one.detach().clone() for one in ddp.parameters()]

    through = train(8, None)
    for saved_at in (1, k, 5):
        for one, other in zip(through, train(8, saved_at), strict=True):
            assert torch.equal(one, other), saved_at


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
def test_modes_change_between_steps(rank: int, world: int) -> None:
    """Between steps, after a flush; ranks that change to different modes all learn of it."""
    torch.manual_seed(0)
    ddp = wrapped(mlp())
    for mode, k in ((Synchronous(), 0), (BoundedStaleness(2), 2), (Synchronous(), 0), (BoundedStaleness(1), 1)):
        ddp.set_sync_mode(mode)
        assert ddp.reduce_config.sync_mode == mode
        for step in range(4):
            ddp.zero_grad()
            loss_of(ddp(batch(rank, step))).backward()
            assert all((one.grad is None) == (step < k) for one in ddp.parameters())
        ddp.zero_grad()
        assert ddp.flush().steps == k
    ddp.set_sync_mode(BoundedStaleness(rank + 1))
    with pytest.raises(fusedreduce.AgreementError, match="sync_mode"):
        ddp(batch(rank, 0))


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
