"""ReportingReducer: what a reducer tells of its steps, its plan and its wires."""

from __future__ import annotations

from .base import ReducerBase
from .plans import Forecast
from .wire_schedule import ParameterWire


class ReportingReducer(ReducerBase):
    """See `Reducer`."""

    def get_backward_stats(self) -> list[int]:
        """When each gradient was ready in the latest step.

        Returns:
            Per parameter, ns on the host clock from the end of forward. For times of every step see `bucket_times`.
        """
        return self.cycle.ordered.ready_times()

    def bucket_times(self) -> list[tuple[int, int]]:
        """When each bucket of the latest step was ready and when it was launched.

        Returns:
            Per bucket (ready, launched), ns on the host clock since backward began.
        """
        return self.cycle.step.bucket_times()

    def plan_json(self) -> str:
        """The plan in use, as JSON for a checkpoint or a file: `ReduceConfig(plan=...)` then keeps to it."""
        return self._plans.json(self.plan)

    def forecast(self) -> Forecast | None:
        """What the planner's model predicts of a step with the plan in use; None where nothing was measured (yet)."""
        return self._plans.forecast(self.plan)

    def stats(self) -> dict[str, int | str]:
        """Counters of this rank since the reducer was built.

        Returns:
            steps (synchronised backwards), buckets, buckets_reduced (in the latest step), collectives (since the
            communicator was set), wire_bytes (payload of one step, padding included; without sparse and hooked buckets;
            with encoded wires in two levels the fp32 elements that are added up within a node, of which fewer bytes
            cross nodes, see docs/wires.md), padding_bytes (of those), wire_allocations, restrided (gradients that were
            copied because their strides were not their parameter's), plans (changes of plan that the ranks have agreed
            on since the communicator was set), path (triton, interpreter, torch, none), state. In other sync modes also
            steps_under_way and steps_given_up, or the counters of contributions. With error feedback also
            residuals_dropped (of parameters, and of parts of them in a shard), for which the host waits.
        """
        feedback = self.pipeline.maker.feedback
        return {
            "steps": self.steps,
            "buckets_reduced": self.cycle.buckets_reduced,
            "plans": self._plans.scheduler.changes,
            "state": self.state.value,
            **self.pipeline.stats(),
            **({} if feedback is None else {"residuals_dropped": feedback.dropped()}),
        }

    def bucket_bytes(self) -> list[int]:
        """Bytes of the gradients in each bucket, in launch order; padding not included."""
        return [sum(self._plans.kinds[index].size_bytes for index in members) for members in self.plan]

    def wire_report(self) -> dict[str, ParameterWire]:
        """By parameter's name what its gradient travels on, and how much its encoding has lost when last measured.

        Measured with ReduceConfig(least_sqnr_db=...) only; the same on every rank. A change takes effect with the next
        step.
        """
        with self.cycle.lock:
            return self.wires.report()
