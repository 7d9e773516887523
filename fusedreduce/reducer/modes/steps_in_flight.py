"""Steps in flight: launched and not applied, where averages come later than their own step (BoundedStaleness).

    end of step t, t < k     its collectives stay in flight; every `.grad` is None
    end of step t, t >= k    step t - k is applied: its sums are unpacked into the gradients that step t has just packed

A step in flight keeps all that belongs to it: a wire per bucket, its loss scale, the used parameters, the exchange of
non-finite gradients. So plans and loss scales may change meanwhile.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ...buckets.bucket_set import BucketSet
from ...buckets.loss_scale import Unscaling
from ...buckets.reduction import Members
from ...buckets.stats.non_finite import Started
from ..unused_parameters import UsedSum


class Applies(Protocol):
    """A reduction that can apply a sum of an earlier step."""

    members: Members

    def apply(self, flight: Any, unused: frozenset[int], unscaling: Unscaling) -> None:
        """Waits for a sum and writes it into the gradients that exist by now.

        Args:
            flight: what `detach_flight` has returned.
            unused: numbers of the parameters that no rank has used.
            unscaling: removes the loss scale of that step.
        """
        ...


@dataclass(eq=False)
class StepInFlight:
    """A synchronised step whose buckets are launched, and not finished.

    Args:
        number: of the step, from 1.
        flights: (reduction, what its `detach_flight` has returned), in launch order.
        unscaling: removes its loss scale.
        used: the sum of its used map; None: every parameter counts as used.
        non_finite: its exchange of non-finite gradients; None: there is none.
        buckets: the set that it was launched in; None: its averages are known, as tensors.
    """

    number: int
    flights: Sequence[tuple[Applies, Any]]
    unscaling: Unscaling
    used: UsedSum | None
    non_finite: Started | None
    buckets: BucketSet | None


class StepsInFlight:
    """The steps in flight of one reducer, oldest first.

    Args:
        parameters: all parameters of the reducer.
    """

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self._parameters = parameters
        self._steps: deque[StepInFlight] = deque()

    def __len__(self) -> int:
        """The number of steps in flight."""
        return len(self._steps)

    def __iter__(self) -> Any:
        """Iterates from the oldest step on."""
        return iter(self._steps)

    def add(self, step: StepInFlight) -> None:
        """Adds the latest step."""
        self._steps.append(step)

    def clear_gradients(self) -> None:
        """Sets every gradient to None, because no step was applied at the end of the latest."""
        for parameter in self._parameters:
            parameter.grad = None

    def apply_oldest(
        self, write: Callable[[Members, Callable[[], None]], None], complete: Callable[[Started], None]
    ) -> StepInFlight:
        """Makes the oldest step's averages the gradients; None where no rank has used a parameter.

        Args:
            write: calls what writes a bucket's gradients, on the stream for that.
            complete: waits for a step's exchange of non-finite gradients.

        Returns:
            The step, which is no longer in flight.
        """
        step = self._steps[0]
        self.write(step, write)
        if step.used is not None:
            step.used.complete()
        if step.non_finite is not None:
            complete(step.non_finite)
        self._steps.popleft()
        return step

    def write(self, step: StepInFlight, write: Callable[[Members, Callable[[], None]], None]) -> None:
        """Makes a step's averages the gradients; see `apply_oldest`."""
        for reduction, flight in step.flights:
            unused = unused_of(reduction.members, step.used)
            for number in unused:
                self._parameters[number].grad = None

            def into(reduction: Applies = reduction, flight: Any = flight, unused: frozenset[int] = unused) -> None:
                reduction.apply(flight, unused, step.unscaling)

            write(reduction.members, into)

    def keep_averages(self, averaged: Callable[[StepInFlight], Sequence[tuple[Applies, Any]]]) -> None:
        """Waits for all steps and keeps their averages as tensors; `.grad` stays as it is.

        Args:
            averaged: makes a step's averages the gradients, and returns what replaces its flights.
        """
        before = [parameter.grad for parameter in self._parameters]
        try:
            for step in self._steps:
                if step.buckets is not None:
                    step.flights, step.used, step.buckets = averaged(step), None, None
        finally:
            for parameter, gradient in zip(self._parameters, before, strict=True):
                parameter.grad = gradient

    def drop_steps(self) -> int:
        """Drops all steps: none is applied. Returns how many there were."""
        dropped = len(self._steps)
        self._steps.clear()
        return dropped


def unused_of(members: Members, used: UsedSum | None) -> frozenset[int]:
    """Numbers of the parameters of a bucket that no rank has used."""
    return frozenset() if used is None else used.nowhere(members.numbers, lambda: members.label)
