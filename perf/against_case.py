"""One process start of against.py: median milliseconds of a step by case, as JSON. Public names only, and what this
folder has without any, so that the same file measures any two checkouts.

    PYTHONPATH=CHECKOUT python against_case.py [CASE ...]
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from harness import Many, hooked
from torch import nn
from torch.multiprocessing.spawn import spawn

import fusedreduce
from fusedreduce import BoundedStaleness, FusedHookState, ReduceConfig, fused_hook

RANKS = 2
SETTLING_STEPS, TIMED_STEPS = 12, 20
MIB = 2**20
VIEWLESS: Mapping[str, Any] = {}
VIEWS: Mapping[str, Any] = {"gradient_as_bucket_view": True}

Step = Callable[[Sequence[torch.Tensor]], None]
Build = Callable[[nn.Module], Step]


def wrapper(*, clip: bool = False, options: Mapping[str, Any] = VIEWLESS, **config: Any) -> Build:
    """Steps of our wrapper, whose buckets follow torch's rule.

    Args:
        clip: clip, with the optimizer's step behind it.
        options: of the wrapper.
        config: of ReduceConfig.
    """

    def build(model: nn.Module) -> Step:
        ddp = fusedreduce.DistributedDataParallel(model, reduce=ReduceConfig(policy="static", **config), **options)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=1e-6, fused=True) if clip else None

        def step(rows: Sequence[torch.Tensor]) -> None:
            ddp.zero_grad(set_to_none=True)
            ddp(rows).backward()
            if optimizer is not None:
                fusedreduce.clip_grad_norm_(ddp, 1.0)
                optimizer.step()

        return step

    return build


def hook(**options: Any) -> Build:
    """Steps of torch's DDP, with these options, with our hook."""

    def build(model: nn.Module) -> Step:
        ddp = hooked(fused_hook, FusedHookState(wire="bf16"), gradient_as_bucket_view=True, **options)(model)

        def step(rows: Sequence[torch.Tensor]) -> None:
            ddp.zero_grad(set_to_none=True)
            ddp(rows).backward()

        return step

    return build


def replicas(_: nn.Module) -> Step:
    """Steps of two replicas in this process, of a chain of small layers: nothing but calls."""
    chain = nn.Sequential(*[nn.Linear(16, 16) for _ in range(100)])
    parallel = fusedreduce.DataParallel(chain, [torch.device("cpu")] * 2)

    def step(_: Sequence[torch.Tensor]) -> None:
        parallel.zero_grad(set_to_none=True)
        parallel(torch.ones(64, 16, device="cpu")).sum().backward()

    return step


LARGE, EVEN, SMALL, MIDDLE = (200, 50_000), (1000, 1000), (2000, 8), (256, 256)
CASES: dict[str, tuple[tuple[int, int], Build]] = {
    "200x50000 native": (LARGE, wrapper()),
    "200x50000 native, views": (LARGE, wrapper(options=VIEWS)),
    "200x50000 bf16": (LARGE, wrapper(wire="bf16")),
    "1000x1000 native, views": (EVEN, wrapper(options=VIEWS)),
    "1000x1000 bf16": (EVEN, wrapper(wire="bf16")),
    "2000x8 native, views": (SMALL, wrapper(options=VIEWS)),
    "2000x8 bf16": (SMALL, wrapper(wire="bf16")),
    "2000x8 bf16, clipped": (SMALL, wrapper(wire="bf16", clip=True)),
    "200x50000 hook bf16": (LARGE, hook()),
    "2000x8 hook bf16": (SMALL, hook()),
    "2000x8 bf16, staleness 1": (SMALL, wrapper(wire="bf16", sync_mode=BoundedStaleness(1))),
    "256x256 in 64 buckets, bf16": (MIDDLE, wrapper(wire="bf16", options={"bucket_cap_mb": 4 * 256 * 4 / MIB})),
    "256x256 in 64 buckets, hook bf16": (MIDDLE, hook(bucket_cap_mb=4 * 256 * 4 / MIB)),
    "100 layers, two replicas": (SMALL, replicas),
}


def rank_main(rank: int, folder: str, names: Sequence[str]) -> None:
    """One rank: all cases take turns, step by step."""
    torch.set_num_threads(1)
    have = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {have[rank % len(have)]})
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    steps, rows = {}, {}
    for name in names:
        (count, numel), build = CASES[name]
        rows[name] = [torch.full((numel,), 1.0 + rank) for _ in range(count)]
        steps[name] = build(Many(count, numel))
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for number in range(SETTLING_STEPS + TIMED_STEPS):
        for name in [*names[number % len(names) :], *names[: number % len(names)]]:
            dist.barrier()
            begin_s = time.perf_counter()
            steps[name](rows[name])
            if number >= SETTLING_STEPS:
                seconds[name].append(time.perf_counter() - begin_s)
    slowest = torch.tensor([seconds[name] for name in names], dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    if rank == 0:
        medians = {name: 1e3 * statistics.median(row) for name, row in zip(names, slowest.tolist(), strict=True)}
        Path(folder, "medians").write_text(json.dumps(medians))
    dist.barrier()
    os._exit(0)  # Gloo's threads may outlive the interpreter, and abort the process


if __name__ == "__main__":
    if not fusedreduce.__file__.startswith(os.getcwd()):
        sys.exit(f"measures {fusedreduce.__file__}, which is not of {os.getcwd()}")
    with tempfile.TemporaryDirectory() as made:
        spawn(rank_main, args=(made, sys.argv[1:] or list(CASES)), nprocs=RANKS)
        print(Path(made, "medians").read_text())
