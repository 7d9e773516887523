"""What test_local_ddp.py runs on threads and on Gloo ranks alike."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn

import fusedreduce
from fusedreduce.config import Wire

STEPS = 30


def normed(seed: int = 0) -> nn.Module:
    """A small model with running statistics. Draws from torch's one generator: not for threads."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))


def batches(rank: int, count: int = STEPS) -> Iterator[torch.Tensor]:
    """Inputs of a rank's own."""
    generator = torch.Generator().manual_seed(100 + rank)
    for _ in range(count):
        yield torch.randn(8, 6, generator=generator)


def loss_of(output: torch.Tensor) -> torch.Tensor:
    return (output - 1).square().mean()


def trained(
    model: nn.Module, rank: int, group: dist.ProcessGroup | None, wire: Wire, grad_stats: bool = True
) -> dict[str, torch.Tensor]:
    """The model's state, its gradients and their norms after some steps under our wrapper."""
    config = fusedreduce.ReduceConfig(wire=wire, grad_stats=grad_stats)
    ddp = fusedreduce.DistributedDataParallel(model, process_group=group, reduce=config, bucket_cap_mb=3e-4)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
    norms = []
    for given in batches(rank):
        optimizer.zero_grad()
        loss_of(ddp(given)).backward()
        if grad_stats:
            norms.append(ddp.grad_norm())
        optimizer.step()
    found = {name: value.detach().clone() for name, value in model.state_dict().items()}
    found |= {f"{name}.grad": one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}
    return {**found, "norms": torch.stack(norms)} if grad_stats else found


def trained_over_gloo(rank: int, world: int, wire: Wire) -> dict[str, torch.Tensor]:
    return trained(normed(rank), rank, None, wire)
