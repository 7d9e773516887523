"""What plans by measurement gain, what looking costs, how well the model of costs predicts; Gloo ranks, one machine.

    python perf/bench_schedule.py                        # 2 ranks, writes a JSON into perf/results
    python perf/bench_schedule.py --part prediction      # or gain, cost

What stands in for the GPU is a thread that sleeps: a backward of layers that take a stated time and make a gradient of
a stated size, and leave the cores to Gloo. The last model computes on the CPU instead, where a collective slows
backward down, as no model of a network foresees; it is shown, and its predictions are not judged.

gain        the step (forward and backward) of these models with torch DDP and with the wrapper at each policy, in
            turns; ratios to torch DDP are medians over rounds of that round's.
cost        on the step benchmark's two shapes, in turns with a wrapper that does neither: recording a trace, as a share
            of a step; and a look at the plan (two profiled steps, two agreements, a decision), in ms per look, from a
            wrapper that looks every eighth step. The default of `replan_every` follows from it.
prediction  one wrapper is profiled, with torch's caps, as a training run would be, and its trace read as
            `fusedreduce plan` reads it. From that alone the end of the last collective is predicted for plans of other
            caps and policies. Then every plan is run, in turns step by step, and measured: median over rounds of the
            later rank. Judged: the rank correlation (Spearman) between predicted and measured within each model, and
            the median error over all points.

Exit status 1 if recording costs 1 % of a step or more, looking at the default cadence 0.5 % of training, or predictions
miss what is required of them.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

import harness
import numpy as np
import records
import report_tables
import torch
import torch.distributed as dist
from torch import nn

import fusedreduce
from fusedreduce.buckets import data_path
from fusedreduce.planning.bucketing import BucketCaps
from fusedreduce.planning.plan import ParameterKind, Plan, ready_plan
from fusedreduce.planning.plan_file import dump
from fusedreduce.planning.planner import optimum
from fusedreduce.planning.timeline import Problem, timeline
from fusedreduce.trace import reader as trace_file
from fusedreduce.trace.problem import problem as problem_of

PARTS = ("gain", "cost", "prediction")
MB = 1_000_000
POLICIES = report_tables.POLICIES
TORCH, TORCH_AGAIN = "torch DDP", "torch DDP, again"
LEARNING_STEPS = 32
LOOK_EVERY = 8
RECORDING_ALLOWED = 0.01
LOOKING_ALLOWED = 0.005
SHAPES: tuple[harness.Shape, ...] = ((200, 50_000), (2_000, 8))
PLAIN, PLAIN_AGAIN, RECORDED, LOOKED = "plain", "plain, again", "recorded", "looked at"
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


# Gain and cost


def ours(**config: Any) -> Callable[[nn.Module], fusedreduce.DistributedDataParallel]:
    """The wrapper."""
    return lambda model: fusedreduce.DistributedDataParallel(model, reduce=fusedreduce.ReduceConfig(**config))


def measure_gain(rank: int, world: int, folder: str, names: Sequence[str], rounds: int) -> NoReturn:
    """One rank: seconds by model and variant."""
    harness.begin(rank, world, folder)
    found: dict[str, Any] = {}
    for name, subject in ((name, SUBJECTS[name]) for name in names):
        variants: dict[str, nn.Module] = {which: harness.torch_ddp()(build(subject)) for which in (TORCH, TORCH_AGAIN)}
        for policy in POLICIES:
            variants[policy] = ours(policy=policy, replan_every=0)(build(subject))
        for ddp in variants.values():
            for _ in range(LEARNING_STEPS):
                step(ddp)
        rows = torch.ones(2, requires_grad=True)

        def case(ddp: nn.Module, rows: torch.Tensor = rows) -> harness.Case:
            return harness.Case(
                prepare=lambda: ddp.zero_grad(set_to_none=True),
                run=lambda: ddp(rows).sum().backward(),
                check=lambda: check_mean(ddp),
            )

        found[name] = {
            "seconds": harness.take_turns({key: case(ddp) for key, ddp in variants.items()}, rounds),
            "buckets": [variants[policy].reduce_stats()["buckets"] for policy in POLICIES],  # type: ignore[operator]
        }
    harness.finish(rank, folder, found)


def measure_cost(rank: int, world: int, folder: str, shape: harness.Shape, rounds: int) -> NoReturn:
    """One rank: seconds of plain, recorded and looked-at steps."""
    harness.begin(rank, world, folder)
    rows = harness.inputs(rank, shape)
    mean = harness.mean_of_ranks(rows)
    plain, again, looked, recorded = (
        ours(policy="ready", replan_every=every)(harness.Many(*shape)) for every in (0, 0, LOOK_EVERY, 0)
    )
    for ddp in (plain, again, looked, recorded):
        for _ in range(LEARNING_STEPS):
            ddp.zero_grad(set_to_none=True)
            ddp(rows).backward()

    def case(ddp: nn.Module) -> harness.Case:
        return harness.Case(
            prepare=lambda: ddp.zero_grad(set_to_none=True),
            run=lambda: ddp(rows).backward(),
            check=lambda: harness.check_gradients("ours", ddp, mean),
        )

    with recorded.record_trace(Path(folder, "trace"), limit=10**9):
        cases = {PLAIN: case(plain), PLAIN_AGAIN: case(again), RECORDED: case(recorded), LOOKED: case(looked)}
        seconds = harness.take_turns(cases, rounds)
    harness.finish(rank, folder, seconds)


# Prediction


def plans_of(subject: Subject, problem: Problem) -> dict[str, Plan]:
    """By name, each plan once."""
    found: dict[str, Plan] = {}
    kinds = [ParameterKind(size, 0, 0) for size in problem.size_bytes]
    for cap_mb in subject.caps_mb:
        caps = BucketCaps(first_bytes=int(cap_mb * MB), cap_bytes=int(cap_mb * MB))
        found[f"ready, {cap_mb:g} MB"] = ready_plan(kinds, caps, "c10d", problem.order, share=False)
    for cap_mb in subject.planned_caps_mb:
        capped = replace(problem, cap_bytes=int(cap_mb * MB))
        found[f"planned, {cap_mb:g} MB"] = optimum(capped)
    names = list(found)
    return {name: found[name] for at, name in enumerate(names) if found[name] not in [found[n] for n in names[:at]]}


def last_collective_ms(ddp: nn.Module) -> float:
    """From the start of backward until the last collective has been waited for.

    Nothing is recorded meanwhile: on few cores a callback per collective would be part of what is measured.
    """
    waited_ns: list[int] = []
    finish = data_path.finish

    def noting(*arguments: Any, **options: Any) -> Any:
        waited_ns.append(time.perf_counter_ns())
        return finish(*arguments, **options)

    ddp.zero_grad(set_to_none=True)
    loss = ddp(torch.ones(2, requires_grad=True)).sum()
    data_path.finish = noting
    try:
        began_ns = time.perf_counter_ns()
        loss.backward()
    finally:
        data_path.finish = finish
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


def measure_prediction(rank: int, world: int, folder: str, names: Sequence[str], rounds: int) -> NoReturn:
    """One rank: profiles a model, predicts its plans, measures them."""
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
        points = {
            key: {
                "buckets": len(plans[key]),
                "predicted_ms": timeline(plans[key], problem).last_done / 1e12,
                "measured_ms": ended_ms[key],
            }
            for key in keys
        }
        parts = {part: getattr(problem.costs, part) for part in ("wire", "pack", "unpack")}
        costs = {part: [line.fixed_ns, line.fs_per_byte] for part, line in parts.items()}
        found[name] = {"points": points, "costs": costs}
    harness.finish(rank, folder, found)


# Rows of the record


def gain_rows(results: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Per model: the step of torch's DDP, and ratios to it."""
    found = []
    for name, first in results[0].items():
        seconds = harness.pooled([result[name]["seconds"] for result in results])
        ratios = {
            which: statistics.median(mine / theirs for mine, theirs in zip(took, seconds[TORCH], strict=True))
            for which, took in seconds.items()
        }
        row = {"part": "gain", "case": name, "torch_ms": round(statistics.median(seconds[TORCH]) * 1e3, 3)}
        variants = {
            policy: {"ratio": round(ratios[policy], 4), "buckets": buckets}
            for policy, buckets in zip(POLICIES, first["buckets"], strict=True)
        }
        found.append(row | {"noise": round(ratios[TORCH_AGAIN], 4), "variants": variants})
    return found


