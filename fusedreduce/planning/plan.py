"""Plans: which parameters form which bucket, and the order in which buckets are launched; the same on every rank."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from ..config import CapPolicy
from ..errors import shortened
from .bucketing import UNLIMITED_BYTES, BucketCaps, assign_by_size

Plan = tuple[tuple[int, ...], ...]
_NAMES_SHOWN = 50


@dataclass(frozen=True)
class ParameterKind:
    """What a plan depends on, of one parameter.

    Args:
        size_bytes: of its gradient.
        group: parameters of equal group may share a bucket (dtype and device).
        wide_group: the group where buckets of mixed dtypes are allowed.
        alone: it gets a bucket of its own (a sparse gradient).
    """

    size_bytes: int
    group: Hashable
    wide_group: Hashable
    alone: bool = False


def bucket_label(index: int, names: Sequence[str]) -> str:
    """A bucket as errors, stall reports and torch's profiler name it: "bucket 3 (0.weight, 0.bias)".

    Args:
        index: its place in the launch order.
        names: its parameters' names; at most 50 are shown.

    Returns:
        The label.
    """
    return f"bucket {index} ({shortened(names, _NAMES_SHOWN)})"


def first_plan(kinds: Sequence[ParameterKind], caps: BucketCaps, cap_policy: CapPolicy, *, learns: bool) -> Plan:
    """The plan of the first step: in reverse order of registration, which is close to that of backward.

    Args:
        kinds: of all parameters.
        caps: limits.
        cap_policy: how the limits are applied.
        learns: the first step shows an order, and uses one bucket per dtype and device. (Otherwise a bucket launched
            early could come before the user's own collectives on one rank and after them on another.)
    """
    limits = (UNLIMITED_BYTES,) if learns and not caps.listed_bytes else caps.limits_bytes
    return tuple(reversed(_cut(kinds, limits, cap_policy, None, share=False)))


def static_plan(kinds: Sequence[ParameterKind], caps: BucketCaps, cap_policy: CapPolicy, order: Sequence[int]) -> Plan:
    """The plan of the policy `static`: torch's rule, in the order in which gradients became ready.

    Args:
        kinds: of all parameters.
        caps: limits.
        cap_policy: how the limits are applied.
        order: every parameter once, the first ready first.

    Returns:
        The plan.
    """
    return tuple(_cut(kinds, caps.limits_bytes, cap_policy, order, share=False))


def ready_plan(
    kinds: Sequence[ParameterKind], caps: BucketCaps, cap_policy: CapPolicy, order: Sequence[int], *, share: bool
) -> Plan:
    """The plan of the policy `ready`: as `static`, but no bucket that is ready waits for one that is not.

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
    plan = _cut(kinds, caps.limits_bytes, cap_policy, order, share=share)
    return tuple(sorted(plan, key=lambda members: max(place[number] for number in members)))


def _cut(
    kinds: Sequence[ParameterKind],
    limits: Sequence[int],
    cap_policy: CapPolicy,
    order: Sequence[int] | None,
    *,
    share: bool,
) -> list[tuple[int, ...]]:
    groups = [kind.wide_group if share else kind.group for kind in kinds]
    alone = [index for index, kind in enumerate(kinds) if kind.alone]
    sizes = [kind.size_bytes for kind in kinds]
    return assign_by_size(sizes, groups, limits, order=order, alone=alone, cap_policy=cap_policy)


def regrouped(plan: Plan, kinds: Sequence[ParameterKind], *, share: bool) -> Plan:
    """`plan`, with buckets split whose parameters cannot be reduced together any more, as their wires have changed.

    Args:
        plan: has every parameter once.
        kinds: of all parameters.
        share: buckets of mixed dtypes are allowed.

    Returns:
        The plan; parts of a bucket are in its place, by the first parameter of each.
    """
    made: list[tuple[int, ...]] = []
    for members in plan:
        parts: dict[Hashable, list[int]] = {}
        for number in members:
            parts.setdefault(kinds[number].wide_group if share else kinds[number].group, []).append(number)
        made += map(tuple, parts.values())
    return tuple(made)


def check_groups(plan: Plan, kinds: Sequence[ParameterKind], *, share: bool) -> None:
    """Refuses a given plan with buckets whose parameters cannot be reduced together.

    Args:
        plan: has every parameter once.
        kinds: of all parameters.
        share: buckets of mixed dtypes are allowed.

    Raises:
        ValueError: naming the first such bucket.
    """
    for index, members in enumerate(plan):
        groups = {kinds[number].wide_group if share else kinds[number].group for number in members}
        if len(groups) > 1 or (len(members) > 1 and any(kinds[number].alone for number in members)):
            raise ValueError(
                f"bucket {index} of the plan that was given puts parameters {members} together, which differ in dtype "
                "or device, or have sparse gradients: it was made for another wire, policy or model"
            )
