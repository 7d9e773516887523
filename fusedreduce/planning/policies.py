"""Policies: how a plan follows from what ranks have agreed on.

static   torch's rule, in the order in which rank 0's gradients came in the first step
ready    the same limits; buckets are launched in the order in which their last gradient is ready
planned  of `ready`, `static` and the optimum the one whose last gradient, says the cost model, is unpacked first
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..config import CapPolicy
from .bucketing import BucketCaps
from .plan import ParameterKind, Plan, learned_plan
from .planner import choose, optimum
from .timeline import Problem


def static_plan(kinds: Sequence[ParameterKind], caps: BucketCaps, cap_policy: CapPolicy, order: Sequence[int]) -> Plan:
    """torch's rule.

    Args:
        kinds: of all parameters.
        caps: limits.
        cap_policy: how they are meant.
        order: every parameter once, the first ready first.
    """
    return learned_plan(kinds, caps, cap_policy, order, share=False)


def ready_plan(
    kinds: Sequence[ParameterKind], caps: BucketCaps, cap_policy: CapPolicy, order: Sequence[int], *, share: bool
) -> Plan:
    """The same limits, launched by the readiness of each bucket's last gradient: none waits for a later one.

    Args:
        kinds: of all parameters.
        caps: limits.
        cap_policy: how they are meant.
        order: every parameter once, the first ready first.
        share: buckets of mixed dtypes are allowed.
    """
    place = {number: position for position, number in enumerate(order)}
    plan = learned_plan(kinds, caps, cap_policy, order, share=share)
    return tuple(sorted(plan, key=lambda members: max(place[number] for number in members)))


def best_plan(problem: Problem, others: Mapping[str, Plan]) -> tuple[str, Plan]:
    """The policy `planned`.

    Args:
        problem: what ranks have agreed on; the optimum keeps to its cap, the others to what they were cut by.
        others: the plans of `ready` and `static`, by name.

    Returns:
        The best in the model, and its name: "optimum" or one of the others'.
    """
    return choose(problem, {**others, "optimum": optimum(problem)})
