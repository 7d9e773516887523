"""The cuts of one lane beside buckets (`Job`s) that stay as they are on the same channel.

Those add what they pack before a cut and reduce after it, and end the channel themselves no earlier than

    when they are packed, after all the lane's buckets before them, and they and all later buckets are reduced

A walk as in `cuts.py` heeds both. A lower cut may then have more jobs behind it: what the walk finds is true, but where
packing is not free it can miss a way that exists.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from .bucket_group import Job, Lane
from .cuts import Terms, minimise


def earliest_beside(lane: Lane, jobs: Sequence[Job], most_steps: int) -> tuple[list[int], int]:
    """Cuts a lane among buckets that stay.

    Args:
        lane: at least one parameter.
        jobs: the others' buckets, by place.
        most_steps: after which the best so far is taken.

    Returns:
        Starts of the buckets, from the end, and the steps taken.
    """
    terms = TermsBeside(lane, jobs)
    return minimise(terms, most_steps), terms.steps


class TermsBeside(Terms):
    """Those of a lane among jobs."""

    def __init__(self, lane: Lane, jobs: Sequence[Job]) -> None:
        own = Terms.of(lane)
        super().__init__(own.late, own.wires, own.lowest, own.pack_fixed, own.wire_fixed)
        self._packs = lane.packs
        self._jobs: list[tuple[int, int]] = []  # (members of the lane before it, when it ends without the lane)
        packed, unsent, end = 0, sum(job.wire for job in jobs), 1
        for job in jobs:
            while end <= len(lane) and lane.places[end] < job.place:
                self.late[end] += packed + unsent
                end += 1
            packed += job.pack
            self._jobs.append((end - 1, job.ready + packed + unsent))
            unsent -= job.wire
        for rest in range(end, len(lane) + 1):
            self.late[rest] += packed
        self._after = max((at for before, at in self._jobs if before == len(lane)), default=0)
        # What a job has behind it from a start on, less what the lane packs before it. Where packing is the slower of
        # the two this does not rise, and its bucket's bytes count as packed before.
        self._rises = lane.packs[-1] <= lane.wires[-1]
        self._net = [w - p if self._rises else w for w, p in zip(lane.wires, lane.packs, strict=True)]
        self.steps = len(self.late) + len(jobs)

    def end(self, starts: list[int]) -> int:
        """When the last collective ends."""
        last = len(self.late) - 1
        jobs = list(self._jobs)
        latest, packs = super().end(starts), len(starts) * self.pack_fixed
        for nth, start in enumerate([last, *starts]):
            rest = nth * self.wire_fixed + self.wires[-1] - self.wires[start]
            while jobs and jobs[-1][0] >= start:
                latest = max(latest, jobs.pop()[1] + packs + self._packs[start] + rest)
            packs -= self.pack_fixed
        return latest

    def lowest_target(self) -> int:
        """No walk meets a lower one: once a member is ready, its bytes and all after it are to be reduced."""
        own = max(
            # Its packing and its bucket's may be hidden behind a job.
            late - packs - wires
            for late, packs, wires in zip(self.late[1:], self._packs[1:], self.wires[:-1], strict=True)
        )
        fewer = min(self.wire_fixed - self.pack_fixed, 0) * len(self.late)
        return max([own + self.wires[-1], *(at for _, at in self._jobs)]) - self.pack_fixed + fewer

    def walk(self, target: int) -> tuple[list[int] | None, int]:
        """As without jobs."""
        late, wires, lowest, jobs = self.late, self.wires, self.lowest, self._jobs
        last = end = len(late) - 1
        over = self._after + self._packs[-1] - self.pack_fixed - target
        if over > 0:
            return None, over
        rise = max(target, 0) + 1
        fixed = wires[-1] - target
        step = self.wire_fixed - self.pack_fixed
        job = bisect_left(jobs, (last, 0)) - 1
        starts: list[int] = []
        while end:
            fixed += step
            need = fixed + late[end]
            start = bisect_left(wires, need, lowest[end], end)
            if start > lowest[end]:
                rise = min(rise, need - wires[start - 1])
            while job >= 0 and jobs[job][0] >= start:
                before, at = jobs[job]
                need = fixed - self.pack_fixed + at + (0 if self._rises else self._packs[end])
                cut = bisect_left(self._net, need, start, before + 1)
                if cut > start:
                    rise = min(rise, need - self._net[cut - 1])
                    start = cut
                job -= start <= before
            if start == end:
                break
            starts.append(start)
            end = start
        self.steps += len(starts) + len(jobs) + 1
        return (None if end else starts), rise
