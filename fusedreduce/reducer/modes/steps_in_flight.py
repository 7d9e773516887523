"""Steps under way: launched, and not landed, where averages may come later than their own step (BoundedStaleness).

    end of step t, t < k     its collectives are taken along; every `.grad` is None
    end of step t, t >= k    step t - k lands: its sums are unpacked into the gradients that step t has just packed

What belongs to one step travels with it: a wire per bucket, the loss scale that is on it, which parameters were used,
what was told of non-finite gradients. So plans may change, and scales, while steps are under way.
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


class Lands(Protocol):
    """A reduction, as far as landing goes."""

    members: Members

    def apply(self, flight: Any, unused: frozenset[int], unscaling: Unscaling) -> None:
        """Waits for what was parted with, and writes it into the gradients, whichever are there by now."""
        ...


@dataclass(eq=False)
class StepInFlight:
    """A synchronised step whose buckets are launched, and not finished.

    Args:
        number: of the step, from 1.
        flights: by reduction what it has parted with, in launch order.
        unscaling: takes its loss scale off.
        used: its parameters in use; None: all are.
        told: its exchange of what is not finite; None: there is none.
        buckets: which it was launched in.
    """

    number: int
    flights: Sequence[tuple[Lands, Any]]
    unscaling: Unscaling
    used: UsedSum | None
    told: Started | None
    buckets: BucketSet | None


class StepsInFlight:
    """The steps of one reducer that are under way, oldest first.

    Args:
        parameters: all of the reducer's.
    """

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self._parameters = parameters
        self._steps: deque[StepInFlight] = deque()
        self.given_up = 0

    def __len__(self) -> int:
        """How many."""
        return len(self._steps)

    def __iter__(self) -> Any:
        """From the oldest on."""
        return iter(self._steps)

    def add(self, step: StepInFlight) -> None:
        """One more."""
        self._steps.append(step)

    def withhold(self) -> None:
        """No step has landed in the place of the latest: there are no gradients."""
        for parameter in self._parameters:
            parameter.grad = None

    def apply_oldest(
        self, write: Callable[[Members, Callable[[], None]], None], complete: Callable[[Started], None]
    ) -> StepInFlight:
        """The oldest step's averages become the gradients, None where no rank used a parameter.

        Args:
            write: calls what writes a bucket's gradients, on the stream where that belongs.
            complete: waits for what was told of a step.
        """
        step = self._steps[0]
        self.write(step, write)
        if step.used is not None:
            step.used.complete()
        if step.told is not None:
            complete(step.told)
        self._steps.popleft()
        return step

    def write(self, step: StepInFlight, write: Callable[[Members, Callable[[], None]], None]) -> None:
        """A step's averages become the gradients; see `apply_oldest`."""
        for reduction, flight in step.flights:
            unused = unused_of(reduction.members, step.used)
            for number in unused:
                self._parameters[number].grad = None

            def into(reduction: Lands = reduction, flight: Any = flight, unused: frozenset[int] = unused) -> None:
                reduction.apply(flight, unused, step.unscaling)

            write(reduction.members, into)

    def keep_averages(self, averaged: Callable[[StepInFlight], Sequence[tuple[Lands, Any]]]) -> None:
        """Waits for all of them; `averaged` makes of each what lands in the place of its flights. Gradients stay."""
        before = [parameter.grad for parameter in self._parameters]
        try:
            for step in self._steps:
                if step.buckets is not None:
                    step.flights, step.used, step.buckets = averaged(step), None, None
        finally:
            for parameter, gradient in zip(self._parameters, before, strict=True):
                parameter.grad = gradient

    def drop_steps(self) -> None:
        """None of them lands any more."""
        self.given_up += len(self._steps)
        self._steps.clear()


def unused_of(members: Members, used: UsedSum | None) -> frozenset[int]:
    """Parameters of a bucket that no rank has a gradient for."""
    return frozenset() if used is None else used.nowhere(members.numbers, lambda: members.label)
