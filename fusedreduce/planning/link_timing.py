"""Link timing: what collectives cost, from the times of their issue and their end, by busy periods of the channel.

A collective starts when the last rank has issued it, and a backend may run several at once (Gloo runs two), so the time
between two ends says little about one of them. But from the moment when the last rank issues a collective while none is
in flight, until everything that was issued meanwhile has ended, the channel is busy for as long as all of it costs.

Ranks share no clock. But a collective ends at the same moment on all ranks, so with d_k the end of bucket k (or of any
before it) and l_k its issue, on each rank's own clock, the smallest over all ranks of

    d_k - l_1        is the time from the last rank's first issue to the end of bucket k
    d_k-1 - l_k      is how long bucket k was queued on the last rank to issue it; negative: nothing was in flight

Example, two ranks, two buckets of 10 and 30 bytes; rank 0 issues at 0 and 5 and sees ends at 12 and 40, rank 1, on its
own clock, issues at 102 and 130 and sees 112 and 140: min(12 - 0, 112 - 102) = 10, min(40 - 0, 140 - 102) = 38;
queued min(12 - 5, 112 - 130) = -18. So two busy periods, of 10 ns for 10 bytes and of 38 - (10 + 18) = 10 for 30.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class CollectiveTimes:
    """The times of one bucket's collective on one rank, or, as the minimum over ranks, on the last rank to issue it.

    Args:
        since_first_ns: from the issue of the step's first bucket until this one and all before it had ended.
        queued_ns: from this one's issue until all before it had ended; negative: they had already.
    """

    since_first_ns: int
    queued_ns: int


def collective_times(issued_ns: Sequence[int], ended_ns: Sequence[int]) -> list[CollectiveTimes]:
    """The times of one rank's step.

    Args:
        issued_ns: per bucket, in launch order.
        ended_ns: per bucket, on the same clock.
    """
    times: list[CollectiveTimes] = []
    ended = issued_ns[0] if issued_ns else 0
    for at, (issued, end) in enumerate(zip(issued_ns, ended_ns, strict=True)):
        queued = ended - issued if at else 0
        ended = max(ended, end)
        times.append(CollectiveTimes(ended - issued_ns[0], queued))
    return times


def last_to_issue(ranks: Sequence[Sequence[CollectiveTimes]]) -> list[CollectiveTimes]:
    """The times of one step on the last rank to issue each bucket: the minimum over all ranks.

    Args:
        ranks: each rank's `collective_times`, of the same buckets.
    """
    return [
        CollectiveTimes(min(one.since_first_ns for one in bucket), min(one.queued_ns for one in bucket))
        for bucket in zip(*ranks, strict=True)
    ]


def busy_periods(buckets: Sequence[CollectiveTimes], sizes_bytes: Sequence[int | None]) -> list[tuple[int, int]]:
    """The cost of an average collective in each busy period.

    Args:
        buckets: in launch order, as `last_to_issue` returns them.
        sizes_bytes: of the buckets, on the wire; None: not known, and the bucket's period is left out.

    Returns:
        Samples (bytes, ns) for `cost_model.fit`: each the total of a period, divided by its number of collectives.
    """
    samples: list[tuple[int, int]] = []
    period: list[int | None] = []
    began = ended = 0

    def end_period() -> None:
        known = [size for size in period if size is not None]
        if known and len(known) == len(period):
            samples.append((sum(known) // len(known), max(ended - began, 0) // len(known)))

    for bucket, size_bytes in zip(buckets, sizes_bytes, strict=True):
        if period and bucket.queued_ns <= 0:
            end_period()
            began = ended - bucket.queued_ns
            period = []
        ended = max(ended, bucket.since_first_ns)
        period.append(size_bytes)
    end_period()
    return samples
