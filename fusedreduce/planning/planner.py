"""The planner: which parameters share a bucket, so that the last collective of a backward ends as early as possible.

Pure: the same numbers give the same plan on every rank. Buckets are launched in the order in which they become ready,
and within a group a bucket is a run of parameters in that order. `timeline.py` is the model, `cuts.py` the exact search
for one group, and with several (`several_groups.py`) the best of a few ways to apply it.
"""

from __future__ import annotations

from collections.abc import Mapping

from .cuts import earliest
from .plan import Plan
from .several_groups import groups_of, plan_of, score_of, ways_to_cut
from .timeline import Problem, timeline


def optimum(problem: Problem) -> Plan:
    """The plan whose last collective ends earliest, and of such plans one with the fewest buckets.

    Args:
        problem: ready times, sizes, costs and limits.

    Returns:
        Buckets in launch order, their members in ready order; none exceeds the cap, unless a single parameter does.
        With one group and no parameter that stays alone it is optimal in the model. With several it is never later
        than with each group filled up to the cap, or cut as if it were alone.
    """
    groups = groups_of(problem)
    if not groups:
        return ()
    if len(groups) == 1:
        return plan_of(groups, [earliest(groups[0])])
    return plan_of(groups, min(ways_to_cut(problem, groups), key=lambda cuts: score_of(groups, cuts)))


def choose(problem: Problem, candidates: Mapping[str, Plan]) -> tuple[str, Plan]:
    """The best of several plans in the model.

    Args:
        problem: that they are plans for.
        candidates: plans by name.

    Returns:
        The name and plan whose last gradient is unpacked first; of equal ones that whose last collective ends first,
        then that with the fewest buckets, then the first named. (`optimum` minimises the end of collectives only: with
        more buckets, or a larger last one, its gradients may be unpacked later.)

    Raises:
        ValueError: there are no candidates, or one does not have every parameter once.
    """
    if not candidates:
        raise ValueError("candidates must name at least one plan")

    def score(name: str) -> tuple[int, int, int]:
        found = timeline(candidates[name], problem)
        return found.finish, found.last_done, len(candidates[name])

    name = min(candidates, key=score)
    return name, candidates[name]


def best_plan(problem: Problem, others: Mapping[str, Plan]) -> tuple[str, Plan]:
    """The plan of the policy `planned`: of `ready`, `static` and the optimum the best in the model.

    Args:
        problem: as ranks have agreed on it; its cap limits the optimum, not the other plans.
        others: the plans of `ready` and `static`, by name.

    Returns:
        The name of the best plan by `choose`, "optimum" or a name in `others`, and the plan.
    """
    return choose(problem, {**others, "optimum": optimum(problem)})
