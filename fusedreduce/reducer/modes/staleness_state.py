"""Averages of steps in flight as plain tensors: the content of a checkpoint with BoundedStaleness.

    {"version": 1, "world_size": 2, "rounds": 7, "steps": [{"step": 6, "loss_scale": 1024.0, "told": [[-1, -1], ...],
                                                              "averages": {"weight": tensor, "bias": None}}, ...]}

They are by parameter name, unscaled, in the gradients' dtype: to copy them gives the bits that unpacking would have
given, under any plan.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from ...buckets.bucket_set import BucketMaker
from ...buckets.loss_scale import LossScale, Unscaling
from ...buckets.reduction import Members
from .steps_in_flight import StepInFlight

_VERSION = 1


class Averaged:
    """Applies averages that are known already, in place of a reduction.

    Args:
        members: parameters of one device.
    """

    def __init__(self, members: Members) -> None:
        self.members = members

    def apply(self, flight: Sequence[torch.Tensor | None], unused: frozenset[int], unscaling: Unscaling) -> None:
        """Copies the averages into the gradients; None where no rank has used a parameter."""
        for parameter, average in zip(self.members.parameters, flight, strict=True):
            now = parameter.grad
            if average is None:
                parameter.grad = None
            elif now is None or now.layout is not torch.strided or average.layout is not torch.strided:
                parameter.grad = average.clone()
            else:
                now.copy_(average)


class Done:
    """A Pending of a collective that is done."""

    def wait(self) -> None:
        """Returns at once."""

    def ready(self) -> bool:
        """Returns True."""
        return True

    def notify(self, done: Any) -> None:
        """Calls `done` at once."""
        done()

    def future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """A future that is done."""
        future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
        future.set_result([])
        return future


def flights(
    parameters: Sequence[torch.Tensor], names: Sequence[str], averages: Sequence[torch.Tensor | None]
) -> list[tuple[Averaged, list[torch.Tensor | None]]]:
    """The flights of a step whose averages are known, by device; `averages` in order of registration."""
    devices: dict[torch.device, list[int]] = {}
    for number, parameter in enumerate(parameters):
        devices.setdefault(parameter.device, []).append(number)
    found = []
    for index, numbers in enumerate(devices.values()):
        members = Members(
            index,
            tuple(numbers),
            tuple(parameters[number] for number in numbers),
            tuple(names[number] for number in numbers),
            index == len(devices) - 1,
        )
        found.append((Averaged(members), [averages[number] for number in numbers]))
    return found


def dump(steps: Iterable[StepInFlight], names: Sequence[str], *, world_size: int, rounds: int) -> dict[str, Any]:
    """The checkpoint of `steps`, the averages of which are all known."""
    kept = []
    for step in steps:
        averages: list[torch.Tensor | None] = [None] * len(names)
        for reduction, flight in step.flights:
            for number, average in zip(reduction.members.numbers, flight, strict=True):
                averages[number] = average
        scale = step.unscaling.scale
        kept.append(
            {
                "step": step.number,
                "loss_scale": None if scale is None else float(scale.scale.item()),
                "told": None if step.non_finite is None else step.non_finite[1].tolist(),
                "averages": dict(zip(names, averages, strict=True)),
            }
        )
    return {"version": _VERSION, "world_size": world_size, "rounds": rounds, "steps": kept}


def load(maker: BucketMaker, state: Mapping[str, Any], *, most: int) -> tuple[list[StepInFlight], int]:
    """Steps in flight from a checkpoint, which is not changed.

    Args:
        maker: has the parameters, their names, the ranks and the settings of now.
        state: what `dump` returned.
        most: number of steps that may be in flight in the mode now.

    Returns:
        The steps, and the number of rounds.

    Raises:
        ValueError: `state` is damaged, or of another model, number of ranks or mode.
    """
    try:
        return _loaded(maker, state, most)
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"a damaged state of steps in flight: {type(error).__name__}: {error}") from error


def _loaded(maker: BucketMaker, state: Mapping[str, Any], most: int) -> tuple[list[StepInFlight], int]:
    parameters, names, world_size = maker.parameters, maker.names, maker.communicator.size
    version = state.get("version")
    if version != _VERSION:
        raise ValueError(f"not a state of steps in flight: version {version!r}, expected {_VERSION}")
    if state["world_size"] != world_size:
        raise ValueError(
            f"the state is of {state['world_size']} ranks, there are {world_size} now, so its averages are of other "
            "gradients. Call flush() before saving where the number of ranks may change"
        )
    if len(state["steps"]) > most:
        raise ValueError(
            f"the state holds {len(state['steps'])} steps in flight, but sync_mode allows {most} now: use the mode "
            "that it was saved in, or call flush() before saving"
        )
    steps = []
    for kept in state["steps"]:
        averages = [_checked(kept["averages"], *one) for one in zip(names, parameters, strict=True)]
        if len(kept["averages"]) != len(names):
            foreign = sorted(set(kept["averages"]) - set(names))
            raise ValueError(f"the state is of another model: {', '.join(foreign[:8])} not among the parameters")
        non_finite = None
        if maker.config.check_finite != "off":
            rows = kept["told"] or [[-1, -1]] * world_size
            non_finite = Done(), torch.tensor(rows, dtype=torch.int64, device=parameters[0].device)
        scale = None
        if kept["loss_scale"] is not None:
            value = torch.tensor([kept["loss_scale"]], dtype=torch.float32, device=parameters[0].device)
            scale = LossScale.of(value)
        held = flights(parameters, names, averages)
        steps.append(StepInFlight(int(kept["step"]), held, Unscaling(scale), None, non_finite, None))
    return steps, int(state["rounds"])


def _checked(averages: Mapping[str, torch.Tensor | None], name: str, parameter: torch.Tensor) -> torch.Tensor | None:
    if name not in averages:
        raise ValueError(f"the state is of another model: it has nothing of {name}")
    average = averages[name]
    if average is None:
        return None
    if average.shape != parameter.shape or average.dtype is not parameter.dtype:
        raise ValueError(
            f"the state is of another model: {name} is {tuple(average.shape)}, {average.dtype} there and "
            f"{tuple(parameter.shape)}, {parameter.dtype} here"
        )
    return average.detach().to(parameter.device)
