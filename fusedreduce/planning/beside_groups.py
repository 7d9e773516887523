"""Cuts of one group beside the fixed buckets (`Job`s) of other groups on the same channel.

Jobs add what they pack before a cut and reduce after it, and end the channel themselves no earlier than

    when they are packed, after all the group's buckets before them, and they and all later buckets are reduced

A walk as in `cuts.py` respects both. A lower cut may then have more jobs behind it: what the walk finds is valid, but
where packing is not free it can miss cuts that exist.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from .bucket_group import BucketGroup, Job
from .cuts import Terms, minimise


def earliest_beside(group: BucketGroup, jobs: Sequence[Job], most_steps: int) -> tuple[list[int], int]:
    """Cuts a group among fixed buckets.

    Args:
        group: with at least one parameter.
        jobs: the other groups' buckets, by place.
        most_steps: after which the best cuts so far are taken.

    Returns:
        Starts of the buckets, from the end, and the number of steps taken.
    """
    terms = TermsBeside(group, jobs)
    return minimise(terms, most_steps), terms.steps


class TermsBeside(Terms):
    """The terms of a group among jobs."""

    def __init__(self, group: BucketGroup, jobs: Sequence[Job]) -> None:
        own = Terms.of(group)
        super().__init__(own.late, own.wires, own.lowest, own.pack_fixed, own.wire_fixed)
        self._packs = group.packs
        self._jobs: list[tuple[int, int]] = []  # (members of the group before it, when it ends without the group)
        packed, unsent, end = 0, sum(job.wire for job in jobs), 1
        for job in jobs:
            while end <= len(group) and group.places[end] < job.place:
                self.late[end] += packed + unsent
                end += 1
            packed += job.pack
            self._jobs.append((end - 1, job.ready + packed + unsent))
            unsent -= job.wire
        for rest in range(end, len(group) + 1):
            self.late[rest] += packed
        self._after = max((at for before, at in self._jobs if before == len(group)), default=0)
        # What is reduced behind a job from a start on, less what the group packs before it. Where packing is slower
        # than reducing this does not rise, and the bucket's bytes count as packed before.
        self._rises = group.packs[-1] <= group.wires[-1]
        self._net = [w - p if self._rises else w for w, p in zip(group.wires, group.packs, strict=True)]
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
        """A target below which no walk succeeds: once a member is ready, it and all after it must be reduced."""
        own = max(
            # Its packing, and its bucket's, may be hidden behind a job.
            late - packs - wires
            for late, packs, wires in zip(self.late[1:], self._packs[1:], self.wires[:-1], strict=True)
        )
        fewer = min(self.wire_fixed - self.pack_fixed, 0) * len(self.late)
        return max([own + self.wires[-1], *(at for _, at in self._jobs)]) - self.pack_fixed + fewer

    def walk(self, target: int) -> tuple[list[int] | None, int]:
        """See `Terms.walk`."""
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
