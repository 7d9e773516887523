"""Synchronisation cost of the hook beside torch's own ways, on Gloo ranks of this machine.

    python perf/bench_hook.py                # 2 ranks, both shapes, writes perf/results/hook_cpu_<date>.json

Cost = median of (forward + backward with exchange) - median of the same under no_sync, per variant; all variants take
turns step by step in one run, so that noise hits them alike. Every variant's gradients are first compared with the
true mean; one that is wrong is an error and no number. Ratios are to torch's DDP as it comes.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import harness
import records
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import debugging_hooks, default_hooks
from torch.nn.parallel import DistributedDataParallel

import fusedreduce

SHAPES = [(200, 50_000), (2_000, 8)]
NOOP = "no-op hook, views"
ALONE = " (no_sync)"  # a variant's second case


def _hooked(hook: Callable[..., Any], state: object = None) -> Callable[[nn.Module], DistributedDataParallel]:
    def build(model: nn.Module) -> DistributedDataParallel:
        ddp = DistributedDataParallel(model, gradient_as_bucket_view=True)
        ddp.register_comm_hook(state, hook)
        return ddp

    return build


def variants() -> dict[str, harness.Build]:
    """Everything that is measured; the no-op hook is the floor of any hook."""
    rows = {
        **harness.torch_variants(),
        "torch allreduce_hook, views": _hooked(default_hooks.allreduce_hook),
        "torch fp16_compress_hook, views": _hooked(default_hooks.fp16_compress_hook),
        NOOP: _hooked(debugging_hooks.noop_hook),
    }
    for wire in ("native", "bf16", "fp16"):
        rows[f"fused_hook {wire}, views"] = _hooked(fusedreduce.fused_hook, fusedreduce.FusedHookState(wire=wire))
    return rows


def measure(rank: int, world: int, folder: str, shape: harness.Shape, steps: int) -> NoReturn:
    """One rank: checks, then times all variants in turns."""
    harness.begin(rank, world, folder)
    rows = harness.inputs(rank, shape)
    mean = harness.mean_of_ranks(rows)
    cases = {}
    for name, build in variants().items():
        ddp = build(harness.Many(*shape))
        assert isinstance(ddp, DistributedDataParallel)
        cases[name] = _case(name, ddp, rows, rows if name == NOOP else mean)
        cases[name + ALONE] = _alone(name, ddp, rows)
    harness.finish(rank, folder, harness.take_turns(cases, steps))


def _case(name: str, ddp: nn.Module, rows: torch.Tensor, expected: torch.Tensor) -> harness.Case:
    wire = next((wire for wire in harness.TOLERANCE if wire in name), "native")
    return harness.Case(
        prepare=ddp.zero_grad,
        run=lambda: ddp(rows).backward(),
        check=lambda: harness.check_gradients(name, ddp, expected, wire),
    )


def _alone(name: str, ddp: DistributedDataParallel, rows: torch.Tensor) -> harness.Case:
    def run() -> None:
        with ddp.no_sync():
            ddp(rows).backward()

    return harness.Case(prepare=ddp.zero_grad, run=run, check=lambda: harness.check_gradients(name + ALONE, ddp, rows))


def main() -> int:
    """Runs every shape, prints a table, writes one JSON."""
    parser = records.Parser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--out", type=Path, default=records.RESULTS)
    arguments = parser.parse_args()
    if arguments.ranks < 2 or arguments.steps < 2:
        parser.error("at least 2 ranks and 2 steps")
    neighbours = records.Neighbours()
    results = {}
    for shape in SHAPES:
        name = harness.shape_name(shape)
        times = harness.pooled(harness.run_ranks(measure, arguments.ranks, shape, arguments.steps))
        rows = {}
        for variant in variants():
            step, alone = (records.Spread.of(times[key]).median_ms for key in (variant, variant + ALONE))
            rows[variant] = {"step_ms": step, "alone_ms": alone, "sync_ms": step - alone}
        base = rows["torch DDP"]["sync_ms"]
        print(
            f"\n{name} parameters, {arguments.ranks} ranks\n{'variant':36} {'step ms':>9} {'sync ms':>9} {'ratio':>6}"
        )
        for variant, row in rows.items():
            row["ratio"] = row["sync_ms"] / base
            print(f"{variant:36} {row['step_ms']:9.2f} {row['sync_ms']:9.2f} {row['ratio']:6.2f}")
        results[name] = rows
    others_cores = neighbours.cores()
    print(f"\nother work kept {others_cores:.2f} cores busy meanwhile")
    path = records.write(
        arguments.out,
        "hook",
        "cpu",
        ranks=arguments.ranks,
        steps=arguments.steps,
        others_cores=others_cores,
        shapes=results,
    )
    print(f"\n{path}")
    return 0


if __name__ == "__main__":
    records.entry(main)
