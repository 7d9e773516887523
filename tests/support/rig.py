"""A Reducer alone, around plain backwards in this process; its peers are scripted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fusedreduce import Reducer
from fusedreduce.kernels import runs
from fusedreduce.reducer.state import ReducerState
from support.leaf_steps import WIRE_DTYPES, assert_same, clear, given, step
from support.loopback import Loopback

loss_with, run = given, step
# Gradients with fewer elements are packed in runs.
LARGE = runs.LARGE_NUMEL + 5
SMALL = ((3,), (5, 7), (1,), (0,), (40,), (2, 0), (8, 3))


def drawn(shapes: Sequence[tuple[int, ...]], dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Parameters with values."""
    return [torch.randn(shape).to(dtype).requires_grad_() for shape in shapes]


def drawn_like(parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Gradients for them."""
    return [torch.randn_like(parameter) for parameter in parameters]


def assert_mean(reducer: Reducer, local: Sequence[torch.Tensor]) -> None:
    """Each `.grad` is the mean over all ranks, where this one had `local`."""
    communicator: Any = reducer.communicator
    wire = WIRE_DTYPES[reducer.config.one_wire]
    assert communicator.under_way == 0
    assert_same([one.grad for one in reducer.parameters], [communicator.mean(one, wire) for one in local])


def assert_gradient(actual: torch.Tensor | None, expected: torch.Tensor, what: object = "") -> None:
    """There is one, and these are its bits."""
    assert_same([actual], [expected], what)


def state_of(reducer: Reducer) -> ReducerState:
    """Behind a call: mypy believes that it cannot change."""
    return reducer.state


def boom(_: torch.Tensor) -> torch.Tensor:
    """A gradient's hook that raises."""
    raise ZeroDivisionError


class Rig:
    """A Reducer, its parameters and its communicator.

    Args:
        parameters: these, or new ones of these shapes.
        communicator: or a Loopback.
        dtype: of new parameters.
        options: of the Reducer.
    """

    def __init__(
        self,
        parameters: Sequence[tuple[int, ...]] | Sequence[torch.Tensor],
        *,
        communicator: Loopback | None = None,
        dtype: torch.dtype = torch.float32,
        **options: Any,
    ) -> None:
        self.parameters = [one if isinstance(one, torch.Tensor) else drawn([one], dtype)[0] for one in parameters]
        self.communicator = communicator or Loopback()
        self.reducer = Reducer(self.parameters, self.communicator, options.pop("config", None), **options)

    def draw(self) -> list[torch.Tensor]:
        """New gradients."""
        return drawn_like(self.parameters)

    def loss(self, gradients: Sequence[torch.Tensor], ready: Sequence[int] | None = None) -> torch.Tensor:
        """A loss whose gradients of the parameters are `gradients`; ready in the order of `ready`."""
        return loss_with(self.parameters, gradients, ready)

    def run(self, gradients: Sequence[torch.Tensor], ready: Sequence[int] | None = None) -> None:
        """One forward and backward with these gradients."""
        run(self.reducer, gradients, ready)

    def step(self, ready: Sequence[int] | None = None) -> list[torch.Tensor]:
        """The same with new ones, which it returns."""
        gradients = self.draw()
        self.run(gradients, ready)
        return gradients

    def assert_mean(self, local: Sequence[torch.Tensor]) -> None:
        """Each `.grad` is the mean over all ranks, where this one had `local`."""
        assert_mean(self.reducer, local)

    def take(self, local: Sequence[torch.Tensor]) -> None:
        """The same, and then zero_grad."""
        self.assert_mean(local)
        clear(self.parameters)

    def train(self, ready: Sequence[int] | None = None) -> None:
        """A step from cleared gradients to cleared gradients, whose means are looked at."""
        clear(self.parameters)
        self.take(self.step(ready))

    def warm(self, steps: int) -> None:
        """Such steps, with nobody looking."""
        for _ in range(steps):
            self.step()
            clear(self.parameters)
