"""Several groups on one channel, of which a parameter that stays alone is one.

Buckets are launched by the place of their last member, so each group's best cuts depend on the others' buckets. A few
cuts are made without regard to that, of which the planner takes the best. (To cut the groups in turn, each among the
others' buckets, and to search all cuts of small models ends a step at most 0.2 % earlier: docs/performance.md.)
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from .bucket_group import BucketGroup
from .cuts import earliest
from .plan import Plan
from .timeline import Problem

Cuts = list[list[int]]  # per group: starts of its buckets, from the end
Score = tuple[int, int]  # when the last collective ends (fs), number of buckets


def groups_of(problem: Problem) -> list[BucketGroup]:
    """The groups of a problem, by their first members; a parameter that stays alone is a group of one."""
    groups: dict[object, list[int]] = {}
    for place, number in enumerate(problem.order):
        key = ("alone", number) if number in problem.alone else ("group", problem.groups[number])
        groups.setdefault(key, []).append(place)
    return [BucketGroup(problem, places) for places in groups.values()]


def plan_of(groups: Sequence[BucketGroup], cuts: Cuts) -> Plan:
    """The buckets in launch order."""
    buckets = [
        (group.places[end], tuple(group.members[start:end]))
        for group, starts in zip(groups, cuts, strict=True)
        for start, end in group.buckets(starts)
    ]
    return tuple(members for _, members in sorted(buckets))


def score_of(groups: Sequence[BucketGroup], cuts: Cuts) -> Score:
    """The score of cuts, which is minimised."""
    jobs = sorted(job for group, starts in zip(groups, cuts, strict=True) for job in group.jobs(starts))
    packs = done = 0
    for _, ready, pack, wire in jobs:
        packs += pack
        done = max(done, ready + packs) + wire
    return done, len(jobs)


def ways_to_cut(problem: Problem, groups: Sequence[BucketGroup]) -> list[Cuts]:
    """Cuts to choose from: buckets filled to the cap, from either end; each group as if alone; all groups as if one.

    Args:
        problem: to be solved.
        groups: its groups.
    """
    filled = [group.filled() for group in groups]
    shared = sum(len(group) > 1 for group in groups)
    if not shared:
        return [filled]
    everything = BucketGroup(problem, range(len(problem.order)), split=shared)
    common = earliest(everything)
    split = [
        sorted({bisect_left(group.places, start) - 1 for start in common} - {len(group)}, reverse=True)
        for group in groups
    ]
    return [filled, [group.filled_forward() for group in groups], [earliest(group) for group in groups], split]
