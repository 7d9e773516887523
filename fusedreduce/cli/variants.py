"""The variants that the demo compares, a row of its table each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import fusedreduce
from fusedreduce import FusedHookState, fused_hook
from fusedreduce.config import Wire

# Small enough that the network's 162 kB of gradients make several buckets, as those of a real model do.
BUCKET_CAP_MB = 0.05
MAX_NORM = 1.0


@dataclass(frozen=True)
class Scaling:
    """A variant's loss scaling and clipping, used in torch's five lines.

    Args:
        scaler: scales the loss.
        clip: called with the optimizer, after `unscale_`.
    """

    scaler: torch.amp.GradScaler
    clip: Callable[[torch.optim.Optimizer], object]


@dataclass(frozen=True)
class Contender:
    """A variant built around one model."""

    ddp: DistributedDataParallel
    stats: Callable[[], dict[str, int | str]] | None = None  # None: torch's own reduction
    scaling: Scaling | None = None

    @property
    def buckets(self) -> int:
        """The number of buckets per step in DDP's current layout."""
        data = self.ddp._get_ddp_logging_data()
        sizes = data.get("rebuilt_bucket_sizes") or data["bucket_sizes"]
        return len(str(sizes).split(","))

    @property
    def path(self) -> str:
        """The path of the bucket's arithmetic in the latest step: triton, interpreter or torch."""
        return "torch" if self.stats is None else str(self.stats()["path"])


@dataclass(frozen=True)
class Variant:
    """One way to average gradients.

    Args:
        name: the row's name.
        setting: how it is built, for the footer of the table.
        build: wraps a model on its device, so that its gradients are averaged across ranks.
    """

    name: str
    setting: str
    build: Callable[[nn.Module], Contender]


def variants(wires: Sequence[Wire]) -> list[Variant]:
    """torch DDP, the fused hook and the wrapper at each of `wires`; then torch's and ours, scaled and clipped."""
    rows = [Variant("torch DDP", f"DistributedDataParallel(model, bucket_cap_mb={BUCKET_CAP_MB})", _torch_ddp)]
    for wire in wires:
        setting = f"the same with gradient_as_bucket_view=True and fused_hook at wire {wire!r}"
        rows.append(Variant(f"hook {wire}", setting, _hook(wire)))
    for wire in wires:
        setting = f"fusedreduce.DistributedDataParallel(model, bucket_cap_mb={BUCKET_CAP_MB}) at wire {wire!r}"
        rows.append(Variant(f"wrapper {wire}", setting, _wrapper(wire)))
    wire = wires[-1]
    clips = f"clipped at {MAX_NORM}"
    rows.append(Variant("torch scaled", f"torch DDP with torch.amp.GradScaler, {clips}", _torch_scaled))
    rows.append(Variant(f"{wire} scaled", f"wrapper {wire} with FusedGradScaler, {clips}", _wrapper_scaled(wire)))
    return rows


def _torch_ddp(model: nn.Module) -> Contender:
    return Contender(DistributedDataParallel(model, bucket_cap_mb=BUCKET_CAP_MB))


def _torch_scaled(model: nn.Module) -> Contender:
    ddp = DistributedDataParallel(model, bucket_cap_mb=BUCKET_CAP_MB)
    scaler = torch.amp.GradScaler(next(model.parameters()).device.type)
    return Contender(ddp, scaling=Scaling(scaler, lambda _: nn.utils.clip_grad_norm_(ddp.parameters(), MAX_NORM)))


def _wrapper_scaled(wire: Wire) -> Callable[[nn.Module], Contender]:
    def build(model: nn.Module) -> Contender:
        config = fusedreduce.ReduceConfig(wire=wire, grad_stats=True, check_finite="count")
        ddp = fusedreduce.DistributedDataParallel(model, bucket_cap_mb=BUCKET_CAP_MB, reduce=config)
        scaler = fusedreduce.FusedGradScaler(ddp)
        scaling = Scaling(scaler, lambda optimizer: fusedreduce.clip_grad_norm_(ddp, MAX_NORM, optimizer))
        return Contender(ddp, ddp.reduce_stats, scaling)

    return build


def _hook(wire: Wire) -> Callable[[nn.Module], Contender]:
    def build(model: nn.Module) -> Contender:
        ddp = DistributedDataParallel(model, bucket_cap_mb=BUCKET_CAP_MB, gradient_as_bucket_view=True)
        state = FusedHookState(wire=wire)
        ddp.register_comm_hook(state, fused_hook)
        return Contender(ddp, state.stats)

    return build


def _wrapper(wire: Wire) -> Callable[[nn.Module], Contender]:
    def build(model: nn.Module) -> Contender:
        config = fusedreduce.ReduceConfig(wire=wire)
        ddp = fusedreduce.DistributedDataParallel(model, bucket_cap_mb=BUCKET_CAP_MB, reduce=config)
        return Contender(ddp, ddp.reduce_stats)

    return build
