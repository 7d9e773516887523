"""Training to a common loss over the present link: how long each variant takes, by the clock.

    digits   the demo's network on scikit-learn's handwritten digits: 40,394 parameters
    code     a GPT of 6.4 million parameters that predicts the next byte of Python's own standard library (its *.py, one
             behind the other): a text that is wherever this runs, of the version that the record names

Every variant begins with the same weights and sees the same batches. The clock runs over whole steps (zero_grad,
forward, backward, optimizer) and stands still between them, where ranks agree on the loss: the mean over all ranks and
the last SMOOTH steps. The target is reached when that is no higher than the task's.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import link_variants
import models
import torch
import torch.distributed as dist
from torch import nn
from training_data import BYTES, PLACES, Batch, Classifier, digits_batch, text_batch

from fusedreduce.cli import digits

SMOOTH = 10
_SEED = 0


@dataclass(frozen=True, kw_only=True)
class TrainingTask:
    """What is trained, and until when."""

    build: Callable[[], nn.Module]
    batch: Callable[[int, int, int], Batch]  # step, rank, ranks
    target: float
    most_steps: int
    learning_rate: float


def _code_model() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(_SEED)
        return models.Gpt2(models.Gpt2Sizes(layers=8, width=256, heads=8, words=BYTES, places=PLACES))


TASKS: Mapping[str, TrainingTask] = {
    "digits": TrainingTask(
        build=lambda: Classifier(digits.build_model(_SEED)),
        batch=digits_batch,
        target=0.15,
        most_steps=400,
        learning_rate=3e-3,
    ),
    "code": TrainingTask(build=_code_model, batch=text_batch, target=2.7, most_steps=400, learning_rate=3e-4),
}


def train(task_name: str, variant: str, limit_s: float) -> dict[str, Any]:
    """One variant's run. Every rank calls it alike, and returns the same but for its own times.

    Args:
        task_name: of TASKS.
        variant: see link_variants.py.
        limit_s: seconds on the clock after which it ends without the target.

    Returns:
        "reached_s" (None: not reached), "steps", "step_ms" (median), "losses", and "seconds" on the clock after each.
    """
    task = TASKS[task_name]
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model = link_variants.variants()[variant].build(task.build())
    optimizer = torch.optim.AdamW(model.parameters(), lr=task.learning_rate, fused=True)
    losses: list[float] = []
    ends: list[float] = []
    clock_s, reached_s = 0.0, None
    for step in range(task.most_steps):
        batch = task.batch(step, rank, ranks)
        dist.barrier()
        begin_s = time.perf_counter()
        optimizer.zero_grad(set_to_none=True)
        loss = model(*batch)
        loss.backward()
        optimizer.step()
        took = torch.tensor([time.perf_counter() - begin_s], dtype=torch.float64)
        shared = loss.detach().double()
        dist.all_reduce(shared)
        dist.all_reduce(took, dist.ReduceOp.MAX)
        clock_s += float(took)
        losses.append(float(shared) / ranks)
        ends.append(clock_s)
        if len(losses) >= SMOOTH and statistics.fmean(losses[-SMOOTH:]) <= task.target:
            reached_s = clock_s
            break
        if clock_s > limit_s:
            break
    spans = [end - begin for begin, end in zip([0.0, *ends], ends, strict=False)]
    return {
        "target": task.target,
        "reached_s": reached_s,
        "steps": len(losses),
        "step_ms": statistics.median(spans) * 1e3,
        "losses": [round(shared_loss, 5) for shared_loss in losses],
        "seconds": [round(end, 4) for end in ends],
    }
