"""DataParallel on one device listed several times, a GPU or a CPU, and on as many GPUs as there are."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from support.data_parallel_models import Experts, batch, mlp
from support.on_device import own_stream, pick, synchronize
from support.on_device import torch_path as torch_path
from torch import nn
from torch.nn import functional as F

from fusedreduce import ReduceConfig
from fusedreduce.config import BoundedStaleness
from fusedreduce.parallel.data_parallel import DataParallel

TOLERANCE = 1e-12
TIMEOUT_S = 30.0


def _devices(device: torch.device) -> list[list[str]]:
    every = [f"cuda:{number}" for number in range(torch.cuda.device_count())]
    return [[str(device)] * 2, [str(device)] * 8, pick(device, cpu=["cpu"] * 3, cuda=every)]


def _both(device: torch.device, dtype: torch.dtype = torch.float64) -> tuple[nn.Module, nn.Module]:
    """The module of a DataParallel, and the same one alone."""
    return mlp(dtype).to(device), mlp(dtype).to(device)


def _batch(samples: int, seed: int, device: torch.device, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    inputs, targets = batch(samples, seed=seed, dtype=dtype)
    return inputs.to(device), targets.to(device)


def _check(module: nn.Module, one: nn.Module) -> None:
    for mine, other in zip(module.parameters(), one.parameters(), strict=True):
        assert (mine.grad is None) == (other.grad is None)
        if mine.grad is not None:
            torch.testing.assert_close(mine.grad, other.grad, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("reduce", [None, ReduceConfig(check_finite="count")], ids=["in_place", "reducers"])
@pytest.mark.parametrize("which", [0, 1, 2], ids=["twice", "eight_times", "all"])
def test_gradients_are_those_of_the_whole_batch(device: torch.device, which: int, reduce: ReduceConfig | None) -> None:
    devices = _devices(device)[which]
    module, one = mlp(), mlp().to(device)
    with DataParallel(module, devices, timeout_s=TIMEOUT_S, reduce=reduce) as dp:
        assert next(module.parameters()).device == device
        for step in range(5):
            inputs, targets = _batch(8 * len(devices) + 3, step, device, torch.float64)
            out = dp(inputs if step % 2 else inputs.cpu())
            assert out.device == device
            F.mse_loss(out, targets).backward()
            F.mse_loss(one(inputs), targets).backward()
            _check(module, one)
        dp.verify_replicas()
        outputs = dp.forward_parallel([inputs] * len(devices))
        assert [each.device for each in outputs] == list(dp.devices)


def test_training_on_a_side_stream(device: torch.device) -> None:
    module, one = _both(device, torch.float32)
    optimizers: list[Any] = []
    config = ReduceConfig(check_finite="count")
    with DataParallel(module, [str(device)] * 3, timeout_s=TIMEOUT_S, reduce=config) as dp:
        optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-3, fused=True) for each in (module, one)]
        synchronize(device)
        with own_stream(device):
            for step in range(pick(device, cpu=20, cuda=100)):
                inputs, targets = _batch(16, step, device, torch.float32)
                for each, optimizer in zip((dp, one), optimizers, strict=True):
                    optimizer.zero_grad()
                    F.mse_loss(each(inputs), targets).backward()
                    optimizer.step()
        synchronize(device)
    for mine, other in zip(module.parameters(), one.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-3, atol=1e-4)


def test_replicas_use_different_parameters(device: torch.device) -> None:
    module = Experts().to(device)
    one = copy.deepcopy(module)
    first, second = (torch.tensor([[zero, 2.0]], dtype=torch.float64, device=device) for zero in (0.0, 1.0))
    config = ReduceConfig(check_finite="count")
    with DataParallel(module, [str(device)] * 2, timeout_s=TIMEOUT_S, reduce=config) as dp:
        dp(torch.cat([first, second])).sum().backward()
        (one(first).sum() + one(second).sum()).backward()
        _check(module, one)


def test_bounded_staleness_and_amp(device: torch.device) -> None:
    module, _ = _both(device, torch.float32)
    config = ReduceConfig(wire="bf16", sync_mode=BoundedStaleness(1))
    with DataParallel(module, [str(device)] * 4, timeout_s=TIMEOUT_S, reduce=config) as dp:
        for step in range(4):
            inputs, targets = _batch(16, step, device, torch.float32)
            module.zero_grad()
            with torch.autocast(device.type, torch.bfloat16):
                out = dp(inputs)
            F.mse_loss(out.float(), targets).backward()
            assert all((parameter.grad is None) == (step == 0) for parameter in module.parameters())
        module.zero_grad()
        assert dp.flush().steps == 1
        assert all(parameter.grad is not None for parameter in module.parameters())


@pytest.mark.gpu
def test_threads_are_refused() -> None:
    with pytest.raises(ValueError, match="threads=True is for CPUs"):
        DataParallel(mlp(), ["cuda:0"] * 2, threads=True)
