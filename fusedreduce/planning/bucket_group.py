"""BucketGroup: one group's parameters in ready order, as prefix sums. A bucket is a run of them between two cuts."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

from .cost_model import FS_PER_NS
from .timeline import Problem


class Job(NamedTuple):
    """What a bucket is to the channel.

    Attributes:
        place: of its last member in ready order.
        ready: when that is ready, in fs.
        pack: cost of packing, in fs.
        wire: cost of its collective, in fs.
    """

    place: int
    ready: int
    pack: int
    wire: int


class BucketGroup:
    """Parameters that may share buckets. Lists begin before the first parameter: index 1 is after the first one.

    Args:
        problem: that the parameters are of.
        places: of the parameters in ready order, ascending.
        split: count each bucket's fixed costs so many times, because it will be split.

    Attributes:
        members: the parameters.
        places: as given.
        ready: ready times in fs.
        packs: cost in fs of packing all bytes so far, without fixed costs.
        wires: cost in fs of reducing them, without fixed costs.
        lowest: for a bucket that ends here, the lowest start within the cap (or the start of a single parameter).
        pack_fixed: fixed cost of packing a bucket, in fs.
        wire_fixed: fixed cost of reducing a bucket, in fs.
    """

    def __init__(self, problem: Problem, places: Sequence[int], split: int = 1) -> None:
        members = [problem.order[place] for place in places]
        sizes = [problem.wire_bytes[number] for number in members]
        pack, wire = problem.costs.pack, problem.costs.wire
        self.members = members
        self.places = [-1, *places]
        self.ready = [0, *map(problem.ready_fs.__getitem__, members)]
        self.packs = list(accumulate([pack.fs_per_byte * size for size in sizes], initial=0))
        self.wires = list(accumulate([wire.fs_per_byte * size for size in sizes], initial=0))
        self.lowest = _lowest_starts([problem.size_bytes[number] for number in members], problem.cap_bytes)
        self.pack_fixed = split * pack.fixed_ns * FS_PER_NS
        self.wire_fixed = split * wire.fixed_ns * FS_PER_NS

    def __len__(self) -> int:
        return len(self.members)

    def filled(self) -> list[int]:
        """Starts, from the end, of the fewest buckets that the cap allows, each as large as possible from the end."""
        return filled(self.lowest)

    def filled_forward(self) -> list[int]:
        """The same, with each bucket as large as possible from the beginning."""
        ends = [0]
        while ends[-1] < len(self):
            ends.append(bisect_right(self.lowest, ends[-1]) - 1)
        return ends[-2::-1]

    def buckets(self, starts: Sequence[int]) -> Iterator[tuple[int, int]]:
        """(start, end) of each bucket, from the end."""
        return zip(starts, [len(self), *starts[:-1]], strict=True)

    def jobs(self, starts: Sequence[int]) -> list[Job]:
        """The buckets as jobs of the channel, from the end."""
        return [
            Job(
                self.places[end],
                self.ready[end],
                self.pack_fixed + self.packs[end] - self.packs[start],
                self.wire_fixed + self.wires[end] - self.wires[start],
            )
            for start, end in self.buckets(starts)
        ]


def filled(lowest: Sequence[int]) -> list[int]:
    """Starts, from the end, of buckets that each start as low as possible.

    Args:
        lowest: the lowest start for each end.
    """
    starts = []
    end = len(lowest) - 1
    while end:
        end = lowest[end]
        starts.append(end)
    return starts


def _lowest_starts(sizes: Sequence[int], cap_bytes: int) -> list[int]:
    lowest = [0]
    start = size_bytes = 0
    for end, size in enumerate(sizes, 1):
        size_bytes += size
        while size_bytes > cap_bytes and start < end - 1:
            size_bytes -= sizes[start]
            start += 1
        lowest.append(start)
    return lowest
