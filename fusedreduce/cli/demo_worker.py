"""One rank of the demo: `python -m fusedreduce.cli.demo_worker FOLDER`, started by torch's launcher.

All variants train side by side, step i of each before step i + 1 of any, on the same batches and in an order that
rotates, so that other load of the machine affects all alike. Every PROBE_EVERY-th step is a probe: before the step
itself, it runs the same forward and backward without exchange (under `no_sync`, discarded), on the same weights and
batch.

    step_ms   median over the steps that are no probes: forward, backward, optimizer, zero_grad; there are no barriers
    sync_ms   step_ms - median over the probes of (forward and backward without exchange, then optimizer, zero_grad):
              what the exchange adds, waiting for the slower rank included

Only in this folder is torch.distributed used the way a user's script uses it.
"""

from __future__ import annotations

import ctypes
import math
import os
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from fusedreduce import DistributedDataParallel

from . import digits, launch, measure, results
from .progress import Progress
from .variants import Contender, Variant, variants

WARM_UP_STEPS = 3  # not timed: kernels are compiled, DDP rebuilds its buckets
LEAST_TIMED_STEPS = WARM_UP_STEPS + 2 * results.PROBE_EVERY  # in a shorter run the warm-up is timed too
_TIMEOUT = timedelta(minutes=3)
_PR_SET_PDEATHSIG = 1
_RECORDED_STEPS = 10


@dataclass
class Run:
    """A variant in training, and its measurements on this rank."""

    variant: Variant
    contender: Contender
    optimizer: torch.optim.Optimizer
    schedule: torch.optim.lr_scheduler.LRScheduler
    losses: list[torch.Tensor] = field(default_factory=list)
    steps_s: list[float] = field(default_factory=list)
    alone_s: list[float] = field(default_factory=list)
    errors: list[float] = field(default_factory=list)

    def step(self, batch: digits.Digits, device: torch.device) -> None:
        """Runs and times one training step."""

        def train() -> None:
            self.losses.append(measure.forward_backward(self.contender.ddp, batch, scaler=self._scaler))
            self._unscale()
            self._update()

        self.steps_s.append(measure.seconds(device, train))
        self.schedule.step()

    def probe(self, batch: digits.Digits, device: torch.device) -> None:
        """Runs one training step, and the same without exchange for comparison."""
        ddp = self.contender.ddp
        local_s = measure.seconds(device, lambda: measure.forward_backward(ddp, batch, exchange=False))
        local = self._gradients()
        self.optimizer.zero_grad()
        self.losses.append(measure.forward_backward(ddp, batch, scaler=self._scaler))
        self._unscale()
        error = measure.gradient_error(self._gradients(), local)
        # The scaler skips a step whose gradients overflow: their error does not matter.
        self.errors.append(error if self._scaler is None or math.isfinite(error) else 0.0)
        self.alone_s.append(local_s + measure.seconds(device, self._update))
        self.schedule.step()

    def drop_times(self) -> None:
        """Drops the times so far, of warm-up steps."""
        self.steps_s.clear()
        self.alone_s.clear()

    @property
    def _scaler(self) -> torch.amp.GradScaler | None:
        return None if self.contender.scaling is None else self.contender.scaling.scaler

    def _unscale(self) -> None:
        if self._scaler is not None:
            self._scaler.unscale_(self.optimizer)

    def _update(self) -> None:
        scaling = self.contender.scaling
        if scaling is None:
            self.optimizer.step()
        else:
            scaling.clip(self.optimizer)
            scaling.scaler.step(self.optimizer)
            scaling.scaler.update()
        self.optimizer.zero_grad()

    def _gradients(self) -> list[torch.Tensor]:
        gradients = [parameter.grad for parameter in self.contender.ddp.parameters()]
        assert all(gradient is not None for gradient in gradients)
        return gradients  # type: ignore[return-value]


