"""DelayedAverages: the part of a reducer for sync modes in which averages come later than their own step.

It keeps the averages of earlier steps in `.grad` apart from what backwards make (modes/gradient_stash.py), and applies
steps in flight in `flush` or saves them in a checkpoint. In the synchronous mode it does nothing. Called under the
reducer's lock.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from ..buckets.loss_scale import LossScale
from ..buckets.stats.grad_stats import GradStats
from ..buckets.tensors import any_gradient
from ..config import FlushReport, SyncMode, is_synchronous
from ..errors import AgreementError, CollectiveError, FusedReduceError
from .modes.asynchronous import AsynchronousMode
from .modes.average_parameters import equalize
from .modes.gradient_stash import GradientStash
from .modes.step_end import Ended
from .pipeline import Pipeline

_NO_SYNC_WAITS = (
    "gradients of backwards under no_sync() are not reduced yet: first run the synchronised backward that they belong "
    "to, or zero_grad(set_to_none=True)"
)


class DelayedAverages:
    """The part of a reducer for sync modes other than Synchronous.

    Args:
        pipeline: has the steps in flight.
        observed: statistics of the gradients.

    Attributes:
        stash: gradients that no backward of this step has made; None in the synchronous mode.
        withheld: the latest step has left no gradients, because averages come later.
        landed_scale: loss scale of the step whose averages were applied last.
        flushed: number of steps that `flush` has applied.
    """

    def __init__(self, pipeline: Pipeline, observed: GradStats) -> None:
        self._pipeline = pipeline
        self._observed = observed
        self._parameters = pipeline.maker.parameters
        self.withheld = False
        self.landed_scale: LossScale | None = None
        self.flushed = 0
        self.stash = self._made(pipeline.maker.config.sync_mode)

    # A step

    def ended(self, ended: Ended) -> None:
        """Notes how a step has ended, or that an earlier one was applied."""
        self.withheld, self.landed_scale = ended.number is None, ended.scale

    def drop_step(self) -> None:
        """Drops the stash of a step that was abandoned."""
        if self.stash is not None:
            self.stash.drop()
        self.withheld = False

    # Between steps

    def check_settled(self) -> None:
        """Checks that the sync mode may be changed.

        Raises:
            FusedReduceError: steps are in flight, or averages are outstanding on some rank.
        """
        pending = self.pending()
        if pending:
            raise FusedReduceError(f"{pending}: call flush() on every rank, then set_sync_mode()")

    def pending(self) -> str:
        """What has not been applied, in words; empty: nothing."""
        ends = self._pipeline.ends
        if len(ends.in_flight):
            return f"{len(ends.in_flight)} steps are in flight"
        if ends.own is not None and not ends.own.settled:
            return "averages of steps since the last flush() are outstanding"
        return ""

    def set_mode(self, mode: SyncMode, *, local: bool) -> None:
        """Switches to another sync mode.

        Args:
            mode: the new one.
            local: `.grad` may hold gradients of backwards under no_sync, which the next step reduces.
        """
        if is_synchronous(mode):
            if self.stash is not None:
                self.stash.put_back()
            self.stash = None
        elif self.stash is None:
            self.stash = self._made(mode)
            if local and self.stash is not None:
                self.stash.keep()
        self.withheld = False

    def flush(
        self,
        optimizers: Sequence[Optimizer],
        step: Callable[[], None] | None,
        buffers: Sequence[torch.Tensor],
        failed: Callable[[BaseException], None],
    ) -> FlushReport:
        """Applies every step in flight; see `Reducer.flush`.

        Args:
            optimizers: whose states become the same on all ranks (asynchronous mode).
            step: called after each step that is applied.
            buffers: become rank 0's (asynchronous mode).
            failed: called with an error that `step` has not raised.
        """
        stash, own = self.stash, self._pipeline.ends.own
        if stash is None:
            return FlushReport()
        if own is not None:
            return self._flush_contributions(own, stash, optimizers, step, buffers, failed)
        if stash.local():
            raise FusedReduceError(f"flush() while {_NO_SYNC_WAITS}")
        landed = 0
        while len(self._pipeline.ends.in_flight):
            stash.stash_unused()
            try:
                ended = self._pipeline.apply_oldest()
            except BaseException as error:
                failed(error)
                raise
            stash.put_back()
            self.ended(ended)
            self.flushed += 1
            landed += 1
            self._observed.check()
            if step is not None:
                step()
        return FlushReport(steps=landed)

    def state_dict(self, failed: Callable[[BaseException], None]) -> dict[str, Any]:
        """`Reducer.state_dict`; `failed` as in `flush`."""
        own = self._pipeline.ends.own
        try:
            return self._pipeline.state_dict() if own is None else own.state()
        except BaseException as error:
            failed(error)
            raise

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """`Reducer.load_state_dict`."""
        ends = self._pipeline.ends
        if len(ends.in_flight):
            raise FusedReduceError("steps are in flight: call flush(), or reset(), before load_state_dict()")
        if ends.own is not None:
            ends.own.load_state(state)
        elif state:
            self._pipeline.load_state_dict(state)

    # Within

    def _made(self, mode: SyncMode) -> GradientStash | None:
        return None if is_synchronous(mode) else GradientStash(self._parameters)

    def _flush_contributions(
        self,
        own: AsynchronousMode,
        stash: GradientStash,
        optimizers: Sequence[Optimizer],
        step: Callable[[], None] | None,
        buffers: Sequence[torch.Tensor],
        failed: Callable[[BaseException], None],
    ) -> FlushReport:
        maker = self._pipeline.maker
        stopped: Exception | None = None
        try:
            if stash.local():
                own.drain(f"flush() while {_NO_SYNC_WAITS}")  # raises, on every rank
            stash.stash_unused()
            try:
                landed = own.drain().landed
            finally:
                stash.put_back()
            try:
                if step is not None and any_gradient(self._parameters):
                    step()
            except Exception as error:
                stopped = error
            problem = "" if stopped is None else f"its step raised {type(stopped).__name__}: {stopped}"
            drift = equalize(self._parameters, maker.names, optimizers, buffers, maker.communicator, problem)
        except CollectiveError as error:
            failed(error)
            raise
        except AgreementError:
            if stopped is not None:
                raise stopped from None
            raise
        self.flushed += 1
        return FlushReport(landed, drift.largest, drift.relative)
