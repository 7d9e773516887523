"""Figures of a trace: aligns the ranks' clocks, and says where a step's time went.

Clocks: first each host's wall clock. Then, because an all-reduce ends on all ranks at nearly the same time, the median
over all buckets and steps of (its end on rank r - its end on rank 0) is taken for rank r's error and subtracted.

    exposed   from the end of backward until the last gradient is reduced
    overlap   share of the time with a collective in flight that lies within backward
    stall     a bucket is ready and an earlier one is not: head-of-line blocking
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..errors import TraceError
from ..planning.timeline import MISSING_NS
from .reader import RankTrace
from .recorder import StepMarks, covered_ns, stall_ns


@dataclass(frozen=True)
class Run:
    """The traces of all ranks on one clock.

    Args:
        traces: by rank.
        errors_ns: by rank, how far its wall clock is ahead of rank 0's.
        spread_ns: the median distance between the collectives' ends after the alignment, of the worst rank; None: the
            ranks have no collective's end in common, and their wall clocks are used as they are.
        origin_ns: time 0 on rank 0's wall clock: the earliest start of any rank.
    """

    traces: tuple[RankTrace, ...]
    errors_ns: tuple[int, ...]
    spread_ns: int | None
    origin_ns: int

    def base_ns(self, rank: int, step: int) -> int:
        """When a rank's backward began in its `step`-th recorded step, in ns since the origin."""
        trace = self.traces[rank]
        return _wall_ns(trace, step) - self.errors_ns[rank] - self.origin_ns

    @property
    def steps(self) -> list[int]:
        """The numbers of the recorded steps."""
        return [step.step for step in self.traces[0].steps]


@dataclass(frozen=True, kw_only=True)
class Figures:
    """Medians over steps; None where the trace does not say.

    Args:
        step_ns: from the start of one step to the next; of a single step, from its forward to its last gradient.
        backward_ns: duration of backward.
        exposed_ns: exposed communication.
        overlap: share of communication within backward.
        stall_ns: head-of-line stall.
        stall_share: stall as a share of backward.
    """

    step_ns: float | None
    backward_ns: float | None
    exposed_ns: float | None
    overlap: float | None
    stall_ns: float | None
    stall_share: float | None


def merge(traces: Sequence[RankTrace]) -> Run:
    """Aligns the ranks' clocks.

    Args:
        traces: as `reader.read` returns them.

    Raises:
        TraceError: no step was recorded.
    """
    steps = range(len(traces[0].steps))
    if not steps:
        raise TraceError("the trace has no steps: record at least one whole step")
    first = _ends_ns(traces[0])
    errors_ns, spreads_ns = [], []
    for trace in traces:
        ends = _ends_ns(trace)
        apart = [end_ns - first[key] for key, end_ns in ends.items() if key in first]
        errors_ns.append(statistics.median_low(apart) if apart else 0)
        spreads_ns += [statistics.median_low([abs(one - errors_ns[-1]) for one in apart])] if apart else []
    begins = [
        _wall_ns(trace, 0) - error_ns + start_ns(trace.steps[0].marks)
        for trace, error_ns in zip(traces, errors_ns, strict=True)
    ]
    spread_ns = max(spreads_ns) if len(spreads_ns) == len(traces) else None
    return Run(tuple(traces), tuple(errors_ns), spread_ns, min(begins))


def figures(run: Run) -> list[Figures]:
    """Returns one row per rank, in rank order, then one for the run.

    The run's row has the slowest rank of each step, but exposed communication from the latest end of backward of any
    rank to the last gradient of any rank (a fast rank's own figure includes its wait for slow ones), and overlap over
    all ranks.
    """
    rows = []
    marks = [[step.marks for step in trace.steps] for trace in run.traces]
    shares = [[_overlap_ns(one) for one in steps] for steps in marks]
    for rank, steps in enumerate(marks):
        rows.append(
            Figures(
                step_ns=_median(_periods_ns(run, rank)),
                backward_ns=_median(map(_backward_ns, steps)),
                exposed_ns=_median(_exposed_ns(run, [rank], index) for index in range(len(steps))),
                overlap=_median(_share([one]) for one in shares[rank]),
                stall_ns=_median(map(stall_ns, [one.buckets for one in steps])),
                stall_share=_median(map(_stall_share, steps)),
            )
        )
    if len(rows) == 1:
        return [*rows, rows[0]]
    ranks = range(len(rows))
    by_step = list(zip(*marks, strict=True))
    everyone = Figures(
        step_ns=_median(_worst(lengths) for lengths in zip(*(_periods_ns(run, rank) for rank in ranks), strict=False)),
        backward_ns=_median(_worst(map(_backward_ns, row)) for row in by_step),
        exposed_ns=_median(_exposed_ns(run, ranks, index) for index in range(len(by_step))),
        overlap=_median(map(_share, zip(*shares, strict=True))),
        stall_ns=_median(_worst(stall_ns(one.buckets) for one in row) for row in by_step),
        stall_share=_median(_worst(map(_stall_share, row)) for row in by_step),
    )
    return [*rows, everyone]


