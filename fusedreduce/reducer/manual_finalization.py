"""ManualFinalization: steps that the caller ends, with torch 2.15's words: other work runs beside the collectives.

reducer.require_manual_finalization(True)
loss.backward()               # ends with every bucket in flight, and local gradients
...                           # no gradient may be used
reducer.finalize_backward()   # exactly once: the gradients are averages
"""

from __future__ import annotations

from ..errors import FusedReduceError
from . import validation
from .reports import ReportingReducer
from .state import ARMED, LAUNCHED


class ManualFinalization(ReportingReducer):
    """See `Reducer`."""

    def require_manual_finalization(self, required: bool) -> None:
        """Sets whether `finalize_backward` ends each synchronised step, and nothing else does, from the next one on.

        A backward then ends with its collectives in flight and local gradients (as views of a bucket: undefined ones).
        The next forward, optimizers, `zero_grad` and this package's norms, clipping and loss scalers then raise. No
        optimizer takes a closure.

        Args:
            required: whether the caller ends each step.

        Raises:
            FusedReduceError: a backward is expected or not finalized, or the reducer cannot be used.
            ValueError: the sync mode is not Synchronous.
        """
        with self.cycle.lock:
            if required == self.cycle.manual:
                return
            if self.state is not LAUNCHED:
                self.cycle.check_finalized()
            if self.state in (ARMED, LAUNCHED):
                raise FusedReduceError(
                    "set_manual_finalization_required cannot be called after forward while a backward pass is "
                    "expected or in progress. Call it before forward or after backward finalization."
                )
            validation.check_mode(self.config.sync_mode, {"manual backward finalization": required})
            self.cycle.manual = required
            self._attend_optimizers()

    @property
    def should_finalize_after_backward(self) -> bool:
        """Whether `finalize_backward` is not possible within the backward of the step that is armed.

        It is not in the first step, in steps that are profiled (to plan by, or for a trace), with
        find_unused_parameters, and where ranks share an autograd thread.
        """
        cycle = self.cycle
        first = self._plans.wants_order or cycle.counting() or self.find_unused_parameters
        return cycle.manual and (first or bool(self.pipeline.observers) or not cycle.waits_in_backward)

    def finalize_backward(self) -> None:
        """Ends the step, once, where `require_manual_finalization` is set: waits for it and writes the gradients.

        Call it when every gradient is ready: after backward, or within it unless `should_finalize_after_backward`.

        Raises:
            FusedReduceError: it is not required; gradients are missing; nothing is to be finalized; or it was called
                within a backward where it cannot be.
            CollectiveError, NonFiniteGradientError: as `finalize`.
        """
        cycle = self.cycle
        with cycle.lock:
            if not cycle.manual:
                raise FusedReduceError(
                    "finalize_backward() called but manual backward finalization is not required. Set "
                    "require_manual_backward_finalization to true first."
                )
            if cycle.state is ARMED and cycle.step.begun:
                if cycle.counting() or not cycle.step.all_ready():
                    raise FusedReduceError(
                        "finalize_backward() called before all DDP buckets were ready. next_bucket_="
                        f"{cycle.step.next_bucket} buckets_.size()={len(self.plan)}. Call finalize_backward() only "
                        "after all DDP-managed parameters have computed gradients."
                    )
                if self.should_finalize_after_backward:
                    raise FusedReduceError(
                        f"rank {self.communicator.rank}: this step cannot be finalized within its backward: call "
                        "finalize_backward() after backward() where should_finalize_after_backward is true"
                    )
                cycle.end_backward(cycle.step)
            elif cycle.state is not LAUNCHED:
                cycle.check_finalized()
                raise FusedReduceError(
                    "finalize_backward() called but no gradient reduction requires finalization. This can happen if "
                    "no_sync() is active or finalize_backward() was already called for this backward pass."
                )
            cycle.complete()
