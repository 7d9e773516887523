"""The planner: which parameters share a bucket, so that the last collective of a backward ends first.

Pure: the same numbers give the same plan on every rank. Launch order is that in which buckets become ready, and within
a group a bucket is a run of parameters in that order. `timeline.py` holds the model, `cuts.py` the search in one group
(exact), `several_groups.py` and `exact.py` what several groups need beyond it.
"""

from __future__ import annotations

from collections.abc import Mapping

from .cuts import earliest
from .exact import better
from .plan import Plan
from .several_groups import cut_in_turn, lanes_of, plan_of, score_of
from .timeline import MISSING_NS, Problem, Timeline, ready_order, timeline

__all__ = ["MISSING_NS", "Problem", "Timeline", "choose", "optimum", "ready_order", "timeline"]


def optimum(problem: Problem) -> Plan:
    """The buckets whose last collective ends first; of those plans one with the fewest buckets.

    Args:
        problem: what is known.

    Returns:
        Buckets in launch order, their members in ready order; none is above the cap but a parameter that is itself.
        With one group and no parameter apart, nothing in the model ends earlier; with several, nothing does where they
        are small, and else it is never later than each group filled up to the cap.
    """
    lanes = lanes_of(problem)
    if not lanes:
        return ()
    if len(lanes) == 1:
        return plan_of(lanes, [earliest(lanes[0])])
    cuts = cut_in_turn(problem, lanes)
    return plan_of(lanes, better(lanes, score_of(lanes, cuts)) or cuts)


def choose(problem: Problem, candidates: Mapping[str, Plan]) -> tuple[str, Plan]:
    """The plan that the model says is best.

    Args:
        problem: what they are plans for.
        candidates: by name.

    Returns:
        The one whose last gradient is unpacked first; of equal ones that whose last collective ends first, then that
        with the fewest buckets, then the first named. (`optimum` looks at collectives alone: with more buckets, or a
        larger last one, it may end them earlier and have their gradients unpacked later.)

    Raises:
        ValueError: no candidates, or one that does not name every parameter once.
    """
    if not candidates:
        raise ValueError("candidates must name at least one plan")

    def score(name: str) -> tuple[int, int, int]:
        found = timeline(candidates[name], problem)
        return found.finish, found.last_done, len(candidates[name])

    name = min(candidates, key=score)
    return name, candidates[name]
