"""DataParallel on CUDA: one device listed several times, and as many devices as there are."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from data_parallel_models import Experts, batch, mlp
from torch import nn
from torch.nn import functional as F

from fusedreduce import ReduceConfig
from fusedreduce.data_parallel import DataParallel
from fusedreduce.modes import BoundedStaleness

pytestmark = pytest.mark.gpu
TOLERANCE = 1e-12
TIMEOUT_S = 30.0


def _devices() -> list[list[str]]:
    here = [f"cuda:{number}" for number in range(torch.cuda.device_count())]
    return [["cuda:0"] * 2, ["cuda:0"] * 8, here]


def _check(module: nn.Module, one: nn.Module) -> None:
    for mine, other in zip(module.parameters(), one.parameters(), strict=True):
        assert (mine.grad is None) == (other.grad is None)
        if mine.grad is not None:
            torch.testing.assert_close(mine.grad, other.grad, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("reduce", [None, ReduceConfig(check_finite="count")], ids=["in_place", "reducers"])
@pytest.mark.parametrize("which", [0, 1, 2], ids=["twice", "eight_times", "all"])
def test_gradients_are_those_of_the_whole_batch(which: int, reduce: ReduceConfig | None) -> None:
    devices = _devices()[which]
    module, one = mlp(), mlp().cuda()
    with DataParallel(module, devices, timeout_s=TIMEOUT_S, reduce=reduce) as dp:
        assert next(module.parameters()).device == torch.device("cuda:0")
        for step in range(5):
            inputs, targets = (tensor.cuda() for tensor in batch(8 * len(devices) + 3, seed=step))
            out = dp(inputs if step % 2 else inputs.cpu())
            assert out.device == torch.device("cuda:0")
            F.mse_loss(out, targets).backward()
            F.mse_loss(one(inputs), targets).backward()
            _check(module, one)
        dp.verify_replicas()
        outputs = dp.forward_parallel([inputs] * len(devices))
        assert [each.device for each in outputs] == list(dp.devices)


def test_training_on_a_side_stream() -> None:
    module, one = mlp(torch.float32), mlp(torch.float32).cuda()
    optimizers: list[Any] = []
    with DataParallel(module, ["cuda:0"] * 3, timeout_s=TIMEOUT_S, reduce=ReduceConfig(check_finite="count")) as dp:
        optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-3, fused=True) for each in (module, one)]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for step in range(100):
                inputs, targets = (tensor.cuda() for tensor in batch(16, seed=step, dtype=torch.float32))
                for each, optimizer in zip((dp, one), optimizers, strict=True):
                    optimizer.zero_grad()
                    F.mse_loss(each(inputs), targets).backward()
                    optimizer.step()
        stream.synchronize()
    for mine, other in zip(module.parameters(), one.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-3, atol=1e-4)


def test_replicas_use_different_parameters() -> None:
    module = Experts().cuda()
    one = copy.deepcopy(module)
    first, second = (torch.tensor([[zero, 2.0]], dtype=torch.float64, device="cuda") for zero in (0.0, 1.0))
    with DataParallel(module, ["cuda:0"] * 2, timeout_s=TIMEOUT_S, reduce=ReduceConfig(check_finite="count")) as dp:
        dp(torch.cat([first, second])).sum().backward()
        (one(first).sum() + one(second).sum()).backward()
        _check(module, one)


def test_bounded_staleness_and_amp() -> None:
    module = mlp(torch.float32)
    config = ReduceConfig(wire="bf16", sync_mode=BoundedStaleness(1))
    with DataParallel(module, ["cuda:0"] * 4, timeout_s=TIMEOUT_S, reduce=config) as dp:
        for step in range(4):
            inputs, targets = (tensor.cuda() for tensor in batch(16, seed=step, dtype=torch.float32))
            module.zero_grad()
            with torch.autocast("cuda", torch.bfloat16):
                out = dp(inputs)
            F.mse_loss(out.float(), targets).backward()
            assert all((parameter.grad is None) == (step == 0) for parameter in module.parameters())
        module.zero_grad()
        assert dp.flush().steps == 1
        assert all(parameter.grad is not None for parameter in module.parameters())


def test_threads_are_refused() -> None:
    with pytest.raises(ValueError, match="threads=True is for CPUs"):
        DataParallel(mlp(), ["cuda:0"] * 2, threads=True)
