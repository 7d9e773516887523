"""Cuts: divides one group into buckets so that the last collective ends as early as possible. Exact.

With K buckets, the m-th from the end running from `start` (exclusive) to `end`, the channel ends at the latest of

    late[end] + pack_fixed * (K + 1 - m) + wire_fixed * m + wires[n] - wires[start]

where `late` is when backward gets there with the packing of all bytes so far. Without `pack_fixed * (K + 1)`, the rest
U, the target, does not depend on K. A walk from the end that takes the lowest `start` that keeps U and the cap meets it
with the fewest buckets, N(U), if any do: a lower cut leaves all later steps the choices they had. So the earliest end
is the least of

    U + pack_fixed * (N(U) + 1)

N falls as U rises, so between two targets the sum is at least that of the lower one with the count of the higher one.
Halving the most promising interval, until none promises more than the best result so far, is exact. The lowest target
that can be met at all is found by dynamic programming over the cuts,

    done(end) = min over start of max(done(start), late[end]) + wire_fixed - pack_fixed + wires[end] - wires[start]

in which the best start is the last one done by `late[end]`, or the one after it. Where `pack_fixed` is 0 that is all.

The walk needs `pack_fixed` to be at most `wire_fixed`. Otherwise the group is read backwards, which is a group again:
what is late before a cut changes places with what is to be sent after it.

Source: the model without packing and cap is that of Shi, Chu and Li, "MG-WFBP: Efficient Data Communication for
    Distributed Synchronous SGD Algorithms" (INFOCOM 2019), who merge layer by layer; this search is our own.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from heapq import heappop, heappush

from .bucket_group import BucketGroup, filled


def earliest(group: BucketGroup) -> list[int]:
    """Cuts a group that uses the channel alone.

    Args:
        group: with at least one parameter.

    Returns:
        Starts of the buckets, from the end. No others end the last collective earlier, nor as early with fewer buckets.
    """
    terms = Terms.of(group)
    if terms.pack_fixed <= terms.wire_fixed:
        return _minimise(terms)
    return [*(len(group) - cut for cut in reversed(_minimise(terms.backwards())) if cut), 0]


def _minimise(terms: Terms) -> list[int]:
    """Finds the cuts that end first, and of those the fewest."""
    starts = filled(terms.lowest)
    best = terms.end(starts), len(starts)
    low = terms.lowest_target()
    # Intervals of targets not tried yet: the earliest end and the fewest buckets possible, the first and last target.
    intervals = [(low + (len(starts) + 1) * terms.pack_fixed, len(starts), low, best[0])]
    while intervals:
        end, fewest, first, last = heappop(intervals)
        if (end, fewest) >= best:
            break
        last = min(last, first + best[0] - end)
        target = first if first == low else (first + last) // 2
        better_starts, rise = terms.walk(target)
        if better_starts is not None:
            score = terms.end(better_starts), len(better_starts)
            if score < best:
                starts, best = better_starts, score
            if first < target:
                heappush(
                    intervals,
                    (first + (len(better_starts) + 1) * terms.pack_fixed, len(better_starts), first, target - 1),
                )
        if target + rise <= last:
            heappush(intervals, (end + target + rise - first, fewest, target + rise, last))
    return starts


@dataclass
class Terms:
    """The terms of the channel's end, in fs; lists have an entry before the first parameter.

    Args:
        late: when a bucket that ends here is packed, without fixed costs.
        wires: to reduce all bytes up to here.
        lowest: for a bucket that ends here, the lowest start that the cap allows.
        pack_fixed: to pack a bucket.
        wire_fixed: to reduce a bucket.
    """

    late: list[int]
    wires: list[int]
    lowest: list[int]
    pack_fixed: int
    wire_fixed: int

    @classmethod
    def of(cls, group: BucketGroup) -> Terms:
        """The terms of a group that uses the channel alone."""
        late = [ready + packs for ready, packs in zip(group.ready, group.packs, strict=True)]
        return cls(late, group.wires, group.lowest, group.pack_fixed, group.wire_fixed)

    def backwards(self) -> Terms:
        """The same terms read from the other end."""
        last = len(self.late) - 1
        late = [self.wires[-1] - wires for wires in reversed(self.wires)]
        wires = [self.late[-1] - late for late in reversed(self.late)]
        lowest = [last + 1 - bisect_right(self.lowest, start) for start in range(last, -1, -1)]
        return Terms(late, wires, lowest, self.wire_fixed, self.pack_fixed)

    def end(self, starts: list[int]) -> int:
        """When the last collective ends."""
        late, wires, step = self.late, self.wires, self.wire_fixed - self.pack_fixed
        latest, end = 0, len(late) - 1
        fixed = (len(starts) + 1) * self.pack_fixed + wires[-1]
        for start in starts:
            fixed += step
            latest = max(latest, late[end] + fixed - wires[start])
            end = start
        return latest

    def lowest_target(self) -> int:
        """A target below which no walk succeeds."""
        late, wires, lowest = self.late, self.wires, self.lowest
        step = self.wire_fixed - self.pack_fixed
        done = [0]
        free = 0  # the last cut that is done by `late[end]`
        for end in range(1, len(late)):
            while free + 1 < end and done[free + 1] <= late[end]:
                free += 1
            start = max(free, lowest[end])
            best = max(done[start], late[end]) - wires[start]
            if start == free and free + 1 < end:
                best = min(best, done[free + 1] - wires[free + 1])
            done.append(best + wires[end] + step)
        return done[-1]

    def walk(self, target: int) -> tuple[list[int] | None, int]:
        """Finds the fewest buckets that meet a target.

        Returns:
            Their starts, or None if none do; and by how much the target must rise before the result changes.
        """
        late, wires, lowest, step = self.late, self.wires, self.lowest, self.wire_fixed - self.pack_fixed
        rise = target + 1
        fixed = wires[-1] - target
        starts: list[int] = []
        end = len(late) - 1
        while end:
            fixed += step
            need = fixed + late[end]
            start = bisect_left(wires, need, lowest[end], end)
            if start > lowest[end] and need - wires[start - 1] < rise:
                rise = need - wires[start - 1]
            if start == end:
                break
            starts.append(start)
            end = start
        return (None if end else starts), rise
