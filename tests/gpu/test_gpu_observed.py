"""A clipped and scaled step without a wait, attribution; also on a GPU."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from support.on_device import no_wait, paths, pick
from torch import nn

import fusedreduce
from fusedreduce import FusedGradScaler, NonFiniteGradientError, clip_grad_norm_
from fusedreduce.kernels import counting

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of the interpreter's NaNs


def _model(device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    layers, width = pick(device, cpu=(2, 16), cuda=(10, 64))
    return nn.Sequential(*[layer for _ in range(layers) for layer in (nn.Linear(width, width), nn.Tanh())]).to(device)


def _batch(device: torch.device, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(8, pick(device, cpu=16, cuda=64), device=device, generator=generator)


def _steps(device: torch.device) -> int:
    return pick(device, cpu=2, cuda=12)


def _ours(device: torch.device, *, views: bool = False, **config: Any) -> fusedreduce.DistributedDataParallel:
    return fusedreduce.DistributedDataParallel(
        _model(device),
        bucket_cap_mb=pick(device, cpu=0.0012, cuda=0.05),
        gradient_as_bucket_view=views,
        reduce=fusedreduce.ReduceConfig(**config),
    )


@pytest.mark.parametrize(("wire", "views"), [("native", False), ("native", True), ("bf16", False)])
def test_a_clipped_and_scaled_step_never_waits_for_the_gpu(
    device: torch.device, group: None, wire: Any, views: bool
) -> None:
    ddp = _ours(device, views=views, wire=wire, grad_stats=True, check_finite="count")
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-3, fused=True)
    scaler = FusedGradScaler(ddp, init_scale=1024.0)
    batch = _batch(device)

    def step() -> None:
        scaler.scale(ddp(batch).square().mean()).backward()
        scaler.unscale_(optimizer)
        clip_grad_norm_(ddp, 0.1, optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    for _ in range(_steps(device)):
        step()
    with no_wait(device), counting.count_launches() as counted:
        step()
    buckets = int(ddp.reduce_stats()["buckets"])
    functions = [one.function for one in counted]
    assert functions.count("pack") == functions.count("unpack") == buckets
    assert functions.count("reduce_partials") == 1
    assert {one.path for one in counted} <= paths(device)
    assert sum(one.launches for one in counted if one.function == "reduce_partials") <= 2


@pytest.mark.parametrize("wire", ["native", "bf16", "fp16"])
def test_scaled_training_equals_torchs(device: torch.device, group: None, wire: Any) -> None:
    """One rank, wire native: the same gradients bit for bit; the norm and the fold differ in their last bits."""
    ours = _ours(device, wire=wire)
    plain = copy.deepcopy(ours.module)
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True) for model in (ours, plain)]
    fused, torchs = FusedGradScaler(ours, init_scale=2.0**12), torch.amp.GradScaler(device.type, init_scale=2.0**12)
    for step in range(_steps(device)):
        batch = _batch(device, seed=step)
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
def test_a_planted_nan_is_found(device: torch.device, group: None, wire: Any) -> None:
    ddp = _ours(device, wire=wire, check_finite="raise")
    batch = _batch(device)
    name, parameter = list(ddp.module.named_parameters())[2]
    index = parameter.numel() * 3 // 10

    def plant(gradient: torch.Tensor) -> torch.Tensor:
        planted = gradient.clone()
        planted.view(-1)[index] = float("nan")
        return planted

    handle = parameter.register_hook(plant)
    with pytest.raises(NonFiniteGradientError, match=f"rank 0, {name}, element {index}"):
        ddp(batch).square().mean().backward()
    handle.remove()
    ddp.zero_grad()
    ddp(batch).square().mean().backward()
    assert len(ddp.non_finite()) == 1
    exact = torch.stack([p.grad.double().square().sum() for p in ddp.parameters() if p.grad is not None]).sum().sqrt()
    assert ddp.grad_norm().item() == pytest.approx(exact.item(), rel=1e-6)
    for norm_type in (2.0, float("inf")):
        for name, norm in ddp.grad_norms(norm_type).items():
            gradient = dict(ddp.module.named_parameters())[name].grad
            assert gradient is not None
            assert norm.item() == pytest.approx(gradient.double().norm(norm_type).item(), rel=1e-6)
