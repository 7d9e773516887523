"""How well the cost model predicts when a step's last collective ends, on Gloo ranks of this machine.

    python perf/bench_prediction.py          # 2 ranks, writes perf/results/prediction_cpu_<date>.json

For each model one wrapper is profiled, with torch's caps, as a training run would be, and its trace read as
`fusedreduce plan` reads it. From that alone the end of the last collective is predicted for plans of other caps and
policies. Then every plan is run, in turns step by step, and measured: median over rounds of the later rank. Judged: the
rank correlation (Spearman) between predicted and measured within each model, and the median error over all points.

What stands in for the GPU is a thread that sleeps: a backward of layers that take a stated time and make a gradient of
a stated size, and leave the cores to Gloo. The last model computes on the CPU instead, where a collective slows
backward down, as no model of a network foresees; it is shown, and not judged.

Exit status 1 if something required is missed.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import harness
import numpy as np
import records
import torch
import torch.distributed as dist
from torch import nn

import fusedreduce
from fusedreduce.buckets import exchange
from fusedreduce.planning.bucketing import BucketCaps
from fusedreduce.planning.plan import ParameterKind, Plan
from fusedreduce.planning.plan_file import dump
from fusedreduce.planning.planner import Problem, optimum, timeline
from fusedreduce.planning.policies import ready_plan
from fusedreduce.trace import reader as trace_file
from fusedreduce.trace.problem import problem as problem_of

MB = 1_000_000
PROFILED_STEPS = 24
CORRELATION_REQUIRED = 0.9
ERROR_REQUIRED = 0.25


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A model: bytes of each layer's gradient and seconds of its backward, in the order of forward.

    Args:
        size_bytes: fp32.
        backward_s: slept, or computed with `cpu`.
        caps_mb: of the plans by readiness that are tried; one of them is all in one bucket.
        cpu: compute instead of sleeping; not judged.
    """

    size_bytes: tuple[int, ...]
    backward_s: tuple[float, ...]
    caps_mb: tuple[float, ...] = (8.0, 16.0, 24.0, 36.0, 1000.0)
    planned_caps_mb: tuple[float, ...] = (1000.0, 6.0)
    cpu: bool = False


# Light on the cores, which here carry the network too: backward sleeps, and what is left is copying and Gloo.
SUBJECTS: Mapping[str, Subject] = {
    "uniform": Subject(size_bytes=(2 * MB,) * 24, backward_s=(0.010,) * 24),
    "large ready first": Subject(
        size_bytes=(1 * MB,) * 20 + (10 * MB,) * 3, backward_s=(0.010,) * 23, caps_mb=(8.0, 16.0, 24.0, 40.0, 1000.0)
    ),
    "large ready last": Subject(
        size_bytes=(20 * MB,) + (2_400_000,) * 23, backward_s=(0.010,) * 24, caps_mb=(12.0, 24.0, 30.0, 40.0, 1000.0)
    ),
    "many small": Subject(
        size_bytes=(400_000,) * 120, backward_s=(0.003,) * 120, caps_mb=(6.0, 18.0, 26.0, 30.0, 1000.0)
    ),
    "uniform, on the CPU": Subject(size_bytes=(2 * MB,) * 24, backward_s=(0.010,) * 24, cpu=True),
}


