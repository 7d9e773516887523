"""Models that `fully_shard` shards, and what they leave in gradients."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

TOKENS, WIDTH, LENGTH = 100, 66, 16


class Block(nn.Module):
    """A residual MLP. With 66 and 262 rows its weights are uneven shards on 4 ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 262)
        self.down = nn.Linear(262, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.down(F.gelu(self.up(self.norm(x))))
        return out


class Language(nn.Module):
    """Predicts the next token from the last one and its place."""

    def __init__(self, blocks: int = 2) -> None:
        super().__init__()
        self.tokens = nn.Embedding(TOKENS, WIDTH)
        self.places = nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, TOKENS, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.tokens(x) + self.places.weight[: x.shape[1]]
        for block in self.blocks:
            x = block(x)
        out: torch.Tensor = self.head(self.norm(x))
        return out


def mesh_of(replicas: int, shards: int) -> DeviceMesh:
    """The ranks as [replicas, shards]."""
    return init_device_mesh("cpu", (replicas, shards), mesh_dim_names=("replicate", "shard"))


def sharded(mesh: DeviceMesh, model: nn.Module | None = None, **options: Any) -> nn.Module:
    """A model, the same on every rank, with a group of parameters per block and one for the rest."""
    if model is None:
        torch.manual_seed(0)
        model = Language()
    for block in model.blocks:  # type: ignore[union-attr]
        fully_shard(block, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    return model


def loss_of(model: nn.Module, step: int = 0) -> torch.Tensor:
    """The loss of this rank's batch of a step."""
    generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    tokens = torch.randint(0, TOKENS, (4, LENGTH + 1), generator=generator)
    return F.cross_entropy(model(tokens[:, :-1]).transpose(1, 2).float(), tokens[:, 1:])


def full_gradients(model: nn.Module) -> dict[str, torch.Tensor | None]:
    """The gradients of all parameters, gathered; None where there is none."""
    found = {}
    for name, parameter in model.named_parameters():
        gradient: Any = parameter.grad
        found[name] = None if gradient is None else gradient.full_tensor().clone()
    return found
