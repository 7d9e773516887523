"""From a trace to what the planner is asked: ready times, costs, limits, and which parameters may share a bucket."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

from ..planning.costs import FREE, FS_PER_NS, Costs, Linear, fit
from ..planning.plan import ParameterKind
from ..planning.timeline import MISSING_NS, Problem
from ..trace import UNKNOWN_NS, StepMarks
from .files import RankTrace

_WIDE = {"float64": "float64", "complex128": "float64"}


def problem(
    traces: Sequence[RankTrace], costs: Costs, cap_bytes: int | None = None, *, share: bool | None = None
) -> Problem:
    """What the planner is asked, on numbers that all ranks would agree on: of each time the latest of any rank.

    Args:
        traces: of all ranks.
        costs: of a bucket.
        cap_bytes: the largest bucket; None: as it was when the trace was recorded.
        share: buckets of mixed dtypes are allowed; None: as `shares` says.
    """
    first = traces[0]
    ready_ns = tuple(max(times_ns) for times_ns in zip(*map(ready_times_ns, traces), strict=True))
    share = shares(first) if share is None else share
    return Problem(
        ready_ns=ready_ns,
        wire_bytes=tuple(one.wire_bytes for one in first.parameters),
        size_bytes=tuple(one.size_bytes for one in first.parameters),
        groups=tuple(kind.wide_group if share else kind.group for kind in kinds(first)),
        alone=frozenset(number for number, one in enumerate(first.parameters) if one.alone),
        cap_bytes=max(first.caps.limits_bytes) if cap_bytes is None else cap_bytes,
        costs=costs,
    )


def kinds(trace: RankTrace) -> list[ParameterKind]:
    """What a plan depends on, per parameter; as `bucket_set.kind_of` has it."""
    found = []
    for one in trace.parameters:
        dtype, _, device = one.group.partition(" ")
        found.append(ParameterKind(one.size_bytes, one.group, (_WIDE.get(dtype), device), one.alone))
    return found


def shares(trace: RankTrace) -> bool:
    """Whether what recorded the trace could have buckets of mixed dtypes: not torch's DDP, and not without a wire."""
    return trace.source != "hook" and trace.config["wire"] != "native"


def ready_times_ns(trace: RankTrace) -> list[int]:
    """Per parameter when its gradient is ready, since backward began and without packing; MISSING_NS: not known.

    The median over the steps in which that was looked at; where there is none, the header's average; where there is
    none either, that of its bucket, which is no earlier.
    """
    seen: list[list[int]] = [[] for _ in trace.parameters]
    whole: list[list[int]] = [[] for _ in trace.parameters]
    for step in trace.steps:
        for number, ready_ns in enumerate(step.ready_ns or ()):
            seen[number] += [ready_ns] if ready_ns != UNKNOWN_NS else []
        for numbers, ready_ns in zip(trace.plans[step.plan], _buckets_ready_ns(step.marks), strict=True):
            for number in numbers:
                whole[number] += [ready_ns] if ready_ns != UNKNOWN_NS else []
    found = []
    for one, times_ns, bounds_ns in zip(trace.parameters, seen, whole, strict=True):
        average_ns = [] if one.ready_ns == UNKNOWN_NS else [one.ready_ns]
        known = times_ns or average_ns or bounds_ns
        found.append(statistics.median_low(known) if known else MISSING_NS)
    return found


def measured_costs(traces: Sequence[RankTrace]) -> Costs | None:
    """What the recorded buckets cost; None: fewer than two sizes among them, so that no line can be drawn.

    Of a collective's times the shortest of any rank: the last rank to issue it waits for nobody.
    """
    wire: list[tuple[int, int]] = []
    pack: list[tuple[int, int]] = []
    unpack: list[tuple[int, int]] = []
    for step in range(len(traces[0].steps)):
        fastest: dict[int, int] = {}
        for trace in traces:
            sizes = _bucket_bytes(trace, trace.steps[step].plan)
            for bucket, wire_ns, pack_ns, unpack_ns in _services_ns(trace.steps[step].marks):
                if sizes[bucket] is not None:
                    fastest[bucket] = min(wire_ns, fastest.get(bucket, wire_ns))
                    pack.append((sizes[bucket] or 0, pack_ns))
                    unpack.append((sizes[bucket] or 0, unpack_ns))
        wire += [(sizes[bucket] or 0, wire_ns) for bucket, wire_ns in fastest.items()]
    link = fit(wire)
    return None if link is None else Costs(wire=link, pack=_copying(pack), unpack=_copying(unpack))


def _buckets_ready_ns(marks: StepMarks) -> Iterator[int]:
    """Per bucket its ready time less the packing that had delayed backward until then."""
    packs = [(one.pack_ns, one.launch_ns) for one in marks.buckets if UNKNOWN_NS not in (one.pack_ns, one.launch_ns)]
    for one in marks.buckets:
        packing_ns = sum(max(0, min(end_ns, one.ready_ns) - begin_ns) for begin_ns, end_ns in packs)
        yield UNKNOWN_NS if one.ready_ns == UNKNOWN_NS else one.ready_ns - packing_ns


def _services_ns(marks: StepMarks) -> Iterator[tuple[int, int, int, int]]:
    """Buckets that were seen whole: which, and the time that its collective, packing and unpacking took."""
    before_ns = 0
    for bucket, one in enumerate(marks.buckets):
        if UNKNOWN_NS in (one.pack_ns, one.launch_ns, one.done_ns):
            continue
        wire_ns = max(0, one.done_ns - max(one.launch_ns, before_ns))
        before_ns = max(before_ns, one.done_ns)
        yield bucket, wire_ns, one.launch_ns - one.pack_ns, max(0, one.end_ns - one.unpack_ns)


def _bucket_bytes(trace: RankTrace, plan: int) -> list[int | None]:
    """Wire bytes per bucket; None: a bucket of its own kind (a sparse gradient), whose cost says nothing of others."""
    return [
        None if trace.parameters[numbers[0]].alone else sum(trace.parameters[number].wire_bytes for number in numbers)
        for numbers in trace.plans[plan]
    ]


def _copying(samples: Sequence[tuple[int, int]]) -> Linear:
    """A copy's cost; proportional to its bytes where no line can be drawn."""
    rates = [time_ns * FS_PER_NS // size_bytes for size_bytes, time_ns in samples if size_bytes]
    return fit(samples) or (Linear(fixed_ns=0, fs_per_byte=statistics.median_low(rates)) if rates else FREE)
