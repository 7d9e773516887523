"""Contributions: the asynchronous mode. A rank uses its own gradients now, and corrects them later by the averages.

At the end of a rank's backward, `end_of_step`:

    1. the gradients, as this rank uses them now, are added to its next contribution
    2. for every contribution whose sum is complete, in the order of issue: `.grad += average - own`
    3. if fewer than `max_in_flight` are in flight, the next one is issued; else it waits, and grows with each step

Nothing waits for a peer. The n-th contributions of all ranks are summed, whatever steps they are made of: so they need
a communicator of their own, on which nothing else is issued. On each rank, and at any relative speed, this holds:

    sum over steps of what `.grad` was given, and of what `drain` gives  ==  sum over n of average n,   to rounding

Without momentum and the like every rank's parameters end alike; with them, ranks drift apart (see
average_parameters.py).

Example: W = 2, one number, gradients 3, 1 here and 5, 7 there. Step 0 uses 3 and issues contribution 0. By step 1 the
peer's has come: average 4, so step 1 uses 1 + (4 - 3) = 2, and issues 1. Draining gives (1 + 7) / 2 - 1 = 3. Given: 3 +
2 + 3 = 8 = 4 + 4. The other rank: 5, then 7 + (4 - 5) = 6, then 4 - 7 = -3: 8 too.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from ...buckets.data_path import InFlight
from ...buckets.tensors import as_real, no_autograd
from ...comm.protocol import Communicator
from ...errors import CollectiveError, FusedReduceError
from .asynchronous_bucket import AsynchronousBucket, Strip


@dataclass(frozen=True, eq=False)
class _Contribution:
    """A contribution in flight.

    Args:
        strips: per bucket this rank's own part.
        in_flight: per bucket its collective.
        used: numbers of the parameters that this rank had a gradient for.
    """

    strips: list[Strip]
    in_flight: list[InFlight]
    used: frozenset[int]

    def is_complete(self) -> bool:
        """Whether all its collectives are done."""
        return all(one.pending.ready() for one in self.in_flight)


class Contributions:
    """The contributions of one rank and their corrections. Called under a lock, by one thread at a time.

    Args:
        ledgers: one per bucket, in the order of their collectives; the same on every rank.
        communicator: the ranks; nothing else issues collectives on it while a contribution may be in flight.
        max_in_flight: number of contributions that may be in flight at once, at least 1.
        comparisons: how often ranks have compared their contributions over `communicator` before.

    Attributes:
        issued: number of contributions so far, on this rank.
        landed: of those, the ones whose average was applied.
        steps: calls of `end_of_step`.
        merged: of those, steps whose gradients went into a contribution together with an earlier step's.
        failure: the error of a collective that failed; nothing else can be done after it.
    """

    def __init__(
        self,
        ledgers: Sequence[AsynchronousBucket],
        communicator: Communicator,
        max_in_flight: int,
        comparisons: int = 0,
    ) -> None:
        self.ledgers = tuple(ledgers)
        self.max_in_flight = max_in_flight
        self._communicator = communicator
        self._device = self.ledgers[0].members.device
        self.issued = self.landed = self.steps = self.merged = 0
        self.failure = ""
        self.comparisons = comparisons
        self._settled_steps = 0
        self._under_way: deque[_Contribution] = deque()
        self._open: list[Strip] | None = None  # the next contribution, as far as it is gathered
        self._open_used: set[int] = set()
        self._owed: list[Strip] | None = None  # surplus that is subtracted from the next gradients
        self._owed_to: set[int] = set()
        self._touched: torch.cuda.Event | None = None

    @property
    def under_way(self) -> int:
        """Number of contributions in flight."""
        return len(self._under_way)

    @property
    def waits(self) -> bool:
        """Whether gradients wait to be issued, because `max_in_flight` contributions are in flight."""
        return self._open is not None

    @property
    def empty(self) -> bool:
        """Whether nothing is in flight, waits, or is still to be corrected."""
        return not self._under_way and self._open is None and self._owed is None

    @property
    def settled(self) -> bool:
        """Whether there was no step since the last `drain`, and no correction is outstanding: as on the other ranks."""
        return self.steps == self._settled_steps and self.empty

    # A step

    def end_of_step(self) -> None:
        """Gathers the gradients, corrects them by the averages that are known, and issues a contribution if it may.

        Waits for no peer.

        Raises:
            TypeError: a gradient is sparse or of another dtype; nothing has been done.
            CollectiveError: a contribution has failed, or could not be issued; earlier corrections are in `.grad`.
        """
        for ledger in self.ledgers:
            ledger.check()
        with self._working():
            self.steps += 1
            self._gather()
            self._subtract_owed()
            self._apply_complete()
            if len(self._under_way) < self.max_in_flight:
                self._issue()
                self._apply_complete()

    # What is outstanding

    def drain(self, problem: str = "") -> int:
        """Waits until all ranks' contributions are averaged everywhere, and adds the outstanding correction to `.grad`.

        Every rank calls it, after any number of steps: those that have issued fewer contributions take part in the
        others' with zeros. The gradient of a parameter that no rank has used is left as it is.

        Args:
            problem: why this rank cannot take part; then no rank does. Empty: it can.

        Returns:
            Number of contributions that were in flight, or had to be issued.

        Raises:
            FusedReduceError: a rank had a problem; on every rank, and nothing has been done.
            CollectiveError: a contribution has failed, or a rank did not come within the timeout.
        """
        landed = self._average_all(problem)
        with self._working():
            self._subtract_owed()
        return landed

    def owed(self) -> dict[int, torch.Tensor]:
        """This rank's outstanding correction by number of the parameter, once all is averaged. Every rank calls it.

        The correction is still applied with the next step, here as well as where it is given to `owe`.

        Raises:
            FusedReduceError, CollectiveError: as `drain`.
        """
        self._average_all()
        return {
            number: ledger.correction(strip, slot)
            for ledger, strip in zip(self.ledgers, self._owed or (), strict=False)
            for slot, number in enumerate(ledger.members.numbers)
            if number in self._owed_to
        }

    def owe(self, owed: Mapping[int, torch.Tensor]) -> None:
        """Restores what `owed` returned, whatever the buckets were; nothing else is outstanding."""
        if not owed:
            return
        with self._working():
            self._owed, self._owed_to = self._zeros(), set(owed)
            for ledger, strip in zip(self.ledgers, self._owed, strict=True):
                for number, view in zip(ledger.members.numbers, strip.views, strict=True):
                    if number in owed:
                        view.copy_(as_real(owed[number])).neg_()

    # Within

    def _average_all(self, problem: str = "") -> int:
        """Has every contribution of all ranks averaged, with the surplus in the outstanding correction.

        Returns:
            How many were outstanding here.
        """
        before = self.landed
        self.comparisons += 1
        try:
            held = self._communicator.compare_aside(
                f"contributions {self.comparisons}",
                json.dumps([self.issued + self.waits, problem or self.failure]),
                self._device,
            )
        except RuntimeError as error:
            self.failure = (
                f"rank {self._communicator.rank}: not every rank called flush() or state_dict() within the timeout, "
                f"at the end of the asynchronous steps: {error}"
            )
            raise CollectiveError(self.failure) from error
        states = [json.loads(one) for one in held]
        problems = [f"rank {rank}: {text}" for rank, (_, text) in enumerate(states) if text]
        if problems:
            raise FusedReduceError(f"nothing was applied on any rank, because of {' | '.join(problems)}")
        target = max(int(standing) for standing, _ in states)
        with self._working():
            while self.issued < target:  # with what waits here, then with zeros
                if len(self._under_way) >= self.max_in_flight:
                    self._add_to_owed()
                if self._open is None:
                    self._open = self._zeros()
                self._issue()
            while self._under_way:
                self._add_to_owed()
        self._settled_steps = self.steps
        return self.landed - before

    def _gather(self) -> None:
        anew = self._open is None
        strips = [ledger.strip() for ledger in self.ledgers] if self._open is None else self._open
        self._open = strips
        for ledger, strip in zip(self.ledgers, strips, strict=True):
            self._open_used.update(ledger.gather(strip, add=not anew))
        self.merged += not anew

    def _issue(self) -> None:
        strips, self._open = self._open, None
        used, self._open_used = frozenset(self._open_used), set()
        assert strips is not None
        in_flight = [ledger.send(strip) for ledger, strip in zip(self.ledgers, strips, strict=True)]
        self._under_way.append(_Contribution(strips, in_flight, used))
        self.issued += 1

    def _apply_complete(self) -> None:
        while self._under_way and self._under_way[0].is_complete():
            missing = [number for number, parameter in self._numbered() if parameter.grad is None]
            one, numbers = self._oldest(missing)
            for ledger, strip, in_flight in zip(self.ledgers, one.strips, one.in_flight, strict=True):
                ledger.apply_correction(strip, in_flight, numbers)

    def _add_to_owed(self) -> None:
        one, numbers = self._oldest([number for number, _ in self._numbered() if number not in self._owed_to])
        if self._owed is None:
            self._owed = self._zeros()
        self._owed_to |= numbers
        for ledger, total, strip, in_flight in zip(self.ledgers, self._owed, one.strips, one.in_flight, strict=True):
            ledger.add_correction(total, strip, in_flight)

    def _oldest(self, asked: Sequence[int]) -> tuple[_Contribution, set[int]]:
        """Waits for the oldest contribution.

        Returns:
            The contribution, and the numbers of the parameters that this rank had a gradient for, with those of `asked`
            that another rank had one for.
        """
        one = self._under_way[0]
        for ledger, in_flight in zip(self.ledgers, one.in_flight, strict=True):
            ledger.complete(in_flight)
        numbers = set(one.used)
        others = set(asked) - numbers
        for ledger, in_flight in zip(self.ledgers, one.in_flight, strict=True):
            numbers.update(ledger.anywhere(in_flight, others))
        self._under_way.popleft()
        self.landed += 1
        return one, numbers

    def _numbered(self) -> Iterator[tuple[int, torch.Tensor]]:
        for ledger in self.ledgers:
            yield from zip(ledger.members.numbers, ledger.members.parameters, strict=True)

    def _subtract_owed(self) -> None:
        owed, self._owed = self._owed, None
        owed_to, self._owed_to = self._owed_to, set()
        for ledger, strip in zip(self.ledgers, owed or (), strict=False):
            ledger.subtract_surplus(strip, owed_to)

    def _zeros(self) -> list[Strip]:
        strips = [ledger.strip() for ledger in self.ledgers]
        for strip in strips:
            strip.flat.zero_()
        return strips

    @contextmanager
    def _working(self) -> Iterator[None]:
        """Context of everything that uses strips and wires; once a collective fails in it nothing else is done."""
        if self.failure:
            raise FusedReduceError(f"an asynchronous step failed before, call reset() on every rank: {self.failure}")
        if self._touched is not None:
            # Strips are free once the stream of the last call has finished with them.
            torch.cuda.current_stream(self._device).wait_event(self._touched)
        try:
            with no_autograd():
                yield
        except CollectiveError as error:
            self.failure = str(error)
            raise
        finally:
            if self._device.type == "cuda":
                self._touched = torch.cuda.Event()
                self._touched.record(torch.cuda.current_stream(self._device))
