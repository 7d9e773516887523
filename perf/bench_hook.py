"""Synchronisation cost of the hook beside torch's own ways, on Gloo ranks of this machine.

    python perf/bench_hook.py                # 2 ranks, both shapes, writes perf/results/hook_cpu_<date>.json

Cost = median of (forward + backward with exchange) - median of the same under no_sync, per variant; all variants take
turns step by step in one run, so that noise hits them alike. Every variant's gradients are first compared with torch's
default; one that is wrong is an error and no number. Ratios are to torch's DDP as it comes.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import debugging_hooks, default_hooks
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel

import fusedreduce

SHAPES = {"200 x 50,000": (200, 50_000), "2,000 x 8": (2_000, 8)}
TOLERANCE = {"fp16": 2.0**-9, "bf16": 2.0**-6}  # of the largest gradient: a few roundings to the wire


class Many(nn.Module):
    """`count` parameters of `numel` elements, each used once; the forward costs next to nothing."""

    def __init__(self, count: int, numel: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.zeros(numel)) for _ in range(count))

    def forward(self, factor: torch.Tensor) -> torch.Tensor:
        return torch.stack([(weight * factor).sum() for weight in self.weights]).sum()


def _ddp(hook: Callable[..., Any] | None = None, state: object = None, **options: Any) -> Callable[..., Any]:
    def build(model: nn.Module) -> DistributedDataParallel:
        ddp = DistributedDataParallel(model, **options)
        if hook is not None:
            ddp.register_comm_hook(state, hook)
        return ddp

    return build


def variants() -> dict[str, Callable[[nn.Module], DistributedDataParallel]]:
    """Everything that is measured; the no-op hook is the floor of any hook."""
    view: dict[str, Any] = {"gradient_as_bucket_view": True}
    rows = {
        "torch DDP": _ddp(),
        "torch DDP, views": _ddp(**view),
        "torch DDP, batched copies": _ddp(batched_grad_copy=True),
        "torch DDP, batched copies, views": _ddp(batched_grad_copy=True, **view),
        "torch allreduce_hook, views": _ddp(default_hooks.allreduce_hook, **view),
        "torch fp16_compress_hook, views": _ddp(default_hooks.fp16_compress_hook, **view),
        "no-op hook, views": _ddp(debugging_hooks.noop_hook, **view),
    }
    for wire in ("native", "bf16", "fp16"):
        rows[f"fused_hook {wire}, views"] = _ddp(fusedreduce.fused_hook, fusedreduce.FusedHookState(wire=wire), **view)
    return rows


def measure(rank: int, world: int, store: str, shape: tuple[int, int], steps: int, out: str) -> None:
    """One rank: checks, then times all variants in turns; rank 0 writes medians in milliseconds."""
    torch.set_num_threads(1)
    timeout = datetime.timedelta(minutes=2)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=timeout)
    models = {name: build(Many(*shape)) for name, build in variants().items()}
    factor = torch.randn(shape[1], generator=torch.Generator().manual_seed(rank))
    times: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in models}
    for step in range(steps + 4):
        for name, ddp in models.items():
            for exchange in (True, False):
                ddp.zero_grad()
                begin = time.perf_counter()
                if exchange:
                    ddp(factor).backward()
                else:
                    with ddp.no_sync():
                        ddp(factor).backward()
                if step >= 4:
                    times[name][0 if exchange else 1].append(time.perf_counter() - begin)
                elif exchange:
                    _check(name, models["torch DDP"], ddp, factor, step)
    if rank == 0:
        rows = {
            name: {
                "step_ms": statistics.median(with_exchange) * 1e3,
                "alone_ms": statistics.median(alone) * 1e3,
                "sync_ms": (statistics.median(with_exchange) - statistics.median(alone)) * 1e3,
            }
            for name, (with_exchange, alone) in times.items()
        }
        Path(out).write_text(json.dumps(rows))
    dist.barrier()
    dist.destroy_process_group()
    # Gloo's threads may outlive the interpreter and abort the process otherwise; plain DDP does so too.
    os._exit(0)


def _check(name: str, reference: nn.Module, ddp: nn.Module, factor: torch.Tensor, step: int) -> None:
    mean = factor.clone()
    dist.all_reduce(mean)
    mean /= dist.get_world_size()
    if name.startswith("no-op"):
        return
    allowed = next((bound for wire, bound in TOLERANCE.items() if wire in name), 1e-6) * float(mean.abs().max())
    for parameter in ddp.parameters():
        assert parameter.grad is not None
        worst = float((parameter.grad - mean).abs().max())
        if worst > allowed:
            raise SystemExit(f"{name} is wrong at step {step}: off by {worst:.3g}, {allowed:.3g} is allowed")


def main() -> int:
    """Runs every shape, prints a table, writes one JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    arguments = parser.parse_args()
    results = {}
    for name, shape in SHAPES.items():
        with tempfile.TemporaryDirectory() as folder:
            out = f"{folder}/rows.json"
            job = (arguments.ranks, f"{folder}/store", shape, arguments.steps, out)
            spawn(measure, args=job, nprocs=arguments.ranks)
            rows = json.loads(Path(out).read_text())
        base = rows["torch DDP"]["sync_ms"]
        print(
            f"\n{name} parameters, {arguments.ranks} ranks\n{'variant':36} {'step ms':>9} {'sync ms':>9} {'ratio':>6}"
        )
        for variant, row in rows.items():
            row["ratio"] = row["sync_ms"] / base
            print(f"{variant:36} {row['step_ms']:9.2f} {row['sync_ms']:9.2f} {row['ratio']:6.2f}")
        results[name] = rows
    now = datetime.datetime.now(datetime.UTC)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    record = {
        "created": now.isoformat(timespec="seconds"),
        "command": "python perf/bench_hook.py " + " ".join(sys.argv[1:]),
        "commit": commit.stdout.strip(),
        "hardware": f"{os.cpu_count()} cores, {platform.machine()}",
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
        "ranks": arguments.ranks,
        "steps": arguments.steps,
        "shapes": results,
    }
    arguments.out.mkdir(parents=True, exist_ok=True)
    path = arguments.out / f"hook_cpu_{now:%Y-%m-%d}.json"
    path.write_text(json.dumps(record, indent=1) + "\n")
    print(f"\n{path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
