"""BoundedStalenessMode: a step is applied k steps later. DelayedMode: what it shares with the asynchronous mode."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from ...buckets.bucket_set import BucketSet
from ...buckets.reduction import Reduction
from ...comm.protocol import Communicator
from ...config import FlushReport
from ...errors import FusedReduceError
from . import staleness_state
from .gradient_stash import GradientStash
from .mode import DelayedAverages, Ended, Steps
from .steps_in_flight import StepInFlight, StepsInFlight

NO_SYNC_WAITS = (
    "gradients of backwards under no_sync() are not reduced yet: first run the synchronised backward that they belong "
    "to, or zero_grad(set_to_none=True)"
)


class DelayedMode:
    """The part of a mode that keeps averages of earlier steps apart from the gradients of backwards.

    Args:
        stash: of the reducer; its content outlives a change between two such modes.
        late: of the reducer.
    """

    delays = True

    def __init__(self, stash: GradientStash, late: DelayedAverages) -> None:
        self._stash = stash
        self._late = late

    def hold_gradients(self) -> None:
        """See `Mode`."""
        self._stash.stash()

    def restore_gradients(self, *, local: bool = False) -> None:
        """See `Mode`."""
        if not (local and self._stash.local()):
            self._stash.put_back()

    def optimizer_steps(self) -> None:
        """See `Mode`: `flush` must not apply again what an optimizer has stepped with."""
        self._stash.stepped = True

    def drop_steps(self) -> None:
        """See `Mode`: drops the stash."""
        self._stash.drop()
        self._late.withheld = False


class BoundedStalenessMode(DelayedMode):
    """See `Mode`. The collectives of a step stay in flight while later steps run.

    Args:
        staleness: by how many steps averages come later than their own step; at least 1.
        parameters: all parameters of the reducer.
        stash, late: see `DelayedMode`.
    """

    together = True

    def __init__(
        self, staleness: int, parameters: Sequence[torch.Tensor], stash: GradientStash, late: DelayedAverages
    ) -> None:
        super().__init__(stash, late)
        self._staleness = staleness
        self._in_flight = StepsInFlight(parameters)

    # Between steps

    def open(self) -> None:
        """Does nothing."""

    def set_buckets(self, buckets: BucketSet) -> None:
        """Does nothing: a step in flight keeps the buckets that it was launched in."""

    def set_communicator(self, communicator: Communicator) -> None:
        """Does nothing: `drop_steps` follows."""

    def drop_steps(self) -> None:
        """See `Mode`."""
        super().drop_steps()
        self.release()

    def release(self) -> None:
        """See `Mode`."""
        self._late.given_up += self._in_flight.drop_steps()

    def stats(self) -> dict[str, int | str]:
        """See `Mode`."""
        return {"steps_under_way": len(self._in_flight)}

    # A step

    def end_step(self, steps: Steps, launched: Sequence[Reduction]) -> Ended:
        """Leaves the step in flight, and applies the oldest one if more than `staleness` are."""
        detachable = steps.buckets.detachable()
        self._in_flight.add(
            StepInFlight(
                number=steps.rounds + 1,
                flights=[(one, one.detach_flight()) for one in detachable],
                unscaling=steps.observed.units.unscaling(),
                used=steps.used.detach_sum(),
                non_finite=steps.observed.detach_exchange(),
                buckets=steps.buckets,
            )
        )
        if len(self._in_flight) > self._staleness:
            ended = self._apply_oldest(steps)
        else:
            self._in_flight.clear_gradients()
            ended = Ended(None)
        for one in detachable:
            one.rotate_wire()
        return ended

    # What is outstanding

    def pending(self) -> str:
        """See `Mode`."""
        return f"{len(self._in_flight)} steps are in flight" if len(self._in_flight) else ""

    def flush(
        self,
        steps: Steps,
        step: Callable[[], None] | None,
        optimizers: Sequence[Optimizer],
        buffers: Sequence[torch.Tensor],
        failed: Callable[[BaseException], None],
    ) -> FlushReport:
        """Applies every step in flight, in order; `step` follows each."""
        if self._stash.local():
            raise FusedReduceError(f"flush() while {NO_SYNC_WAITS}")
        landed = 0
        while len(self._in_flight):
            self._stash.stash_unused()
            try:
                with torch.no_grad():
                    ended = self._apply_oldest(steps)
                    steps.end_statistics(ended)
            except BaseException as error:
                failed(error)
                raise
            self._stash.put_back()
            self._late.ended(ended)
            self._late.flushed += 1
            landed += 1
            steps.observed.check()
            if step is not None:
                step()
        return FlushReport(steps=landed)

    def state_dict(self, steps: Steps) -> dict[str, Any]:
        """The averages of the steps in flight; waits for them."""
        maker = steps.maker

        def averaged(step: StepInFlight) -> Any:
            for parameter in maker.parameters:
                parameter.grad = None
            if step.non_finite is not None:
                steps.observed.complete(step.non_finite)
            self._in_flight.write(step, steps.write)
            return staleness_state.flights(maker.parameters, maker.names, [one.grad for one in maker.parameters])

        with torch.no_grad():
            self._in_flight.keep_averages(averaged)
            for one in steps.buckets.detachable():
                one.rotate_wire()
        size = maker.communicator.size
        return staleness_state.dump(self._in_flight, maker.names, world_size=size, rounds=steps.rounds)

    def load_state_dict(self, steps: Steps, state: Mapping[str, Any]) -> int:
        """See `Mode`."""
        if len(self._in_flight):
            raise FusedReduceError("steps are in flight: call flush(), or reset(), before load_state_dict()")
        if not state:
            return steps.rounds
        loaded, rounds = staleness_state.load(steps.maker, state, most=self._staleness)
        for step in loaded:
            self._in_flight.add(step)
        return rounds

    # Within

    def _apply_oldest(self, steps: Steps) -> Ended:
        steps.observed.begin_stale_write()
        step = self._in_flight.apply_oldest(steps.write, steps.observed.complete)
        return Ended(step.number, elsewhere=step.buckets is not steps.buckets, scale=step.unscaling.scale)
