"""Measures one backward of the demo: launches and bytes of its exchange, its error, its time.

Launches are torch operators that do work (`dispatch.does_work`: no views, no bare allocations, no marks for the
profiler) and Triton kernels; collectives (c10d) are counted separately. Those of a backward under `no_sync` on the same
weights and batch are subtracted: the rest is due to the exchange of gradients.
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
    """Counts of one step's exchange of gradients on this rank.

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
    """Runs forward and backward, with gradients exchanged or, if `exchange` is False, local. Returns the loss."""
    with nullcontext() if exchange else ddp.no_sync():
        loss: torch.Tensor = nn.functional.cross_entropy(ddp(batch.images), batch.labels)
        (loss if scaler is None else scaler.scale(loss)).backward()
    return loss.detach()


def seconds(device: torch.device, function: Callable[[], Any]) -> float:
    """Time of `function` in seconds; on CUDA until the device has finished."""
    _synchronize(device)
    begin = time.perf_counter()
    function()
    _synchronize(device)
    return time.perf_counter() - begin


def count_exchange(ddp: DistributedDataParallel, batch: Digits) -> Exchange:
    """Counts one step's exchange; gradients are None afterwards. Every rank must call it."""
    operators, payload_bytes = _count(ddp, batch, exchange=True)
    without, local_bytes = _count(ddp, batch, exchange=False)
    ddp.zero_grad(set_to_none=True)
    assert not local_bytes, "a backward under no_sync must not communicate"
    return Exchange(operators - without, len(payload_bytes), sum(payload_bytes))


def gradient_error(exchanged: Sequence[torch.Tensor], local: Sequence[torch.Tensor]) -> float:
    """The error of exchanged gradients against the fp64 mean of all ranks' local ones. Every rank must call it.

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
    """The first parameter or buffer whose bytes differ between ranks, or None. Every rank must call it."""
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
            return f"{name} on rank{'s' if len(others) > 1 else ''} {shown} differs from rank 0's"
    return None


def median(values: Sequence[float]) -> float:
    """The median; NaN if there are no values."""
    return statistics.median(values) if values else math.nan


def _count(ddp: DistributedDataParallel, batch: Digits, *, exchange: bool) -> tuple[int, list[int]]:
    """Launches of one forward and backward, and the payload bytes of each collective."""
    ddp.zero_grad(set_to_none=True)
    with dispatch.count_launches() as launched, _ExchangeCounter() as counter:
        forward_backward(ddp, batch, exchange=exchange)
    return counter.calls + sum(launch.launches for launch in launched), counter.payload_bytes


class _ExchangeCounter(dispatch.OperatorCounter):
    """Counts operators, and records the payload of each collective."""

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
