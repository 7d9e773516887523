"""The wrapper, and much of it the hook: kinds of parameters, modules and user code, on 2 and 3 Gloo ranks."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.ddp_models import (
    STEPS,
    ComplexNet,
    Together,
    Zoo,
    assert_averaged,
    assert_is_mean,
    assert_same_on_all_ranks,
    assert_step_averages,
    batch,
    images,
    loss_of,
    mlp,
    train,
    training_cells,
    wrapped,
)
from support.grids import grid
from support.ranks import on_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.utils.checkpoint import checkpoint

import fusedreduce


def zoo(rank: int, world: int, wire: str, surface: str = "wrapper") -> None:
    """Tied, frozen, zero-element, channels-last and 16-bit parameters; complex ones; with views where they may be."""
    train(rank, Zoo(), wire, images, surface=surface)
    train(rank, ComplexNet(), wire, surface=surface)
    if wire == "native" or surface == "hook":
        options: dict[str, Any] = {"surface": surface, "gradient_as_bucket_view": True}
        train(rank, Zoo(), wire, images, **options)
        train(rank, Zoo(), wire, images, set_to_none=False, **options)
        train(rank, ComplexNet(), wire, set_to_none=False, **options)
    transposed: Any = mlp()
    first = transposed[0]
    first.weight = nn.Parameter(first.weight.detach().t().contiguous().t())
    assert not first.weight.is_contiguous()
    train(rank, transposed, wire, surface=surface)


def sparse(rank: int, world: int, wire: str, hook: bool = False, surface: str = "wrapper") -> None:
    """A sparse gradient beside dense ones."""
    torch.manual_seed(6)
    ddp = wrapped(nn.Sequential(nn.Embedding(50, 24, sparse=True), nn.Linear(24, 6)), wire, surface=surface)
    if hook:
        # (torch reads annotations of a hook, and takes no strings)
        ddp.register_comm_hook(None, lambda state, bucket: _all_reduce_then_divide(bucket))
    for step in range(STEPS):
        tokens = torch.randint(0, 50, (10,), generator=torch.Generator().manual_seed(13 * step + rank))
        model, local = ddp.module, copy.deepcopy(ddp.module)
        for one in (ddp, local):
            one.zero_grad()
            loss_of(one(tokens)).backward()
        assert model[0].weight.grad.is_sparse
        averaged, mine = ([one.weight.grad.to_dense()] for one in (model[0], local[0]))
        assert_same_on_all_ranks(averaged)
        assert_is_mean(averaged, mine, "native", factor=2.0)
        assert_averaged(model[1], local[1], wire)


def _all_reduce_then_divide(bucket: Any) -> torch.futures.Future[torch.Tensor]:
    world = dist.get_world_size()
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    assert work is not None
    future: torch.futures.Future[Any] = work.get_future()
    return future.then(lambda done: done.value()[0] / world)


@on_ranks(2)
def test_ignored(rank: int, world: int) -> None:
    """Ignored parameters keep this rank's own gradient and value, ignored buffers their value."""
    model: Any = nn.Sequential(nn.Linear(24, 24), nn.BatchNorm1d(24), nn.Linear(24, 6))
    with torch.no_grad():
        model[2].bias.fill_(float(rank))
    names = ["2.bias", "1.running_mean"]
    TorchDDP._set_params_and_buffers_to_ignore_for_model(model, names)
    ddp = wrapped(model)
    own: Any = ddp.module
    for step in range(STEPS):
        assert own[2].bias.unique().tolist() == [float(rank)]
        ddp.zero_grad()
        local: Any = copy.deepcopy(ddp.module)
        loss_of(ddp(batch(rank, step))).backward()
        loss_of(local(batch(rank, step))).backward()
        assert torch.equal(own[2].bias.grad, local[2].bias.grad)
        assert_averaged(own[0], local[0])
        assert_averaged(own[1], local[1])
        assert torch.equal(own[1].running_mean, local[1].running_mean)
    means = [torch.empty_like(own[1].running_mean) for _ in range(world)]
    dist.all_gather(means, own[1].running_mean)
    assert not torch.equal(means[0], means[1])


