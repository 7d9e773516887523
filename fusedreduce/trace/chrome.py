"""The timeline of a run: each rank's slices by lane, and the Trace Event JSON of them that Perfetto opens."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from ..planning.plan import bucket_label
from ..planning.timeline import MISSING_NS
from .reader import RankTrace
from .recorder import BucketMarks
from .report import Run, finish_ns, start_ns

Lane = Literal["compute", "pack", "wire", "unpack"]
LANES: tuple[Lane, ...] = ("compute", "pack", "wire", "unpack")
_NAMES_IN_ARGS = 50
_NS_PER_US = 1000


@dataclass(frozen=True)
class Slice:
    """An interval in one lane of one rank, in ns from the run's origin.

    Args:
        lane: its lane.
        stage: "forward", "backward", "exposed", "pack", "all_reduce" or "unpack".
        bucket: its index; None for the first three stages.
        begin_ns: where it begins.
        end_ns: where it ends.
        waited_ns: until it began: for "pack" since the bucket was ready, for "all_reduce" since it was issued.
    """

    lane: Lane
    stage: str
    bucket: int | None
    begin_ns: int
    end_ns: int
    waited_ns: int = 0


def slices(run: Run, rank: int, step: int) -> list[Slice]:
    """The slices of one rank's `step`-th recorded step. Within a lane they ascend and do not overlap."""
    marks, base_ns = run.traces[rank].steps[step].marks, run.base_ns(rank, step)
    slices_ = [Slice("compute", "forward", None, start_ns(marks), 0)] if marks.forward_ns != MISSING_NS else []
    backward_end_ns, last_ns = marks.backward_end_ns, finish_ns(marks)
    if backward_end_ns != MISSING_NS:
        slices_.append(Slice("compute", "backward", None, 0, backward_end_ns))
        if last_ns is not None and last_ns > backward_end_ns:
            slices_.append(Slice("compute", "exposed", None, backward_end_ns, last_ns))
    stages: tuple[tuple[Lane, str, Callable[[BucketMarks], tuple[int, int, int]]], ...] = (
        ("pack", "pack", lambda one: (one.pack_ns, one.launch_ns, one.ready_ns)),
        # Begins when the one before it has ended, because collectives of a group run one after the other.
        ("wire", "all_reduce", lambda one: (one.launch_ns, one.done_ns, one.launch_ns)),
        ("unpack", "unpack", lambda one: (one.unpack_ns, one.end_ns, one.unpack_ns)),
    )
    for lane, stage, times in stages:
        free_ns = 0
        known = [(*times(one), bucket) for bucket, one in enumerate(marks.buckets) if MISSING_NS not in times(one)[:2]]
        for begin_ns, end_ns, since_ns, bucket in sorted(known):
            begin_ns, end_ns = max(begin_ns, free_ns), max(end_ns, free_ns)
            waited_ns = 0 if since_ns == MISSING_NS else begin_ns - since_ns
            slices_.append(Slice(lane, stage, bucket, begin_ns, end_ns, waited_ns))
            free_ns = end_ns
    return [replace(one, begin_ns=one.begin_ns + base_ns, end_ns=one.end_ns + base_ns) for one in slices_]


def chrome_trace(run: Run, steps: Sequence[int]) -> dict[str, Any]:
    """The timeline as an object of the Trace Event Format: complete events, a process per rank, a thread per lane.

    Args:
        run: all ranks.
        steps: their indices among the recorded steps.

    Source: "Trace Event Format" (Google); Perfetto and chrome://tracing open it. ts and dur are us.
    """
    events = [event for trace in run.traces for event in _metadata(trace)]
    for rank, trace in enumerate(run.traces):
        free_ns = dict.fromkeys(LANES, -(1 << 63))
        for step in steps:
            labels = _labels(trace, trace.steps[step].plan)
            for one in slices(run, rank, step):
                # A GPU may still be at the step before when the host begins the next; a thread's events must not
                # overlap.
                begin_ns = max(one.begin_ns, free_ns[one.lane])
                free_ns[one.lane] = end_ns = max(one.end_ns, begin_ns)
                shown = replace(one, begin_ns=begin_ns, end_ns=end_ns)
                events.append(_event(shown, trace.rank, trace.steps[step].step, labels))
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _event(one: Slice, rank: int, step: int, labels: Sequence[tuple[str, dict[str, Any]]]) -> dict[str, Any]:
    label, args = ("", {}) if one.bucket is None else labels[one.bucket]
    if one.bucket is not None:
        args = {**args, "waited_us": one.waited_ns / _NS_PER_US}
    return {
        # The labels of `exchange`, which torch's profiler shows.
        "name": f"fusedreduce::{one.stage} {label}" if label else one.stage,
        "cat": one.lane,
        "ph": "X",
        "ts": one.begin_ns / _NS_PER_US,
        "dur": (one.end_ns - one.begin_ns) / _NS_PER_US,
        "pid": rank,
        "tid": LANES.index(one.lane),
        "args": {"step": step, **args},
    }


def _metadata(trace: RankTrace) -> Iterator[dict[str, Any]]:
    """Metadata events with the names of the rank's process and its threads."""
    rows: list[tuple[str, int, dict[str, Any]]] = [
        ("process_name", 0, {"name": f"rank {trace.rank} of {trace.ranks} ({trace.device}, {trace.source})"}),
        ("process_sort_index", 0, {"sort_index": trace.rank}),
    ]
    for thread, lane in enumerate(LANES):
        rows += [("thread_name", thread, {"name": lane}), ("thread_sort_index", thread, {"sort_index": thread})]
    for name, thread, args in rows:
        yield {"name": name, "ph": "M", "pid": trace.rank, "tid": thread, "args": args}


def _labels(trace: RankTrace, plan: int) -> list[tuple[str, dict[str, Any]]]:
    """Per bucket, its label and the arguments of its events."""
    labels = []
    for index, numbers in enumerate(trace.plans[plan]):
        members = [trace.parameters[number] for number in numbers]
        names = [one.name for one in members]
        args = {
            "bucket": index,
            "parameters": names[:_NAMES_IN_ARGS],
            "parameter_count": len(members),
            "gradient_bytes": sum(one.size_bytes for one in members),
            "wire_bytes": sum(one.wire_bytes for one in members),
        }
        labels.append((bucket_label(index, names), args))
    return labels
