"""The variants that the demo compares, a row of its table each."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
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
    scaler: torch.amp.GradScaler
    clip: Callable[[torch.optim.Optimizer], object] | None = None


Build = Callable[[nn.Module], Contender]


def variants(wires: Sequence[Wire]) -> dict[str, Build]:
    """By name: torch DDP, the fused hook and the wrapper at each of `wires`; then torch's and ours, scaled and clipped.

    Each wraps a model on its device, so that its gradients are averaged across ranks.
    """
    found: dict[str, Build] = {"torch DDP": _torch_ddp}
    found |= {f"hook {wire}": partial(_hook, wire) for wire in wires}
    found |= {f"wrapper {wire}": partial(_wrapper, wire) for wire in wires}
    found |= {"torch scaled": _torch_scaled, f"{wires[-1]} scaled": partial(_wrapper_scaled, wires[-1])}
    return found


def _torch_ddp(model: nn.Module) -> Contender:
    ddp = DistributedDataParallel(model, bucket_cap_mb=BUCKET_CAP_MB)
    size_bytes = sum(parameter.nbytes for parameter in model.parameters())
    return Contender(ddp, lambda: (size_bytes, "torch"), None, _unscaled())


def _torch_scaled(model: nn.Module) -> Contender:
    plain = _torch_ddp(model)
    scaler = torch.amp.GradScaler(next(model.parameters()).device.type)
    return dataclasses.replace(
        plain, scaler=scaler, clip=lambda _: nn.utils.clip_grad_norm_(plain.ddp.parameters(), MAX_NORM)
    )


def _hook(wire: Wire, model: nn.Module) -> Contender:
    ddp = DistributedDataParallel(model, bucket_cap_mb=BUCKET_CAP_MB, gradient_as_bucket_view=True)
    state = fusedreduce.FusedHookState(wire=wire)
    ddp.register_comm_hook(state, fusedreduce.fused_hook)

    def exchanged() -> tuple[int, str]:
        counted = state.stats()
        return int(counted["wire_bytes"]) // int(counted["steps"]), str(counted["path"])

    return Contender(ddp, exchanged, wire, _unscaled())


def _wrapper(wire: Wire, model: nn.Module) -> Contender:
    ddp = _wrapped(model, fusedreduce.ReduceConfig(wire=wire))
    return Contender(ddp, partial(_exchanged, ddp), wire, _unscaled())


def _wrapper_scaled(wire: Wire, model: nn.Module) -> Contender:
    ddp = _wrapped(model, fusedreduce.ReduceConfig(wire=wire, grad_stats=True, check_finite="count"))
    scaler = fusedreduce.FusedGradScaler(ddp)
    clip = partial(fusedreduce.clip_grad_norm_, ddp, MAX_NORM)
    return Contender(ddp, partial(_exchanged, ddp), wire, scaler, clip)


def _wrapped(model: nn.Module, config: fusedreduce.ReduceConfig) -> fusedreduce.DistributedDataParallel:
    return fusedreduce.DistributedDataParallel(model, bucket_cap_mb=BUCKET_CAP_MB, reduce=config)


def _exchanged(ddp: fusedreduce.DistributedDataParallel) -> tuple[int, str]:
    counted = ddp.reduce_stats()
    return int(counted["wire_bytes"]), str(counted["path"])


def _unscaled() -> torch.amp.GradScaler:
    return torch.amp.GradScaler(enabled=False)
