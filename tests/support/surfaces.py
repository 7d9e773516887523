"""One training loop through everything that reduces gradients: what tests of several surfaces are written for once.

A test of this kind is the body of a rank: `test(make, ...)`, where `make(...)` is a `Loop`. `cells` has it run on
surface x mode x wire; `hole` says why a cell is missing.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import fusedreduce
from fusedreduce import BucketCaps, FusedGradScaler, FusedHookState, LocalGroup, ReduceConfig, Reducer
from fusedreduce.buckets.stats.non_finite import NonFiniteReport
from fusedreduce.config import Asynchronous, BoundedStaleness, FlushReport, Synchronous, SyncMode
from support.grids import grid
from support.inside import inside
from support.loopback import ThreadWorld
from support.ranks import group_of_one
from support.wires import EXCHANGED, settings

MODES: tuple[SyncMode, ...] = (Synchronous(), BoundedStaleness(1), BoundedStaleness(3), Asynchronous(2))
# Of a rank each: Reducers of two threads, and wrappers: alone, of two threads, of two processes over Gloo, where "hook"
# is torch's with ours. And replicas that have a thread each, or one for all.
SURFACES = ("ranks", "wrapper", "threads", "gloo", "hook", "data parallel", "one thread")
WIRES = ("native", "bf16", "fp16", *EXCHANGED)
# The code of a block's largest value: what is a multiple of it by a number of few bits comes back as it was.
UNITS = {"int8": 127.0, "int4": 7.0}
PARTS = 3
Used = Sequence[Sequence[int]]


def hole(surface: str, mode: SyncMode, wire: str = "native") -> str:
    """Why there is no such cell; nothing where there is one."""
    if wire in EXCHANGED and mode != Synchronous():
        return "they exclude each other: contributions are exchanged within their own step"
    if surface == "hook" and mode != Synchronous():
        return "torch's class awaits a step's averages at its end"
    if mode != Asynchronous(2):
        return ""
    if wire == "fp16":
        return "they exclude each other"
    return "replicas that are driven in turn have no paces of their own" if surface == "one thread" else ""


def late(mode: SyncMode) -> int:
    """Steps after which a step's average lands."""
    return mode.max_staleness if isinstance(mode, BoundedStaleness) else 0


def cells(
    *keep: Callable[[str, SyncMode], bool],
    wires: Sequence[str] = ("native",),
    **options: Sequence[Any],
) -> Callable[[Callable[..., None]], Any]:
    """Runs `test(make, ...)` once for every cell of those wires that all of `keep` keep, and for all `options`.

    See `grid` for which of them run without `--full`.
    """
    places = itertools.product(SURFACES, MODES, wires)
    kept = [one for one in places if not hole(*one) and all(keeps(*one[:2]) for keeps in keep)]
    every = [(*one, *more) for one in kept for more in itertools.product(*options.values())]
    names = ("surface", "mode", "wire", *options)

    def decorate(body: Callable[..., None]) -> Any:
        @functools.wraps(body)
        def test(request: pytest.FixtureRequest, **given: Any) -> None:
            place = tuple(given.pop(name) for name in names[:3])
            if place[0] in PROCESSES:
                request.getfixturevalue("two").run(_in_process, test, place, given)
            else:
                _run(body, place, given)

        asked = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in ("request", *names)]
        test.__dict__["__signature__"] = inspect.Signature(asked)
        return grid(names, every, lambda row: [pytest.mark.ranks] if row[0] in PROCESSES else [])(test)

    return decorate


def stale(surface: str, mode: SyncMode) -> bool:
    """Averages land in a later step."""
    return late(mode) > 0


def delayed(surface: str, mode: SyncMode) -> bool:
    """Something may be under way between steps."""
    return mode != Synchronous()


def own_pace(surface: str, mode: SyncMode) -> bool:
    """Ranks take as many steps as each likes."""
    return mode == Asynchronous(2)


def in_step(surface: str, mode: SyncMode) -> bool:
    """What lands in which step does not depend on the clock."""
    return mode != Asynchronous(2) or surface == "wrapper"


def alike(surface: str, mode: SyncMode) -> bool:
    """Steps of the same gradients on every rank are the same on every rank."""
    return mode != Asynchronous(2) or surface in ("wrapper", "data parallel")


def prompt(surface: str, mode: SyncMode) -> bool:
    """They land in their own."""
    return late(mode) == 0 and in_step(surface, mode)


def whole(surface: str, mode: SyncMode) -> bool:
    """The loss scale is on while gradients travel. (DataParallel's replicas each take it off before.)"""
    return surface not in REPLICAS


