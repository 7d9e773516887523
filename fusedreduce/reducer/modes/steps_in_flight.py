"""Steps in flight: launched and not applied, where averages come later than their own step (BoundedStaleness).

    end of step t, t < k     its collectives stay in flight; every `.grad` is None
    end of step t, t >= k    step t - k is applied: its sums are unpacked into the gradients that step t has just packed

A step in flight keeps all that belongs to it: a wire per bucket, its loss scale, the used parameters, the exchange of
non-finite gradients. So plans and loss scales may change meanwhile. A checkpoint keeps averages in place of wires: they
are unscaled, in the gradients' dtype, so to copy them gives the bits that unpacking would have given.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...buckets.bucket_set import BucketMaker, BucketSet
from ...buckets.dense import DenseReduction
from ...buckets.loss_scale import LossScale
from ...buckets.reduction import Members
from ...buckets.sparse import SparseReduction
from ...buckets.stats.non_finite import Started
from ..unused_parameters import UsedSum
from . import checkpoint
from .steps import Steps

_MODE = "staleness"  # Synchronous is a staleness of 0


@dataclass(eq=False)
class StepInFlight:
    """A synchronised step whose buckets are launched, and not finished.

    Args:
        number: of the step, from 1.
        scale: its loss scale, which is to be removed; None: there is none.
        non_finite: its exchange of non-finite gradients; None: there is none.
        flights: (reduction, what its `detach_flight` has returned), in launch order.
        used: the sum of its used map; None: every parameter counts as used.
        buckets: the set that it was launched in.
        averages: of all parameters, None where no rank has used one, in place of the three before it (a checkpoint).
    """

    number: int
    scale: LossScale | None
    non_finite: Started | None
    flights: Sequence[tuple[DenseReduction | SparseReduction, Any]] = ()
    used: UsedSum | None = None
    buckets: BucketSet | None = None
    averages: Sequence[torch.Tensor | None] | None = None

    def apply(self, steps: Steps) -> None:
        """Waits for the averages and makes them the gradients; None where no rank has used a parameter."""
        parameters = steps.maker.parameters.tensors
        for parameter, average in zip(parameters, self.averages or (), strict=False):
            parameter.grad = None if average is None else average.to(parameter, copy=True)
        writes = []
        for reduction, flight in self.flights:
            unused = unused_of(reduction.members, self.used)
            for number in unused:
                parameters[number].grad = None
            writes.append((reduction, functools.partial(reduction.apply, flight, unused, self.scale)))
        steps.write(writes)
        if self.used is not None:
            self.used.complete()
        if self.non_finite is not None:
            steps.observed.complete_exchange(self.non_finite)

    def keep_averages(self, steps: Steps) -> None:
        """Waits for the averages and keeps them as tensors. `.grad` is overwritten."""
        for parameter in steps.maker.parameters.tensors:
            parameter.grad = None
        self.apply(steps)
        self.averages = [parameter.grad for parameter in steps.maker.parameters.tensors]
        self.flights, self.used, self.buckets = (), None, None

    def state(self, names: Sequence[str]) -> dict[str, Any]:
        """Its part of a checkpoint, after `keep_averages`."""
        return {
            "step": self.number,
            "loss_scale": None if self.scale is None else float(self.scale.scale.item()),
            "told": None if self.non_finite is None else self.non_finite[1].tolist(),
            "averages": dict(zip(names, self.averages or (), strict=True)),
        }

    @classmethod
    def of_state(cls, state: Mapping[str, Any], maker: BucketMaker) -> StepInFlight:
        """Makes the step of `state`, which is not changed, neither now nor later."""
        device, scale, non_finite = maker.parameters.device, None, None
        if state["loss_scale"] is not None:
            scale = LossScale.of(torch.tensor([state["loss_scale"]], dtype=torch.float32, device=device))
        if maker.config.check_finite != "off":
            done: Any = torch.futures.Future()
            done.set_result(None)
            rows = state["told"] or [[-1, -1]] * maker.group.communicator.size
            non_finite = done, torch.tensor(rows, dtype=torch.int64, device=device)
        averages = checkpoint.in_order(state["averages"], maker, own_dtype=True)
        return cls(int(state["step"]), scale, non_finite, averages=averages)


def state_of(in_flight: Sequence[StepInFlight], steps: Steps) -> dict[str, Any]:
    """The checkpoint of steps whose averages are kept."""
    header, names = checkpoint.header(steps.maker, _MODE), steps.maker.parameters.names
    return {**header, "rounds": steps.rounds, "steps": [step.state(names) for step in in_flight]}


def load(state: Mapping[str, Any], steps: Steps, *, most: int) -> list[StepInFlight]:
    """Makes the steps of `state`, at most `most`, and goes on with its number of rounds."""
    here = checkpoint.header(steps.maker, _MODE)
    if state.get("steps") == []:
        del here["world_size"]  # what else there is, any number of ranks can take up
    checkpoint.check(state, here)
    if state.get("residuals") and steps.maker.feedback is None:
        raise ValueError(
            "this state has residuals of error feedback, which is off here: use error_feedback=True, or delete "
            "state['residuals'] to drop what they hold"
        )
    if len(state["steps"]) > most:
        raise ValueError(
            f"the state holds {len(state['steps'])} steps in flight, but sync_mode allows {most} now: use the mode "
            "that it was saved in, or call flush() before saving"
        )
    loaded = [StepInFlight.of_state(one, steps.maker) for one in state["steps"]]
    steps.rounds = int(state["rounds"])
    return loaded


def unused_of(members: Members, used: UsedSum | None) -> frozenset[int]:
    """Numbers of the parameters of a bucket that no rank has used."""
    return frozenset() if used is None else used.nowhere(members.numbers, lambda: members.label)
