"""BoundedStalenessMode: a step is applied k steps later. DelayedMode: what it shares with the asynchronous mode."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from ...buckets.reduction import Reduction
from ...buckets.step_feature import Ended
from ...buckets.tensors import no_autograd
from ...config import FlushReport
from ...errors import FusedReduceError
from . import steps_in_flight
from .gradient_stash import GradientStash
from .mode import DelayedAverages, Mode
from .steps import Steps
from .steps_in_flight import StepInFlight

NO_SYNC_WAITS = (
    "gradients of backwards under no_sync() are not reduced yet: first run the synchronised backward that they belong "
    "to, or zero_grad(set_to_none=True)"
)


class DelayedMode(Mode):
    """The part of a mode that keeps averages of earlier steps apart from the gradients of backwards.

    Args:
        stash: its content outlives a change between two such modes.
        late: of the reducer.
    """

    stash: GradientStash

    def __init__(self, stash: GradientStash, late: DelayedAverages) -> None:
        self.stash = stash
        self._late = late

    def drop_steps(self) -> None:
        """Drops the stash, and forgets how the latest step ended but for its loss scale."""
        self.stash.drop()
        self._late.latest = Ended(0, scale=self._late.landed_scale)


class BoundedStalenessMode(DelayedMode):
    """The collectives of a step stay in flight while later steps run.

    Args:
        staleness: by how many steps averages come later than their own step; at least 1.
        stash, late: see `DelayedMode`.
    """

    def __init__(self, staleness: int, stash: GradientStash, late: DelayedAverages) -> None:
        super().__init__(stash, late)
        self._staleness = staleness
        self._in_flight: deque[StepInFlight] = deque()  # oldest first

    # Between steps

    def drop_steps(self) -> None:
        """Drops the stash and the steps in flight."""
        super().drop_steps()
        self.release()

    def release(self) -> None:
        """Drops the steps in flight, and counts them as given up; there is no communicator to close."""
        self._late.given_up += len(self._in_flight)
        self._in_flight.clear()

    def stats(self) -> dict[str, int | str]:
        """Number of steps in flight."""
        return {"steps_under_way": len(self._in_flight)}

    # A step

    def end_step(self, steps: Steps, launched: Sequence[Reduction]) -> Ended:
        """Leaves the step in flight, and applies the oldest one if more than `staleness` are."""
        detachable = steps.buckets.detachable()
        self._in_flight.append(
            StepInFlight(
                number=steps.rounds + 1,
                flights=[(one, one.detach_flight()) for one in detachable],
                scale=steps.observed.units.scale_of_step(),
                used=steps.used.detach_sum(),
                non_finite=steps.observed.detach_exchange(),
                buckets=steps.buckets,
            )
        )
        if len(self._in_flight) > self._staleness:
            ended = self._apply_oldest(steps)
        else:
            for parameter in steps.maker.parameters.tensors:
                parameter.grad = None
            ended = Ended(None)
        for one in detachable:
            one.rotate_wire()
        return ended

    # What is outstanding

    def pending(self) -> str:
        """Says how many steps are in flight."""
        return f"{len(self._in_flight)} steps are in flight" if self._in_flight else ""

    def flush(
        self,
        steps: Steps,
        step: Callable[[], None] | None,
        optimizers: Sequence[Optimizer],
        buffers: Sequence[torch.Tensor],
    ) -> FlushReport:
        """Applies every step in flight, in order; `step` follows each."""
        if self.stash.local():
            raise FusedReduceError(f"flush() while {NO_SYNC_WAITS}")
        landed = 0
        while self._in_flight:
            self.stash.stash_unused()
            try:
                with no_autograd():
                    ended = self._apply_oldest(steps)
                    steps.end_statistics(ended)
            except BaseException as error:
                steps.fail(error)
                raise
            self.stash.put_back()
            self._late.latest = ended
            self._late.flushed += 1
            landed += 1
            steps.observed.raises()
            if step is not None:
                step()
        return FlushReport(steps=landed)

    def state_dict(self, steps: Steps) -> dict[str, Any]:
        """The averages of the steps in flight; waits for them. `.grad` stays as it is."""
        parameters = steps.maker.parameters.tensors
        before = [parameter.grad for parameter in parameters]
        if self._in_flight:
            steps.observed.begin_stale_write()  # their statistics take the place of those of what `.grad` holds
        try:
            with no_autograd():
                for step in self._in_flight:
                    step.keep_averages(steps)
        finally:
            for parameter, gradient in zip(parameters, before, strict=True):
                parameter.grad = gradient
        for one in steps.buckets.detachable():
            one.rotate_wire()
        return steps_in_flight.state_of(self._in_flight, steps)

    def load_state_dict(self, steps: Steps, state: Mapping[str, Any]) -> None:
        """Puts the steps of `state` in flight again, of which there may be `staleness`."""
        self._in_flight.extend(steps_in_flight.load(state, steps, most=self._staleness))

    # Within

    def _apply_oldest(self, steps: Steps) -> Ended:
        steps.observed.begin_stale_write()
        step = self._in_flight[0]
        step.apply(steps)
        self._in_flight.popleft()
        return Ended(step.number, elsewhere=step.buckets is not steps.buckets, scale=step.scale)