def _wall_ns(trace: RankTrace, step: int) -> int:
    return trace.wall_ns - trace.perf_ns + trace.steps[step].marks.began_ns


def start_ns(marks: StepMarks) -> int:
    """When forward began, in ns since backward began: at most 0; 0 if that is not known."""
    return 0 if marks.forward_ns == MISSING_NS else marks.forward_ns - marks.began_ns


def _ends_ns(trace: RankTrace) -> dict[tuple[int, int], int]:
    """The collectives' ends on the rank's wall clock, by step and bucket."""
    return {
        (step, bucket): _wall_ns(trace, step) + one.done_ns
        for step, row in enumerate(trace.steps)
        for bucket, one in enumerate(row.marks.buckets)
        if one.done_ns != MISSING_NS
    }


def finish_ns(marks: StepMarks) -> int | None:
    """When the last gradient was reduced, in ns since backward began; None if a launched bucket's end is missing."""
    launched = [one for one in marks.buckets if one.launch_ns != MISSING_NS]
    ends = [one.done_ns if one.end_ns == MISSING_NS else one.end_ns for one in launched]
    return None if not ends or MISSING_NS in ends else max(ends)


def _backward_ns(marks: StepMarks) -> int | None:
    return None if marks.backward_end_ns == MISSING_NS else marks.backward_end_ns


def _exposed_ns(run: Run, ranks: Iterable[int], step: int) -> int | None:
    """From the latest end of backward of these ranks to the last of their gradients."""
    backward, finish = [], []
    for rank in ranks:
        marks, base_ns = run.traces[rank].steps[step].marks, run.base_ns(rank, step)
        last_ns = finish_ns(marks)
        if last_ns is None or marks.backward_end_ns == MISSING_NS:
            return None
        backward.append(base_ns + marks.backward_end_ns)
        finish.append(base_ns + last_ns)
    return max(0, max(finish) - max(backward))


def _overlap_ns(marks: StepMarks) -> tuple[int, int] | None:
    """The time with a collective in flight: within backward, and in all."""
    pairs = [(one.launch_ns, one.done_ns) for one in marks.buckets if one.done_ns != MISSING_NS]
    if marks.backward_end_ns == MISSING_NS or not pairs or any(launch_ns == MISSING_NS for launch_ns, _ in pairs):
        return None
    end_ns = marks.backward_end_ns
    return covered_ns([(begin, min(end, end_ns)) for begin, end in pairs]), covered_ns(pairs)


def _share(rows: Iterable[tuple[int, int] | None]) -> float | None:
    known = [row for row in rows if row is not None]
    whole = sum(row[1] for row in known)
    return sum(row[0] for row in known) / whole if whole else None


def _stall_share(marks: StepMarks) -> float | None:
    stalled_ns = stall_ns(marks.buckets)
    return None if stalled_ns is None or marks.backward_end_ns <= 0 else stalled_ns / marks.backward_end_ns


def _periods_ns(run: Run, rank: int) -> list[int | None]:
    """From each step to the next, where both were recorded; if there are no such pairs, each step's own length."""
    steps = run.traces[rank].steps
    pairs = zip(steps, steps[1:], strict=False)
    found: list[int | None] = [
        after.marks.began_ns - before.marks.began_ns for before, after in pairs if after.step == before.step + 1
    ]
    if found:
        return found
    lasts = [(finish_ns(step.marks), start_ns(step.marks)) for step in steps]
    return [None if last_ns is None else last_ns - start_ns for last_ns, start_ns in lasts]


def _median(found: Iterable[float | None]) -> float | None:
    known = [value for value in found if value is not None]
    return statistics.median(known) if known else None


def _worst(found: Iterable[float | None]) -> float | None:
    return max((value for value in found if value is not None), default=None)
