"""Reads traces, and checks every field, because they may come from another machine, run or program."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from ..config import Wire
from ..errors import TraceError
from ..planning.bucketing import BucketCaps
from ..planning.cost_model import Costs, Linear
from ..planning.plan import Plan
from ..planning.timeline import MISSING_NS
from ..wires import WIRES
from . import fields
from .recorder import FORMAT, MARKS, VERSION, BucketMarks, Parameter, Source, StepMarks

SOURCES: tuple[Source, ...] = get_args(Source)
MAX_FILE_BYTES = 256 * 1024 * 1024
MAX_RANKS = 1 << 20
_FILE = re.compile(r"rank(0|[1-9]\d{0,6})\.json")
_MISSING_SHOWN = 10


@dataclass(frozen=True, kw_only=True)
class Step:
    """One recorded step.

    Args:
        step: its number.
        plan: index of its plan among the trace's plans.
        marks: its times.
        ready_ns: per parameter, or MISSING_NS; None: not measured in this step.
    """

    step: int
    plan: int
    marks: StepMarks
    ready_ns: tuple[int, ...] | None


@dataclass(frozen=True, kw_only=True)
class RankTrace:
    """One rank's file.

    Args:
        rank: its number.
        ranks: how many ranks there are.
        device: the type of device that the gradients were on.
        source: what recorded it.
        perf_ns: time.perf_counter_ns() at one moment ("clock" in the file).
        wall_ns: time.time_ns() at the same moment.
        config: the ReduceConfig's plain values, of which "wire" is required.
        caps: limits of the buckets, in bytes of gradients.
        parameters: in the order of their numbers.
        costs: as fitted last; None: not known.
        plans: those that steps used.
        steps: ascending by number.
        place: digests of host, network namespace and boot of its process, see `recorder.place`; None: an older trace.
    """

    rank: int
    ranks: int
    device: str
    source: Source
    perf_ns: int
    wall_ns: int
    config: Mapping[str, object]
    caps: BucketCaps
    parameters: tuple[Parameter, ...]
    costs: Costs | None
    plans: tuple[Plan, ...]
    steps: tuple[Step, ...]
    place: tuple[str, str, str] | None = None


def read(path: Path) -> list[RankTrace]:
    """Reads the traces of a run.

    Args:
        path: a folder with the files of all ranks, or one of those files.

    Returns:
        The traces by rank; for a file, that one trace.

    Raises:
        TraceError: there is no trace, it is damaged or not ours, a rank is missing, or ranks are of different runs.
    """
    if not path.is_dir():
        return [_read(path)]
    files = {int(match[1]): one for one in path.iterdir() if (match := _FILE.fullmatch(one.name))}
    if not files:
        raise TraceError(f"{path}: no trace there: the folder has no file rank<i>.json")
    traces: list[RankTrace] = []
    for rank, file in sorted(files.items()):
        trace = _read(file)
        if trace.rank != rank:
            raise TraceError(f"{file}: it is the trace of rank {trace.rank}, whose file is rank{trace.rank}.json")
        if traces:
            _check_same(file, traces[0], trace)
        traces.append(trace)
    missing = [str(rank) for rank in range(traces[0].ranks) if rank not in files]
    if missing:
        named = ", ".join(missing[:_MISSING_SHOWN]) + (", ..." if len(missing) > _MISSING_SHOWN else "")
        raise TraceError(f"{path}: rank {named} of {traces[0].ranks} ranks left no trace there")
    return traces


def _check_same(file: Path, first: RankTrace, other: RankTrace) -> None:
    """Refuses traces that are not of the same run."""
    facts: tuple[tuple[str, Callable[[RankTrace], Sequence[object]]], ...] = (
        ("number of ranks", lambda trace: [trace.ranks]),
        ("source", lambda trace: [trace.source]),
        ("config", lambda trace: sorted(trace.config.items())),
        ("limits", lambda trace: [trace.caps]),
        ("parameters", _model),
        ("steps", lambda trace: [step.step for step in trace.steps]),
        ("plans", lambda trace: [trace.plans[step.plan] for step in trace.steps]),
    )
    for what, of in facts:
        ours, theirs = of(first), of(other)
        if ours != theirs:
            at = next((at for at, (one, two) in enumerate(zip(ours, theirs, strict=False)) if one != two), None)
            shown = (len(theirs), len(ours)) if at is None else (theirs[at], ours[at])
            where = f"number of {what}" if at is None else what
            raise TraceError(
                f"{file}: not of the same run as rank {first.rank}'s trace: its {where}: {fields.short(shown[0])}, "
                f"there: {fields.short(shown[1])}"
            )


def _model(trace: RankTrace) -> list[tuple[object, ...]]:
    """What must agree between ranks. Of groups, which parameters share one: ranks have different devices."""
    groups: dict[str, int] = {}
    rows = ((one, groups.setdefault(one.group, len(groups))) for one in trace.parameters)
    return [
        (one.name, one.numel, one.ndim, one.size_bytes, one.wire, one.wire_bytes, one.alone, group)
        for one, group in rows
    ]


def _read(path: Path) -> RankTrace:
    try:
        size_bytes = path.stat().st_size
        if size_bytes > MAX_FILE_BYTES:
            raise TraceError(f"{path}: {size_bytes:,} bytes are more than the {MAX_FILE_BYTES:,} that a trace may have")
        data = json.loads(path.read_bytes(), parse_constant=fields.refuse_constant)
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror}") from None
    except TraceError:
        raise
    except (ValueError, RecursionError) as error:
        raise TraceError(f"{path}: no trace, as no JSON: {error}") from None
    try:
        return _trace(data)
    except ValueError as error:
        raise TraceError(f"{path}: {error}") from None


def _trace(data: object) -> RankTrace:
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise ValueError(f'no trace of fusedreduce: no "format": "{FORMAT}" in it')
    version = fields.integer(data, "version")
    if version != VERSION:
        raise ValueError(f"its version is {version}; this fusedreduce reads version {VERSION}")
    ranks = fields.integer(data, "ranks", least=1, most=MAX_RANKS)
    source = fields.text(data, "source")
    if source not in SOURCES:
        raise ValueError(f'"source" must be one of {", ".join(SOURCES)}, got {fields.short(source)}')
    config, clock = fields.mapping(data, "config"), fields.mapping(data, "clock")
    fields.word(config, "wire")
    parameters = tuple(map(_parameter, fields.mappings(data, "parameters")))
    if not parameters:
        raise ValueError('"parameters" is empty')
    plans = tuple(_plan(one, len(parameters)) for one in fields.array(data, "plans"))
    steps = tuple(_step(row, plans, len(parameters)) for row in fields.mappings(data, "steps"))
    for before, after in zip(steps, steps[1:], strict=False):
        if after.step <= before.step or after.marks.began_ns <= before.marks.began_ns:
            raise ValueError(f"step {after.step} does not begin after step {before.step}, which stands before it")
    return RankTrace(
        rank=fields.integer(data, "rank", most=ranks - 1),
        ranks=ranks,
        device=fields.word(data, "device"),
        source=source,
        perf_ns=fields.integer(clock, "perf_ns"),
        wall_ns=fields.integer(clock, "wall_ns"),
        config=config,
        caps=_caps(fields.mapping(data, "caps")),
        parameters=parameters,
        costs=None if fields.field(data, "costs") is None else _costs(fields.mapping(data, "costs")),
        plans=plans,
        steps=steps,
        place=_place(fields.mapping(data, "place")) if "place" in data else None,
    )


def _place(row: Mapping[str, Any]) -> tuple[str, str, str]:
    return fields.text(row, "host"), fields.text(row, "network"), fields.text(row, "boot")


def _parameter(row: Mapping[str, Any]) -> Parameter:
    return Parameter(
        name=fields.text(row, "name"),
        numel=fields.integer(row, "numel"),
        ndim=fields.integer(row, "ndim"),
        size_bytes=fields.integer(row, "size_bytes"),
        wire=_wire(row),
        wire_bytes=fields.integer(row, "wire_bytes"),
        group=fields.text(row, "group"),
        alone=fields.boolean(row, "alone"),
        ready_ns=fields.integer(row, "ready_ns", least=MISSING_NS),
    )


def _wire(row: Mapping[str, Any]) -> Wire:
    wire = fields.word(row, "wire")
    if wire not in WIRES:  # nothing that a file names is imported
        raise ValueError(f"unknown wire {wire!r}: use one of {', '.join(map(repr, WIRES))}")
    return wire


def _caps(data: Mapping[str, Any]) -> BucketCaps:
    unlimited = fields.field(data, "planned_bytes") is None
    return BucketCaps(
        first_bytes=fields.integer(data, "first_bytes", least=1),
        cap_bytes=fields.integer(data, "cap_bytes", least=1),
        listed_bytes=fields.integers(fields.array(data, "listed_bytes"), '"listed_bytes"', least=1),
        planned_bytes=None if unlimited else fields.integer(data, "planned_bytes", least=1),
    )


def _costs(data: Mapping[str, Any]) -> Costs:
    def linear(name: str) -> Linear:
        row = fields.mapping(data, name)
        return Linear(fixed_ns=fields.integer(row, "fixed_ns"), fs_per_byte=fields.integer(row, "fs_per_byte"))

    return Costs(wire=linear("wire"), pack=linear("pack"), unpack=linear("unpack"))


def _plan(data: object, parameters: int) -> Plan:
    if not isinstance(data, list) or not all(isinstance(bucket, list) and bucket for bucket in data):
        raise ValueError('"plans" must hold lists of buckets, and those numbers of parameters')
    numbers = fields.integers([number for bucket in data for number in bucket], "numbers of parameters in a plan")
    if sorted(numbers) != list(range(parameters)):
        raise ValueError(f"a plan does not name each of {parameters} parameters once")
    return tuple(tuple(bucket) for bucket in data)


def _step(row: Mapping[str, Any], plans: Sequence[Plan], parameters: int) -> Step:
    number = fields.integer(row, "step")
    plan = fields.integer(row, "plan", most=len(plans) - 1)
    buckets = fields.array(row, "buckets")
    if len(buckets) != len(plans[plan]):
        raise ValueError(f"step {number} has {len(buckets)} buckets, its plan {len(plans[plan])}")
    marks = StepMarks(0, fields.integer(row, "began_ns"))
    marks.forward_ns = fields.integer(row, "forward_ns", least=MISSING_NS, most=marks.began_ns)
    marks.backward_end_ns = fields.integer(row, "backward_end_ns", least=MISSING_NS)
    marks.buckets = [_bucket(one, f"bucket {index} of step {number}") for index, one in enumerate(buckets)]
    if not _ascend(bucket.launch_ns for bucket in marks.buckets):
        raise ValueError(f"the buckets of step {number} were not launched in their plan's order")
    ready_ns = None
    if fields.field(row, "ready_ns") is not None:
        what = f'"ready_ns" of step {number}'
        ready_ns = fields.integers(fields.array(row, "ready_ns"), what, least=MISSING_NS)
        if len(ready_ns) != parameters:
            raise ValueError(f"{what} has {len(ready_ns)} times for {parameters} parameters")
    return Step(step=number, plan=plan, marks=marks, ready_ns=ready_ns)


def _bucket(data: object, what: str) -> BucketMarks:
    if not isinstance(data, list) or len(data) != len(MARKS):
        raise ValueError(f"{what} must be a list of {len(MARKS)} times, got {fields.short(data)}")
    times_ns = fields.integers(data, f"times of {what}", least=MISSING_NS)
    if not _ascend(times_ns):
        raise ValueError(f"the times of {what} do not ascend: {fields.short(data)}")
    return BucketMarks(*times_ns)


def _ascend(times_ns: Iterable[int]) -> bool:
    known = [time_ns for time_ns in times_ns if time_ns != MISSING_NS]
    return known == sorted(known)
