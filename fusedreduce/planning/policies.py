"""Policies: the plan that follows from what ranks have agreed on.

static   torch's rule, in the order in which rank 0's gradients were ready in the first step
ready    the same limits; buckets are launched in the order in which their last gradient is ready
planned  of `ready`, `static` and the optimum the plan whose last gradient is unpacked first, by the cost model
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..config import CapPolicy
from .bucketing import BucketCaps
from .plan import ParameterKind, Plan, learned_plan
from .planner import choose, optimum
from .timeline import Problem


def static_plan(kinds: Sequence[ParameterKind], caps: BucketCaps, cap_policy: CapPolicy, order: Sequence[int]) -> Plan:
    """The plan of the policy `static`.

    Args:
        kinds: of all parameters.
        caps: limits.
        cap_policy: how the limits are applied.
        order: every parameter once, the first ready first.

    Returns:
        The plan.
    """
    return learned_plan(kinds, caps, cap_policy, order, share=False)


def ready_plan(
    kinds: Sequence[ParameterKind], caps: BucketCaps, cap_policy: CapPolicy, order: Sequence[int], *, share: bool
) -> Plan:
    """The plan of the policy `ready`: no bucket that is ready waits for one that is not.

    Args:
        kinds: of all parameters.
        caps: limits.
        cap_policy: how the limits are applied.
        order: every parameter once, the first ready first.
        share: buckets of mixed dtypes are allowed.

    Returns:
        The plan.
    """
    place = {number: position for position, number in enumerate(order)}
    plan = learned_plan(kinds, caps, cap_policy, order, share=share)
    return tuple(sorted(plan, key=lambda members: max(place[number] for number in members)))


def best_plan(problem: Problem, others: Mapping[str, Plan]) -> tuple[str, Plan]:
    """The plan of the policy `planned`.

    Args:
        problem: as ranks have agreed on it; its cap limits the optimum, not the other plans.
        others: the plans of `ready` and `static`, by name.

    Returns:
        The name of the best plan in the model, "optimum" or a name in `others`, and the plan.
    """
    return choose(problem, {**others, "optimum": optimum(problem)})
