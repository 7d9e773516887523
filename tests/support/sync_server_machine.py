"""Programs for the devices of a SyncServer, run by a thread each, and a pure model of what must come of them.

A program is a list of attempts, each at one epoch. The model knows nothing of threads: whatever their interleaving, an
attempt either ends with the gradients that it says, or raises.
"""

from __future__ import annotations

import enum
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

from fusedreduce import CollectiveError, SyncServer
from fusedreduce.parallel.sync_device import SyncDevice
from support.inside import group_of

WORLD = 3
NUMELS = (5, 1, 3)
DTYPES = (torch.float32, torch.float64, torch.float32)  # two buckets
TIMEOUT_S = 30.0
LATE_TIMEOUT_S = 0.1
_TURN_S = 0.003

# By parameter its value everywhere, None: no gradient. Or None: the attempt raises.
Outcome = tuple[float | None, ...] | None


class Kind(enum.Enum):
    """What a device does in an attempt."""

    FULL = "all of it"
    RAISES_BEFORE = "gives up before announce"
    RAISES_WITHIN = "gives up between announce and backward"
    RAISES_IN_BACKWARD = "its backward raises, before any gradient"
    RAISES_AFTER = "gives up between backward and sync"
    CLOSES = "is closed after announce, and started again"
    LATE = "comes when the others have given up"


RAISES = (Kind.RAISES_BEFORE, Kind.RAISES_WITHIN, Kind.RAISES_IN_BACKWARD, Kind.RAISES_AFTER)


@dataclass(frozen=True)
class Attempt:
    """Of one device at one epoch.

    Args:
        kind: what it does.
        announces: numbers of the parameters that its loss reaches; None: it announces None.
        value: all elements of these gradients; a multiple of the number of devices, so that means are exact.
    """

    kind: Kind
    announces: tuple[int, ...] | None
    value: int

    @property
    def contributes(self) -> bool:
        """Whether the others get what they need of it."""
        return self.kind is Kind.FULL or (self.kind is Kind.RAISES_AFTER and bool(self.announces))


Round = tuple[Attempt, ...]


def programs(rounds: Sequence[Round], spare: Sequence[Attempt]) -> list[list[Attempt]]:
    """Each device's attempts: those of the rounds; and where a round leaves some devices with a failure that they have
    not heard of, the attempts in `spare` that hear of it."""
    found: list[list[Attempt]] = [[] for _ in range(WORLD)]
    for one in rounds:
        for rank, attempt in enumerate(one):
            found[rank].append(attempt)
            if _heard_later(one, attempt):
                found[rank].append(spare[rank])
    return found


def outcomes(rounds: Sequence[Round]) -> list[list[Outcome]]:
    """What must come of `programs(rounds, ...)`, by device."""
    found: list[list[Outcome]] = [[] for _ in range(WORLD)]
    for one in rounds:
        means = tuple(_mean(one, index) for index in range(len(NUMELS)))
        met = all(attempt.contributes for attempt in one)
        for rank, attempt in enumerate(one):
            found[rank].append(means if met and attempt.kind is Kind.FULL else None)
            if _heard_later(one, attempt):
                found[rank].append(None)
    return found


def _heard_later(one: Round, attempt: Attempt) -> bool:
    met = all(other.contributes for other in one)
    return met and attempt.kind is Kind.FULL and any(other.kind is not Kind.FULL for other in one)


def _mean(one: Round, index: int) -> float | None:
    values = [attempt.value for attempt in one if index in (attempt.announces or ())]
    return sum(values) / WORLD if values else None


class _Raises(torch.autograd.Function):
    """What it is given; its backward raises."""

    @staticmethod
    def forward(ctx: Any, loss: torch.Tensor) -> torch.Tensor:
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> torch.Tensor:
        raise ZeroDivisionError("planted")


class Turns:
    """An order in which threads are to go on. Each waits for its turn, but not for long: it may never come."""

    def __init__(self, order: Sequence[int] = ()) -> None:
        self._order = deque(order)
        self._changed = threading.Condition()

    def take(self, rank: int) -> None:
        if not self._order:
            return
        with self._changed:
            self._changed.wait_for(lambda: not self._order or self._order[0] == rank, _TURN_S)
            if rank in self._order:
                self._order.remove(rank)
            self._changed.notify_all()


