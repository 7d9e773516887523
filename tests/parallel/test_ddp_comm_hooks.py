"""Comm hooks on the wrapper give what they give on torch's class, on 2 Gloo ranks."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from support.comm_hooks import HOOKS
from support.ddp_models import SMALL_CAP_MB, STEPS, batch, gradients, loss_of, mlp, wrapped
from support.ranks import on_ranks
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import fusedreduce


@pytest.mark.parametrize("as_view", [False, True])
@pytest.mark.parametrize("name", HOOKS)
@on_ranks(2)
def test_a_comm_hook_gives_what_it_gives_on_torchs_class(rank: int, world: int, name: str, as_view: bool) -> None:
    """A hook registered on ours gives, bit for bit, what it gives on torch's, step by step."""
    # On Gloo the collectives that PowerSGD chains for several buckets meet in different orders, with torch's class too.
    cap_mb = 25 if name == "PowerSGD" else SMALL_CAP_MB
    options: dict[str, Any] = {"bucket_cap_mb": cap_mb, "gradient_as_bucket_view": as_view}
    models: list[TorchDDP] = [TorchDDP(mlp(), **options), fusedreduce.DistributedDataParallel(mlp(), **options)]
    for ddp in models:
        HOOKS[name](ddp)
    optimizers = [torch.optim.SGD(ddp.parameters(), lr=0.05) for ddp in models]
    for step in range(8):  # PowerSGD and local SGD begin in the middle
        for ddp, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            loss_of(ddp(batch(rank, step))).backward()
        theirs, ours = (gradients(ddp) for ddp in models)
        assert all(torch.equal(one, other) for one, other in zip(theirs, ours, strict=True)), f"step {step}"
        for optimizer in optimizers:
            optimizer.step()
    names = [ddp._get_ddp_logging_data()["comm_hook"] for ddp in models]
    assert names[0] == names[1]


@pytest.mark.parametrize("as_view", [False, True])
@on_ranks(2)
def test_what_a_comm_hook_sees(rank: int, world: int, as_view: bool) -> None:
    """The six methods of torch's GradBucket: flat, dense, no padding, not divided; what set_buffer takes comes back."""
    seen: list[int] = []

    def doubling(bucket: Any) -> torch.futures.Future[torch.Tensor]:
        buffer, views, parameters = bucket.buffer(), bucket.gradients(), bucket.parameters()
        assert buffer.dim() == 1 and buffer.is_contiguous() and buffer.dtype is torch.float32
        assert buffer.numel() == sum(parameter.numel() for parameter in parameters)
        own = {id(parameter) for parameter in ddp.parameters()}
        offset = 0
        for view, parameter in zip(views, parameters, strict=True):
            assert view.shape == parameter.shape and id(parameter) in own
            assert view.data_ptr() == buffer.data_ptr() + 4 * offset
            assert torch.equal(view, mine[id(parameter)]), "divided, or another parameter's"
            offset += parameter.numel()
        seen.append(bucket.index())
        assert bucket.is_last() == (len(seen) == ddp.reduce_stats()["buckets"])
        bucket.set_buffer(torch.nn.functional.pad(buffer * 2, (3, 0))[3:])  # a part of a larger tensor
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    ddp = wrapped(mlp(), gradient_as_bucket_view=as_view)
    ddp.register_comm_hook(None, lambda state, bucket: doubling(bucket))
    for step in range(STEPS):
        local = copy.deepcopy(ddp.module)
        loss_of(local(batch(rank, step))).backward()
        pairs = zip(ddp.parameters(), local.parameters(), strict=True)
        mine = {id(parameter): alone.grad for parameter, alone in pairs}
        seen.clear()
        ddp.zero_grad()
        loss_of(ddp(batch(rank, step))).backward()
        assert seen == list(range(int(ddp.reduce_stats()["buckets"])))
        for doubled, once in zip(gradients(ddp), gradients(local), strict=True):
            assert torch.equal(doubled, 2 * once)
    assert len(seen) >= 2


@on_ranks(2)
def test_hook_that_ends_behind_backward(rank: int, world: int) -> None:
    """A hook's future is there once a callback has run that the hook has queued: torch's mixed precision joins its
    stream in one."""

    def doubling(state: object, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        buffer = bucket.buffer()
        torch.autograd.Variable._execution_engine.queue_callback(lambda: future.set_result(buffer.mul_(2)))
        return future

    options: dict[str, Any] = {"bucket_cap_mb": SMALL_CAP_MB}
    models: list[TorchDDP] = [TorchDDP(mlp(), **options), fusedreduce.DistributedDataParallel(mlp(), **options)]
    for ddp in models:
        ddp.register_comm_hook(None, lambda state, bucket: doubling(state, bucket))
    for step in range(STEPS):
        for ddp in models:
            ddp.zero_grad()
            loss_of(ddp(batch(rank, step))).backward()
        theirs, ours = (gradients(ddp) for ddp in models)
        assert all(torch.equal(one, other) for one, other in zip(theirs, ours, strict=True)), f"step {step}"
