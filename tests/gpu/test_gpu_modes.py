"""Options and synchronisation modes of the wrapper in a group of one, on CPU and on a GPU, where NCCL carries them.

Not here, because they need a second GPU: sums over NCCL, and plans from the device's clock, since a group of one
measures nothing. Nor are sparse gradients, of which torch has no all-reduce over NCCL.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from gpu import rank_cases
from support.leaf_steps import assert_same, copies
from support.on_device import own_stream, pick, synchronize
from support.on_device import torch_path as torch_path
from support.ranks import RankPool, group_of_one
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.parallel.distributed import _MixedPrecision

from fusedreduce import Asynchronous, BoundedStaleness, DistributedDataParallel, ReduceConfig

STEPS = 5
CAP_MB = 0.001  # several buckets


class Net(nn.Module):
    """Embedding, two layers, a head; with `branches` a step uses one of the two, and a third one is never used."""

    def __init__(self, *, branches: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(20, 16)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3 if branches else 2))
        self.head = nn.Linear(16, 4)
        self._branches = branches

    def forward(self, tokens: torch.Tensor, step: int) -> torch.Tensor:
        hidden = self.table(tokens).mean(1)
        used = [self.layers[step % 2]] if self._branches else self.layers
        for layer in used:
            hidden = torch.tanh(layer(hidden))
        result: torch.Tensor = self.head(hidden)
        return result


OPTIONS: Mapping[str, Mapping[str, bool]] = {
    "plain": {},
    "views": {"gradient_as_bucket_view": True},
    "static graph": {"static_graph": True},
    "unused": {"find_unused_parameters": True},
    "unused, views": {"find_unused_parameters": True, "gradient_as_bucket_view": True},
}
MIXED = _MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, buffer_dtype=torch.float32)
TORCHS: Mapping[str, Mapping[str, Any]] = {"comm hook": {}, "comm hook, views": {"gradient_as_bucket_view": True}}


def _tokens(device: torch.device, step: int) -> torch.Tensor:
    return torch.randint(0, 20, (8, 3), generator=torch.Generator().manual_seed(step)).to(device)


def _wrapped(net: nn.Module, **options: Any) -> DistributedDataParallel:
    return DistributedDataParallel(net, bucket_cap_mb=CAP_MB, **options)


def _loss(model: nn.Module, device: torch.device, step: int) -> torch.Tensor:
    loss: torch.Tensor = model(_tokens(device, step), step).square().mean()
    return loss


def _gradients(model: nn.Module) -> list[torch.Tensor | None]:
    return copies(model.parameters())


@pytest.mark.parametrize("way", OPTIONS)
def test_gradients_are_those_without_a_wrapper(device: torch.device, group: None, way: str) -> None:
    net = Net(branches="find_unused_parameters" in OPTIONS[way]).to(device)
    ddp = _wrapped(net, **OPTIONS[way])
    alone = copy.deepcopy(ddp.module)
    synchronize(device)
    with own_stream(device):
        for step in range(STEPS):
            for model in (ddp, alone):
                model.zero_grad()
                _loss(model, device, step).backward()
            assert_same(_gradients(ddp), _gradients(alone), f"step {step}")


@pytest.mark.gpu
@pytest.mark.parametrize("way", TORCHS)
def test_gradients_are_those_of_torchs_wrapper(way: str) -> None:
    """With a hook that torch has over NCCL alone."""
    device = torch.device("cuda", torch.cuda.current_device())
    with group_of_one("cuda"):
        wrappers = [
            kind(Net().to(device), bucket_cap_mb=CAP_MB, **TORCHS[way]) for kind in (DistributedDataParallel, DDP)
        ]
        for ddp in wrappers:
            ddp.register_comm_hook(None, default_hooks.bf16_compress_hook)
        for step in range(STEPS):
            for ddp in wrappers:
                ddp.zero_grad()
                _loss(ddp, device, step).backward()
            ours, theirs = map(_gradients, wrappers)
            assert_same(ours, theirs, f"step {step}")


@pytest.mark.gpu
def test_torchs_mixed_precision_gives_the_gradients_of_a_bf16_model() -> None:
    """Which torch's own wrapper gives from the second step on: in its first, on an H100 with torch 2.11, `.grad` held
    the bf16 parameters."""
    device = torch.device("cuda", torch.cuda.current_device())
    plain = Net().to(device).bfloat16()
    with group_of_one("cuda"):
        ddp = _wrapped(Net().to(device), mixed_precision=MIXED)
        for step in range(STEPS):
            for model in (ddp, plain):
                model.zero_grad()
                _loss(model, device, step).backward()
            wanted = [None if one is None else one.float() for one in _gradients(plain)]
            assert_same(_gradients(ddp), wanted, f"step {step}")


@pytest.mark.gpu
def test_lazy_wires_leave_their_memory_to_the_next_forward() -> None:
    """Also where the host, which waits for nothing, is steps ahead of the device."""
    peaks = []
    for lazy in (False, True):
        ranks = RankPool(1, {}, backend="nccl")  # a process of its own: what another run has left is not its peak
        try:
            peaks += ranks.run(rank_cases.peak_of_steps, lazy)
        finally:
            ranks.close()
    (plain_bytes, wire_bytes), (lazy_bytes, _) = peaks
    assert plain_bytes - lazy_bytes >= 0.5 * wire_bytes


def test_join_trains_as_without_it(device: torch.device, group: None) -> None:
    # torch's stand-in for a group on CPU cannot say how many ranks are left.
    for by_initial in pick(device, cpu=(True,), cuda=(True, False)):
        ddp = _wrapped(Net().to(device))
        alone = copy.deepcopy(ddp.module)
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.05) for model in (ddp, alone)]
        with ddp.join(divide_by_initial_world_size=by_initial):
            for step in range(STEPS):
                for model, optimizer in zip((ddp, alone), optimizers, strict=True):
                    optimizer.zero_grad()
                    _loss(model, device, step).backward()
                    optimizer.step()
        for ours, theirs in zip(ddp.parameters(), alone.parameters(), strict=True):
            assert torch.equal(ours, theirs)


@pytest.mark.parametrize("wire", ["native", "bf16"])
def test_bounded_staleness_gives_the_gradients_of_the_step_before(device: torch.device, group: None, wire: Any) -> None:
    ddp = _wrapped(Net().to(device), reduce=ReduceConfig(wire=wire, sync_mode=BoundedStaleness(1)))
    alone = copy.deepcopy(ddp.module)
    before: list[torch.Tensor | None] = [None for _ in alone.parameters()]
    synchronize(device)
    with own_stream(device):
        for step in range(STEPS):
            for model in (ddp, alone):
                model.zero_grad()
                _loss(model, device, step).backward()
            assert_same(_gradients(ddp), before, f"step {step}")
            before = [one if one is None or wire == "native" else one.bfloat16().float() for one in _gradients(alone)]
        ddp.zero_grad()
        assert ddp.flush().steps == 1
        assert_same(_gradients(ddp), before, "flushed")


def test_asynchronous_alone_has_nothing_to_correct(device: torch.device, group: None) -> None:
    ddp = _wrapped(Net().to(device), reduce=ReduceConfig(sync_mode=Asynchronous()))
    alone = copy.deepcopy(ddp.module)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.05) for model in (ddp, alone)]
    synchronize(device)
    with own_stream(device):
        for step in range(STEPS):
            for model, optimizer in zip((ddp, alone), optimizers, strict=True):
                optimizer.zero_grad()
                _loss(model, device, step).backward()
                optimizer.step()
            assert_same(_gradients(ddp), _gradients(alone), f"step {step}")
        assert ddp.flush(optimizers[0]).drift == 0.0
        assert int(ddp.reduce_stats()["contributions"]) > 0
        for ours, theirs in zip(ddp.parameters(), alone.parameters(), strict=True):
            assert torch.equal(ours, theirs)