class Machine:
    """A server, its devices, and a thread for each; `pause(rank)` is called between any two calls of a device."""

    def __init__(self, pause: Callable[[int], None] = lambda rank: None) -> None:
        self.server = SyncServer(WORLD, timeout_s=TIMEOUT_S)
        self.parameters = [
            [torch.zeros(numel, dtype=dtype, requires_grad=True) for numel, dtype in zip(NUMELS, DTYPES, strict=True)]
            for _ in range(WORLD)
        ]
        self.devices: list[SyncDevice] = [self._start(rank) for rank in range(WORLD)]
        self.pause = pause
        self._threads = ThreadPoolExecutor(WORLD)
        self._complete = threading.Event()  # all devices are started
        self._complete.set()
        self._failed = threading.Event()

    def run(self, rounds: Sequence[Round], spare: Sequence[Attempt]) -> None:
        """Runs the rounds, and compares what comes of them with the model."""
        todo, expected = programs(rounds, spare), outcomes(rounds)
        late = any(attempt.kind is Kind.LATE for one in rounds for attempt in one)
        assert not late or len(rounds) == 1, "its timeout would hold for the others"
        self._failed.clear()
        group_of(self.server).timeout_s = LATE_TIMEOUT_S if late else TIMEOUT_S
        futures = [self._threads.submit(self._device, rank, todo[rank], expected[rank]) for rank in range(WORLD)]
        errors = [error for future in futures if (error := future.exception(10 * TIMEOUT_S)) is not None]
        if errors:
            raise errors[0]

    def close(self) -> None:
        self.server.close()
        self._threads.shutdown()

    def _start(self, rank: int) -> SyncDevice:
        return self.server.device(rank, zip("abc", self.parameters[rank], strict=True))

    def _device(self, rank: int, todo: Sequence[Attempt], expected: Sequence[Outcome]) -> None:
        try:
            for attempt, outcome in zip(todo, expected, strict=True):
                got = self._attempt(rank, attempt)
                assert got == outcome, f"device {rank}, {attempt}: expected {outcome}, got {got}"
        except BaseException as error:
            self.devices[rank].abort(error)  # else the others would wait for it
            raise

    def _attempt(self, rank: int, attempt: Attempt) -> Outcome:
        parameters = self.parameters[rank]
        for parameter in parameters:
            parameter.grad = None
        self._complete.wait()
        try:
            self._stages(rank, attempt)
        except (CollectiveError, ZeroDivisionError):
            self._failed.set()
            return None
        found = [None if one.grad is None else one.grad.unique().tolist() for one in parameters]
        assert all(values is None or len(values) == 1 for values in found), found
        return tuple(None if values is None else values[0] for values in found)

    def _stages(self, rank: int, attempt: Attempt) -> None:
        """One call of the device after another."""
        kind, device = attempt.kind, self.devices[rank]
        if kind is Kind.LATE:
            self._failed.wait(TIMEOUT_S)
        self.pause(rank)
        if kind is Kind.RAISES_BEFORE:
            self._raise(device)
        loss = self._loss(rank, attempt)
        device.announce(loss)
        self.pause(rank)
        if kind is Kind.CLOSES:
            self._complete.clear()
            device.close()
            self.pause(rank)
            self.devices[rank] = self._start(rank)
            self._complete.set()
            raise ZeroDivisionError("closed")
        if kind is Kind.RAISES_WITHIN:
            self._raise(device)
        if loss is not None:
            try:
                loss.backward()
            except BaseException as error:
                device.abort(error)  # its epoch is over: what is raised next belongs to another one
                raise
        self.pause(rank)
        if kind is Kind.RAISES_AFTER:
            self._raise(device)
        device.sync()

    def _raise(self, device: SyncDevice) -> None:
        error = ZeroDivisionError("planted")
        device.abort(error)
        raise error

    def _loss(self, rank: int, attempt: Attempt) -> torch.Tensor | None:
        parameters = self.parameters[rank]
        raises = attempt.kind is Kind.RAISES_IN_BACKWARD
        if attempt.announces is None and not raises:
            return None
        terms = [(parameters[index].double() * attempt.value).sum() for index in attempt.announces or ()]
        total = torch.stack(terms).sum() if terms else torch.ones((), dtype=torch.float64, requires_grad=True) * 2
        return _Raises.apply(total) if raises else total


class Sleeps:
    """Pauses of a few microseconds now and then; a device's are its own, whatever the others do."""

    def __init__(self, seed: int) -> None:
        self._random = [random.Random(f"{seed} {rank}") for rank in range(WORLD)]

    def __call__(self, rank: int) -> None:
        own = self._random[rank]
        if own.random() < 0.25:
            time.sleep(own.random() * 2e-4)


def random_round(source: random.Random, *, troubled: bool, several: bool = True) -> Round:
    """One round; `troubled`: not all devices do all of it; `several`: maybe two of them."""
    attempts = [random_attempt(source) for _ in range(WORLD)]
    if troubled:
        rank = source.randrange(WORLD)
        if source.random() < 0.3:
            attempts[rank] = Attempt(Kind.CLOSES, attempts[rank].announces, attempts[rank].value)
        else:
            for one in {rank, source.randrange(WORLD) if several else rank}:
                attempts[one] = Attempt(source.choice(RAISES), attempts[one].announces, attempts[one].value)
    return tuple(attempts)


def random_attempt(source: random.Random) -> Attempt:
    """One that does all of it."""
    numbers = range(len(NUMELS))
    announces = None if source.random() < 0.2 else tuple(one for one in numbers if source.random() < 0.6)
    return Attempt(Kind.FULL, announces, WORLD * source.randrange(-1000, 1000))