@on_ranks(2)
def test_delayed(rank: int, world: int) -> None:
    """delay_all_reduce_named_params: torch's own buffer reduces these, we the others."""
    model: Any = mlp()
    names = ("2.weight", "2.bias")
    late = [(name, parameter) for name, parameter in model.named_parameters() if name in names]
    # A whole number of MiB: torch 2.11 hands the cap to a C++ function that takes no other.
    options = {"delay_all_reduce_named_params": late, "param_to_hook_all_reduce": model[0].weight}
    ddp = wrapped(model, bucket_cap_mb=1, **options)
    assert len(fusedreduce.reducer_of(ddp).parameters) == 4
    for step in range(STEPS):  # torch waits for that all-reduce nowhere
        assert_step_averages(ddp, batch(rank, step), end=dist.barrier, factor=2.0)


@on_ranks(2)
def test_all_delayed(rank: int, world: int) -> None:
    """Every parameter that is trained is delayed, and a frozen one is left: torch builds no reducer then."""
    errors = []
    for cls in (TorchDDP, fusedreduce.DistributedDataParallel):
        model = nn.Sequential(mlp(), nn.Linear(12, 12).requires_grad_(False))
        late = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
        gate = torch.ones(24, requires_grad=True)  # its gradient comes last
        ddp = cls(model, delay_all_reduce_named_params=late, param_to_hook_all_reduce=gate)
        try:
            for step in range(3):
                local = copy.deepcopy(ddp.module)
                ddp.zero_grad()
                loss_of(ddp(batch(rank, step) * gate)).backward()
                dist.barrier()
                loss_of(local(batch(rank, step))).backward()
                assert_averaged(ddp.module, local, factor=2.0)
        except AttributeError as error:
            errors.append(str(error))
        ddp.zero_grad(set_to_none=False)
    assert len(errors) in (0, 2), f"torch's class and ours differ: {errors}"


@on_ranks(2)
def test_buffers(rank: int, world: int) -> None:
    """Buffers are rank 0's at the start of each forward, unless told otherwise."""
    for synced in (True, False):
        model = nn.Sequential(nn.Linear(24, 24), nn.BatchNorm1d(24))
        # Its name before torch 2.13, which warns of that one.
        newer = "forward_sync_buffers" in inspect.signature(TorchDDP.__init__).parameters
        options: dict[str, Any] = {} if synced else {"forward_sync_buffers" if newer else "broadcast_buffers": False}
        ddp = wrapped(model, "bf16", **options)
        for step in range(3):
            loss_of(ddp(batch(rank, step))).backward()
        norm: Any = dict(ddp.module.named_children())["1"]
        mine = norm.running_mean.clone()
        gathered = [torch.empty_like(mine) for _ in range(world)]
        dist.all_gather(gathered, mine)
        assert not torch.equal(gathered[0], gathered[1])
        ddp.eval()
        with torch.no_grad():
            ddp(batch(rank, 3))
        assert torch.equal(norm.running_mean, gathered[0] if synced else mine)


class Autocast(nn.Module):
    """Computes in bf16; gradients are in fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp()

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            result: torch.Tensor = self.body(features)
        return result


def mixed_precision(rank: int, world: int, wire: str, surface: str = "wrapper") -> None:
    """Autocast to bf16, and torch's GradScaler, which skips a step on every rank if one rank overflows."""
    train(rank, Autocast(), wire, surface=surface)
    ddp = wrapped(mlp(), wire, surface=surface)
    optimizer, scaler = torch.optim.SGD(ddp.parameters(), lr=0.05), torch.amp.GradScaler("cpu", init_scale=256.0)
    for step in range(STEPS):
        local = copy.deepcopy(ddp.module)
        before = [parameter.detach().clone() for parameter in ddp.parameters()]
        overflows = step == 3
        given = batch(rank, step) * (float("inf") if overflows and rank == world - 1 else 1.0)
        optimizer.zero_grad()
        scaler.scale(loss_of(ddp(given))).backward()
        scaler.unscale_(optimizer)
        if not overflows:
            loss_of(local(given)).backward()
            assert_averaged(ddp.module, local, wire)
        scaler.step(optimizer)
        scaler.update()
        same = [torch.equal(old, new) for old, new in zip(before, ddp.parameters(), strict=True)]
        assert all(same) if overflows else not any(same)
        assert_same_on_all_ranks([parameter.detach() for parameter in ddp.parameters()])
    assert scaler.get_scale() == 128.0