def ours(surface: str, mode: SyncMode) -> bool:
    """FusedGradScaler takes it, and `flush` is there."""
    return surface != "hook"


PROCESSES, REPLICAS = ("gloo", "hook"), ("data parallel", "one thread")


class Weights(nn.Module):
    """Weights of one size, zeros at first; the last element of an input says which of them are used."""

    def __init__(self, numel: int) -> None:
        super().__init__()
        self.parts = nn.ParameterList(torch.zeros(numel) for _ in range(PARTS))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        used = int(rows[0, -1])
        return torch.stack([rows[:, :-1] @ one for place, one in enumerate(self.parts) if used >> place & 1]).sum(0)


class Loop:
    """A training loop over weights of four elements; each rank's gradient is what it is told, for all of them.

    On an encoded wire a weight has a block and more, and its gradients, weights and norms are in `UNITS`.

    Args:
        place: surface, mode and wire.
        communicator: of a rank that is a thread.
        fused: whether the optimizer, SGD with a rate of 1, is.
        scaler: arguments of the FusedGradScaler, or None for no scaler.
        unused: whether a rank may leave out weights.
        cap_bytes: of buckets; as many as hold a weight.
        config: of the reduction.
    """

    def __init__(
        self,
        place: tuple[str, SyncMode, str],
        communicator: Any = None,
        *,
        fused: bool = False,
        scaler: dict[str, Any] | None = None,
        unused: bool = False,
        cap_bytes: int = 16,
        **config: Any,
    ) -> None:
        surface, mode, wire = place
        self.late, self.whole, self.alike = late(mode), whole(surface, mode), alike(surface, mode)
        self.unit = UNITS.get(wire, 1.0)
        self.module = Weights(300 if wire in UNITS else 4)
        self.numel = sum(one.numel() for one in self.module.parameters())
        held, reduce = list(self.module.parameters()), ReduceConfig(sync_mode=mode, **settings(wire), **config)
        self.wrapper: Any
        self.observed: Any
        if surface == "ranks":
            self.wrapper = Reducer(
                held,
                communicator,
                reduce,
                names=[name for name, _ in self.module.named_parameters()],
                caps=BucketCaps(first_bytes=cap_bytes, cap_bytes=cap_bytes),
                find_unused_parameters=unused,
            )
            self.observed = inside(self.wrapper).statistics
        elif surface in REPLICAS:
            self.wrapper = fusedreduce.DataParallel(
                self.module, ["cpu"] * 2, timeout_s=20.0, reduce=reduce, threads=surface == "data parallel"
            )
        else:
            kind = TorchDDP if surface == "hook" else fusedreduce.DistributedDataParallel
            options: dict[str, Any] = {"find_unused_parameters": unused, "bucket_cap_mb": cap_bytes / 2**20}
            if communicator is not None:
                options["process_group"] = communicator.process_group()
            if surface != "hook":
                options["reduce"] = reduce
            self.wrapper = kind(self.module, **options)
        if surface == "hook":
            self.observed = FusedHookState(**settings(wire), **config)
            self.wrapper.register_comm_hook(self.observed, fusedreduce.fused_hook)
            self.observed.name_parameters(self.module)
        elif surface != "ranks":
            self.observed = self.wrapper
        # Ranks whose gradients may be told apart, and which of them are this loop's.
        self.ranks = 1 if surface == "wrapper" else 2
        self.rank = communicator.rank if communicator else getattr(self.wrapper, "_distributed_rank", 0)
        self._all = surface in REPLICAS
        self.optimizer = torch.optim.SGD(held, lr=1.0, fused=fused)
        self.steps = 0
        self.optimizer.register_step_post_hook(lambda *_: self._stepped())
        if scaler is not None:
            self.scaler = FusedGradScaler(self.wrapper, **{"init_scale": 1024.0, "growth_interval": 1000, **scaler})

    def _stepped(self) -> None:
        self.steps += 1

    def loss(self, *gradients: float, used: Used | None = None) -> torch.Tensor:
        """Of one forward, with a rank's gradient of each weight that it uses; one gradient is every rank's."""
        every = gradients * 2 if len(gradients) == 1 else gradients
        # DataParallel's replicas have a sample each, and their sum counts.
        ranks = range(2) if self._all else [self.rank] * 2
        rows = torch.empty(2, self.module.parts[0].numel() + 1)
        for row, rank in zip(rows, ranks, strict=True):
            row[:-1] = self.unit * every[rank] / 2
            row[-1] = sum(1 << place for place in (range(PARTS) if used is None else used[rank]))
        if not isinstance(self.wrapper, Reducer):
            total: torch.Tensor = self.wrapper(rows).sum()
            return total
        total = self.module(rows).sum()
        self.wrapper.prepare_for_backward(total)
        return total

    def mean(self, *gradients: float, used: Used | None = None) -> list[float | None]:
        """By weight the mean of the gradients over ranks; None where no rank uses it."""
        found: list[float | None] = []
        for place in range(PARTS):
            own = [one for rank, one in enumerate(gradients[: self.ranks]) if used is None or place in used[rank]]
            found.append(sum(own) / len(gradients[: self.ranks]) if own else None)
        return found

    def backward(self, *gradients: float, used: Used | None = None) -> None:
        """Of a loss that is scaled, if there is a scaler."""
        loss = self.loss(*gradients, used=used)
        (self.scaler.scale(loss) if hasattr(self, "scaler") else loss).backward()

    def step(self) -> None:
        """The optimizer's, and zero_grad."""
        self.optimizer.step()
        self.optimizer.zero_grad()

    def finish(self, *, unscale: bool = False) -> None:
        """The same by way of the scaler."""
        if unscale:
            self.scaler.unscale_(self.optimizer)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()

    def flush(self, step: Callable[[], object] | None = None) -> int:
        """Takes the steps under way, by `finish` unless said otherwise; how many there were."""
        report: FlushReport = self.wrapper.flush(step=step or self.finish)
        return report.steps

    def mode(self) -> SyncMode:
        """The one in use."""
        mode: SyncMode = (self.wrapper.config if isinstance(self.wrapper, Reducer) else self.wrapper).sync_mode
        return mode

    def grad_norm(self, norm_type: float = 2.0) -> float:
        """As the surface has it."""
        return float(self.observed.grad_norm(norm_type))

    def non_finite(self) -> list[NonFiniteReport]:
        """The reports of all steps; of replicas, those of the first."""
        if isinstance(self.wrapper, TorchDDP):
            told: list[NonFiniteReport] = self.observed.non_finite()
            return told
        one = self.wrapper if isinstance(self.wrapper, Reducer) else self.wrapper.reducers[0]
        return list(inside(one).statistics.finite_check().reports)

    def state_dict(self) -> dict[str, Any]:
        """The steps under way, unpacked."""
        saved = self.wrapper.state_dict if isinstance(self.wrapper, Reducer) else self.wrapper.reduce_state_dict
        state: dict[str, Any] = saved()
        return state

    def load(self, state: Mapping[str, Any]) -> None:
        """What `state_dict` has given."""
        wrapper = self.wrapper
        (wrapper.load_state_dict if isinstance(wrapper, Reducer) else wrapper.load_reduce_state_dict)(state)

    def weights(self) -> list[float]:
        """By weight the value of all its elements."""
        return [self._one(weight.detach()) for weight in self.module.parts]

    def weight(self) -> float:
        """The value of all elements of all of them."""
        (value,) = set(self.weights())
        return value

    def gradients(self) -> list[float | None]:
        """By weight the value of all elements of `.grad`."""
        return [None if weight.grad is None else self._one(weight.grad) for weight in self.module.parts]

    def gradient(self) -> float | None:
        """The same of all of them."""
        (value,) = set(self.gradients())
        return value

    def _one(self, tensor: torch.Tensor) -> float:
        (value,) = set(tensor.tolist())
        return float(value) / self.unit


