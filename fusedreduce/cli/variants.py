"""What the demo compares: the rows of its table. A later front door is one more Variant in `variants`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import nn
from torch.nn.parallel import DistributedDataParallel

import fusedreduce
from fusedreduce import FusedHookState, fused_hook
from fusedreduce.config import Wire

# Small enough that the network's 162 kB of gradients make several buckets, as a real model's would.
BUCKET_CAP_MB = 0.05


@dataclass(frozen=True)
class Contender:
    """A variant built around one model."""

    ddp: DistributedDataParallel
    stats: Callable[[], dict[str, int | str]] | None = None  # None: torch's own reduction

    @property
    def buckets(self) -> int:
        """Buckets per step, as DDP has laid them out by now."""
        data = self.ddp._get_ddp_logging_data()
        sizes = data.get("rebuilt_bucket_sizes") or data["bucket_sizes"]
        return len(str(sizes).split(","))

    @property
    def path(self) -> str:
        """Where the bucket's arithmetic ran in the latest step."""
        return "torch" if self.stats is None else str(self.stats()["path"])


@dataclass(frozen=True)
class Variant:
    """One way to average gradients.

    Args:
        name: the row's name.
        setting: how it is built, for the footer of the table.
        build: a model on its device -> the same model, its gradients averaged across ranks.
    """

    name: str
    setting: str
    build: Callable[[nn.Module], Contender]


def variants(wires: Sequence[Wire]) -> list[Variant]:
    """torch DDP, then the fused hook, then the wrapper, at each of `wires`."""
    rows = [Variant("torch DDP", f"DistributedDataParallel(model, bucket_cap_mb={BUCKET_CAP_MB})", _torch_ddp)]
    for wire in wires:
        setting = f"the same with gradient_as_bucket_view=True and fused_hook at wire {wire!r}"
        rows.append(Variant(f"hook {wire}", setting, _hook(wire)))
    for wire in wires:
        setting = f"fusedreduce.DistributedDataParallel(model, bucket_cap_mb={BUCKET_CAP_MB}) at wire {wire!r}"
        rows.append(Variant(f"wrapper {wire}", setting, _wrapper(wire)))
    return rows


def _torch_ddp(model: nn.Module) -> Contender:
    return Contender(DistributedDataParallel(model, bucket_cap_mb=BUCKET_CAP_MB))


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
