"""Channels of a LocalGroup, which are sequences of collectives, and the epochs that they belong to.

An epoch is all channels from one abort of the group to the next; it ends for all of them at once. The n-th channel
that each rank asks for from the same parent (the epoch, or a channel that it duplicates) is the same channel. The
group's lock guards everything here.
"""

from __future__ import annotations

import functools
import logging
import threading
import weakref
from collections import Counter
from collections.abc import Callable, MutableMapping, Sequence
from typing import Any, Protocol, TypeAlias, TypeVar

from torch.utils.weak import WeakIdKeyDictionary

from ...errors import CollectiveError
from ..agreement import ranks_text
from .operations import Resources, perform
from .rendezvous import Arrival, LocalPending, Rendezvous

_logger = logging.getLogger(__name__)
OwnerT = TypeVar("OwnerT")
# Of a collective in a channel: its number; the key of an exchange; number, source and destination of a transfer.
Place: TypeAlias = int | str | tuple[int, int, int]


class Group(Protocol):
    """What an epoch uses of its group, a LocalGroup.

    Attributes:
        unaware: by rank, the epoch that has ended without the rank having been told.
    """

    size: int
    timeout_s: float
    one_thread: bool
    lock: threading.RLock
    resources: Resources
    unaware: dict[int, Epoch]


class Channels:
    """The channels of one parent, by number."""

    def __init__(self, epoch: Epoch, name: str) -> None:
        self._epoch = epoch
        self._name = name
        self._numbers: dict[int, int] = {}
        self._incomplete: dict[tuple[int, tuple[int, ...]], tuple[Channel, set[int]]] = {}

    def next_of(self, rank: int, among: tuple[int, ...]) -> Channel:
        """The next channel of `rank`, of the ranks `among`. One that they all have is no longer referenced here."""
        epoch = self._epoch
        with epoch.group.lock:
            epoch.check(f"rank {rank} cannot make a communicator", rank)
            number = self._numbers[rank] = self._numbers.get(rank, -1) + 1
            if (number, among) not in self._incomplete:
                self._incomplete[number, among] = (Channel(epoch, f"{self._name}{number}", among), set())
            channel, ranks = self._incomplete[number, among]
            ranks.add(rank)
            epoch.ranks.add(rank)
            if len(ranks) == len(among):
                del self._incomplete[number, among]
            return channel


class Epoch:
    """All channels from one abort of the group to the next.

    Attributes:
        problem: why it has ended; empty while it has not.
        cause: the error that ended it.
        ranks: those that have a communicator of it.
    """

    def __init__(self, group: Group) -> None:
        self.group = group
        self.problem = ""
        self.cause: BaseException | None = None
        self.channels: weakref.WeakSet[Channel] = weakref.WeakSet()
        self.ranks: set[int] = set()
        self.roots = Channels(self, "")
        self._at_end: MutableMapping[Any, Callable[[Any, str], None]] = WeakIdKeyDictionary()

    def check(self, what: str, rank: int) -> None:
        """Raises CollectiveError if the epoch has ended; `rank` has been told then. The lock must be held."""
        if self.problem:
            self.acknowledge(rank)
            raise CollectiveError(f"{what}: {self.problem}") from self.cause

    def acknowledge(self, rank: int) -> None:
        """`rank` has been told that this epoch has ended; it may not know of epochs that ended later."""
        with self.group.lock:
            if self.group.unaware.get(rank) is self:
                del self.group.unaware[rank]

    def call_at_end(self, owner: OwnerT, call: Callable[[OwnerT, str], None]) -> None:
        """Has `call(owner, why)` called when the epoch ends; see `LocalGroup.on_epoch_end`. The lock must be held."""
        self._at_end[owner] = call

    def end(self, problem: str, cause: BaseException | None) -> list[Callable[[], None]]:
        """Ends the epoch: every collective of it that is not being performed raises from now on. The lock must be held.

        Args:
            problem: why; the first reason counts.
            cause: the error behind it.

        Returns:
            What the caller calls once it has released the lock.
        """
        if self.problem:
            return []
        self.problem, self.cause = problem, cause
        dropped = [one for channel in list(self.channels) for one in channel.drop_incomplete()]
        calls = [one.run_callbacks for one in dropped if one.abort(f"{one.name}: {problem}", cause)]
        calls += [functools.partial(_tell, owner, call, problem) for owner, call in self._at_end.items()]
        self._at_end.clear()
        return calls


