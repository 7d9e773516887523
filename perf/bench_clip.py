"""What clipping, loss scaling and gradient statistics cost beside the reduction, on Gloo ranks of this machine.

    python perf/bench_clip.py                  # 2 ranks, all parts; writes a JSON into perf/results
    python perf/bench_clip.py --part kernels   # or clip, scale, stats

clip     a step = backward, norm and clipping, fused AdamW; torch's DDP with clip_grad_norm_ against the wrapper, by
         where the norm comes from (measured again, or from the reduction) and how the coefficient reaches the gradients
         (one multiplication, or folded into the optimizer).
scale    the same with a loss scaler: torch's GradScaler with unscale_ and clip, against FusedGradScaler.
stats    a step without clipping: what grad_stats and check_finite add to it.
kernels  one process, no ranks: the ways from a reduced bf16 wire to clipped fp32 gradients and updated weights.
           fold      unpack with sums; AdamW divides (and writes gradients back)
           multiply  unpack with sums; one multiplication in place; AdamW
           late      sums over the wire; unpack times the coefficient; AdamW (14 bytes per element before AdamW)

Cases take turns step by step, in an order that changes each round; medians over rounds and ranks; ratios to the first
case of the same table, which takes part twice. Every case's gradients are compared with what they must be before it may
have a number.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import harness
import records
import report_tables
import torch
from torch import nn

import fusedreduce
from fusedreduce.kernels import dispatch
from fusedreduce.kernels.table import ChunkTable, PointerTable

LARGE = (200, 50_000)
SMALL = (2_000, 8)
PARTS = ("clip", "scale", "stats", "kernels")
SCALE = 1024.0
AGAIN = ", again"  # the first case once more: the ratio of the two is the noise
Step = Callable[[], object]


def rate(model: nn.Module) -> torch.optim.AdamW:
    """An optimizer that hardly moves the weights: gradients do not depend on them here."""
    return torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)


def torch_best() -> tuple[str, harness.Build]:
    """torch's DDP as it is fastest on both shapes (perf/bench_step.py), rebuilt where torch lacks it; with its name."""
    return harness.torch_batched(views=True)


def ours(model: nn.Module, **config: Any) -> fusedreduce.DistributedDataParallel:
    """The wrapper with these settings."""
    return fusedreduce.DistributedDataParallel(model, reduce=fusedreduce.ReduceConfig(**config))


def clip_cases(shape: harness.Shape, rows: torch.Tensor, max_norm: float) -> dict[str, tuple[nn.Module, Step]]:
    """Steps that clip."""
    torch_name, torch_ddp = torch_best()

    def torchs(*, clip: bool) -> tuple[nn.Module, Step]:
        ddp = torch_ddp(harness.Many(*shape))
        optimizer = rate(ddp)

        def step() -> None:
            ddp(rows).backward()
            if clip:
                nn.utils.clip_grad_norm_(ddp.parameters(), max_norm)
            optimizer.step()

        return ddp, step

    def wrapped(
        *, clip: bool = True, reuse: bool = False, fold: bool = False, wire: Any = "native", views: bool = False
    ) -> tuple[nn.Module, Step]:
        config = fusedreduce.ReduceConfig(wire=wire, grad_stats=reuse)
        ddp = fusedreduce.DistributedDataParallel(harness.Many(*shape), reduce=config, gradient_as_bucket_view=views)
        optimizer = rate(ddp)

        def step() -> None:
            ddp(rows).backward()
            if clip:
                fusedreduce.clip_grad_norm_(ddp, max_norm, optimizer if fold else None, reuse_norm=reuse)
            optimizer.step()

        return ddp, step

    return {
        f"{torch_name}, clip_grad_norm_": torchs(clip=True),
        f"{torch_name}, clip_grad_norm_{AGAIN}": torchs(clip=True),
        f"{torch_name}, not clipped": torchs(clip=False),
        "ours, not clipped": wrapped(clip=False),
        "ours, measured, multiplied": wrapped(reuse=False, fold=False),
        "ours, measured, folded": wrapped(reuse=False, fold=True),
        "ours, reused, multiplied": wrapped(reuse=True, fold=False),
        "ours, reused, folded": wrapped(reuse=True, fold=True),
        "ours, views, not clipped": wrapped(clip=False, views=True),
        "ours, views, measured, folded": wrapped(fold=True, views=True),
        "ours bf16, not clipped": wrapped(clip=False, wire="bf16"),
        "ours bf16, measured, folded": wrapped(fold=True, wire="bf16"),
        "ours bf16, reused, folded": wrapped(reuse=True, fold=True, wire="bf16"),
    }


