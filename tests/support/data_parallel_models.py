"""Models whose replicas are told from one another: what a plain layer never shows."""

from __future__ import annotations

import collections
import dataclasses
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

FEATURES = 6
CLASSES = 3


def mlp(dtype: torch.dtype = torch.float64) -> nn.Module:
    """Three layers, always the same ones."""
    torch.manual_seed(0)
    layers = (nn.Linear(FEATURES, 16), nn.Tanh(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, CLASSES))
    return nn.Sequential(*layers).to(dtype)


def batch(samples: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets for `mlp`."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(samples, FEATURES, dtype=dtype, generator=generator)
    return inputs, torch.randn(samples, CLASSES, dtype=dtype, generator=generator)


class Calls(nn.Module):
    """Does with its inputs what it is told."""

    def __init__(self, call: Callable[..., Any]) -> None:
        super().__init__()
        self.call = call
        self.weight = nn.Parameter(torch.tensor([2.0], dtype=torch.float64))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the call returns; its first argument is this module."""
        return self.call(self, *args, **kwargs)


class Experts(nn.Module):
    """Which of two layers a replica uses depends on its samples; a third one is never used."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first = nn.Linear(2, 1).double()
        self.second = nn.Linear(2, 1).double()
        self.never = nn.Linear(2, 1).double()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Samples that begin with 0 go to the first expert, others to the second."""
        chosen = self.first if float(inputs[0, 0].detach()) == 0.0 else self.second
        out: torch.Tensor = chosen(inputs)
        return out


class Tied(nn.Module):
    """One weight in two places, one frozen parameter, one in a plain list."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.there = nn.Linear(4, 4, bias=False).double()
        self.back = nn.Linear(4, 4, bias=False).double()
        self.back.weight = self.there.weight
        self.frozen = nn.Parameter(torch.randn(4, dtype=torch.float64), requires_grad=False)
        self.scale = nn.Parameter(torch.randn(4, dtype=torch.float64))
        self.listed = [self.scale]

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Uses all of them."""
        out: torch.Tensor = self.back(torch.tanh(self.there(inputs))) * self.listed[0] + self.frozen
        return out


class Pair(NamedTuple):
    """A named tuple of tensors."""

    logits: torch.Tensor
    hidden: torch.Tensor


class NamedSubclass(Pair):
    """Containers that no pytree knows: subclasses with an attribute of their own."""

    note = "class"


class DictSubclass(dict[str, Any]):
    """A dict with an attribute of its own."""

    note = "class"


class DefaultSubclass(collections.defaultdict[str, Any]):
    """A defaultdict with an attribute of its own."""

    note = "class"


class ListSubclass(list[Any]):
    """A list with an attribute of its own."""

    note = "class"


class TupleSubclass(tuple[Any, ...]):
    """A tuple with an attribute of its own."""

    note = "class"


@dataclasses.dataclass
class Record:
    """A dataclass that no pytree knows."""

    logits: torch.Tensor
    extra: dict[str, Any]


class Seen:
    """Notes which thread ran a forward, and in which modes."""

    def __init__(self) -> None:
        self.threads: list[str] = []
        self.modes: list[tuple[bool, bool, bool, torch.dtype, int]] = []

    def __call__(self, module: Calls, inputs: torch.Tensor) -> torch.Tensor:
        self.threads.append(threading.current_thread().name)
        self.modes.append(
            (
                torch.is_grad_enabled(),
                torch.is_inference_mode_enabled(),
                torch.is_autocast_enabled("cpu"),
                torch.get_autocast_dtype("cpu"),
                torch.get_num_threads(),
            )
        )
        return inputs * module.weight


class Slotted(nn.Module):
    """Keeps what it needs in slots; one of them is a layer."""

    __slots__ = ("again", "factor", "later")
    again: nn.Module

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layer = nn.Linear(FEATURES, FEATURES).double()
        object.__setattr__(self, "again", self.layer)
        self.factor = 3.0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Uses all of them."""
        out: torch.Tensor = self.again(self.layer(inputs)) * self.factor
        return out + getattr(self, "later", 0.0)


class Stores(nn.Module):
    """Has attributes of its own making, and keeps its latest output."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.layer = nn.Linear(FEATURES, CLASSES).double()
        self.calls = 0
        self.last: torch.Tensor | None = None

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "calls":
            self.__dict__["_calls"] = value
        else:
            super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:
        return self.__dict__["_calls"] if name == "calls" else super().__getattr__(name)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Counts, and stores its output with its graph."""
        self.calls += 1
        self.last = self.layer(inputs)
        return self.last
