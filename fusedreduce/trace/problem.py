"""Makes the planner's problem of a trace: ready times, costs, limits, and which parameters may share a bucket."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterator, Sequence

from ..config import Wire
from ..kernels.encodings import ENCODINGS, EncodedLayout
from ..planning.cost_model import FREE, Costs, fit, fit_copy
from ..planning.layout import aligned_layout, block_layout
from ..planning.link_timing import busy_periods, collective_times, last_to_issue
from ..planning.plan import ParameterKind
from ..planning.timeline import MISSING_NS, Problem
from ..wires import encoding_of, is_accumulated
from .reader import RankTrace, Step
from .recorder import BucketMarks, Parameter, StepMarks

_WIDE = {"float64": "float64", "complex128": "float64"}


def problem(
    traces: Sequence[RankTrace], costs: Costs, cap_bytes: int | None = None, *, share: bool | None = None
) -> Problem:
    """Makes the planner's problem, from the times that all ranks would agree on: the latest of any rank.

    Args:
        traces: of all ranks.
        costs: of a bucket.
        cap_bytes: the largest bucket; None: the limit of the recorded run.
        share: buckets of mixed dtypes are allowed; None: as `shares` says.
    """
    first = traces[0]
    return Problem.of(
        kinds(first),
        ready_ns=[max(times_ns) for times_ns in zip(*map(ready_times_ns, traces), strict=True)],
        wire_bytes=[one.wire_bytes for one in first.parameters],
        cap_bytes=max(first.caps.limits_bytes) if cap_bytes is None else cap_bytes,
        costs=costs,
        share=shares(first) if share is None else share,
    )


def kinds(trace: RankTrace) -> list[ParameterKind]:
    """Returns per parameter what a plan depends on, as `bucket_set.kind_of` does for a live model."""
    found = []
    for one in trace.parameters:
        dtype, _, device = one.group.partition(" ")
        own = (one.wire, one.group)
        wide = own if one.wire == "native" else (one.wire, (_WIDE.get(dtype), device))
        found.append(ParameterKind(one.size_bytes, own, wide, one.alone))
    return found


def on_wire(trace: RankTrace, wire: Wire) -> RankTrace:
    """`trace` as if the run had used `ReduceConfig(wire=wire)`; its times are those of the recorded run."""
    return dataclasses.replace(trace, parameters=tuple(_sent(one, wire) for one in trace.parameters))


def _sent(one: Parameter, wire: Wire) -> Parameter:
    parts = 2 if one.group.startswith("complex") else 1
    if encoding := encoding_of(wire):
        if parts == 1 and one.ndim > 1 and one.numel >= encoding.block_numel and not one.alone:
            sent_bytes = -(-one.numel // encoding.block_numel) * encoding.block_bytes
            return dataclasses.replace(one, wire=wire, wire_bytes=sent_bytes)
    elif wire != "native" and not one.alone:
        return dataclasses.replace(one, wire=wire, wire_bytes=2 * parts * one.numel)
    return dataclasses.replace(one, wire="native", wire_bytes=0 if one.alone else one.size_bytes)


def exchanges_shards(trace: RankTrace) -> bool:
    """Whether most elements of the run travel in two collectives per bucket: shards, and then their sums."""
    exchanged = (one for one in trace.parameters if one.wire in ENCODINGS or _accumulates(trace, one))
    numel = sum(one.numel for one in exchanged)
    return trace.ranks > 2 and 2 * numel > sum(one.numel for one in trace.parameters)


def _accumulates(trace: RankTrace, one: Parameter) -> bool:
    return trace.config.get("accumulation") == "fp32" and is_accumulated(one.wire)


def bucket_bytes(trace: RankTrace, numbers: Sequence[int]) -> int:
    """Bytes that a bucket of the parameters `numbers` has on the wire, padding included; DDP's have none of ours."""
    members = [trace.parameters[number] for number in numbers]
    shards = 1 if trace.ranks <= 2 else trace.ranks
    plain = [one.wire_bytes for one in members if one.wire not in ENCODINGS]
    accumulated = any(_accumulates(trace, one) for one in members)
    aligned = aligned_layout(plain, wire_itemsize_bytes=1, shards=shards if accumulated else 1)
    found = sum(plain) if trace.source == "hook" else aligned.numel
    for wire, encoding in ENCODINGS.items():
        numels = [one.numel for one in members if one.wire == wire]
        align = encoding.shard_align
        layout = block_layout(numels, block_numel=encoding.block_numel, shard_align=align, shards=shards)
        found += EncodedLayout.of(encoding, layout.numel, shards).nbytes
    return found


def shares(trace: RankTrace) -> bool:
    """Whether the recorded run could have buckets of mixed dtypes: not under torch's DDP, nor with the native wire."""
    return trace.source != "hook" and any(one.wire != "native" for one in trace.parameters)


