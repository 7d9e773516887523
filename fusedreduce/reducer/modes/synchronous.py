"""SynchronousMode: every step ends with its own averages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...buckets.bucket_set import BucketSet
from ...buckets.reduction import Reduction
from ...comm.protocol import Communicator
from ...config import FlushReport
from . import steps_in_flight
from .mode import Ended, FlushRequest, Steps


class SynchronousMode:
    """See `Mode`. Nothing outlives a step."""

    together = True
    delays = False

    def open(self) -> None:
        """Does nothing."""

    def set_buckets(self, buckets: BucketSet) -> None:
        """Does nothing."""

    def set_communicator(self, communicator: Communicator) -> None:
        """Does nothing."""

    def drop_steps(self) -> None:
        """Does nothing."""

    def release(self) -> None:
        """Does nothing."""

    def stats(self) -> dict[str, int | str]:
        """Returns no counters."""
        return {}

    def hold_gradients(self) -> None:
        """Does nothing."""

    def restore_gradients(self, *, local: bool = False) -> None:
        """Does nothing."""

    def end_step(self, steps: Steps, launched: Sequence[Reduction]) -> Ended:
        """Waits for the buckets in flight, and writes the gradients."""
        return Ended(steps.rounds + 1, steps.finish_buckets(launched))

    def optimizer_steps(self) -> None:
        """Does nothing."""

    def pending(self) -> str:
        """Nothing is ever outstanding."""
        return ""

    def flush(self, steps: Steps, asked: FlushRequest) -> FlushReport:
        """Applies nothing."""
        return FlushReport()

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
            feedback.load(residuals, steps.maker.communicator)
