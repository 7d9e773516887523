"""Simulates one backward on many ranks, bucket by bucket: how much communication backward does not hide.

On each rank gradients become ready and buckets are packed as in `timeline`, each rank at its own pace. The collective
of a bucket starts when the last rank has issued it and the one before it has ended, and ends on all ranks at once. With
one rank, or without noise, and a straight line for the wire, this equals `timeline` to the femtosecond.

    packed_k[r]  = max(e_1[r] .. e_k[r]) + pack_1 + ... + pack_k
    done_k       = max(done_k-1, max over r of packed_k[r]) + wire_k
    finish[r]    = max(backward end[r] + all unpacks, max over k of done_k + unpack_k + ... + unpack_K)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ..planning.bucketing import UNLIMITED_BYTES, BucketCaps
from ..planning.cost_model import FREE, FS_PER_NS, Costs, Linear
from ..planning.plan import ParameterKind, Plan, ready_plan, static_plan
from ..planning.planner import best_plan
from ..planning.timeline import Problem
from .models import Workload
from .networks import Network, bucket_lines, costs, fastest_fs
from .noise import LONGEST_FS, QUIET, Noise, Times, moments_of, ready_times

POLICIES = ("static", "ready", "capped", "planned")

_PROFILED_STEPS = 3


@dataclass(frozen=True)
class Outcome:
    """One simulated step. Arrays are per rank; all times in fs since backward began.

    Args:
        alone: when backward would end without packing and communication.
        finish: when the last gradient holds its result.
        done: per bucket, when its collective ended.
    """

    alone: Times
    finish: Times
    done: tuple[int, ...]

    @property
    def exposed_ns(self) -> float:
        """How much communication adds to the step: how much later the last rank ends than the slowest would alone."""
        return float(self.finish.max() - self.alone.max()) / FS_PER_NS


def compare(
    problem: Problem,
    plans: Mapping[str, Plan],
    ranks: int,
    network: Network | None = None,
    *,
    noise: Noise = QUIET,
    steps: int = 1,
    wide: float | None = None,
    padded: Callable[[Plan, Problem], Problem] | None = None,
) -> dict[str, list[Outcome]]:
    """Simulates several plans on the same steps.

    Args:
        problem: from a model or a trace.
        plans: by name, buckets in launch order.
        ranks: number of ranks.
        network: which reduces; None: the problem's own line for the wire.
        noise: how ranks differ.
        steps: number of steps; without noise all are equal.
        wide: for buckets that are exchanged, see `exchange_lines`; None: they are all-reduced.
        padded: the problem with the padding of a plan's buckets; None: they have none.

    Returns:
        By name of the plan, one outcome per step.

    Raises:
        ValueError: there are no ranks or steps, times are too long to count in fs (over an hour), or a plan is empty.
    """
    if steps < 1:
        raise ValueError(f"steps must be at least 1, got {steps}")
    choices = [problem.costs.wire] if network is None else bucket_lines(network, ranks, wide)
    sizes = {name: padded(plan, problem) if padded else problem for name, plan in plans.items()}
    outcomes: dict[str, list[Outcome]] = {name: [] for name in plans}
    moments, places = moments_of(problem)
    for ready_fs in ready_times(moments, ranks, noise, steps):
        for name, plan in plans.items():
            outcomes[name].append(_step(sizes[name], plan, ready_fs, places, choices))
    return outcomes


def agreed(problem: Problem, ranks: int, noise: Noise) -> Problem:
    """The problem as ranks would agree on it: per gradient the latest of any rank's mean times over three steps."""
    if noise.quiet:
        return problem
    moments, places = moments_of(problem)
    total = sum(ready_times(moments, ranks, noise, _PROFILED_STEPS, rehearsal=True))
    latest_ns = (np.max(total, axis=0) // (_PROFILED_STEPS * FS_PER_NS)).tolist()
    return dataclasses.replace(problem, ready_ns=tuple(latest_ns[place] for place in places))


def policy_plans(problem: Problem, caps: BucketCaps | None = None) -> dict[str, Plan]:
    """The plan of each policy, by name; `capped` is `planned` under the cap of `static` and `ready`.

    Args:
        problem: as ranks agree on it; its own cap is ignored. If its wire is free, its cost is taken as unknown, and
            `capped` and `planned` are `ready`.
        caps: of all policies; None: torch's, which do not bind `planned`.
    """
    kinds = [
        ParameterKind(size, group, group, number in problem.alone)
        for number, (size, group) in enumerate(zip(problem.size_bytes, problem.groups, strict=True))
    ]
    order, limits = problem.order, caps or BucketCaps()
    plans = {
        "static": static_plan(kinds, limits, "c10d", order),
        "ready": ready_plan(kinds, limits, "c10d", order, share=True),
    }
    if problem.costs.wire == FREE:
        return {**plans, "capped": plans["ready"], "planned": plans["ready"]}
    reach_bytes = {"capped": max(limits.limits_bytes), "planned": limits.planned_limit_bytes}
    asked = {name: dataclasses.replace(problem, cap_bytes=reach) for name, reach in reach_bytes.items()}
    return {**plans, **{name: best_plan(one, plans)[1] for name, one in asked.items()}}


def problem_of(
    workload: Workload,
    copy: Linear,
    *,
    wire_itemsize_bytes: int,
    gradient_itemsize_bytes: int = 4,
) -> Problem:
    """Makes a problem of a model, with a wire and caps that are not known yet.

    Args:
        workload: when gradients are ready.
        copy: cost of packing, and of unpacking.
        wire_itemsize_bytes: bytes of an element on the wire.
        gradient_itemsize_bytes: bytes of an element of a gradient, to which caps apply.
    """
    count = len(workload.numels)
    return Problem(
        ready_ns=workload.ready_ns,
        wire_bytes=tuple(numel * wire_itemsize_bytes for numel in workload.numels),
        size_bytes=tuple(numel * gradient_itemsize_bytes for numel in workload.numels),
        groups=("",) * count,
        alone=frozenset(),
        cap_bytes=UNLIMITED_BYTES,
        costs=Costs(wire=FREE, pack=copy, unpack=copy),
    )


def on_network(
    problem: Problem, network: Network, ranks: int, caps: BucketCaps | None = None, *, wide: float | None = None
) -> Problem:
    """The problem with the line for the wire that training would learn on a network, from the buckets of `static`.

    Args:
        problem: whose costs of packing and unpacking are kept.
        network: which reduces.
        ranks: number of ranks.
        caps: of `static`; None: torch's.
        wide: for buckets that are exchanged, see `exchange_lines`; None: they are all-reduced.
    """
    seen = policy_plans(dataclasses.replace(problem, costs=Costs(wire=FREE)), caps)["static"]
    learned = costs(network, ranks, _sizes(problem, seen), problem.costs.pack, wide=wide)
    wire = FREE if learned is None else learned.wire
    return dataclasses.replace(problem, costs=dataclasses.replace(problem.costs, wire=wire))


def _step(problem: Problem, plan: Plan, ready_fs: Times, places: Sequence[int], choices: Sequence[Linear]) -> Outcome:
    """One plan in one step; `ready_fs` is [ranks, moments], `places` the index of each parameter's moment."""
    # Gradients come in the same order on every rank, so a bucket's last one is the same on all.
    last = [max(places[number] for number in members) for members in plan]
    sizes = _sizes(problem, plan)
    packs = [problem.costs.pack.fs(size) for size in sizes]
    unpacks = [problem.costs.unpack.fs(size) for size in sizes]
    wires = [fastest_fs(choices, size) for size in sizes]
    if sum(packs) + sum(unpacks) + sum(wires) >= LONGEST_FS:
        raise ValueError(f"cannot simulate {sum(wires) / 1e15:.0f} s of collectives")
    issued = np.maximum.accumulate(ready_fs[:, last], axis=1).max(axis=0) + np.cumsum(packs)
    done, channel = [], 0
    for issued_fs, wire in zip(issued.tolist(), wires, strict=True):
        channel = max(channel, issued_fs) + wire
        done.append(channel)
    alone, behind = ready_fs[:, -1], sum(unpacks)
    finish = alone + sum(packs) + behind
    for done_fs, unpack in zip(done, unpacks, strict=True):
        finish = np.maximum(finish, done_fs + behind)
        behind -= unpack
    return Outcome(alone, finish, tuple(done))


def _sizes(problem: Problem, plan: Plan) -> list[int]:
    return [sum(problem.wire_bytes[number] for number in members) for members in plan]
