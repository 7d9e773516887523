"""Ends: how synchronised steps end, where not with their own averages.

    BoundedStaleness    what was launched is taken along, and an earlier step lands in its place (later/)
    Asynchronous        gradients are contributed and corrected, at this rank's own pace (asynchronous/)

In both something outlives its step: buckets may be laid out anew meanwhile. Called under the reducer's lock.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from ...buckets.bucket_set import BucketMaker, BucketSet
from ...buckets.loss_scale import LossScale
from ...buckets.reduction import Members
from ...buckets.stats.grad_stats import Observed
from ...comm.protocol import Communicator
from ...config import Asynchronous, staleness
from ..unused_parameters import UsedMap
from . import staleness_state as averages
from .asynchronous import AsynchronousMode
from .steps_in_flight import StepInFlight, StepsInFlight

# Calls what writes a bucket's gradients, on the stream where that belongs.
Write = Callable[[Members, Callable[[], None]], None]


class Ended(NamedTuple):
    """How a step has ended.

    Args:
        number: of the step whose averages the gradients are; None: there are none.
        left: numbers of the parameters whose gradients are as they were.
        elsewhere: it was launched in other buckets than those in use.
        scale: its loss scale, which has come off.
    """

    number: int | None
    left: Sequence[int] = ()
    elsewhere: bool = False
    scale: LossScale | None = None


class Ends:
    """How the steps of one reducer end.

    Args:
        maker: has the parameters and the mode.
        observed: is told what happens to the gradients.
        used: parameters that have a gradient.

    Attributes:
        staleness: by how many steps averages come later than their own.
        under_way: steps that end later than with their own backward.
        own: in the asynchronous mode, what takes the place of launching and finishing.
    """

    def __init__(self, maker: BucketMaker, observed: Observed, used: UsedMap) -> None:
        self._parameters = maker.parameters
        self._observed = observed
        self._used = used
        self.under_way = StepsInFlight(maker.parameters)
        self.own: AsynchronousMode | None = None
        self.staleness = 0
        self.set_mode(maker, BucketSet((), maker))

    # Between steps

    def set_mode(self, maker: BucketMaker, buckets: BucketSet) -> None:
        """Steps end as the mode of `maker` says from now on; none is under way."""
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
        """The buckets are new."""
        if self.own is not None:
            self.own.set_buckets([one.members for one in buckets.reductions])

    def set_communicator(self, communicator: Communicator) -> None:
        """Goes on with other ranks. To be followed by `drop_steps`."""
        if self.own is not None:
            self.own.set_communicator(communicator)

    def drop_steps(self) -> None:
        """Nothing that is under way lands any more."""
        self.under_way.drop_steps()

    def release(self) -> None:
        """As `drop_steps`, for good."""
        self.under_way.drop_steps()
        if self.own is not None:
            self.own.release()

    def stats(self) -> dict[str, int | str]:
        """The part of `Reducer.stats` that is counted here."""
        counted = {"steps_under_way": len(self.under_way), "steps_given_up": self.under_way.given_up}
        return {**counted, **({} if self.own is None else self.own.stats())}

    # A step

    def end_later(self, buckets: BucketSet, number: int, write: Write) -> Ended:
        """Takes along what was launched; an earlier step lands in its place, if there are as many as there may be."""
        detachable = buckets.detachable()
        step = StepInFlight(
            number=number,
            flights=[(one, one.detach_flight()) for one in detachable],
            unscaling=self._observed.units.unscaling(),
            used=self._used.detach_sum(),
            told=self._observed.detach_exchange(),
            buckets=buckets,
        )
        self.under_way.add(step)
        if len(self.under_way) > self.staleness:
            ended = self.apply_oldest(buckets, write)
        else:
            self.under_way.withhold()
            ended = Ended(None)
        for one in detachable:
            one.rotate_wire()
        return ended

    def apply_oldest(self, buckets: BucketSet, write: Write) -> Ended:
        """The oldest step under way lands."""
        self._observed.begin_stale_write()
        step = self.under_way.apply_oldest(write, self._observed.complete)
        return Ended(step.number, elsewhere=step.buckets is not buckets, scale=step.unscaling.scale)

    def contribute(self, buckets: BucketSet) -> None:
        """The end of a step in the asynchronous mode."""
        assert self.own is not None
        self.own.end_step(self._observed, buckets.streams)
        for bucket in buckets.packed():
            bucket.drop_gathered()

    def observe(self, ended: Ended) -> int:
        """Completes what is observed of the gradients; returns the number of collectives that this has issued."""
        if ended.number is None or self.own is not None:
            self._observed.end_without_gradients()
        elif ended.elsewhere:
            self._observed.end_measured_step(ended.number)
        else:
            return self._observed.end_step(ended.number, ended.left)
        return 0

    # Checkpoints of what is under way

    def state_dict(self, maker: BucketMaker, buckets: BucketSet, rounds: int, write: Write) -> dict[str, Any]:
        """What is under way, by parameter name; waits for it."""
        if not self.staleness:
            return {}

        def averaged(step: StepInFlight) -> Any:
            for parameter in self._parameters:
                parameter.grad = None
            if step.told is not None:
                self._observed.complete(step.told)
            self.under_way.write(step, write)
            return averages.flights(maker.parameters, maker.names, [one.grad for one in maker.parameters])

        self.under_way.keep_averages(averaged)
        for one in buckets.detachable():
            one.rotate_wire()
        return averages.dump(self.under_way, maker.names, world_size=maker.communicator.size, rounds=rounds)

    def load_state_dict(self, maker: BucketMaker, state: Mapping[str, Any]) -> int:
        """Goes on with what `state_dict` has given; returns how many rounds there had been. See `averages.load`."""
        steps, rounds = averages.load(
            state,
            maker.parameters,
            maker.names,
            world_size=maker.communicator.size,
            most=self.staleness,
            tells=maker.config.check_finite != "off",
        )
        for step in steps:
            self.under_way.add(step)
        return rounds
