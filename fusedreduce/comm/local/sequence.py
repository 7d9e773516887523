"""Channels of a LocalGroup: sequences of collectives, and the generations that they live in.

A generation is all channels from one abort of the group to the next; it ends for all of them at once. The n-th
channels that ranks ask for in the same place are one. The group's lock guards everything here.
"""

from __future__ import annotations

import threading
import weakref
from typing import Protocol

from ...errors import CollectiveError
from ..agreement import ranks_text
from .operations import Workshop, perform
from .rendezvous import Arrival, LocalPending, Meeting


class Group(Protocol):
    """What a generation uses of its group, a LocalGroup."""

    size: int
    timeout_s: float
    one_thread: bool
    lock: threading.RLock
    workshop: Workshop
    unaware: dict[int, Generation]


class Siblings:
    """Channels by number: the n-th that each rank asks for is the same one."""

    def __init__(self, generation: Generation, name: str) -> None:
        self._generation = generation
        self._name = name
        self._asked: dict[int, int] = {}
        self._waiting: dict[int, tuple[Channel, set[int]]] = {}

    def channel(self, rank: int) -> Channel:
        """The next one of `rank`; forgotten here when all ranks have it."""
        generation = self._generation
        with generation.group.lock:
            generation.check(f"rank {rank} cannot make a communicator", rank)
            number = self._asked[rank] = self._asked.get(rank, -1) + 1
            if number not in self._waiting:
                self._waiting[number] = (Channel(generation, f"{self._name}{number}"), set())
            channel, have = self._waiting[number]
            have.add(rank)
            generation.ranks.add(rank)
            if len(have) == generation.group.size:
                del self._waiting[number]
            return channel


class Generation:
    """All channels from one abort of the group to the next."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self.problem = ""
        self.cause: BaseException | None = None
        self.channels: weakref.WeakSet[Channel] = weakref.WeakSet()
        self.ranks: set[int] = set()  # that have a communicator of it
        self.roots = Siblings(self, "")

    def check(self, what: str, rank: int) -> None:
        """Raises if somebody has given up; `rank` knows then. The lock is held."""
        if self.problem:
            self.acknowledge(rank)
            raise CollectiveError(f"{what}: {self.problem}") from self.cause

    def acknowledge(self, rank: int) -> None:
        """`rank` knows that this one has ended; of those that ended later it may not know."""
        with self.group.lock:
            if self.group.unaware.get(rank) is self:
                del self.group.unaware[rank]

    def fail(self, problem: str, cause: BaseException | None) -> None:
        """Everything of this generation raises from now on, but what is being performed."""
        failed: list[Meeting] = []
        with self.group.lock:
            if self.problem:
                return
            self.problem, self.cause = problem, cause
            for channel in list(self.channels):
                failed += [one for one in channel.forget() if one.abort(f"{one.name}: {problem}", cause)]
        for meeting in failed:
            meeting.tell()


class Channel:
    """A sequence of collectives, and those that have a key instead of a place in it."""

    def __init__(self, generation: Generation, name: str) -> None:
        self.generation = generation
        self.name = name
        self.siblings = Siblings(generation, f"{name}.")
        # By rank, the thread that used its communicator last. None: nobody has, and there is one thread for each.
        self.used_by: dict[int, int | None] = {}
        self._meetings: dict[int | str, Meeting] = {}
        generation.channels.add(self)

    def forget(self) -> list[Meeting]:
        """Those that not all ranks have come to; the channel has none any more."""
        meetings = list(self._meetings.values())
        self._meetings.clear()
        return meetings

    def arrive(self, rank: int, place: int | str, arrival: Arrival) -> LocalPending:
        """Never blocks, but performs the collective if this is the last rank to come.

        Raises:
            CollectiveError: the group is closed, or a rank has given up.
        """
        generation, group = self.generation, self.generation.group
        with group.lock:
            generation.check(f"rank {rank} cannot issue {arrival}", rank)
            meeting = self._meetings.get(place)
            if meeting is None:
                where = f"collective {place}" if isinstance(place, int) else f"exchange {place!r}"
                name = f"{where} of channel {self.name} among {group.size} local ranks"
                meeting = self._meetings[place] = Meeting(name, group.size, group.lock, group.timeout_s)
            self.used_by[rank] = arrival.thread
            pending = LocalPending(
                meeting, rank, arrival, lambda: self._alone(meeting), lambda: generation.acknowledge(rank)
            )
            last = meeting.arrive(rank, arrival)
            if not meeting.missing():
                del self._meetings[place]
        if last:
            try:
                meeting.perform(lambda arrivals: perform(arrivals, group.workshop))
            finally:
                meeting.end_at_last(f"rank {rank}, the last to come, was interrupted")
        return pending

    def _alone(self, meeting: Meeting) -> str:
        """Why waiting here would be for ever: with one thread for all ranks, whoever is missing cannot come."""
        me = threading.get_ident()
        missing = meeting.missing()
        if self.generation.group.one_thread and missing and all(self.used_by.get(rank, me) == me for rank in missing):
            return f"{ranks_text(missing)} cannot come: this thread drives them too, and it waits"
        return ""
