"""Sync modes: what becomes of a step's gradients when its backward ends. One base class (mode.py), three modes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...buckets.bucket_set import BucketMaker
from ...buckets.reduction import Reduction
from ...buckets.step_feature import Ended
from ...config import Asynchronous, is_synchronous, staleness
from . import steps_in_flight
from .asynchronous import AsynchronousMode
from .bounded_staleness import BoundedStalenessMode
from .gradient_stash import GradientStash
from .mode import DelayedAverages, Mode, Steps


class SynchronousMode(Mode):
    """See `Mode`. Every step ends with its own averages."""

    def end_step(self, steps: Steps, launched: Sequence[Reduction]) -> Ended:
        """Waits for the buckets in flight, and writes the gradients."""
        return Ended(steps.rounds + 1, steps.finish_buckets(launched))

    def state_dict(self, steps: Steps) -> dict[str, Any]:
        """What encoded wires keep: the number of steps, and this rank's residuals."""
        config, feedback = steps.maker.config, steps.maker.feedback
        if not (config.wire_after or config.stochastic_rounding or config.error_feedback):
            return {}
        state = steps_in_flight.state_of((), steps)
        return state if feedback is None else {**state, "residuals": feedback.own()}

    def load_state_dict(self, steps: Steps, state: Mapping[str, Any]) -> None:
        """Takes a checkpoint without steps in flight, with every rank's residuals; see `Mode`."""
        feedback, residuals = steps.maker.feedback, state.get("residuals", {})
        if feedback is not None:
            feedback.check(residuals)
        steps_in_flight.load(state, steps, most=0)
        if feedback is not None:
            feedback.load(residuals, steps.maker.group.communicator)


def make_mode(maker: BucketMaker, late: DelayedAverages, stash: GradientStash | None) -> Mode:
    """Makes the sync mode of `maker.config`; `late` is the reducer's, `stash` that of the mode before it."""
    mode = maker.config.sync_mode
    if is_synchronous(mode):
        return SynchronousMode()
    stash = stash or GradientStash(maker.parameters)
    if isinstance(mode, Asynchronous):
        return AsynchronousMode(maker, mode.max_in_flight, stash, late)
    return BoundedStalenessMode(staleness(mode), stash, late)