class _Layer(torch.autograd.Function):
    """Passes its input on; backward takes a while and makes a gradient."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, weight: torch.Tensor, gradient: torch.Tensor, layer: Layer
    ) -> torch.Tensor:
        ctx.gradient, ctx.layer = gradient, layer
        return rows.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None, None]:
        ctx.layer.work()
        return grads[0], ctx.gradient.clone(), None, None


class Layer(nn.Module):
    """One parameter whose gradient takes `backward_s`."""

    def __init__(self, size_bytes: int, backward_s: float, *, cpu: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size_bytes // 4))
        self.gradient = torch.full((size_bytes // 4,), 1.0 + dist.get_rank())  # other values on each rank
        self._backward_s = backward_s
        self._cpu = cpu
        self._square = torch.ones(96, 96)

    def work(self) -> None:
        """What backward does."""
        if not self._cpu:
            time.sleep(self._backward_s)
            return
        until_s = time.perf_counter() + self._backward_s
        while time.perf_counter() < until_s:
            torch.mm(self._square, self._square)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return _Layer.apply(rows, self.weight, self.gradient, self)  # type: ignore[no-any-return]


def build(subject: Subject) -> nn.Module:
    """The model."""
    sizes = zip(subject.size_bytes, subject.backward_s, strict=True)
    return nn.Sequential(*[Layer(size, seconds, cpu=subject.cpu) for size, seconds in sizes])


def plans_of(subject: Subject, problem: Problem) -> dict[str, Plan]:
    """By name, each plan once."""
    found: dict[str, Plan] = {}
    kinds = [ParameterKind(size, 0, 0) for size in problem.size_bytes]
    for cap_mb in subject.caps_mb:
        caps = BucketCaps(first_bytes=int(cap_mb * MB), cap_bytes=int(cap_mb * MB))
        found[f"ready, {cap_mb:g} MB"] = ready_plan(kinds, caps, "c10d", problem.order, share=False)
    for cap_mb in subject.planned_caps_mb:
        capped = Problem(**{**vars_of(problem), "cap_bytes": int(cap_mb * MB)})
        found[f"planned, {cap_mb:g} MB"] = optimum(capped)
    names = list(found)
    return {name: found[name] for at, name in enumerate(names) if found[name] not in [found[n] for n in names[:at]]}


def vars_of(problem: Problem) -> dict[str, Any]:
    """Its fields."""
    return {name: getattr(problem, name) for name in type(problem).__dataclass_fields__}


def step(ddp: nn.Module) -> None:
    """Forward and backward."""
    ddp.zero_grad(set_to_none=True)
    ddp(torch.ones(2, requires_grad=True)).sum().backward()


def check_mean(ddp: nn.Module) -> None:
    """Every gradient must be the mean of all ranks'.

    Raises:
        BenchError: one is missing or something else.
    """
    mean = (1 + dist.get_world_size()) / 2
    for name, parameter in ddp.named_parameters():
        if parameter.grad is None or not torch.equal(parameter.grad, torch.full_like(parameter, mean)):
            raise records.BenchError(f"the gradient of {name} is wrong")


def last_collective_ms(ddp: nn.Module) -> float:
    """From the start of backward until the last collective has been waited for.

    Nothing is recorded meanwhile: on few cores a callback per collective would be part of what is measured.
    """
    waited_ns: list[int] = []
    finish = exchange.finish

    def noting(*arguments: Any, **options: Any) -> Any:
        waited_ns.append(time.perf_counter_ns())
        return finish(*arguments, **options)

    ddp.zero_grad(set_to_none=True)
    loss = ddp(torch.ones(2, requires_grad=True)).sum()
    exchange.finish = noting
    try:
        began_ns = time.perf_counter_ns()
        loss.backward()
    finally:
        exchange.finish = finish
    return (waited_ns[-1] - began_ns) / 1e6


def profile(rank: int, folder: Path, subject: Subject) -> Problem:
    """Runs a wrapper as training would, and reads what it recorded."""
    ddp = fusedreduce.DistributedDataParallel(build(subject), reduce=fusedreduce.ReduceConfig(replan_every=8))
    with ddp.record_trace(folder, limit=PROFILED_STEPS):
        for _ in range(PROFILED_STEPS):
            step(ddp)
    dist.barrier()
    traces = trace_file.read(folder)
    if traces[0].costs is None:
        raise RuntimeError("the wrapper has not fitted the link")
    return problem_of(traces, traces[0].costs, cap_bytes=2**40)


def measure(rank: int, world: int, folder: str, names: Sequence[str], rounds: int) -> NoReturn:
    """One rank: profiles, predicts, measures."""
    harness.begin(rank, world, folder)
    found: dict[str, Any] = {}
    for name in names:
        subject = SUBJECTS[name]
        problem = profile(rank, Path(folder, f"trace-{len(found)}"), subject)
        plans = plans_of(subject, problem)
        numels = [size // 4 for size in subject.size_bytes]
        parameters = [key for key, _ in build(subject).named_parameters()]
        wrappers: dict[str, fusedreduce.DistributedDataParallel] = {}
        for key, plan in plans.items():
            text = dump(plan, names=parameters, numels=numels, world_size=world, wire="native")
            wrappers[key] = fusedreduce.DistributedDataParallel(
                build(subject), reduce=fusedreduce.ReduceConfig(plan=text)
            )
            for _ in range(harness.WARMUP_ROUNDS):
                step(wrappers[key])
                check_mean(wrappers[key])
        keys = list(wrappers)
        ended_ms: dict[str, list[float]] = {key: [] for key in keys}
        for round_number in range(rounds):
            for key in (keys[turn] for turn in harness.turns(len(keys), round_number)):
                dist.barrier()
                ended_ms[key].append(last_collective_ms(wrappers[key]))
                if round_number == rounds - 1:
                    check_mean(wrappers[key])
        found[name] = {
            key: {
                "buckets": len(plans[key]),
                "predicted_ms": timeline(plans[key], problem).last_done / 1e12,
                "measured_ms": ended_ms[key],
            }
            for key in keys
        }
        costs = problem.costs
        found[name]["costs"] = {
            part: [getattr(costs, part).fixed_ns, getattr(costs, part).fs_per_byte]
            for part in ("wire", "pack", "unpack")
        }
    harness.finish(rank, folder, found)


def spearman(first: Sequence[float], second: Sequence[float]) -> float:
    """Correlation of ranks; equal values share theirs."""

    def ranks(values: Sequence[float]) -> np.ndarray[Any, Any]:
        array = np.asarray(values)
        return np.array([(array < one).sum() + ((array == one).sum() - 1) / 2 for one in array])

    return float(np.corrcoef(ranks(first), ranks(second))[0, 1])


def summary(results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Per model its points, as the later rank saw them, and what is judged."""
    models: dict[str, Any] = {}
    errors = []
    for name in results[0]:
        points = {}
        for key, one in results[0][name].items():
            if key == "costs":
                continue
            later = [max(pair) for pair in zip(*(result[name][key]["measured_ms"] for result in results), strict=True)]
            measured_ms = statistics.median(later)
            error = abs(one["predicted_ms"] - measured_ms) / measured_ms
            points[key] = {**one, "measured_ms": round(measured_ms, 3), "error": round(error, 4)}
            if not SUBJECTS[name].cpu:
                errors.append(error)
        rows = list(points.values())
        correlation = spearman([row["predicted_ms"] for row in rows], [row["measured_ms"] for row in rows])
        models[name] = {
            "judged": not SUBJECTS[name].cpu,
            "costs": results[0][name]["costs"],
            "rank_correlation": round(correlation, 4),
            "median_error": round(statistics.median(row["error"] for row in rows), 4),
            "points": points,
        }
    return {"models": models, "points_judged": len(errors), "median_error": round(statistics.median(errors), 4)}