class Make:
    """What a rank makes loops with; `close` ends them."""

    def __init__(self, place: tuple[str, SyncMode, str], communicator: Any = None) -> None:
        self.place, self._communicator, self._made = place, communicator, list[Loop]()

    def __call__(self, *, mode: SyncMode | None = None, **options: Any) -> Loop:
        """A `Loop`; in the cell's mode unless said otherwise."""
        surface, own, wire = self.place
        self._made.append(Loop((surface, mode or own, wire), self._communicator, **options))
        return self._made[-1]

    def close(self) -> None:
        for loop in self._made:
            getattr(loop.wrapper, "close", lambda: None)()


def _run(body: Callable[..., None], place: tuple[str, SyncMode, str], given: Mapping[str, Any]) -> None:
    def rank(communicator: Any = None) -> None:
        make = Make(place, communicator)
        try:
            body(make, **given)
        finally:
            make.close()

    if place[0] == "ranks":
        ThreadWorld(2).results(rank)
    elif place[0] == "threads":
        with LocalGroup(2, timeout_s=20.0) as group:
            group.run(rank)
    elif place[0] == "wrapper":
        with group_of_one():
            rank()
    else:
        rank()


def _in_process(rank: int, world: int, test: Any, place: tuple[str, SyncMode, str], given: Mapping[str, Any]) -> None:
    _run(test.__wrapped__, place, given)