def main(arguments: Sequence[str]) -> None:
    """Trains and measures. Rank 0 writes the rows into FOLDER; a rank that fails writes the reason there."""
    folder = Path(arguments[0])
    try:
        job = results.read_job(folder)
    except FileNotFoundError:
        os._exit(1)  # the demo was interrupted while this rank started, and has removed its folder
    _end_with(job.launcher_pid)
    rank = int(os.environ["RANK"])
    status = 0
    try:
        device = _join(job, int(os.environ["LOCAL_RANK"]))
        rows = train(job, device, rank, folder / results.TRACE_FOLDER)
        if rank == 0:
            results.write_rows(folder, rows)
        dist.destroy_process_group()
    except Exception as error:
        failure = {
            "reason": launch.one_line(error),
            "lost_peer": isinstance(error, dist.DistError | ConnectionError) or "peer" in str(error),
            "traceback": traceback.format_exc(),
            "time": time.time(),
        }
        results.write_json(folder / f"rank{rank}.error.json", failure)
        status = 1
    # No ordinary exit. After a failure, destroying a process group may wait for a peer that is gone. After success,
    # torch 2.13 aborts now and then, with or without the hook: a Gloo thread frees its last tensor while the
    # interpreter is shut down ("terminate called without an active exception").
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def train(job: results.Job, device: torch.device, rank: int, traces: Path) -> list[results.Row]:
    """Trains all variants side by side, then records some steps of the last one into `traces`.

    Returns:
        A row per variant; accuracy, path and counts are this rank's own.
    """
    ranks = dist.get_world_size()
    training, held_out = (part.to(device) for part in digits.load())
    runs = [_start(variant, job, device) for variant in variants(job.wires)]
    progress = Progress(job.steps, sys.stderr) if rank == 0 else None
    for step in range(job.steps):
        batch = training.select(digits.batch_rows(step, len(training), rank, ranks, job.seed).to(device))
        turn = step % len(runs)
        for run in runs[turn:] + runs[:turn]:
            if step == WARM_UP_STEPS and job.steps > LEAST_TIMED_STEPS:
                run.drop_times()
            if step % results.PROBE_EVERY == 0:
                run.probe(batch, device)
            else:
                run.step(batch, device)
        if progress is not None:
            progress.show(step + 1)
    batch = training.select(torch.arange(digits.BATCH_IMAGES))
    rows = [_row(run, batch, held_out, device) for run in runs]
    _record(runs[-1], batch, traces)
    return rows


def _record(run: Run, batch: digits.Digits, folder: Path) -> None:
    ddp = run.contender.ddp
    assert isinstance(ddp, DistributedDataParallel)
    with ddp.record_trace(folder):
        for _ in range(_RECORDED_STEPS):
            measure.forward_backward(ddp, batch)
            run.optimizer.zero_grad()


def _start(variant: Variant, job: results.Job, device: torch.device) -> Run:
    contender = variant.build(digits.build_model(job.seed).to(device))
    optimizer, schedule = digits.build_optimizer(contender.ddp, job.steps, fused=contender.scaling is not None)
    return Run(variant, contender, optimizer, schedule)


def _row(run: Run, batch: digits.Digits, held_out: digits.Digits, device: torch.device) -> results.Row:
    """Combines the ranks' measurements of one variant."""
    contender = run.contender
    difference = measure.difference_between_ranks(contender.ddp.module, device)
    with torch.no_grad():
        guessed = contender.ddp.module(held_out.images).argmax(dim=1)
    # Twice: DDP may rebuild its buckets within the first.
    exchange = [measure.count_exchange(contender.ddp, batch) for _ in range(2)][-1]
    losses = _mean_over_ranks(torch.stack(run.losses).double())
    own = torch.tensor([measure.median(run.steps_s) * 1e3, measure.median(run.alone_s) * 1e3], dtype=torch.float64)
    step_ms, alone_ms = _mean_over_ranks(own.to(device)).tolist()
    epoch = digits.batches_per_epoch(digits.TRAINING_IMAGES, dist.get_world_size())
    return results.Row(
        name=run.variant.name,
        setting=run.variant.setting,
        accuracy=float((guessed == held_out.labels).double().mean()),
        loss=float(losses[-epoch:].mean()),
        worst_gradient_error=_worst_over_ranks(run.errors, device),
        wire_bytes_per_step=exchange.wire_bytes,
        step_ms=step_ms,
        sync_ms=step_ms - alone_ms,
        sync_share=(step_ms - alone_ms) / step_ms,
        launches_per_bucket=exchange.launches / contender.buckets,
        collectives_per_bucket=exchange.collectives / contender.buckets,
        buckets=contender.buckets,
        path=contender.path,
        losses=losses.tolist(),
        parameters_equal=difference is None,
        difference=difference,
    )


def _mean_over_ranks(values: torch.Tensor) -> torch.Tensor:
    dist.all_reduce(values)
    return values.div_(dist.get_world_size())


def _worst_over_ranks(errors: list[float], device: torch.device) -> float:
    """The maximum over ranks; NaN if there is one, which a MAX reduction does not guarantee."""
    mine = torch.tensor(errors, dtype=torch.float64, device=device)
    gathered = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, mine)
    return float(torch.cat(gathered).max())


def _join(job: results.Job, local_rank: int) -> torch.device:
    if job.device == "cpu":
        dist.init_process_group("gloo", timeout=_TIMEOUT)
        return torch.device("cpu")
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    # The two passes of a probe must compute the same local gradients, bit for bit.
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False
    dist.init_process_group("nccl", timeout=_TIMEOUT, device_id=device)
    return device


def _end_with(launcher_pid: int) -> None:
    """Asks the operating system to kill this process when the launcher ends, for whatever reason."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != launcher_pid:
        os._exit(1)


if __name__ == "__main__":
    main(sys.argv[1:])
