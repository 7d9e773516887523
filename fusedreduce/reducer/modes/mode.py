"""Mode: what becomes of a step's gradients when its backward ends. A reducer has one at a time (modes/__init__.py)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from ...buckets.bucket_set import BucketSet
from ...buckets.loss_scale import LossScale
from ...buckets.reduction import Reduction
from ...buckets.step_feature import Ended
from ...config import FlushReport
from . import steps_in_flight
from .gradient_stash import GradientStash
from .steps import Steps


@dataclass
class DelayedAverages:
    """What optimizers, clipping and loss scalers ask about averages that come later than their own step.

    Args:
        latest: how the latest step has ended, or an earlier one was applied.
        flushed: number of times that averages were applied in `flush`.
        given_up: number of steps in flight that were dropped.
    """

    latest: Ended = Ended(0)
    flushed: int = 0
    given_up: int = 0

    @property
    def withheld(self) -> bool:
        """Whether the latest step has left no gradients, because averages come later."""
        return self.latest.number is None

    @property
    def landed_scale(self) -> LossScale | None:
        """Loss scale of the step whose averages were applied last; None: it had none."""
        return self.latest.scale


class Mode:
    """The synchronous mode of one reducer, and the base class of the others: every step ends with its own averages, and
    nothing outlives it. Called under the reducer's lock.

    Attributes:
        together: ranks are in the same step, and issue its collectives during backward in the order of the plan.
        stash: where averages come later than their own step: keeps those in `.grad`, which the next step must not
            reduce again, apart from what backwards make; optimizers' steps are watched. None: they do not.
    """

    together = True
    stash: GradientStash | None = None

    # Between steps

    def open(self) -> None:
        """Makes the mode's own communicator, once; called by every rank after the ranks have agreed on settings.

        Raises:
            CollectiveError: a rank did not come within the timeout, or they could not be connected.
        """

    def set_buckets(self, buckets: BucketSet) -> None:
        """Switches to new buckets."""

    def new_group(self) -> None:
        """Follows other ranks. `drop_steps` and `open` must follow."""
        self.release()

    def drop_steps(self) -> None:
        """Drops the steps in flight, and what belongs to a step that was given up (reset)."""

    def release(self) -> None:
        """Drops what is in flight and closes the mode's own communicator (close, another mode). May be called twice."""

    def stats(self) -> dict[str, int | str]:
        """The mode's part of `Reducer.stats`."""
        return {}

    # A step

    def end_step(self, steps: Steps, launched: Sequence[Reduction]) -> Ended:
        """Ends a step whose gradients are all there and were not changed since they were packed: here it waits for the
        buckets in flight, and writes the gradients.

        Args:
            steps: the engine.
            launched: the buckets whose collectives are in flight, in launch order; none unless `together`.

        Returns:
            How the step has ended.

        Raises:
            CollectiveError: a peer died, left, or did not answer.
        """
        return Ended(steps.rounds + 1, steps.finish_buckets(launched))

    # What is outstanding

    def pending(self) -> str:
        """What has not been applied, in words; empty: nothing."""
        return ""

    def flush(
        self,
        steps: Steps,
        step: Callable[[], None] | None,
        optimizers: Sequence[Optimizer],
        buffers: Sequence[torch.Tensor],
    ) -> FlushReport:
        """Applies all averages that are outstanding.

        Args:
            steps: the engine.
            step: called after each application of averages; None: nothing is.
            optimizers: whose states become the same on all ranks, unless `together`.
            buffers: become rank 0's, unless `together`.
        """
        return FlushReport()

    def state_dict(self, steps: Steps) -> dict[str, Any]:
        """What is outstanding, for a checkpoint: plain values, tensors by parameter name. Waits for it.

        Here what encoded wires keep: the number of steps, and this rank's residuals.
        """
        config, feedback = steps.maker.config, steps.maker.feedback
        if not (config.wire_after or config.stochastic_rounding or config.error_feedback):
            return {}
        state = steps_in_flight.state_of((), steps)
        return state if feedback is None else {**state, "residuals": feedback.own()}

    def load_state_dict(self, steps: Steps, state: Mapping[str, Any]) -> None:
        """Restores what `state_dict` returned, here with every rank's residuals; called when nothing is `pending`.

        Raises:
            ValueError: `state` is of another model, number of ranks or mode; nothing has been changed.
            AttributeError, KeyError, TypeError: it is damaged; as before.
        """
        feedback, residuals = steps.maker.feedback, state.get("residuals", {})
        if feedback is not None:
            feedback.check(residuals)
        steps_in_flight.load(state, steps, most=0)
        if feedback is not None:
            feedback.load(residuals, steps.maker.group.communicator)
