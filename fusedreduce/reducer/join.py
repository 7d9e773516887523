"""JoinShadows: the shadow collectives of a rank that has run out of inputs while others still have some (join).

In place of forward and backward it issues the same collectives as the others, in the same order, with zeros.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..buckets.grad_bucket import GradBucket
from ..buckets.stats.grad_stats import GradStats, Shadow
from ..comm.waiting import wait_for
from .pipeline import Pipeline
from .plans import Plans
from .wire_schedule import WireSchedule


class JoinShadows:
    """The steps of a rank without inputs.

    Args:
        pipeline: has the buckets.
        plans: says whether plans follow measurements now.
        wires: takes part for this rank in the comparison of what encodings lose.
        observed: takes part for this rank in the gradient statistics.
    """

    def __init__(self, pipeline: Pipeline, plans: Plans, wires: WireSchedule, observed: GradStats) -> None:
        self._pipeline = pipeline
        self._plans = plans
        self._wires = wires
        self._observed = observed
        self._shadows: list[Shadow] = []

    def begin_step(self) -> list[GradBucket]:
        """Begins a step; call it after `Reducer.agree` and `Reducer.rebuild`.

        Returns:
            Zeros for every bucket, in launch order, each to be given to `run`.
        """
        self._pipeline.begin_round()
        if self._plans.measured:
            self._pipeline.issued += self._plans.scheduler.open_round(None)
        self._shadows = []
        return [reduction.shadow() for reduction in self._pipeline.buckets.reductions]

    def run(self, bucket: GradBucket) -> Callable[[], None]:
        """Takes part in one bucket's collective with zeros.

        Args:
            bucket: from `begin_step`.

        Returns:
            A function that waits for the collective.
        """
        reduction, communicator = self._pipeline.buckets.reductions[bucket.index()], self._pipeline.maker.communicator
        pending = reduction.run_shadow(bucket)
        if pending is None:
            return _nothing
        self._pipeline.issued += 1
        self._shadows.append((bucket, pending))

        def complete() -> None:
            self._pipeline.maker.phases.issue_all()
            what = f"the reduction of {reduction.members.label}, in which this rank takes part without inputs,"
            wait_for(pending, what, communicator)

        return complete

    def used_map(self, *, joined: bool) -> torch.Tensor:
        """On how many ranks each parameter was used in the latest step.

        Args:
            joined: return zeros instead, for the sum in which the caller takes part now.

        Returns:
            int32 per parameter.
        """
        self._pipeline.issued += joined
        used = self._pipeline.used
        return used.local() if joined or used.last is None else used.last

    def end_step(self) -> None:
        """Ends a step: takes part in the collectives after the last bucket, and in agreeing on a plan.

        Raises:
            NonFiniteGradientError, AgreementError, CollectiveError: as on the other ranks.
        """
        plans, pipeline, kinds = self._plans, self._pipeline, self._pipeline.maker.sparse_kinds
        plans.note_order()
        for one in pipeline.collectives:
            pipeline.issued += one.shadow()
        for complete in [self.run(one.shadow()) for one in pipeline.buckets.sparse(kinds.learn())]:
            complete()
        for number in kinds.place:
            kinds.of_step.agreed_kind(number)  # raises if the others do
        plans.scheduler.complete()
        self._wires.complete()
        pipeline.close_round(None)
        shadows, self._shadows = self._shadows, []
        pipeline.issued += self._observed.end_shadow_step(shadows, pipeline.rounds)
        self._observed.check()


def _nothing() -> None: ...
