"""Several lanes on one channel: groups, and parameters that stay alone.

Buckets are launched by the place of their last member. Each lane's best cuts depend on the others' buckets, so lanes
are cut in turn, each among the buckets of the others, until that gains nothing, from the best of a few first cuts.
That is never worse than those, and no proof: where the ways to cut are few, `exact.py` looks at all of them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence

from .beside_groups import earliest_beside
from .bucket_group import Job, Lane
from .cuts import earliest
from .plan import Plan
from .timeline import Problem

Cuts = list[list[int]]  # per lane: starts of its buckets, from the end
Score = tuple[int, int]  # when the last collective ends (fs), number of buckets

# A third of a second on a slow core.
TURN_STEPS = 400_000


def lanes_of(problem: Problem) -> list[Lane]:
    """One per group, in the order of their first members; a parameter that stays alone is a lane of one."""
    lanes: dict[object, list[int]] = {}
    for place, number in enumerate(problem.order):
        key = ("alone", number) if number in problem.alone else ("group", problem.groups[number])
        lanes.setdefault(key, []).append(place)
    return [Lane(problem, places) for places in lanes.values()]


def plan_of(lanes: Sequence[Lane], cuts: Cuts) -> Plan:
    """The buckets in launch order."""
    found = [
        (lane.places[end], tuple(lane.members[start:end]))
        for lane, starts in zip(lanes, cuts, strict=True)
        for start, end in lane.buckets(starts)
    ]
    return tuple(members for _, members in sorted(found))


def score_of(lanes: Sequence[Lane], cuts: Cuts) -> Score:
    """What is minimised."""
    return _score(job for lane, starts in zip(lanes, cuts, strict=True) for job in lane.jobs(starts))


def cut_in_turn(problem: Problem, lanes: Sequence[Lane]) -> Cuts:
    """Cuts the lanes one after the other, each among the others' buckets, from the best of `first_cuts` on.

    Args:
        problem: what is cut.
        lanes: its lanes.
    """
    cuts = min(first_cuts(problem, lanes), key=lambda cuts: score_of(lanes, cuts))
    best = score_of(lanes, cuts)
    jobs = [lane.jobs(starts) for lane, starts in zip(lanes, cuts, strict=True)]
    turns = [index for index, lane in enumerate(lanes) if len(lane) > 1]
    left = TURN_STEPS
    turn = idle = 0
    while idle < len(turns) and left > 0:
        index = turns[turn % len(turns)]
        others = sorted(job for other, part in enumerate(jobs) if other != index for job in part)
        starts, steps = earliest_beside(lanes[index], others, left)
        own = lanes[index].jobs(starts)
        score = _score([*others, *own])
        left, turn, idle = left - steps, turn + 1, idle + 1
        if score < best:
            best, idle, cuts[index], jobs[index] = score, 0, starts, own
    return cuts


def first_cuts(problem: Problem, lanes: Sequence[Lane]) -> list[Cuts]:
    """Cuts to begin with: buckets filled to the cap, from either side; each lane as if alone; all as if one.

    Args:
        problem: what is cut.
        lanes: its lanes.
    """
    filled = [lane.filled() for lane in lanes]
    shared = sum(len(lane) > 1 for lane in lanes)
    if not shared:
        return [filled]
    everything = Lane(problem, range(len(problem.order)), split=shared)
    common = earliest(everything)
    split = [
        sorted({bisect_left(lane.places, start) - 1 for start in common} - {len(lane)}, reverse=True) for lane in lanes
    ]
    return [filled, [lane.filled_forward() for lane in lanes], [earliest(lane) for lane in lanes], split]


def _score(jobs: Iterable[Job]) -> Score:
    launched = sorted(jobs)
    packs = done = 0
    for _, ready, pack, wire in launched:
        packs += pack
        done = max(done, ready + packs) + wire
    return done, len(launched)