def show(found: Mapping[str, Any]) -> bool:
    """Prints the table; whether all that is required holds."""
    fine: bool = found["median_error"] <= ERROR_REQUIRED
    for name, model in found["models"].items():
        judged = "" if model["judged"] else " (not judged)"
        print(f"\n{name}{judged}: rank correlation {model['rank_correlation']:.2f}", end="")
        print(f", median error {model['median_error']:.0%}; wire {model['costs']['wire']} (ns, fs per byte)")
        for key, row in sorted(model["points"].items(), key=lambda item: item[1]["predicted_ms"]):
            times = f"predicted {row['predicted_ms']:8.2f} ms   measured {row['measured_ms']:8.2f} ms"
            print(f"  {key:20} {row['buckets']:4} buckets   {times}   {row['error']:.0%}")
        if model["judged"] and model["rank_correlation"] < CORRELATION_REQUIRED:
            fine = False
            print(f"  MISSED: rank correlation of at least {CORRELATION_REQUIRED}")
    print(f"\n{found['points_judged']} points: median error {found['median_error']:.1%}, required {ERROR_REQUIRED:.0%}")
    return fine


def main() -> int:
    parser = records.Parser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=24)
    parser.add_argument("--model", action="append", choices=list(SUBJECTS))
    parser.add_argument("--out", type=Path, default=records.RESULTS)
    arguments = parser.parse_args()
    neighbours = records.Neighbours()
    names = arguments.model or list(SUBJECTS)
    results = harness.run_ranks(measure, arguments.ranks, names, arguments.rounds)
    found = summary(results)
    fine = show(found)
    cores = round(neighbours.cores(), 2)
    print(f"other work kept {cores} cores busy")
    path = records.write(
        arguments.out,
        "prediction",
        "cpu",
        ranks=arguments.ranks,
        rounds=arguments.rounds,
        others_cores=cores,
        required={"rank_correlation": CORRELATION_REQUIRED, "median_error": ERROR_REQUIRED},
        **found,
    )
    print(path)
    return 0 if fine else 1


if __name__ == "__main__":
    records.entry(main)