class Channel:
    """A sequence of collectives, and those that are identified by a key instead of a place in the sequence.

    Attributes:
        ranks: the group's ranks that take part, in the order of the communicators' own ranks.
        children: channels of the communicators that were duplicated, or split off, from this one's.
        used_by: by rank, the thread that used its communicator last. None: no thread has, and each rank has its own.
    """

    def __init__(self, epoch: Epoch, name: str, ranks: tuple[int, ...]) -> None:
        self.epoch = epoch
        self.name = name
        self.ranks = ranks
        self.children = Channels(epoch, f"{name}.")
        self.used_by: dict[int, int | None] = {}
        self._incomplete: dict[Place, Rendezvous] = {}
        self._transfers: Counter[tuple[int, int, int]] = Counter()
        epoch.channels.add(self)

    def drop_incomplete(self) -> list[Rendezvous]:
        """Removes and returns the collectives that not all ranks have issued."""
        incomplete = list(self._incomplete.values())
        self._incomplete.clear()
        return incomplete

    def transfer(self, rank: int, source: int, destination: int, arrival: Arrival) -> LocalPending:
        """Takes part in the next transfer of `rank` from one rank to another, as `issue` does."""
        with self.epoch.group.lock:
            number = self._transfers[rank, source, destination]
            self._transfers[rank, source, destination] += 1
        return self.issue(rank, (number, source, destination), arrival, (source, destination))

    def issue(self, rank: int, place: Place, arrival: Arrival, ranks: Sequence[int] | None = None) -> LocalPending:
        """Takes part in a collective. Never blocks, but performs the collective if `rank` is the last to issue it.

        Args:
            rank: that issues it.
            place: its number in the sequence, its key, or of a transfer its number, source and destination.
            arrival: what the rank brings.
            ranks: those that take part, in the order in which the collective gets their arrivals; None: the channel's.

        Raises:
            CollectiveError: the group is closed, or a rank has given up.
        """
        epoch, group = self.epoch, self.epoch.group
        with group.lock:
            epoch.check(f"rank {rank} cannot issue {arrival}", rank)
            rendezvous = self._incomplete.get(place)
            if rendezvous is None:
                name = f"{_place_text(place)} of channel {self.name} among {len(self.ranks)} local ranks"
                ranks = self.ranks if ranks is None else ranks
                rendezvous = self._incomplete[place] = Rendezvous(name, ranks, group.lock, group.timeout_s)
            self.used_by[rank] = arrival.thread
            pending = LocalPending(
                rendezvous, rank, arrival, lambda: self._deadlock(rendezvous), lambda: epoch.acknowledge(rank)
            )
            last = rendezvous.add(rank, arrival)
            if not rendezvous.missing():
                del self._incomplete[place]
        if last:
            try:
                rendezvous.perform(lambda arrivals: perform(arrivals, group.resources))
            finally:
                rendezvous.fail_if_unfinished(f"rank {rank}, the last to arrive, was interrupted")
        return pending

    def _deadlock(self, rendezvous: Rendezvous) -> str:
        """Why waiting here would never end: with one thread for all ranks, the missing ones cannot arrive; else ""."""
        me = threading.get_ident()
        missing = rendezvous.missing()
        if self.epoch.group.one_thread and missing and all(self.used_by.get(rank, me) == me for rank in missing):
            return f"{ranks_text(missing)} cannot arrive: the thread that waits drives them too"
        return ""


def _tell(owner: OwnerT, call: Callable[[OwnerT, str], None], problem: str) -> None:
    try:
        call(owner, problem)
    except Exception:
        _logger.exception("a callback at the end of an epoch failed (%s)", problem)


def _place_text(place: Place) -> str:
    if isinstance(place, tuple):
        return f"transfer {place[0]} from rank {place[1]} to rank {place[2]}"
    return f"collective {place}" if isinstance(place, int) else f"exchange {place!r}"
