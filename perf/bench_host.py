"""The host's time on the critical path of a step, in microseconds: per bucket and per parameter.

    python perf/bench_host.py                   # one rank on Gloo; writes perf/results/host_<hardware>_<date>.json
    python perf/bench_host.py --device cuda     # one rank on NCCL; the GPU is never waited for while the clock runs

A backward whose gradients are there already, all from one node of the graph: little else takes time. Two sweeps:
parameters at fixed bytes and buckets, and buckets at fixed parameters and bytes; the slopes are least squares through
the medians. All variants take turns step by step in one run; what each leaves in gradients is checked first. Cost =
median over rounds of (forward + backward with the variant - the same without DDP in that round). Buckets are cut by
torch's rule in all of them (policy "static"), and one of torch's forms takes part twice: how its slopes differ is the
noise. On a CPU there is the copying of the bytes in it as well, the same in every point of a sweep.

Where it goes within a step a profiler says, in which steps of ours have labels (docs/scheduling.md); how many Python
functions a step calls, tests/ceilings.json.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NoReturn

import harness
import records
import report_tables
import torch
from step_variants import FLOOR, TORCH_AGAIN, TORCH_DEFAULT
from torch import nn

import fusedreduce
from fusedreduce.planning.bucketing import MIB

ELEMENTS = 64_000
SETTLING_STEPS = 6
OURS_NATIVE, OURS_BF16 = "ours native, views", "ours bf16"
HOOK_NATIVE, HOOK_BF16 = "fused_hook native, views", "fused_hook bf16, views"


@dataclass(frozen=True, kw_only=True)
class Point:
    """One size: ELEMENTS in so many equal parameters, in so many equal buckets."""

    parameters: int
    buckets: int

    @property
    def cap_bytes(self) -> int:
        """At which a bucket closes."""
        return -(-self.parameters // self.buckets) * (ELEMENTS // self.parameters) * 4


SWEEPS: Mapping[str, tuple[Point, ...]] = {
    "parameter": tuple(Point(parameters=count, buckets=4) for count in (64, 256, 1000, 2000)),
    "bucket": tuple(Point(parameters=640, buckets=count) for count in (1, 4, 16, 64)),
}
SMALL_SWEEPS: Mapping[str, tuple[Point, ...]] = {
    "parameter": (Point(parameters=64, buckets=4), Point(parameters=256, buckets=4)),
    "bucket": (Point(parameters=64, buckets=1), Point(parameters=64, buckets=16)),
}


class _Give(torch.autograd.Function):
    """Zero, whose gradients are what was given."""

    @staticmethod
    def forward(ctx: Any, gradients: Sequence[torch.Tensor], *weights: torch.Tensor) -> torch.Tensor:
        ctx.gradients = gradients
        return weights[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> tuple[Any, ...]:
        return None, *ctx.gradients


class Given(nn.Module):
    """Parameters whose gradients cost one node of the graph in all, and a copy each."""

    def __init__(self, count: int, numel: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.zeros(numel)) for _ in range(count))

    def forward(self, gradients: Sequence[torch.Tensor]) -> torch.Tensor:
        return _Give.apply(gradients, *self.weights)  # type: ignore[no-any-return]


def variants(point: Point) -> dict[str, harness.Build]:
    """Everything that is measured, the floor first."""
    cap: dict[str, Any] = {"bucket_cap_mb": point.cap_bytes / MIB}

    def ours(wire: Any, *, views: bool) -> harness.Build:
        reduce = fusedreduce.ReduceConfig(wire=wire, policy="static")
        return lambda model: fusedreduce.DistributedDataParallel(
            model, reduce=reduce, gradient_as_bucket_view=views, **cap
        )

    def hook(wire: Any) -> harness.Build:
        return lambda model: harness.hooked(
            fusedreduce.fused_hook, fusedreduce.FusedHookState(wire=wire), gradient_as_bucket_view=True, **cap
        )(model)

    torchs = harness.torch_variants(**cap)
    return {
        FLOOR: lambda model: model,
        **torchs,
        TORCH_AGAIN: torchs[TORCH_DEFAULT],
        OURS_NATIVE: ours("native", views=True),
        OURS_BF16: ours("bf16", views=False),
        HOOK_NATIVE: hook("native"),
        HOOK_BF16: hook("bf16"),
    }


def measure(
    rank: int, world: int, folder: str, sweeps: Mapping[str, Sequence[Point]], rounds: int, device_type: str
) -> NoReturn:
    """The one rank: every point of every sweep."""
    device = harness.begin(rank, world, folder, device_type)
    points = [
        point_row(sweep, point, measure_point(point, rounds, device))
        for sweep, swept in sweeps.items()
        for point in swept
    ]
    harness.finish(rank, folder, [*(slopes(points, sweep) for sweep in sweeps), *points])


def measure_point(point: Point, rounds: int, device: torch.device) -> dict[str, list[float]]:
    """Seconds by variant."""
    cases = {name: case_of(name, build, point, device) for name, build in variants(point).items()}
    return harness.take_turns(cases, rounds, device, host_only=True)


def case_of(name: str, build: harness.Build, point: Point, device: torch.device) -> harness.Case:
    """A step of a variant: forward and backward, from gradients that are None."""
    numel = ELEMENTS // point.parameters
    rows = harness.inputs(0, (point.parameters, numel)).contiguous().to(device)
    gradients = list(rows)
    model = build(Given(point.parameters, numel).to(device))
    wire = next((wire for wire in harness.TOLERANCE if wire in name), "native")

    def check() -> None:
        harness.check_gradients(name, model, rows, wire)
        if isinstance(model, fusedreduce.DistributedDataParallel):
            cut = model.reduce_stats()["buckets"]
            if cut != point.buckets:
                raise records.BenchError(f"{name} has {cut} buckets, not {point.buckets}")

    case = harness.Case(
        prepare=lambda: model.zero_grad(set_to_none=True), run=lambda: model(gradients).backward(), check=check
    )
    for _ in range(SETTLING_STEPS):
        case.prepare()
        case.run()
    return case


# Rows of the record


def point_row(sweep: str, point: Point, seconds: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """By variant what a step takes more than the floor: microseconds with their spread."""
    rows = {}
    for name in seconds:
        over = [mine - floor for mine, floor in zip(seconds[name], seconds[FLOOR], strict=True)]
        rows[name] = records.spread(seconds[name] if name == FLOOR else over, "us")
    case = f"{point.parameters} parameters, {point.buckets} buckets"
    return {"part": "points", "case": case, "sweep": sweep, **asdict(point), "variants": rows}


def slopes(points: Sequence[Mapping[str, Any]], sweep: str) -> dict[str, Any]:
    """By variant the line, by least squares, of microseconds through a sweep's points.

    Of each: the slope, what does not depend on how many there are, and how far off the line the worst point is.
    """
    swept = [point for point in points if point["sweep"] == sweep]
    places = [float(point[f"{sweep}s"]) for point in swept]
    lines: dict[str, dict[str, float]] = {}
    for name in (name for name in swept[0]["variants"] if name != FLOOR):
        values = [point["variants"][name]["us"] for point in swept]
        slope, besides = statistics.linear_regression(places, values)
        worst = max(abs(value - besides - slope * place) for place, value in zip(places, values, strict=True))
        lines[name] = {"us_slope": slope, "us_besides": besides, "us_worst": worst}
    return {"part": "slopes", "case": sweep, "variants": lines}


def main() -> int:
    """Runs the sweeps, prints tables, writes one JSON."""
    parser = records.Parser(description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--rounds", type=int, default=30, help="timed rounds per point (default: 30)")
    parser.add_record()
    asked = parser.parse_args()
    if asked.rounds < 2:
        parser.error("at least 2 rounds")
    records.pick_device(asked.device)
    sweeps = SMALL_SWEEPS if asked.rehearse else SWEEPS
    (rows,) = harness.run_ranks(measure, 1, sweeps, asked.rounds, asked.device)
    return report_tables.publish(
        asked,
        "host",
        asked.device,
        rounds=asked.rounds,
        elements=ELEMENTS,
        rows=rows,
    )


if __name__ == "__main__":
    records.entry(main)
