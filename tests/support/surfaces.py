"""One training loop through everything that reduces gradients: what tests of several surfaces are written for once.

A test of this kind is a function of a `Loop`. `cells` lists what it runs on, surface x mode x wire; `hole` says
why a cell is missing.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

import fusedreduce
from fusedreduce import FusedGradScaler, ReduceConfig, Reducer
from fusedreduce.comm.protocol import Communicator
from fusedreduce.config import Asynchronous, BoundedStaleness, Synchronous, SyncMode
from support.grids import grid
from support.inside import inside
from support.loopback import Loopback, ThreadWorld
from support.ranks import group_of_one
from support.wires import EXCHANGED, settings

MODES: tuple[SyncMode, ...] = (Synchronous(), BoundedStaleness(1), BoundedStaleness(3), Asynchronous(2))
SURFACES = ("reducer", "ranks", "wrapper", "data parallel", "one thread")
WIRES = ("native", "bf16", "fp16", *EXCHANGED)
# The code of a block's largest value: what is a multiple of it by a number of few bits comes back as it was.
UNITS = {"int8": 127.0, "int4": 7.0}


def hole(surface: str, mode: SyncMode, wire: str = "native") -> str:
    """Why there is no such cell; nothing where there is one."""
    if wire in EXCHANGED and mode != Synchronous():
        return "they exclude each other: contributions are exchanged within their own step"
    if mode != Asynchronous(2):
        return ""
    if wire == "fp16":
        return "they exclude each other"
    return {
        "reducer": "its peers are functions, which contribute nothing at a pace of their own",
        "ranks": "what lands in which step depends on the clock: test_own_pace.py adds it all up",
        "one thread": "replicas that are driven in turn have no paces of their own",
    }.get(surface, "")


def late(mode: SyncMode) -> int:
    """Steps after which a step's average lands."""
    return mode.max_staleness if isinstance(mode, BoundedStaleness) else 0


def cells(
    keep: Callable[[str, SyncMode], bool] = lambda surface, mode: True,
    wires: Sequence[str] = ("native",),
    **options: Sequence[Any],
) -> pytest.MarkDecorator:
    """Parametrizes a test with `surface`, `mode`, `wire` and `options`: every cell of those wires that `keep` keeps.

    See `grid` for which of them run without `--full`.
    """
    places = itertools.product(SURFACES, MODES, wires)
    kept = [one for one in places if not hole(*one) and keep(*one[:2])]
    every = [(*one, *more) for one in kept for more in itertools.product(*options.values())]
    return grid(("surface", "mode", "wire", *options), every)


def stale(surface: str, mode: SyncMode) -> bool:
    """Averages land in a later step."""
    return late(mode) > 0


def prompt(surface: str, mode: SyncMode) -> bool:
    """They land in their own."""
    return late(mode) == 0 and in_step(surface, mode)


def in_step(surface: str, mode: SyncMode) -> bool:
    """What lands in which step does not depend on the clock."""
    return (surface, mode) != ("data parallel", Asynchronous(2))


def whole(surface: str, mode: SyncMode) -> bool:
    """The loss scale is on while gradients travel. (DataParallel's replicas each take it off before.)"""
    return surface in ("reducer", "ranks", "wrapper")


