"""The variants that the demo compares, a row of its table each."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import fusedreduce
from fusedreduce.config import Wire

# Small enough that the network's 162 kB of gradients make several buckets, as those of a real model do.
BUCKET_CAP_MB = 0.05
MAX_NORM = 1.0


@dataclass(frozen=True)
class Contender:
    """A variant built around one model.

    Args:
        ddp: the wrapped model.
        exchanged: returns the bytes that a rank handed to collectives in one step, and the path of the buckets'
            arithmetic in the latest one: triton, interpreter or torch.
        wire: None: torch's own reduction.
        scaler: scales the loss, if it is enabled.
        clip: called with the optimizer between unscaling and the step.
    """

    ddp: DistributedDataParallel
    exchanged: Callable[[], tuple[int, str]]
    wire: Wire | None
    scaler: torch.amp.GradScaler = field(default_factory=partial(torch.amp.GradScaler, enabled=False))
    clip: Callable[[torch.optim.Optimizer], object] | None = None


Build = Callable[[nn.Module], Contender]


def variants(wires: Sequence[Wire]) -> dict[str, Build]:
    """By name: torch DDP, the fused hook and the wrapper at each of `wires`; then torch's and ours, scaled and clipped.

    Each wraps a model on its device, so that its gradients are averaged across ranks.
    """
    found: dict[str, Build] = {"torch DDP": _torch}
    found |= {f"hook {wire}": partial(_hook, wire) for wire in wires}
    found |= {f"wrapper {wire}": partial(_wrapper, wire) for wire in wires}
    found["torch scaled"] = partial(_torch, scaled=True)
    found[f"{wires[-1]} scaled"] = partial(_wrapper, wires[-1], scaled=True)
    return found


def _torch(model: nn.Module, *, scaled: bool = False) -> Contender:
    ddp = DistributedDataParallel(model, bucket_cap_mb=BUCKET_CAP_MB)
    parameters = list(model.parameters())
    plain = Contender(ddp, lambda: (sum(one.nbytes for one in parameters), "torch"), None)
    if not scaled:
        return plain
    scaler = torch.amp.GradScaler(parameters[0].device.type)
    return dataclasses.replace(plain, scaler=scaler, clip=lambda _: nn.utils.clip_grad_norm_(parameters, MAX_NORM))


def _hook(wire: Wire, model: nn.Module) -> Contender:
    ddp = DistributedDataParallel(model, bucket_cap_mb=BUCKET_CAP_MB, gradient_as_bucket_view=True)
    state = fusedreduce.FusedHookState(wire=wire)
    ddp.register_comm_hook(state, fusedreduce.fused_hook)

    def exchanged() -> tuple[int, str]:
        counted = state.stats()
        return int(counted["wire_bytes"]) // int(counted["steps"]), str(counted["path"])

    return Contender(ddp, exchanged, wire)


def _wrapper(wire: Wire, model: nn.Module, *, scaled: bool = False) -> Contender:
    config = fusedreduce.ReduceConfig(wire=wire, grad_stats=scaled, check_finite="count" if scaled else "off")
    ddp = fusedreduce.DistributedDataParallel(model, bucket_cap_mb=BUCKET_CAP_MB, reduce=config)

    def exchanged() -> tuple[int, str]:
        counted = ddp.reduce_stats()
        return int(counted["wire_bytes"]), str(counted["path"])

    plain = Contender(ddp, exchanged, wire)
    if not scaled:
        return plain
    clip = partial(fusedreduce.clip_grad_norm_, ddp, MAX_NORM)
    return dataclasses.replace(plain, scaler=fusedreduce.FusedGradScaler(ddp), clip=clip)