def ready_times_ns(trace: RankTrace) -> list[int]:
    """Returns per parameter when its gradient is ready, since backward began and without packing; or MISSING_NS.

    It is the median over the steps in which that was measured; if there is none, the header's average; if there is none
    either, the median of its bucket's time, which is no earlier.
    """
    own: list[list[int]] = [[] for _ in trace.parameters]
    of_bucket: list[list[int]] = [[] for _ in trace.parameters]
    for step in trace.steps:
        for number, ready_ns in enumerate(step.ready_ns or ()):
            own[number] += [ready_ns] if ready_ns != MISSING_NS else []
        for numbers, ready_ns in zip(trace.plans[step.plan], _buckets_ready_ns(step.marks), strict=True):
            for number in numbers:
                of_bucket[number] += [ready_ns] if ready_ns != MISSING_NS else []
    found = []
    for one, times_ns, bounds_ns in zip(trace.parameters, own, of_bucket, strict=True):
        average_ns = [] if one.ready_ns == MISSING_NS else [one.ready_ns]
        known = times_ns or average_ns or bounds_ns
        found.append(statistics.median_low(known) if known else MISSING_NS)
    return found


def measured_costs(traces: Sequence[RankTrace]) -> Costs | None:
    """Fits the costs of the recorded buckets; None if they have fewer than two sizes, so that there is no line."""
    wire, pack, unpack = _samples(traces)
    link = fit(wire)
    return None if link is None else Costs(wire=link, pack=fit_copy(pack), unpack=fit_copy(unpack))


def known_costs(traces: Sequence[RankTrace]) -> Costs | None:
    """The costs that ranks had agreed on, else those fitted to the recorded buckets; None: neither."""
    return next((trace.costs for trace in traces if trace.costs is not None), None) or measured_costs(traces)


def known_copies(traces: Sequence[RankTrace]) -> Costs:
    """`known_costs` of packing and unpacking, which buckets of one size tell too; the link costs nothing."""
    known = known_costs(traces)
    if known is not None:
        return Costs(wire=FREE, pack=known.pack, unpack=known.unpack)
    _, pack, unpack = _samples(traces)
    return Costs(wire=FREE, pack=fit_copy(pack), unpack=fit_copy(unpack))


def _samples(traces: Sequence[RankTrace]) -> tuple[list[tuple[int, int]], ...]:
    """(bytes, ns) of collectives, of packing and of unpacking."""
    wire: list[tuple[int, int]] = []
    pack: list[tuple[int, int]] = []
    unpack: list[tuple[int, int]] = []
    for steps in zip(*(trace.steps for trace in traces), strict=True):
        buckets, sizes = _complete_buckets(steps, _bucket_bytes(traces[0], steps[0].plan))
        ranks = [
            collective_times([one.launch_ns for one in marks], [one.done_ns for one in marks])
            for marks in zip(*buckets, strict=True)
        ]
        wire += busy_periods(last_to_issue(ranks), sizes)
        for bucket, size in zip(buckets, sizes, strict=True):
            if size is not None:
                pack += [(size, one.launch_ns - one.pack_ns) for one in bucket]
                unpack += [(size, max(one.end_ns - one.unpack_ns, 0)) for one in bucket]
    return wire, pack, unpack


def _buckets_ready_ns(marks: StepMarks) -> Iterator[int]:
    """Yields per bucket its ready time, less the packing that had delayed backward until then."""
    packs = [(one.pack_ns, one.launch_ns) for one in marks.buckets if MISSING_NS not in (one.pack_ns, one.launch_ns)]
    for one in marks.buckets:
        packing_ns = sum(max(0, min(end_ns, one.ready_ns) - begin_ns) for begin_ns, end_ns in packs)
        yield MISSING_NS if one.ready_ns == MISSING_NS else one.ready_ns - packing_ns


def _complete_buckets(
    steps: Sequence[Step], sizes_bytes: Sequence[int | None]
) -> tuple[list[tuple[BucketMarks, ...]], list[int | None]]:
    """The buckets of one step whose times all ranks have: their marks by rank, and their sizes.

    The size of a bucket behind one without times counts as unknown, because it may have waited for that one.
    """
    complete: list[tuple[BucketMarks, ...]] = []
    sizes: list[int | None] = []
    waits = False
    for size, bucket in zip(sizes_bytes, zip(*(step.marks.buckets for step in steps), strict=True), strict=True):
        if any(MISSING_NS in (one.pack_ns, one.launch_ns, one.done_ns) for one in bucket):
            waits = True
            continue
        complete.append(bucket)
        sizes.append(None if waits else size)
        waits = False
    return complete, sizes


def _bucket_bytes(trace: RankTrace, plan: int) -> list[int | None]:
    """Wire bytes per bucket; None for a sparse gradient's, whose cost says nothing about others."""
    return [
        None if trace.parameters[numbers[0]].alone else bucket_bytes(trace, numbers) for numbers in trace.plans[plan]
    ]
