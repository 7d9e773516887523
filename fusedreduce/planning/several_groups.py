"""Several groups on one channel, of which a parameter that stays alone is one.

Buckets are launched by the place of their last member. Each group's best cuts depend on the others' buckets, so groups
are cut in turn, each among the buckets of the others, until that gains nothing, from the best of a few initial cuts.
This is a heuristic, never worse than the initial cuts; for small models `exact.py` then searches all cuts.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence

from .beside_groups import earliest_beside
from .bucket_group import BucketGroup, Job
from .cuts import earliest
from .plan import Plan
from .timeline import Problem

Cuts = list[list[int]]  # per group: starts of its buckets, from the end
Score = tuple[int, int]  # when the last collective ends (fs), number of buckets

# A third of a second on a slow core.
TURN_STEPS = 400_000


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
    return _score(job for group, starts in zip(groups, cuts, strict=True) for job in group.jobs(starts))


def cut_in_turn(problem: Problem, groups: Sequence[BucketGroup]) -> Cuts:
    """Cuts the groups in turn, each among the others' buckets, beginning with the best of `first_cuts`.

    Args:
        problem: to be solved.
        groups: its groups.
    """
    cuts = min(first_cuts(problem, groups), key=lambda cuts: score_of(groups, cuts))
    best = score_of(groups, cuts)
    jobs = [group.jobs(starts) for group, starts in zip(groups, cuts, strict=True)]
    turns = [index for index, group in enumerate(groups) if len(group) > 1]
    left = TURN_STEPS
    turn = idle = 0
    while idle < len(turns) and left > 0:
        index = turns[turn % len(turns)]
        others = sorted(job for other, part in enumerate(jobs) if other != index for job in part)
        starts, steps = earliest_beside(groups[index], others, left)
        own = groups[index].jobs(starts)
        score = _score([*others, *own])
        left, turn, idle = left - steps, turn + 1, idle + 1
        if score < best:
            best, idle, cuts[index], jobs[index] = score, 0, starts, own
    return cuts


def first_cuts(problem: Problem, groups: Sequence[BucketGroup]) -> list[Cuts]:
    """Initial cuts: buckets filled to the cap, from either end; each group as if alone; all groups as if one.

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


def _score(jobs: Iterable[Job]) -> Score:
    launched = sorted(jobs)
    packs = done = 0
    for _, ready, pack, wire in launched:
        packs += pack
        done = max(done, ready + packs) + wire
    return done, len(launched)