def cost_row(shape: str, results: Sequence[Mapping[str, list[float]]]) -> dict[str, Any]:
    """What recording costs of a step, and a look in ms and, at the default cadence, of training."""
    seconds = harness.pooled(results)
    plain_s = statistics.median(seconds[PLAIN])
    recording, noise = (
        statistics.median(mine - base for mine, base in zip(seconds[name], seconds[PLAIN], strict=True)) / plain_s
        for name in (RECORDED, PLAIN_AGAIN)
    )
    # Steps of a look are few, so the mean and not the median; trimmed, because this machine has other work.
    extra_s = sorted(mine - base for mine, base in zip(seconds[LOOKED], seconds[PLAIN], strict=True))
    trim = len(extra_s) // 50
    look_s = LOOK_EVERY * statistics.fmean(extra_s[trim : len(extra_s) - trim])
    every = fusedreduce.ReduceConfig().replan_every
    return {
        "part": "cost",
        "case": shape,
        "step_ms": round(plain_s * 1e3, 3),
        "recording_share": round(recording, 4),
        "noise_share": round(noise, 4),
        "look_ms": round(look_s * 1e3, 3),
        "looking_share": round(look_s / (every * plain_s), 5),
        "variants": {},
    }


def prediction_rows(results: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Per model its points, as the later rank saw them."""
    found = []
    for name, first in results[0].items():
        points: dict[str, Any] = {}
        for key, one in first["points"].items():
            ranks = zip(*(result[name]["points"][key]["measured_ms"] for result in results), strict=True)
            measured_ms = statistics.median(map(max, ranks))
            error = abs(one["predicted_ms"] - measured_ms) / measured_ms
            points[key] = {**one, "measured_ms": round(measured_ms, 3), "error": round(error, 4)}
        predicted, measured = ([point[key] for point in points.values()] for key in ("predicted_ms", "measured_ms"))
        found.append(
            {
                "part": "prediction",
                "case": name,
                "judged": not SUBJECTS[name].cpu,
                "costs": first["costs"],
                "rank_correlation": round(spearman(predicted, measured), 4),
                "median_error": round(statistics.median(point["error"] for point in points.values()), 4),
                "variants": points,
            }
        )
    return found


def spearman(first: Sequence[float], second: Sequence[float]) -> float:
    """Correlation of ranks; equal values share theirs."""

    def ranks(values: Sequence[float]) -> np.ndarray[Any, Any]:
        array = np.asarray(values)
        return np.array([(array < one).sum() + ((array == one).sum() - 1) / 2 for one in array])

    return float(np.corrcoef(ranks(first), ranks(second))[0, 1])


def judge(rows: Sequence[Mapping[str, Any]], allowed: Mapping[str, float]) -> list[dict[str, Any]]:
    """What is demanded of recording and looking, and of predictions."""
    found = [
        records.demand(f"{row['case']}: {key.replace('_', ' ')}", row[key], "<", most, unit="%")
        for row in rows
        if row["part"] == "cost"
        for key, most in allowed.items()
    ]
    judged = [row for row in rows if row["part"] == "prediction" and row["judged"]]
    for row in judged:
        what = f"{row['case']}: rank correlation"
        found.append(records.demand(what, row["rank_correlation"], ">=", CORRELATION_REQUIRED))
    if judged:
        found.append(records.demand("median error", _errors(judged)["median_error"], "<=", ERROR_REQUIRED, unit="%"))
    return found


def _errors(judged: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    errors = [point["error"] for row in judged for point in row["variants"].values()]
    return {"points_judged": len(errors), "median_error": round(statistics.median(errors), 4)}


def main() -> int:
    """Runs the parts, prints tables and demands, writes one JSON."""
    parser = records.Parser(description=__doc__)
    parser.add_argument("--part", choices=PARTS, action="append", help="default: all")
    parser.add_argument("--model", action="append", choices=list(SUBJECTS), help="default: all")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=40, help="of gains and predictions (default: 40)")
    parser.add_argument("--cost-rounds", type=int, default=160)
    parser.add_argument("--shapes", type=harness.parse_shape, nargs="+", default=SHAPES, metavar="COUNTxNUMEL")
    parser.add_record()
    asked = parser.parse_args()
    parts, names = asked.part or PARTS, asked.model or list(SUBJECTS)
    rows: list[dict[str, Any]] = []
    if "gain" in parts:
        rows += gain_rows(harness.run_ranks(measure_gain, asked.ranks, names, asked.rounds))
    for shape in asked.shapes if "cost" in parts else ():
        per_rank = harness.run_ranks(measure_cost, asked.ranks, shape, asked.cost_rounds)
        rows.append(cost_row(harness.shape_name(shape), per_rank))
    if "prediction" in parts:
        rows += prediction_rows(harness.run_ranks(measure_prediction, asked.ranks, names, asked.rounds))
    allowed = {"recording_share": RECORDING_ALLOWED, "looking_share": LOOKING_ALLOWED}
    judged = [row for row in rows if row["part"] == "prediction" and row["judged"]]
    errors: dict[str, Any] = _errors(judged) if judged else {}
    return report_tables.publish(
        asked,
        "schedule" if len(parts) == len(PARTS) else f"schedule-{'-'.join(parts)}",
        "cpu",
        ranks=asked.ranks,
        rounds=asked.rounds,
        allowed=allowed,
        required={"rank_correlation": CORRELATION_REQUIRED, "median_error": ERROR_REQUIRED},
        rows=rows,
        demands=judge(rows, allowed),
        **errors,
    )


if __name__ == "__main__":
    records.entry(main)
