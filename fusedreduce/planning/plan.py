"""Plans: which parameters form which bucket, and the order in which buckets are launched; the same on every rank."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from ..config import CapPolicy
from .bucketing import UNLIMITED_BYTES, BucketCaps, assign_by_size

Plan = tuple[tuple[int, ...], ...]
_NAMES_SHOWN = 50


@dataclass(frozen=True)
class ParameterKind:
    """What a plan depends on, per parameter.

    Args:
        size_bytes: of its gradient.
        group: parameters of one group may share a bucket (dtype and device).
        wide_group: the same where buckets of mixed dtypes are allowed.
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
    """
    more = len(names) - _NAMES_SHOWN
    return f"bucket {index} ({', '.join(names[:_NAMES_SHOWN])}{f' and {more} more' if more > 0 else ''})"


def first_plan(kinds: Sequence[ParameterKind], caps: BucketCaps, cap_policy: CapPolicy, *, learns: bool) -> Plan:
    """Before anything is known: in the reverse of the order of registration, which is near that of backward.

    Args:
        kinds: of all parameters.
        caps: limits.
        cap_policy: how they are meant.
        learns: an order will be learned in the first step, which then uses one bucket per dtype and device. (A bucket
            launched early could otherwise meet collectives of the user's own in another order on another rank.)
    """
    limits = (UNLIMITED_BYTES,) if learns and not caps.listed_bytes else caps.limits_bytes
    return tuple(reversed(_cut(kinds, limits, cap_policy, None, share=False)))


def learned_plan(
    kinds: Sequence[ParameterKind], caps: BucketCaps, cap_policy: CapPolicy, order: Sequence[int], *, share: bool
) -> Plan:
    """In the order in which gradients became ready.

    Args:
        kinds: of all parameters.
        caps: limits.
        cap_policy: how they are meant.
        order: every parameter once, the first ready first.
        share: buckets of mixed dtypes are allowed.
    """
    return tuple(_cut(kinds, caps.limits_bytes, cap_policy, order, share=share))


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


def check_groups(plan: Plan, kinds: Sequence[ParameterKind], *, share: bool) -> None:
    """Refuses a plan from outside whose buckets cannot be reduced together.

    Args:
        plan: names every parameter once.
        kinds: of all parameters.
        share: buckets of mixed dtypes are allowed.

    Raises:
        ValueError: with the first bucket that mixes what cannot be mixed.
    """
    for index, members in enumerate(plan):
        groups = {kinds[number].wide_group if share else kinds[number].group for number in members}
        if len(groups) > 1 or (len(members) > 1 and any(kinds[number].alone for number in members)):
            raise ValueError(
                f"bucket {index} of the plan that was given puts parameters {members} together, which differ in dtype "
                "or device, or have sparse gradients: it was made for another wire, policy or model"
            )
