"""SecondPhases: the second collectives of buckets that are exchanged in two phases, in one order on every rank.

    phase one   all-to-all: each rank gets every rank's contribution to its shard         issued as a bucket is launched
    between     the owner of a shard adds the contributions up in fp32, and encodes the sum
    phase two   all-gather: every rank gets every shard's sum                             issued here

The order in which phase two may be issued follows a clock, and differs between ranks, where the host has to wait for
phase one: on CPU. There phase two has a communicator of its own, on which only this order counts: as a bucket is
launched, those whose phase one has ended are issued, and the rest at the end of the step. Nothing waits before. On CUDA
nothing has to wait: phase two follows the last bucket's phase one on the same communicator.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import torch

from ..comm.protocol import Communicator, Pending


class TwoPhases:
    """One bucket's exchange: a `Pending` of both phases.

    Args:
        first: phase one.
        begin_second: called when phase one has ended, with the communicator of phase two; returns phase two.
        label: names the bucket in errors.
        phases: issues phase two.
    """

    def __init__(
        self, first: Pending, begin_second: Callable[[Communicator], Pending], label: str, phases: SecondPhases
    ) -> None:
        self.first = first
        self._begin_second = begin_second
        self._label = label
        self._phases = phases
        self._second: Pending | None = None

    def issue_second(self, communicator: Communicator) -> None:
        """Waits for phase one (on CUDA: the current stream does) and starts phase two.

        Raises:
            RuntimeError: phase one failed, or phase two could not be issued; says which.
        """
        phase = "the all-to-all"
        try:
            self.first.wait()
            phase = "starting the all-gather"
            self._second = self._begin_second(communicator)
        except RuntimeError as error:
            raise RuntimeError(f"{phase} of {self._label}: {error}") from error

    def notify(self, done: Callable[[], None]) -> None:
        """As `Pending.notify`, of phase one."""
        self.first.notify(done)

    def ready(self) -> bool:
        """Whether `wait` would return without blocking."""
        return self._second is not None and self._second.ready()

    def future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """A future of both phases; waits until phase two is issued."""
        self._phases.issue_all()
        assert self._second is not None
        return self._second.future()

    def wait(self) -> None:
        """Issues every second phase that is due, then waits for this one.

        Raises:
            RuntimeError: a phase of this bucket, or of one before it, failed; says which.
        """
        self._phases.issue_all()
        assert self._second is not None
        try:
            self._second.wait()
        except RuntimeError as error:
            raise RuntimeError(f"the all-gather of {self._label}: {error}") from error


class SecondPhases:
    """Issues second phases. One per reducer; called under its lock.

    Args:
        communicator: the ranks.
        device: of the gradients.

    Attributes:
        issued: second phases issued on `communicator` itself since it was set.
    """

    def __init__(self, communicator: Communicator, device: torch.device) -> None:
        self._communicator = communicator
        self._device = device
        self._apart: Communicator | None = None
        self._due: deque[TwoPhases] = deque()
        self.issued = 0

    @property
    def due(self) -> int:
        """Second phases that are to be issued."""
        return len(self._due)

    @property
    def follow_at_once(self) -> bool:
        """Whether second phases follow the last bucket's first one, without a wait of the host."""
        return self._device.type == "cuda" and self._communicator.waits_in_backward(self._device)

    def open(self) -> None:
        """Makes the communicator of second phases, where they need one of their own; every rank calls it, once.

        Raises:
            CollectiveError: a rank did not come within the timeout.
        """
        if self._apart is None and self._device.type == "cpu":
            self._apart = self._communicator.apart()

    def close(self) -> None:
        """Forgets what is in flight, and closes the communicator of second phases; `open` makes another."""
        self._due.clear()
        if self._apart is not None:
            self._apart.close()
            self._apart = None

    def set_communicator(self, communicator: Communicator) -> None:
        """Switches to `communicator`."""
        self.close()
        self._communicator = communicator
        self.issued = 0

    def follow(self, first: Pending, begin_second: Callable[[Communicator], Pending], label: str) -> TwoPhases:
        """Registers a bucket whose phase one has just been issued, and issues what may be issued without waiting.

        Args:
            first: phase one.
            begin_second: see `TwoPhases`.
            label: names the bucket in errors.

        Returns:
            The exchange in flight.
        """
        both = TwoPhases(first, begin_second, label, self)
        self._due.append(both)
        if self._apart is not None:
            while self._due and self._due[0].first.ready():
                self._issue_next()
        return both

    def issue_all(self) -> None:
        """Issues every second phase that is due; waits for first phases (on CUDA the current stream does).

        Raises:
            RuntimeError: see `TwoPhases.issue_second`.
        """
        while self._due:
            self._issue_next()

    def _issue_next(self) -> None:
        self._due.popleft().issue_second(self._apart or self._communicator)
        self.issued += self._apart is None