def scale_cases(shape: harness.Shape, rows: torch.Tensor, max_norm: float) -> dict[str, tuple[nn.Module, Step]]:
    """Steps that scale the loss, and clip."""
    torch_name, torch_ddp = torch_best()

    def torchs() -> tuple[nn.Module, Step]:
        ddp = torch_ddp(harness.Many(*shape))
        optimizer = rate(ddp)
        scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)

        def step() -> None:
            scaler.scale(ddp(rows)).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(ddp.parameters(), max_norm)
            scaler.step(optimizer)
            scaler.update()

        return ddp, step

    def wrapped(*, fold: bool, wire: str = "native") -> tuple[nn.Module, Step]:
        ddp = ours(harness.Many(*shape), wire=wire)
        optimizer = rate(ddp)
        scaler = fusedreduce.FusedGradScaler(ddp, init_scale=SCALE)

        def step() -> None:
            scaler.scale(ddp(rows)).backward()
            scaler.unscale_(optimizer)
            fusedreduce.clip_grad_norm_(ddp, max_norm, optimizer if fold else None)
            scaler.step(optimizer)
            scaler.update()

        return ddp, step

    return {
        f"{torch_name}, GradScaler": torchs(),
        f"{torch_name}, GradScaler{AGAIN}": torchs(),
        "ours, FusedGradScaler, multiplied": wrapped(fold=False),
        "ours, FusedGradScaler, folded": wrapped(fold=True),
        "ours bf16, FusedGradScaler, folded": wrapped(fold=True, wire="bf16"),
    }


def stats_cases(shape: harness.Shape, rows: torch.Tensor, max_norm: float) -> dict[str, tuple[nn.Module, Step]]:
    """Steps that clip nothing (`max_norm` is infinite here)."""

    def wrapped(**config: Any) -> tuple[nn.Module, Step]:
        ddp = ours(harness.Many(*shape), **config)
        optimizer = rate(ddp)

        def step() -> None:
            ddp(rows).backward()
            optimizer.step()
            if config.get("grad_stats"):
                ddp.grad_stats(per_parameter=False)

        return ddp, step

    return {
        "ours": wrapped(),
        f"ours{AGAIN}": wrapped(),
        "ours, grad_stats, read every step": wrapped(grad_stats=True),
        "ours, check_finite=count": wrapped(check_finite="count"),
        "ours, check_finite=raise": wrapped(check_finite="raise"),
        "ours bf16": wrapped(wire="bf16"),
        "ours bf16, grad_stats, read every step": wrapped(wire="bf16", grad_stats=True),
        "ours bf16, check_finite=count": wrapped(wire="bf16", check_finite="count"),
    }


CASES = {"clip": clip_cases, "scale": scale_cases, "stats": stats_cases}


def measure(rank: int, world: int, folder: str, part: str, shape: harness.Shape, rounds: int) -> NoReturn:
    """One rank of one part."""
    harness.begin(rank, world, folder)
    rows = harness.inputs(rank, shape)
    mean = harness.mean_of_ranks(rows)
    max_norm = float("inf") if part == "stats" else float(mean.double().norm()) / 2
    expected = mean if part == "stats" else mean / 2

    def case(name: str, model: nn.Module, step: Step) -> harness.Case:
        wire = "bf16" if "bf16" in name else "native"

        def check() -> None:
            # Adam's fused step leaves gradients as they were used: clipped, however that came about.
            harness.check_gradients(name, model, mean if "not clipped" in name else expected, wire)

        return harness.Case(prepare=lambda: model.zero_grad(set_to_none=True), run=step, check=check)

    cases = {name: case(name, *built) for name, built in CASES[part](shape, rows, max_norm).items()}
    harness.finish(rank, folder, harness.take_turns(cases, rounds))


