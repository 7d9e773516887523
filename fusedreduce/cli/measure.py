"""Measuring one backward: what its exchange launches and sends, how wrong it is, how long it takes.

Which calls count as launches: every torch operator that does work (`dispatch.does_work`: no views, no bare allocations,
no marks for the profiler) and every Triton kernel; collectives (c10d) are counted apart. Those of a backward under
`no_sync` on the same weights and batch are taken off: what is left exists because gradients are exchanged.
"""

from __future__ import annotations

import hashlib
import math
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from fusedreduce.kernels import dispatch

from .digits import Digits

Gradients = Sequence[torch.Tensor | None]


@dataclass(frozen=True)
class Exchange:
    """What one step's exchange of gradients took on this rank.

    Args:
        launches: operator calls and Triton launches, collectives not included.
        collectives: c10d calls.
        wire_bytes: payload handed to them.
    """

    launches: int
    collectives: int
    wire_bytes: int


def forward_backward(
    ddp: DistributedDataParallel,
    batch: Digits,
    *,
    exchange: bool = True,
    scaler: torch.amp.GradScaler | None = None,
) -> torch.Tensor:
    """One loss and its gradients, exchanged with the other ranks or (`exchange` false) this rank's own."""
    with nullcontext() if exchange else ddp.no_sync():
        loss: torch.Tensor = nn.functional.cross_entropy(ddp(batch.images), batch.labels)
        (loss if scaler is None else scaler.scale(loss)).backward()
    return loss.detach()


def seconds(device: torch.device, function: Callable[[], Any]) -> float:
    """How long `function` takes; on CUDA until the device has finished it."""
    _synchronize(device)
    begin = time.perf_counter()
    function()
    _synchronize(device)
    return time.perf_counter() - begin


def count_exchange(ddp: DistributedDataParallel, batch: Digits) -> Exchange:
    """Counts one step's exchange; leaves no gradient behind. Every rank must call it."""
    operators, payload_bytes = _count(ddp, batch, exchange=True)
    without, local_bytes = _count(ddp, batch, exchange=False)
    ddp.zero_grad(set_to_none=True)
    assert not local_bytes, "a backward under no_sync must not communicate"
    return Exchange(operators - without, len(payload_bytes), sum(payload_bytes))


def gradient_error(exchanged: Sequence[torch.Tensor], local: Sequence[torch.Tensor]) -> float:
    """How far exchanged gradients are from the fp64 mean of all ranks' local ones. Every rank must call it.

    Per parameter max |difference| / max |mean|, the worst of them: gradients (1, 2) and (3, 2) on two ranks have the
    mean (2, 2); an exchanged (2, 2.5) is 0.25 off. NaN if anything is not a number.
    """
    flat = torch.cat([gradient.double().reshape(-1) for gradient in local])
    dist.all_reduce(flat)
    means = flat.div_(dist.get_world_size()).split([gradient.numel() for gradient in local])
    errors = []
    for gradient, mean in zip(exchanged, means, strict=True):
        difference = (gradient.double().reshape(-1) - mean).abs().max()
        errors.append(torch.where(difference == 0, difference, difference / mean.abs().max()))
    return float(torch.stack(errors).max())


def difference_between_ranks(model: nn.Module, device: torch.device) -> str | None:
    """Which parameter or buffer does not have the same bytes on every rank, or None. Every rank must call it."""
    tensors = dict([*model.named_parameters(), *model.named_buffers()])
    digests = b"".join(_digest(tensor) for tensor in tensors.values())
    mine = torch.frombuffer(bytearray(digests), dtype=torch.uint8).to(device)
    gathered = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, mine)
    rows = [one.view(len(tensors), -1) for one in gathered]
    for index, name in enumerate(tensors):
        others = [rank for rank, row in enumerate(rows) if not torch.equal(row[index], rows[0][index])]
        if others:
            shown = ", ".join(map(str, others))
            return f"{name} on rank{'s' if len(others) > 1 else ''} {shown} is not what it is on rank 0"
    return None


def median(values: Sequence[float]) -> float:
    """The median; NaN of nothing."""
    return statistics.median(values) if values else math.nan


def _count(ddp: DistributedDataParallel, batch: Digits, *, exchange: bool) -> tuple[int, list[int]]:
    """Launches of one forward and backward, and the bytes that each collective was given."""
    ddp.zero_grad(set_to_none=True)
    with dispatch.count_launches() as launched, _ExchangeCounter() as counter:
        forward_backward(ddp, batch, exchange=exchange)
    return counter.calls + sum(launch.launches for launch in launched), counter.payload_bytes


class _ExchangeCounter(dispatch.OperatorCounter):
    """Counts operators, and keeps the payload of each collective apart."""

    def __init__(self) -> None:
        super().__init__()
        self.payload_bytes: list[int] = []

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func.namespace != "c10d":
            return super().__torch_dispatch__(func, types, args, kwargs)
        self.payload_bytes.append(_payload_bytes(func, args))
        return func(*args, **(kwargs or {}))


def _payload_bytes(collective: Any, args: tuple[Any, ...]) -> int:
    """Bytes that a rank gives to a c10d operator: its input; of one that works in place, its only tensors."""
    names = [argument.name for argument in collective._schema.arguments]
    inputs = [name for name in names if name.startswith("input")] or ["tensors" if "tensors" in names else "tensor"]
    return sum(_bytes(args[names.index(name)]) for name in inputs)


def _bytes(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    return sum(_bytes(one) for one in value)


def _digest(tensor: torch.Tensor) -> bytes:
    raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha256(raw.numpy().tobytes()).digest()


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
