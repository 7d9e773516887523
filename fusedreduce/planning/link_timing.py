"""What collectives have cost, from when they were issued and when they ended: busy periods of the channel.

A collective starts when the last rank has issued it, and a backend may run several at once (Gloo runs two), so the time
between two ends says little about one of them. What holds anyway: from the moment the last rank issues a collective
while nothing is under way, until everything that was issued meanwhile has ended, the channel is busy for as long as all
of it costs together.

No clock is shared. But a collective ends at the same moment everywhere, so with d_k the end of bucket k (or of any
before it) and l_k its issue, on each rank's own clock, the smallest over all ranks of

    d_k - l_1        is the time from the last rank's first issue to the end of bucket k
    d_k-1 - l_k      is how long bucket k was queued, seen by the last rank to issue it; negative: nothing was under way

Example, two ranks, two buckets of 10 and 30 bytes; rank 0 issues at 0 and 5 and sees ends at 12 and 40, rank 1, on its
own clock, issues at 102 and 130 and sees 112 and 140: min(12 - 0, 112 - 102) = 10, min(40 - 0, 140 - 102) = 38;
queued min(12 - 5, 112 - 130) = -18. So two busy periods, of 10 ns for 10 bytes and of 38 - (10 + 18) = 10 for 30.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Seen:
    """One bucket's collective as one rank saw it, or after the minimum over ranks as the last one did.

    Args:
        since_first_ns: from the issue of the step's first bucket until this one and all before it had ended.
        queued_ns: from this one's issue until all before it had ended; negative: they had already.
    """

    since_first_ns: int
    queued_ns: int


def seen(issued_ns: Sequence[int], ended_ns: Sequence[int]) -> list[Seen]:
    """One rank's step.

    Args:
        issued_ns: per bucket, in launch order.
        ended_ns: per bucket, on the same clock.
    """
    found: list[Seen] = []
    ended = issued_ns[0] if issued_ns else 0
    for at, (issued, end) in enumerate(zip(issued_ns, ended_ns, strict=True)):
        queued = ended - issued if at else 0
        ended = max(ended, end)
        found.append(Seen(ended - issued_ns[0], queued))
    return found


def last_to_issue(ranks: Sequence[Sequence[Seen]]) -> list[Seen]:
    """One step as the last rank to issue each bucket saw it: the minimum over all ranks.

    Args:
        ranks: of each its step, of the same buckets.
    """
    return [
        Seen(min(one.since_first_ns for one in bucket), min(one.queued_ns for one in bucket))
        for bucket in zip(*ranks, strict=True)
    ]


def busy_periods(buckets: Sequence[Seen], sizes_bytes: Sequence[int | None]) -> list[tuple[int, int]]:
    """(bytes, ns) of an average collective in each busy period.

    Args:
        buckets: in launch order, as `last_to_issue` has them.
        sizes_bytes: theirs on the wire; None: not known, so that nothing follows from its period.

    Returns:
        Samples for `costs.fit`: of `count` collectives that together had `size` bytes and took `ns`, the average.
    """
    found: list[tuple[int, int]] = []
    period: list[int | None] = []
    began = ended = 0

    def close() -> None:
        known = [size for size in period if size is not None]
        if known and len(known) == len(period):
            found.append((sum(known) // len(known), max(ended - began, 0) // len(known)))

    for bucket, size_bytes in zip(buckets, sizes_bytes, strict=True):
        if period and bucket.queued_ns <= 0:
            close()
            began = ended - bucket.queued_ns
            period = []
        ended = max(ended, bucket.since_first_ns)
        period.append(size_bytes)
    close()
    return found