def measure_kernels(rank: int, world: int, folder: str, shape: harness.Shape, rounds: int) -> NoReturn:
    """The ways from a reduced wire to updated weights."""
    harness.begin(rank, world, folder)
    count, numel = shape
    mean = harness.inputs(0, shape).bfloat16().float()
    expected = mean / 2
    max_norm = float(mean.double().norm()) / 2
    chunks = ChunkTable([numel] * count, range(0, count * numel, numel), [torch.float32] * count, count * numel)
    flat = ChunkTable([count * numel], [0], [torch.bfloat16], count * numel)
    cpu = torch.device("cpu")
    one, kernels = torch.ones(1), dispatch.unchecked(cpu, (torch.float32, torch.bfloat16))

    def way(kind: str) -> harness.Case:
        model = harness.Many(*shape)
        optimizer = rate(model)
        for parameter in model.parameters():
            parameter.grad = torch.empty(numel)
        gradients = [parameter.grad for parameter in model.parameters()]
        wire = mean.reshape(-1).bfloat16()
        pointers, of_wire = PointerTable(), PointerTable()
        partials, of_flat = chunks.new_partials(cpu), flat.new_partials(cpu)

        def run() -> None:
            by = one
            if kind == "late":
                kernels.measure([wire], flat, of_wire, of_flat)
                norm = dispatch.reduce_partials(of_flat, flat.spans(cpu)).total[0].sqrt()
                by = (max_norm / (norm + 1e-6)).clamp(max=1.0).float().reshape(1)
            kernels.unpack(gradients, chunks, pointers, wire, by, None if kind == "late" else partials)
            if kind != "late":
                norm = dispatch.reduce_partials(partials, chunks.spans(cpu)).total[0].sqrt()
            if kind == "multiply":
                factor = (max_norm / (norm + 1e-6)).clamp(max=1.0).float().reshape(1)
                kernels.scale(gradients, chunks, pointers, factor)
            if kind == "fold":
                optimizer.grad_scale = ((norm + 1e-6) / max_norm).clamp(min=1.0).float()  # type: ignore[attr-defined]
            optimizer.step()

        return harness.Case(
            prepare=lambda: None, run=run, check=lambda: harness.check_gradients(kind, model, expected, "bf16")
        )

    cases = {kind: way(kind) for kind in ("multiply", "fold", "late")} | {f"multiply{AGAIN}": way("multiply")}
    harness.finish(rank, folder, harness.take_turns(cases, rounds))


def row_of(part: str, shape: str, times: Mapping[str, list[float]]) -> dict[str, Any]:
    """A row of the record; ratios, to the first case, are medians of those within a round."""
    base = next(iter(times))
    ratios = {
        name: statistics.median(mine / first for mine, first in zip(seconds, times[base], strict=True))
        for name, seconds in times.items()
    }
    cases = {name: {**records.Spread.of(seconds).values(), "ratio": ratios[name]} for name, seconds in times.items()}
    return {"part": part, "case": shape, "base": base, "variants": cases}


def main() -> int:
    """Runs the parts, prints tables, writes one JSON."""
    parser = records.Parser(description=__doc__)
    parser.add_argument("--part", choices=PARTS, action="append", help="default: all")
    parser.add_argument("--ranks", type=int, default=2, help="processes of one thread each (default: 2)")
    parser.add_argument("--steps", type=int, default=36, help="timed rounds (default: 36)")
    parser.add_argument("--shapes", type=harness.parse_shape, nargs="+", default=[LARGE, SMALL], metavar="COUNTxNUMEL")
    parser.add_record()
    arguments = parser.parse_args()
    if arguments.ranks < 2 or arguments.steps < 2:
        parser.error("at least 2 ranks and 2 steps")
    rows = []
    for part in arguments.part or PARTS:
        for shape in arguments.shapes:
            if part == "kernels":
                per_rank = harness.run_ranks(measure_kernels, 1, shape, arguments.steps)
            else:
                per_rank = harness.run_ranks(measure, arguments.ranks, part, shape, arguments.steps)
            rows.append(row_of(part, harness.shape_name(shape), harness.pooled(per_rank)))
    return report_tables.publish(
        arguments,
        "clip",
        "cpu",
        ranks=arguments.ranks,
        steps=arguments.steps,
        rows=rows,
    )


if __name__ == "__main__":
    records.entry(main)
