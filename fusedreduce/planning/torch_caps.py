"""TorchCaps: a plan as torch's `bucket_cap_mb_list`, limits with which c10d's rule cuts where the plan does.

c10d closes a bucket once it has reached its limit. So any limit up to the bucket's bytes, and above those bytes without
its last member, gives that bucket; of that range the number with the fewest digits is taken. The list's n-th limit is
that of the n-th bucket of every group (dtype and device): with one group the cuts are the plan's, with several only
where the ranges of their n-th buckets overlap; elsewhere one group has precedence, and the best such list is taken.

Example, one group, sizes 4 4 4 15 15 MB, plan {4 4} {4 15 15}: the limits may be 5 to 8 and 20 to 34 MB; 8 and 34.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass

from .bucketing import MIB, assign_by_size
from .plan import Plan

_MOST_DIGITS = 20
_Range = tuple[int, int]  # bytes: above the first, up to the second


@dataclass(frozen=True)
class TorchCaps:
    """Limits, and how close to a plan they come.

    Args:
        caps_mb: the list for DistributedDataParallel(bucket_cap_mb_list=...), in MiB; the last one repeats.
        plan: what torch makes of them, if gradients become ready in the given order.
        kept: how many buckets of the wanted plan it has.
        exact: whether it has no others.
    """

    caps_mb: tuple[float, ...]
    plan: Plan
    kept: int
    exact: bool


def nearest(
    plan: Plan,
    sizes_bytes: Sequence[int],
    groups: Sequence[Hashable],
    order: Sequence[int],
    *,
    alone: Collection[int] = (),
    cost: Callable[[Plan], int] | None = None,
) -> TorchCaps:
    """Finds the limits that come closest to a plan.

    Args:
        plan: buckets in launch order, each of one group.
        sizes_bytes: of each parameter's gradient.
        groups: per parameter, what must be equal within a bucket of torch's: dtype and device.
        order: every parameter once, in the order in which gradients will be ready on rank 0.
        alone: parameters that get a bucket of their own (sparse gradients), to which limits do not apply.
        cost: of a plan, to be minimised, such as the model's time; None: the number of buckets that differ.

    Returns:
        The limits. With one group, and buckets that are stretches of `order`, they give the plan itself. (A parameter
        without elements may be in the next bucket, because no limit can keep it in its own.)

    Raises:
        ValueError: `plan` or `order` does not have every parameter once.
    """
    count = len(sizes_bytes)
    if sorted(order) != list(range(count)) or sorted(number for bucket in plan for number in bucket) != list(
        range(count)
    ):
        raise ValueError(f"plan and order must name each of {count} parameters once")
    place = {number: position for position, number in enumerate(order)}
    wanted = {frozenset(bucket) for bucket in plan}
    best: TorchCaps | None = None
    best_cost: tuple[int, ...] = ()
    for ranges in _lists(_ranges(plan, sizes_bytes, groups, place, frozenset(alone))):
        caps_mb = tuple(_short(*one) for one in _without_tail(ranges))
        limits = [int(cap_mb * MIB) for cap_mb in caps_mb]
        made = tuple(assign_by_size(sizes_bytes, groups, limits, order=order, alone=alone))
        kept = sum(frozenset(bucket) in wanted for bucket in made)
        left = _left(made, sizes_bytes, groups, limits, frozenset(alone))
        new_cost = (cost(made) if cost else 0, len(made) - kept, left, len(caps_mb))
        if best is None or new_cost < best_cost:
            best, best_cost = TorchCaps(caps_mb, made, kept, kept == len(made) == len(plan)), new_cost
    assert best is not None
    return best


def _ranges(
    plan: Plan, sizes_bytes: Sequence[int], groups: Sequence[Hashable], place: dict[int, int], alone: Collection[int]
) -> list[list[_Range]]:
    """Per group, by bytes in descending order, the ranges of its buckets' limits; none for buckets without bytes."""
    result: dict[Hashable, list[tuple[int, _Range]]] = {}
    for bucket in plan:
        filled = sorted((number for number in bucket if sizes_bytes[number]), key=place.__getitem__)
        if filled and filled[0] not in alone:
            size_bytes = sum(sizes_bytes[number] for number in filled)
            limit = (size_bytes - sizes_bytes[filled[-1]], size_bytes)
            result.setdefault(groups[filled[0]], []).append((place[filled[-1]], limit))
    # torch counts a group's buckets in the order in which they close.
    rows = [[limit for _, limit in sorted(row)] for row in result.values()]
    return sorted(rows, key=lambda row: -sum(high for _, high in row))


def _lists(rows: list[list[_Range]]) -> list[list[_Range]]:
    """The lists to try: each group with precedence once; the largest, and the smallest, limit of any group."""
    if not rows:
        return [[(0, MIB)]]  # nothing to limit
    length = max(map(len, rows))
    columns = [[row[at] for row in rows if at < len(row)] for at in range(length)]
    result = [
        [max(column, key=lambda one: one[1]) for column in columns],
        [min(column, key=lambda one: one[1]) for column in columns],
    ]
    for front in rows:
        ordered = [front, *(row for row in rows if row is not front)]
        result.append([_overlap([row[at] for row in ordered if at < len(row)]) for at in range(length)])
    return result[2:] + result[:2]


def _left(
    plan: Plan, sizes_bytes: Sequence[int], groups: Sequence[Hashable], limits: Sequence[int], alone: Collection[int]
) -> int:
    """How many groups' last buckets do not reach their limit; torch launches those last, in an order of its own."""
    latest = {groups[bucket[0]]: bucket for bucket in plan if bucket[0] not in alone}
    counts = Counter(groups[bucket[0]] for bucket in plan if bucket[0] not in alone)
    return sum(
        sum(map(sizes_bytes.__getitem__, bucket)) < limits[min(counts[group], len(limits)) - 1]
        for group, bucket in latest.items()
    )


def _overlap(ranges: Sequence[_Range]) -> _Range:
    """The first range, reduced to its overlap with each other range that overlaps it."""
    low, high = ranges[0]
    for other_low, other_high in ranges[1:]:
        if max(low, other_low) < min(high, other_high):
            low, high = max(low, other_low), min(high, other_high)
    return low, high


def _without_tail(ranges: Sequence[_Range]) -> list[_Range]:
    """The list, shortened where one limit serves its whole end, because the last limit repeats."""
    result = list(ranges)
    while len(result) > 1:
        low, high = max(result[-1][0], result[-2][0]), min(result[-1][1], result[-2][1])
        if low >= high:
            break
        result[-2:] = [(low, high)]
    return result


def _short(low: int, high: int) -> float:
    """The number of MiB with the fewest decimals in a range of bytes, as torch converts it."""
    for digits in range(_MOST_DIGITS):
        scale: int = 10**digits
        cap_mb = (high * scale // MIB) / scale
        if low < int(cap_mb * MIB) <= high:
            return cap_mb
    return high / MIB
