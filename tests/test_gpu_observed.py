"""On hardware: measure and scale against the reference, a clipped and scaled step without a wait, attribution."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from buckets import FLOATS
from torch import nn

import fusedreduce
from fusedreduce import FusedGradScaler, NonFiniteGradientError, clip_grad_norm_
from fusedreduce.kernels import dispatch, reference, reference_stats
from fusedreduce.kernels.table import ChunkTable, PointerTable

pytestmark = pytest.mark.gpu
STEPS = 12


def _cuda() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    """An NCCL group of one."""
    dist.init_process_group("nccl", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[layer for _ in range(10) for layer in (nn.Linear(64, 64), nn.Tanh())]).to(_cuda())


def _ours(model: nn.Module, **config: Any) -> fusedreduce.DistributedDataParallel:
    return fusedreduce.DistributedDataParallel(model, bucket_cap_mb=0.05, reduce=fusedreduce.ReduceConfig(**config))


@pytest.mark.parametrize("dtype", [*FLOATS, torch.float64])
def test_measure_and_scale_equal_the_reference(dtype: torch.dtype) -> None:
    numels = [1, 7, 8192, 100_003]
    offsets = [0, 16, 32, 8224]
    chunks = ChunkTable(numels, offsets, [dtype] * 4, 8224 + 100_003)
    gradients = [torch.randn(numel, device=_cuda()).mul_(10.0**slot).to(dtype) for slot, numel in enumerate(numels)]
    gradients[2][5000] = float("nan")
    gradients[3][99_999] = float("inf")
    factor = torch.tensor([0.37], dtype=torch.float64 if dtype is torch.float64 else torch.float32, device=_cuda())
    totals, scaled = [], []
    for functions, stats in ((dispatch, dispatch), (reference, reference_stats)):
        mine = [one.clone() for one in gradients]
        pointers, partials = PointerTable(), chunks.new_partials(_cuda())
        functions.measure(mine, chunks, pointers, partials)
        totals.append(stats.reduce_partials(partials, chunks.spans(_cuda())))
        functions.scale(mine, chunks, pointers, factor)
        scaled.append(mine)
    ours, theirs = totals
    assert ours.first_non_finite.tolist() == theirs.first_non_finite.tolist() == [-1, -1, 5000, 99_999]
    torch.testing.assert_close(ours.parameter_sums, theirs.parameter_sums, rtol=1e-6, atol=0, equal_nan=True)
    assert torch.equal(ours.parameter_peaks[[0, 1, 3]], theirs.parameter_peaks[[0, 1, 3]])
    assert ours.parameter_peaks[2].isnan()
    assert ours.total[2].item() == 2
    for one, other in zip(*scaled, strict=True):
        assert torch.equal(one.nan_to_num(7.0), other.nan_to_num(7.0))


@pytest.mark.parametrize("views", [False, True])
@pytest.mark.parametrize("wire", ["native", "bf16"])
def test_a_clipped_and_scaled_step_never_waits_for_the_gpu(alone: None, wire: Any, views: bool) -> None:
    if views and wire != "native":
        return
    ddp = fusedreduce.DistributedDataParallel(
        _model(),
        bucket_cap_mb=0.05,
        gradient_as_bucket_view=views,
        reduce=fusedreduce.ReduceConfig(wire=wire, grad_stats=True, check_finite="count"),
    )
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-3, fused=True)
    scaler = FusedGradScaler(ddp, init_scale=1024.0)
    batch = torch.randn(8, 64, device=_cuda())

    def step() -> None:
        scaler.scale(ddp(batch).square().mean()).backward()
        scaler.unscale_(optimizer)
        clip_grad_norm_(ddp, 0.1, optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    for _ in range(STEPS):
        step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with dispatch.count_launches() as counted:
            step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    buckets = int(ddp.reduce_stats()["buckets"])
    functions = [one.function for one in counted]
    assert functions.count("pack") == functions.count("unpack") == buckets
    assert functions.count("reduce_partials") == 1
    assert {one.path for one in counted} == {"triton"}
    assert sum(one.launches for one in counted if one.function == "reduce_partials") <= 2


@pytest.mark.parametrize("wire", ["native", "bf16", "fp16"])
def test_scaled_training_equals_torchs(alone: None, wire: Any) -> None:
    """One rank, wire native: the same gradients bit for bit; the norm and the fold differ in their last bits."""
    ours = _ours(_model(), wire=wire)
    plain = copy.deepcopy(ours.module)
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True) for model in (ours, plain)]
    fused, torchs = FusedGradScaler(ours, init_scale=2.0**12), torch.amp.GradScaler("cuda", init_scale=2.0**12)
    for step in range(STEPS):
        batch = torch.randn(8, 64, device=_cuda(), generator=torch.Generator(_cuda()).manual_seed(step))
        losses = []
        for model, scaler, optimizer in ((ours, fused, optimizers[0]), (plain, torchs, optimizers[1])):
            optimizer.zero_grad()
            loss = model(batch).square().mean()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            if model is ours:
                clip_grad_norm_(ours, 0.05, optimizer)
            else:
                nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            scaler.step(optimizer)
            scaler.update()
            losses.append(loss.item())
        tolerance = {"native": 1e-5, "bf16": 2e-2, "fp16": 2e-3}[wire]
        assert losses[0] == pytest.approx(losses[1], rel=tolerance), f"step {step}"
    assert fused.get_scale() == torchs.get_scale()


@pytest.mark.parametrize("wire", ["native", "bf16"])
def test_a_planted_nan_is_found_on_the_gpu(alone: None, wire: Any) -> None:
    ddp = _ours(_model(), wire=wire, check_finite="raise")
    batch = torch.randn(8, 64, device=_cuda())
    name, parameter = list(ddp.module.named_parameters())[4]

    def plant(gradient: torch.Tensor) -> torch.Tensor:
        planted = gradient.clone()
        planted.view(-1)[1234] = float("nan")
        return planted

    handle = parameter.register_hook(plant)
    with pytest.raises(NonFiniteGradientError, match=f"rank 0, {name}, element 1234"):
        ddp(batch).square().mean().backward()
    handle.remove()
    ddp.zero_grad()
    ddp(batch).square().mean().backward()
    assert len(ddp.non_finite()) == 1
    exact = torch.stack([p.grad.double().square().sum() for p in ddp.parameters() if p.grad is not None]).sum().sqrt()
    assert ddp.grad_norm().item() == pytest.approx(exact.item(), rel=1e-6)


def test_norms_are_those_of_fp64(alone: None) -> None:
    ddp = _ours(_model(), wire="bf16", grad_stats=True)
    batch = torch.randn(8, 64, device=_cuda())
    for _ in range(STEPS):
        ddp.zero_grad()
        ddp(batch).square().mean().backward()
        for name, norm in ddp.grad_norms().items():
            gradient = dict(ddp.module.named_parameters())[name].grad
            assert gradient is not None
            assert norm.item() == pytest.approx(gradient.double().norm().item(), rel=1e-6)
            assert ddp.grad_norms(float("inf"))[name].item() == gradient.abs().max().item()
