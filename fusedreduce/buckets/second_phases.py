"""SecondPhases: the second collectives of buckets that are exchanged in two phases, in one order on every rank.

    phase one   all-to-all: each rank gets every rank's contribution to its shard         issued as a bucket is launched
    between     the owner of a shard adds the contributions up in fp32, and encodes the sum
    phase two   all-gather: every rank gets every shard's sum                             issued here

Where the host has to wait for phase one, the moment at which phase two may be issued follows a clock, and differs
between ranks. There phase two has a communicator of its own, on which only the buckets' order counts. On CPU, those
whose phase one has ended are issued as further buckets are launched, and the rest at the end of the step: nothing waits
before. With NCCL nothing has to wait: phase two follows the last bucket's phase one on the same communicator.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress

import torch

from ..comm.protocol import Communicator, Pending
from ..comm.waiting import collective_failed, wait_for

# Communicators whose owner was dropped without `close`: at an arbitrary place and in any thread, maybe a backend's own,
# where nothing may be closed. The next `open` closes them.
_shelved: deque[Communicator] = deque()


class TwoPhases:
    """One bucket's exchange: a `Pending` of both phases, once `SecondPhases` has issued the second one.

    Args:
        first: phase one.
        begin_second: called when phase one has ended, with the communicator of phase two; returns phase two.
        label: names the bucket in errors.
    """

    def __init__(self, first: Pending, begin_second: Callable[[Communicator], Pending], label: str) -> None:
        self.first = first
        self.label = label
        self._begin_second = begin_second
        self._second: Pending | None = None
        self._told: list[Callable[[], None]] = []

    def begin_second(self, communicator: Communicator) -> None:
        """Starts phase two, when phase one has been waited for."""
        self._second = self._begin_second(communicator)
        for done in self._told:
            self._second.notify(done)

    def notify(self, done: Callable[[], None]) -> None:
        """See `Pending`."""
        if self._second is None:
            self._told.append(done)
        else:
            self._second.notify(done)

    def ready(self) -> bool:
        """See `Pending`."""
        return self._second is not None and self._second.ready()

    def future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """See `Pending`."""
        return self._issued().future()

    def wait(self) -> None:
        """See `Pending`."""
        try:
            self._issued().wait()
        except RuntimeError as error:
            raise RuntimeError(f"the all-gather of {self.label}: {error}") from error

    def _issued(self) -> Pending:
        assert self._second is not None, f"phase two of {self.label} is not issued"
        return self._second


class SecondPhases:
    """Issues second phases. One per reducer; called under its lock.

    Args:
        communicator: the ranks.
        device: of the gradients.

    Attributes:
        due: those that are to be issued.
        issued: second phases issued since the communicator was set.
        issued_together: those of them that were issued on that communicator itself.
    """

    def __init__(self, communicator: Communicator, device: torch.device) -> None:
        self._communicator = communicator
        self._device = device
        self._apart: Communicator | None = None
        self._is_stale = False
        self._shelf: weakref.finalize[[Communicator], SecondPhases] | None = None
        self.due: deque[TwoPhases] = deque()
        self.issued = self.issued_together = 0

    @property
    def follow_at_once(self) -> bool:
        """Whether second phases follow the last bucket's first one, without a wait of the host."""
        return self._device.type == "cuda" and self._communicator.waits_in_backward(self._device)

    def open(self) -> None:
        """Makes the communicator of second phases, where they need one of their own; every rank calls it.

        Raises:
            CollectiveError: a rank did not come within the timeout.
        """
        with suppress(IndexError):  # ranks may be threads, which empty it together
            while True:
                _shelved.popleft().close()
        if self._is_stale:
            self.close()
        if self._apart is None and not self.follow_at_once:
            try:
                self._apart = self._communicator.apart()
            except RuntimeError as error:
                what = "the group of second phases could not be made"
                raise collective_failed(what, self._communicator, error) from error
            self._shelf = weakref.finalize(self, _shelved.append, self._apart)
            self._shelf.atexit = False

    def restart(self) -> None:
        """Forgets an abandoned step; every rank does so. The next `open` makes another communicator.

        The one in use stays until then: peers may still wait for what is in flight on it.
        """
        self.due.clear()
        self._is_stale = self._apart is not None

    def close(self) -> None:
        """Forgets what is in flight, and closes the communicator of second phases."""
        self.due.clear()
        self._is_stale = False
        if self._apart is not None:
            assert self._shelf is not None
            self._shelf.detach()
            self._apart.close()
            self._apart = None

    def set_communicator(self, communicator: Communicator) -> None:
        """Switches to `communicator`."""
        self.close()
        self._communicator = communicator
        self.issued = self.issued_together = 0

    def follow(self, first: Pending, begin_second: Callable[[Communicator], Pending], label: str) -> TwoPhases:
        """Registers a bucket whose phase one has just been issued, and issues what may be issued without waiting.

        Args:
            first: phase one.
            begin_second: see `TwoPhases`.
            label: names the bucket in errors.

        Returns:
            The exchange in flight.

        Raises:
            CollectiveError: see `issue_all`.
        """
        both = TwoPhases(first, begin_second, label)
        self.due.append(both)
        if self._device.type == "cpu":
            while self.due and self.due[0].first.ready():
                self._issue_next()
        return both

    def issue_all(self) -> None:
        """Issues every second phase that is due; waits for first phases (on CUDA the current stream does).

        Raises:
            CollectiveError: a phase one failed, or a phase two could not be issued; names it and its bucket.
        """
        while self.due:
            self._issue_next()

    def _issue_next(self) -> None:
        both = self.due.popleft()
        wait_for(both.first, lambda: f"the all-to-all of {both.label}", self._communicator)
        try:
            both.begin_second(self._apart or self._communicator)
        except RuntimeError as error:
            what = f"the all-gather of {both.label} could not be started"
            raise collective_failed(what, self._communicator, error) from error
        self.issued += 1
        self.issued_together += self._apart is None
