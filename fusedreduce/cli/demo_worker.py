"""One rank of the demo: `python -m fusedreduce.cli.demo_worker FOLDER DEVICE WIRES STEPS SEED`.

All variants train side by side, step i of each before step i + 1 of any, on the same batches. Every CHECK_EVERY-th step
compares the averaged gradients with the ranks' local ones. Only in this folder is torch.distributed used the way a
user's script uses it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn

from fusedreduce import reducer_of
from fusedreduce.config import Wire

from . import digits
from .demo_report import CHECK_EVERY, ROWS_FILE, TRACE_FOLDER, Row, show_progress
from .launch import as_rank
from .variants import Contender, variants

_TIMEOUT = timedelta(minutes=3)
_RECORDED_STEPS = 10


@dataclass
class Run:
    """A variant in training, and what this rank has found of it."""

    name: str
    contender: Contender
    optimizer: torch.optim.Optimizer
    schedule: torch.optim.lr_scheduler.LRScheduler
    losses: list[torch.Tensor] = field(default_factory=list)
    errors: list[float] = field(default_factory=list)

    def step(self, batch: digits.Digits, *, check: bool) -> None:
        """Runs one training step; `check`: and notes the error of its gradients."""
        ddp, scaler = self.contender.ddp, self.contender.scaler
        parameters = list(ddp.parameters())
        # Of the module alone, so that no rank averages them.
        local = torch.autograd.grad(_loss(ddp.module, batch), parameters) if check else ()
        loss = _loss(ddp, batch)
        self.losses.append(loss.detach())
        scaler.scale(loss).backward()
        scaler.unscale_(self.optimizer)
        if check:
            error = gradient_error([cast("torch.Tensor", parameter.grad) for parameter in parameters], local)
            # The scaler skips a step whose gradients overflow: their error does not matter.
            self.errors.append(error if math.isfinite(error) or not scaler.is_enabled() else 0.0)
        if self.contender.clip is not None:
            self.contender.clip(self.optimizer)
        scaler.step(self.optimizer)
        scaler.update()
        self.optimizer.zero_grad()
        self.schedule.step()


def train(
    rank: int, ranks: int, device: torch.device, wires: Sequence[Wire], steps: int, seed: int, traces: Path
) -> list[Row]:
    """Trains all variants side by side, then records some steps of the last one into `traces`.

    Returns:
        A row per variant, the same on every rank but for accuracy, bytes and path, which are this rank's own.
    """
    training, held_out = (part.to(device) for part in digits.load())
    runs = []
    for name, build in variants(wires).items():
        contender = build(digits.build_model(seed).to(device))
        runs.append(Run(name, contender, *digits.build_optimizer(contender.ddp, steps)))
    for step in range(steps):
        batch = training.select(digits.batch_rows(step, len(training), rank, ranks, seed).to(device))
        for run in runs:
            run.step(batch, check=step % CHECK_EVERY == 0)
        if rank == 0:
            show_progress(step + 1, steps, sys.stderr)
    found = rows(runs, held_out)
    ddp = runs[-1].contender.ddp
    with reducer_of(ddp).record_trace(traces):
        for _ in range(_RECORDED_STEPS):
            _loss(ddp, batch).backward()
            ddp.zero_grad()
    return found


def rows(runs: Sequence[Run], held_out: digits.Digits) -> list[Row]:
    """Combines what all ranks have found. Every rank must call it."""
    ranks = dist.get_world_size()
    mine = [(torch.stack(run.losses).tolist(), run.errors, _digests(run.contender.ddp.module)) for run in runs]
    every: list[Any] = [None] * ranks
    dist.all_gather_object(every, mine)
    last_epoch = digits.batches_per_epoch(digits.TRAINING_IMAGES, ranks)
    found = []
    for run, of_ranks in zip(runs, zip(*every, strict=True), strict=True):
        losses_of_ranks, errors, digests = zip(*of_ranks, strict=True)
        losses = torch.tensor(losses_of_ranks, dtype=torch.float64, device="cpu").mean(dim=0)
        contender = run.contender
        if contender.wire is None:
            torchs = losses
        with torch.no_grad():
            guessed = contender.ddp.module(held_out.images).argmax(dim=1)
        wire_bytes, path = contender.exchanged()
        row = Row(
            name=run.name,
            accuracy=float((guessed == held_out.labels).double().mean()),
            loss=float(losses[-last_epoch:].mean()),
            worst_loss_difference=float((losses - torchs).abs().max()),
            # Sums over more ranks depend on which gradients share a bucket; clipping adds up in another order.
            exact=contender.wire == "native" and contender.clip is None and ranks <= 2,
            worst_gradient_error=float(torch.tensor(errors, dtype=torch.float64, device="cpu").max()),
            wire_bytes_per_step=wire_bytes,
            path=path,
            losses=losses.tolist(),
            difference=_difference(digests),
        )
        found.append(row)
    return found


def gradient_error(averaged: Sequence[torch.Tensor], local: Sequence[torch.Tensor]) -> float:
    """The error of averaged gradients against the fp64 mean of all ranks' local ones. Every rank must call it.

    Per parameter max |difference| / max |mean|, the worst of them: gradients (1, 2) and (3, 2) on two ranks have the
    mean (2, 2); an averaged (2, 2.5) is 0.25 off. NaN if anything is not a number.
    """
    flat = torch.cat([gradient.double().reshape(-1) for gradient in local])
    dist.all_reduce(flat)
    means = flat.div_(dist.get_world_size()).split([gradient.numel() for gradient in local])
    errors = []
    for gradient, mean in zip(averaged, means, strict=True):
        difference = (gradient.double().reshape(-1) - mean).abs().max()
        errors.append(torch.where(difference == 0, difference, difference / mean.abs().max()))
    return float(torch.stack(errors).max())  # max() of tensors: NaN if there is one


def _loss(model: nn.Module, batch: digits.Digits) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch.images), batch.labels)


def _digests(model: nn.Module) -> dict[str, str]:
    """A digest of each parameter's and buffer's bytes."""
    state = {name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()}
    return {name: hashlib.sha256(tensor.numpy().tobytes()).hexdigest() for name, tensor in state.items()}


def _difference(digests: Sequence[Mapping[str, str]]) -> str | None:
    """The first parameter or buffer whose bytes differ between ranks, or None."""
    for name, first in digests[0].items():
        others = [str(rank) for rank, theirs in enumerate(digests) if theirs[name] != first]
        if others:
            return f"{name} on rank{'s'[: len(others) > 1]} {', '.join(others)} differs from rank 0's"
    return None


def _join(device_type: str, folder: Path, rank: int, ranks: int) -> torch.device:
    """Initialises the process group, through a file: no port, no name server."""
    store = f"file://{folder / 'store'}"
    if device_type == "cpu":
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks, timeout=_TIMEOUT)
        return torch.device("cpu")
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    # A step's local gradients are computed twice, and must be the same bits.
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False
    dist.init_process_group("nccl", init_method=store, rank=rank, world_size=ranks, timeout=_TIMEOUT, device_id=device)
    return device


def main(arguments: Sequence[str]) -> None:
    """Trains, and ends the process. Rank 0 writes the rows into the folder."""
    path, device_type, wires, steps, seed = arguments
    folder = Path(path)

    def work(rank: int, ranks: int) -> None:
        device = _join(device_type, folder, rank, ranks)
        found = train(rank, ranks, device, wires.split(","), int(steps), int(seed), folder / TRACE_FOLDER)
        if rank == 0:
            (folder / ROWS_FILE).write_text(json.dumps([dataclasses.asdict(row) for row in found]))
        dist.destroy_process_group()

    as_rank(folder, work)


if __name__ == "__main__":
    main(sys.argv[1:])