@pytest.mark.parametrize("wire", ["native", "bf16", "int8"])
@on_ranks(2)
def test_modules_together(rank: int, world: int, wire: str) -> None:
    """Two wrappers in one backward; one wrapper around another; one in evaluation between the steps."""
    first, second = wrapped(mlp(1), wire), wrapped(nn.Linear(12, 24), wire)
    for step in range(STEPS):
        locals_ = [copy.deepcopy(first.module), copy.deepcopy(second.module)]
        for one in (first, second):
            one.zero_grad()
        loss_of(second(first(batch(rank, step)))).backward()
        loss_of(locals_[1](locals_[0](batch(rank, step)))).backward()
        assert_averaged(first.module, locals_[0], wire)
        assert_averaged(second.module, locals_[1], wire)
        with torch.no_grad():
            first(batch(rank, step))
    inner, head = wrapped(mlp(3), wire), nn.Linear(12, 4)
    outer = wrapped(nn.Sequential(inner, head), wire)
    for step in range(STEPS):
        local = copy.deepcopy(nn.Sequential(inner.module, head))
        outer.zero_grad()
        loss_of(outer(batch(rank, step))).backward()
        loss_of(local(batch(rank, step))).backward()
        assert_averaged(nn.Sequential(inner.module, head), local, wire, factor=3.0)


@pytest.mark.parametrize("wire", ["native", "bf16", "int8"])
@on_ranks(2)
def test_around_forward(rank: int, world: int, wire: str) -> None:
    """Weights used outside of forward, an output changed in place, a second backward, autograd.grad, a whole-model
    checkpoint: what torch's class does in a plain step, it does in a late one too."""
    ddp = wrapped(mlp(), wire)
    for step in range(20):
        local = copy.deepcopy(ddp.module)
        ddp.zero_grad()
        kind = (step - 6) % 4 if step >= 6 else -1
        for model in (ddp, local):
            given = batch(rank, step).requires_grad_(kind == 3)
            output = checkpoint(model, given, use_reentrant=True) if kind == 3 else model(given)
            loss = loss_of(output.mul_(2.0) if kind == 1 else output)
            if kind == 0:
                loss = loss + sum(parameter.square().sum() for parameter in list(model.parameters())[::2])
            if kind == 2:
                torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
                assert all(parameter.grad is None for parameter in model.parameters())
            loss.backward()
        assert_averaged(ddp.module, local, wire)
        ddp.check_finalized()


def collectives(rank: int, world: int, wire: str, surface: str = "wrapper") -> None:
    """The user's, in forward and backward, and ones that a hook on a parameter issues: none meets one of ours."""
    train(rank, Together(), wire, surface=surface, bucket_cap_mb=0.001)
    ddp, sums = wrapped(mlp(), wire, surface=surface), set[float]()

    def reduces(_: torch.Tensor) -> None:
        one = torch.tensor([float(rank + 1)])
        dist.all_reduce(one)
        sums.add(one.item())

    ddp.module[2].weight.register_post_accumulate_grad_hook(reduces)
    for step in range(STEPS):
        assert_step_averages(ddp, batch(rank, step), wire)
    assert sums == {world * (world + 1) / 2}


TRAINING = (zoo, sparse, mixed_precision, collectives)


@grid(("world", "case", "surface", "wire"), training_cells(TRAINING))
@on_ranks()
def test_training_gives_the_mean(rank: int, world: int, case: Any, surface: str, wire: str) -> None:
    case(rank, world, wire, surface=surface)


@on_ranks(2)
def test_sparse_gradients_through_a_comm_hook(rank: int, world: int) -> None:
    sparse(rank, world, "native", True)


@pytest.mark.parametrize("debugged", [pytest.param("INFO", marks=pytest.mark.full), "DETAIL"], indirect=True)
@on_ranks(pool="debugged")
def test_sparse_gradients_under_torchs_debugging(rank: int, world: int) -> None:
    sparse(rank, world, "native")