class Loop:
    """A training loop over one weight of four elements, zeros at first; each rank's gradient is what it is told.

    On an encoded wire the weight has a block and more, and its gradients, weights and norms are in `UNITS`.

    Args:
        surface: one of `SURFACES`.
        communicator: of a rank that is a thread.
        fused: whether the optimizer, SGD with a rate of 1, is.
        scaler: arguments of the FusedGradScaler, or None for no scaler.
        config: of the reduction.
    """

    def __init__(
        self,
        surface: str,
        communicator: Communicator | None = None,
        *,
        fused: bool = False,
        scaler: dict[str, Any] | None = None,
        wire: str = "native",
        **config: Any,
    ) -> None:
        self.unit = UNITS.get(wire, 1.0)
        self.module = nn.Linear(300 if wire in UNITS else 4, 1, bias=False)
        nn.init.zeros_(self.module.weight)
        held, reduce = list(self.module.parameters()), ReduceConfig(**settings(wire), **config)
        self.wrapper: Any
        if surface in ("reducer", "ranks"):
            self.wrapper = Reducer(held, communicator or Loopback([torch.clone]), reduce)
        elif surface == "wrapper":
            self.wrapper = fusedreduce.DistributedDataParallel(self.module, reduce=reduce)
        else:
            threads = surface == "data parallel"
            devices = ["cpu"] * 2
            self.wrapper = fusedreduce.DataParallel(
                self.module, devices, timeout_s=20.0, reduce=reduce, threads=threads
            )
        self.optimizer = torch.optim.SGD(held, lr=1.0, fused=fused)
        self.steps = 0
        self.optimizer.register_step_post_hook(lambda *_: self._stepped())
        if scaler is not None:
            self.scaler = FusedGradScaler(self.wrapper, **{"init_scale": 1024.0, "growth_interval": 1000, **scaler})

    def _stepped(self) -> None:
        self.steps += 1

    def loss(self, gradient: float) -> torch.Tensor:
        """Of one forward, whose mean gradient over all ranks is `gradient` everywhere, if all ranks have the same."""
        size = 2, self.module.in_features
        halves = torch.full(
            size, self.unit * gradient / 2
        )  # DataParallel's replicas have a sample each, and their sum counts
        if not isinstance(self.wrapper, Reducer):
            total: torch.Tensor = self.wrapper(halves).sum()
            return total
        total = self.module(halves).sum()
        self.wrapper.prepare_for_backward(total)
        return total

    def backward(self, gradient: float) -> None:
        """Of a loss that is scaled, if there is a scaler."""
        loss = self.loss(gradient)
        (self.scaler.scale(loss) if hasattr(self, "scaler") else loss).backward()

    def finish(self, *, unscale: bool = False) -> None:
        """The step, and zero_grad."""
        if unscale:
            self.scaler.unscale_(self.optimizer)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()

    def flush(self, step: Callable[[], object] | None = None) -> int:
        """Takes the steps under way, by `finish` unless said otherwise; how many there were."""
        steps: int = self.wrapper.flush(step=step or self.finish).steps
        return steps

    def grad_norm(self, norm_type: float = 2.0) -> float:
        """As the surface has it."""
        observed = inside(self.wrapper).statistics if isinstance(self.wrapper, Reducer) else self.wrapper
        return float(observed.grad_norm(norm_type))

    def state_dict(self) -> dict[str, Any]:
        """The steps under way, unpacked."""
        saved = self.wrapper.state_dict if isinstance(self.wrapper, Reducer) else self.wrapper.reduce_state_dict
        state: dict[str, Any] = saved()
        return state

    def weight(self) -> float:
        """The value of all four elements."""
        (value,) = set(self.module.weight.detach().reshape(-1).tolist())
        return float(value) / self.unit

    def gradient(self) -> float | None:
        """The same of `.grad`."""
        if self.module.weight.grad is None:
            return None
        (value,) = set(self.module.weight.grad.reshape(-1).tolist())
        return float(value) / self.unit


def run(surface: str, case: Callable[[Loop], Any], **options: Any) -> Any:
    """`case(loop)` on a new loop; on each of two ranks where `surface` has some. What it returned, on rank 0."""

    def rank(communicator: Communicator | None = None) -> Any:
        loop = Loop(surface, communicator, **options)
        try:
            return case(loop)
        finally:
            getattr(loop.wrapper, "close", lambda: None)()

    if surface == "ranks":
        return ThreadWorld(2).results(rank)[0]
    if surface == "wrapper":
        with group_of_one():
            return rank()
    return rank()
