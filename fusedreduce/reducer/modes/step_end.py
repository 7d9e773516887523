"""Ends: how synchronised steps end in sync modes other than Synchronous.

    BoundedStaleness    the step stays in flight, and an earlier one is applied in its place (steps_in_flight.py)
    Asynchronous        gradients are contributed and corrected, at this rank's own pace (asynchronous.py)

In both something outlives its step, and buckets may be rebuilt meanwhile. Called under the reducer's lock.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from ...buckets.bucket_set import BucketMaker, BucketSet
from ...buckets.loss_scale import LossScale
from ...buckets.reduction import Members
from ...buckets.stats.grad_stats import GradStats
from ...comm.protocol import Communicator
from ...config import Asynchronous, staleness
from ..unused_parameters import UsedMap
from . import staleness_state
from .asynchronous import AsynchronousMode
from .steps_in_flight import StepInFlight, StepsInFlight

# Calls what writes a bucket's gradients, on the stream for that.
Write = Callable[[Members, Callable[[], None]], None]


class Ended(NamedTuple):
    """How a step has ended.

    Args:
        number: of the step whose averages the gradients are; None: there are none.
        left: numbers of the parameters whose gradients were not written.
        elsewhere: that step was launched in other buckets than those in use.
        scale: its loss scale, which was removed.
    """

    number: int | None
    left: Sequence[int] = ()
    elsewhere: bool = False
    scale: LossScale | None = None


class Ends:
    """How the steps of one reducer end.

    Args:
        maker: has the parameters and the sync mode.
        observed: statistics of the gradients.
        used: the map of used parameters.

    Attributes:
        staleness: by how many steps averages come later than their own step.
        in_flight: the steps in flight.
        own: the asynchronous mode, which replaces launching and finishing; None in other modes.
    """

    def __init__(self, maker: BucketMaker, observed: GradStats, used: UsedMap) -> None:
        self._parameters = maker.parameters
        self._observed = observed
        self._used = used
        self.in_flight = StepsInFlight(maker.parameters)
        self.own: AsynchronousMode | None = None
        self.staleness = 0
        self.set_mode(maker, BucketSet((), maker))

    # Between steps

    def set_mode(self, maker: BucketMaker, buckets: BucketSet) -> None:
        """Switches to the sync mode of `maker`, when no step is in flight."""
        mode = maker.config.sync_mode
        self.staleness = staleness(mode)
        if self.own is not None:
            self.own.release()
            self.own = None
        if isinstance(mode, Asynchronous):
            self.own = AsynchronousMode(maker, mode.max_in_flight)
            self.set_buckets(buckets)
        self._used.alone = self._observed.alone = self.own is not None

    def set_buckets(self, buckets: BucketSet) -> None:
        """Switches to new buckets."""
        if self.own is not None:
            self.own.set_buckets([one.members for one in buckets.reductions])

    def set_communicator(self, communicator: Communicator) -> None:
        """Switches to `communicator`. `drop_steps` must follow."""
        if self.own is not None:
            self.own.set_communicator(communicator)

    def drop_steps(self) -> None:
        """Drops the steps in flight."""
        self.in_flight.drop_steps()

    def release(self) -> None:
        """Drops the steps in flight and releases what the mode holds."""
        self.in_flight.drop_steps()
        if self.own is not None:
            self.own.release()

    def stats(self) -> dict[str, int | str]:
        """The sync mode's part of `Reducer.stats`."""
        counted = {"steps_under_way": len(self.in_flight), "steps_given_up": self.in_flight.given_up}
        return {**counted, **({} if self.own is None else self.own.stats())}

    # A step

    def end_later(self, buckets: BucketSet, number: int, write: Write) -> Ended:
        """Ends a launched step, which stays in flight; the oldest one is applied if more than `staleness` are.

        Args:
            buckets: those in use.
            number: of the step, from 1.
            write: see `Write`.

        Returns:
            How the step has ended.
        """
        detachable = buckets.detachable()
        step = StepInFlight(
            number=number,
            flights=[(one, one.detach_flight()) for one in detachable],
            unscaling=self._observed.units.unscaling(),
            used=self._used.detach_sum(),
            non_finite=self._observed.detach_exchange(),
            buckets=buckets,
        )
        self.in_flight.add(step)
        if len(self.in_flight) > self.staleness:
            ended = self.apply_oldest(buckets, write)
        else:
            self.in_flight.clear_gradients()
            ended = Ended(None)
        for one in detachable:
            one.rotate_wire()
        return ended

    def apply_oldest(self, buckets: BucketSet, write: Write) -> Ended:
        """Applies the oldest step in flight."""
        self._observed.begin_stale_write()
        step = self.in_flight.apply_oldest(write, self._observed.complete)
        return Ended(step.number, elsewhere=step.buckets is not buckets, scale=step.unscaling.scale)

    def contribute(self, buckets: BucketSet) -> None:
        """Ends a step in the asynchronous mode."""
        assert self.own is not None
        self.own.end_step(self._observed, buckets.streams)
        for bucket in buckets.packed():
            bucket.drop_gathered()

    def observe(self, ended: Ended) -> int:
        """Completes the statistics of the gradients; returns how many collectives this issued."""
        if ended.number is None or self.own is not None:
            self._observed.end_without_gradients()
        elif ended.elsewhere:
            self._observed.end_measured_step(ended.number)
        else:
            return self._observed.end_step(ended.number, ended.left)
        return 0

    # Checkpoints of steps in flight

    def state_dict(self, maker: BucketMaker, buckets: BucketSet, rounds: int, write: Write) -> dict[str, Any]:
        """The steps in flight as plain values, tensors by parameter name; waits for them."""
        if not self.staleness:
            return {}

        def averaged(step: StepInFlight) -> Any:
            for parameter in self._parameters:
                parameter.grad = None
            if step.non_finite is not None:
                self._observed.complete(step.non_finite)
            self.in_flight.write(step, write)
            return staleness_state.flights(maker.parameters, maker.names, [one.grad for one in maker.parameters])

        self.in_flight.keep_averages(averaged)
        for one in buckets.detachable():
            one.rotate_wire()
        return staleness_state.dump(self.in_flight, maker.names, world_size=maker.communicator.size, rounds=rounds)

    def load_state_dict(self, maker: BucketMaker, state: Mapping[str, Any]) -> int:
        """Restores the steps in flight of `state_dict`; returns the number of rounds. Raises as `averages.load`."""
        steps, rounds = staleness_state.load(
            state,
            maker.parameters,
            maker.names,
            world_size=maker.communicator.size,
            most=self.staleness,
            check_finite=maker.config.check_finite != "off",
        )
        for step in steps:
            self.in_flight.add(step)
        return rounds
