"""Models that `fully_shard` shards, and what they leave in gradients."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard

from support.ddp_models import assert_same_on_all_ranks

Gradients = Mapping[str, torch.Tensor]
TOKENS, WIDTH, LENGTH = 100, 66, 16
POLICIES: Mapping[str, dict[str, Any]] = {
    "fp32": {},
    "bf16 reduce": {"mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)},
    "bf16 parameters": {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)},
    "fp16 reduce": {"mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.float16)},
    "zero2": {"reshard_after_forward": False},
    "offloaded": {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
}


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


@functools.cache
def mesh_of(replicas: int, shards: int) -> DeviceMesh:
    """The ranks as [replicas, shards]; made once, since its Gloo groups keep their threads."""
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


def modules_of(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def group_of(module: Any) -> Any:
    """torch's FSDPParamGroup of a module."""
    state = module._get_fsdp_state()
    return state._fsdp_param_groups[0] if hasattr(state, "_fsdp_param_groups") else state._fsdp_param_group


def set_factor(model: nn.Module, factor: float | None, *, force_sum: bool) -> None:
    for module in modules_of(model):
        if factor is not None:
            module.set_gradient_divide_factor(factor)
        if force_sum:
            module.set_force_sum_reduction_for_comms(True)


def steps_of(model: nn.Module, steps: int = 2, micro: int = 1) -> Any:
    """Gradients that have added up over some backwards; between replicas only in each `micro`-th."""
    for step in range(steps * micro):
        if micro > 1:
            for module in modules_of(model):
                module.set_requires_all_reduce(step % micro == micro - 1)
        loss_of(model, step).backward()
    return full_gradients(model)


@functools.cache
def torchs(shape: tuple[int, ...], policy: str, factor: float | None = None, *, force_sum: bool = False) -> Gradients:
    """What torch leaves after `steps_of`: the same for every wire, and way to set it, that is compared with it."""
    mesh = mesh_of(*shape) if len(shape) > 1 else init_device_mesh("cpu", shape)
    model = sharded(mesh, **POLICIES[policy])
    set_factor(model, factor, force_sum=force_sum)
    return steps_of(model)  # type: ignore[no-any-return]


def assert_everywhere(gradients: Gradients) -> None:
    """Every rank has the same bytes."""
    assert_same_on_all_ranks(list(gradients.values()))


def errors_of(found: Gradients, expected: Gradients) -> dict[str, float]:
    """By parameter the error relative to the L2 norm of what is expected."""
    return {
        name: float((found[name] - expected[name]).double().norm() / expected[name].double().norm()) for name in found
    }
