"""What plans by measurement gain, and what looking costs, on Gloo ranks of this machine.

    python perf/bench_schedule.py          # 2 ranks, writes perf/results/schedule_cpu_<date>.json

Gain: the step (forward and backward) of bench_prediction's models, whose backward sleeps in place of a GPU, with torch
DDP and with the wrapper at each policy, in turns; ratios to torch DDP are medians over rounds of that round's.

Cost, on the step benchmark's two shapes, in turns with a wrapper that does neither: recording a trace, as a share of a
step; and a look at the plan (two profiled steps, two agreements, a decision), in ms per look, from a wrapper that looks
every eighth step. The default of `replan_every` follows from it: looking must cost less than 0.5 % of training.

Exit status 1 if recording costs 1 % of a step or more, or looking at the default cadence 0.5 %.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import bench_prediction
import harness
import records
import torch
from torch import nn

import fusedreduce

POLICIES = ("static", "ready", "planned")
TORCH, TORCH_AGAIN = "torch DDP", "torch DDP, again"
LEARNING_STEPS = 32
LOOK_EVERY = 8
RECORDING_ALLOWED = 0.01
LOOKING_ALLOWED = 0.005
SHAPES: tuple[harness.Shape, ...] = ((200, 50_000), (2_000, 8))
PLAIN, PLAIN_AGAIN, RECORDED, LOOKED = "plain", "plain, again", "recorded", "looked at"


def ours(**config: Any) -> Callable[[nn.Module], fusedreduce.DistributedDataParallel]:
    """The wrapper."""
    return lambda model: fusedreduce.DistributedDataParallel(model, reduce=fusedreduce.ReduceConfig(**config))


def measure_gain(rank: int, world: int, folder: str, rounds: int) -> NoReturn:
    """One rank: seconds by model and variant."""
    harness.begin(rank, world, folder)
    found: dict[str, Any] = {}
    for name, subject in bench_prediction.SUBJECTS.items():
        variants: dict[str, nn.Module] = {
            name: harness.torch_ddp()(bench_prediction.build(subject)) for name in (TORCH, TORCH_AGAIN)
        }
        for policy in POLICIES:
            variants[policy] = ours(policy=policy, replan_every=0)(bench_prediction.build(subject))
        for ddp in variants.values():
            for _ in range(LEARNING_STEPS):
                bench_prediction.step(ddp)
        rows = torch.ones(2, requires_grad=True)

        def case(ddp: nn.Module, rows: torch.Tensor = rows) -> harness.Case:
            return harness.Case(
                prepare=lambda: ddp.zero_grad(set_to_none=True),
                run=lambda: ddp(rows).sum().backward(),
                check=lambda: bench_prediction.check_mean(ddp),
            )

        found[name] = harness.take_turns({key: case(ddp) for key, ddp in variants.items()}, rounds)
        found[name]["buckets"] = [variants[policy].reduce_stats()["buckets"] for policy in POLICIES]  # type: ignore[operator]
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


def gains(results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Per model: the step of torch's DDP, and ratios to it."""
    found: dict[str, Any] = {}
    for name in results[0]:
        seconds = harness.pooled(
            [{key: one for key, one in result[name].items() if key != "buckets"} for result in results]
        )
        base = seconds[TORCH]
        ratios = {
            name: statistics.median(mine / theirs for mine, theirs in zip(seconds[name], base, strict=True))
            for name in (*POLICIES, TORCH_AGAIN)
        }
        noise = ratios.pop(TORCH_AGAIN)
        found[name] = {
            "torch_ms": round(statistics.median(base) * 1e3, 3),
            "ratio_to_torch": {policy: round(ratio, 4) for policy, ratio in ratios.items()},
            "noise": round(noise, 4),
            "buckets": dict(zip(POLICIES, results[0][name]["buckets"], strict=True)),
        }
    return found


def costs(results: Sequence[Mapping[str, list[float]]]) -> dict[str, float]:
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
        "step_ms": round(plain_s * 1e3, 3),
        "recording_share": round(recording, 4),
        "noise_share": round(noise, 4),
        "look_ms": round(look_s * 1e3, 3),
        "looking_share": round(look_s / (every * plain_s), 5),
    }


def main() -> int:
    parser = records.Parser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--cost-rounds", type=int, default=160)
    parser.add_argument("--part", choices=("gain", "cost", "both"), default="both")
    parser.add_argument("--out", type=Path, default=records.RESULTS)
    arguments = parser.parse_args()
    neighbours = records.Neighbours()
    found_gains: dict[str, Any] = {}
    if arguments.part != "cost":
        found_gains = gains(harness.run_ranks(measure_gain, arguments.ranks, arguments.rounds))
    for name, row in found_gains.items():
        shown = "  ".join(f"{policy} {ratio:.3f}" for policy, ratio in row["ratio_to_torch"].items())
        print(
            f"{name:22} torch DDP {row['torch_ms']:8.2f} ms;  of it: {shown}   buckets {row['buckets']}; "
            f"the same twice {row['noise']:.3f}"
        )
    found_costs = {}
    fine = True
    for shape in SHAPES if arguments.part != "gain" else ():
        one = costs(harness.run_ranks(measure_cost, arguments.ranks, shape, arguments.cost_rounds))
        found_costs[harness.shape_name(shape)] = one
        print(
            f"{harness.shape_name(shape)}: step {one['step_ms']:.2f} ms; recording {one['recording_share']:.2%} of it; "
            f"a look {one['look_ms']:.2f} ms, {one['looking_share']:.3%} of training; "
            f"the same twice {one['noise_share']:+.2%}"
        )
        fine &= one["recording_share"] < RECORDING_ALLOWED and one["looking_share"] < LOOKING_ALLOWED
    cores = round(neighbours.cores(), 2)
    print(f"other work kept {cores} cores busy{'' if fine else '; MISSED: recording or looking costs too much'}")
    path = records.write(
        arguments.out,
        {"gain": "schedule_gain", "cost": "schedule_cost", "both": "schedule"}[arguments.part],
        "cpu",
        ranks=arguments.ranks,
        rounds=arguments.rounds,
        others_cores=cores,
        allowed={"recording_share": RECORDING_ALLOWED, "looking_share": LOOKING_ALLOWED},
        gains=found_gains,
        costs=found_costs,
    )
    print(path)
    return 0 if fine else 1


if __name__ == "__main__":
    records.entry(main)
