"""Epochs: which epoch each device of a SyncServer is in, and which ones were given up.

An epoch that cannot be finished is given up for every device in it, and the communicators that it used with it. Those
who are not in it yet go on in a *generation* of new communicators.
"""

from __future__ import annotations

import enum
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, NoReturn, Protocol, TypeVar

from ..comm.local.group import LocalCommunicator, LocalGroup
from ..errors import CollectiveError, FusedReduceError, shortened

NAMES_SHOWN = 20


class DeviceState(enum.Enum):
    """State of a SyncDevice."""

    IDLE = "between epochs"  # a backward raises
    ANNOUNCED = "in an epoch"  # from announce to sync
    CLOSED = "closed"  # cannot be used again


@dataclass(frozen=True, eq=False)
class Generation:
    """The epochs that use the same communicators: from `first` on, until one is given up.

    Args:
        communicators: by rank, made together.
        first: number of the first epoch.
    """

    communicators: list[LocalCommunicator]
    first: int


class Member(Protocol):
    """A SyncDevice, as the epochs see it."""

    rank: int
    epoch: int
    state: DeviceState
    generation: Generation

    @property
    def contributed(self) -> bool:
        """True if the other devices can finish this device's latest epoch without it."""

    def announced(self) -> list[str]:
        """Names of the parameters that were announced for the latest epoch."""

    def missing(self) -> str:
        """What the others wait for, such as "has not produced the gradients of w"; empty if it has done its part."""


D = TypeVar("D", bound=Member)


class Epochs(Generic[D]):
    """The epochs of one SyncServer.

    Args:
        group: of its devices.

    Attributes:
        lock: to hold in calls of all methods but `check_open`, `leave` and `close`.
        devices: those that are started, by rank.
        generation: the latest.
        failures: why epochs were given up, by number; of those that not every device has come to.
    """

    def __init__(self, group: LocalGroup) -> None:
        self.lock = threading.RLock()
        self.devices: dict[int, D] = {}
        self.failures: dict[int, CollectiveError] = {}
        self._group = group
        self._departed: dict[int, int] = {}  # devices that are closed and not started again: rank -> last epoch
        self._last_epoch = 0  # of any device
        self._closed = False
        self.begin_generation()

    def check_open(self) -> None:
        """Raises if `close` was called.

        Raises:
            FusedReduceError: it was.
        """
        if self._closed:
            raise FusedReduceError("this SyncServer is closed: make a new one")

    def close(self) -> None:
        """No epoch begins any more."""
        with self.lock:
            self._closed = True

    def begin_generation(self) -> None:
        """The epochs that nobody has begun use new communicators, also while some are still in those before."""
        self.generation = Generation(self._group.communicators(apart=True), self._last_epoch + 1)

    def check_startable(self, rank: int) -> None:
        """Before a device is made: one of this rank is not started; if it was, the others get new communicators.

        Raises:
            FusedReduceError: the server is closed, or the device is started.
        """
        self.check_open()
        if rank in self.devices:
            raise FusedReduceError(f"device {rank} has been started already: close() it before starting it again")
        if rank in self._departed:
            self.begin_generation()  # the others join it with their next epoch

    def enter(self, device: D) -> None:
        """A device has been started."""
        self._departed.pop(device.rank, None)
        self.devices[device.rank] = device

    def begin(self, device: D) -> None:
        """A device begins its next epoch.

        Raises:
            CollectiveError: it was given up already; or another device is closed and will not come, and none has begun.
        """
        epoch = device.epoch + 1
        if epoch in self.failures:
            device.epoch = epoch
            self.raise_failure(device)
        missing = [rank for rank, last in sorted(self._departed.items()) if last < epoch]
        if missing:
            raise CollectiveError(
                f"device {device.rank}: {devices_text(missing)} closed, so no epoch can be finished: "
                "start the closed ones again with SyncServer.device, or close this device too"
            )
        device.epoch = epoch
        self._last_epoch = max(self._last_epoch, epoch)
        if self.failures:
            known = min(one.epoch for one in self.devices.values())
            self.failures = {epoch: failure for epoch, failure in self.failures.items() if epoch >= known}

    def raise_failure(self, device: D) -> NoReturn:
        """Raises for a device in an epoch that was given up.

        Raises:
            CollectiveError: says why.
        """
        failure = self.failures[device.epoch]
        raise CollectiveError(f"device {device.rank}: {failure}") from failure.__cause__

    def abort(self, epoch: int, device: D, error: BaseException, *, from_outside: bool = False) -> None:
        """An epoch cannot be finished, as `device` has found, or another thread; the first reason counts.

        Args:
            epoch: its number.
            device: whose epoch it is.
            error: why.
            from_outside: the device does not know, and may wait in it.
        """
        if epoch in self.failures:
            return
        why = f"device {device.rank} raised {type(error).__name__}: {error}"
        if isinstance(error, CollectiveError):
            missing = self._missing(epoch)
            why = f"{f'{missing}. ' if missing else ''}{error}"
        self.failures[epoch] = failure = CollectiveError(f"epoch {epoch} was given up: {why}")
        failure.__cause__ = error
        self._last_epoch = max(self._last_epoch, epoch)
        # Of its epochs, a device may have one to end still that others have done their part in, also after a later one
        # was given up.
        generation = self.generation if epoch >= self.generation.first else device.generation
        if any((from_outside or one is not device) and one.epoch >= epoch for one in self.devices.values()):
            # Whoever is in it has all of the epoch before. If nobody is, some may be in that, and shall end it.
            generation.communicators[device.rank].abort(failure)
        if generation is self.generation and not self._closed:
            self.begin_generation()

    def _missing(self, epoch: int) -> str:
        """The text on which devices an epoch waits for, and why."""
        found, announced = [], dict[str, None]()
        for rank in range(self._group.size):
            device = self.devices.get(rank)
            if device is None:
                found.append(f"device {rank} is not started")
            elif device.epoch < epoch:
                found.append(f"device {rank} has not announced epoch {epoch}")
            elif device.epoch == epoch and device.state is DeviceState.ANNOUNCED:
                announced |= dict.fromkeys(device.announced())
                found += [f"device {rank} {one}" for one in [device.missing()] if one]
        if found and announced:
            found.append(f"{shortened(announced, NAMES_SHOWN)} cannot be averaged")
        return "; ".join(found)

    def leave(self, device: D) -> None:
        """A device is closed: those that wait for it, or would, raise."""
        with self.lock:
            if self.devices.get(device.rank) is not device:
                return
            epoch = device.epoch + device.contributed
            lost = {one.epoch for one in self.devices.values() if one is not device and one.epoch >= epoch}
            if not device.contributed:
                lost.add(epoch)
            for one in sorted(lost):
                self.abort(one, device, FusedReduceError("the device was closed"))
            del self.devices[device.rank]
            self._departed[device.rank] = device.epoch


def devices_text(ranks: Sequence[int]) -> str:
    """ "device 3 is" or "devices 0 and 2 are"."""
    listed = " and ".join([", ".join(map(str, ranks[:-1])), str(ranks[-1])]) if len(ranks) > 1 else str(ranks[0])
    return f"device{'s' if len(ranks) > 1 else ''} {listed} {'are' if len(ranks) > 1 else 'is'}"
