"""Which launch shape pack and unpack should have on an architecture: tile, warps, tiles per program, eviction hint.

Every shape's result is compared bit for bit before it has a time. Shapes of one hint take turns, and with them the
shape in use, twice: their times are compared as ratios to it, and its two are the noise. `ranking` says what
kernels/variants.py should have: the shape that is slowest, relative to the fastest, by the least in the worst of the
workloads. The second stage of the norms is swept beside it: lanes and warps of its one program per tensor.

Called by the GPU check; there is nothing to sweep without a GPU but the plumbing.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import kernel_cases
import layers
import timing
import torch
from bench_kernels import REHEARSED, REHEARSED_CAP_BYTES, ratio
from records import BenchError
from workload import Bucket, Pair, Workload

from fusedreduce.kernels import cpu, cpu_stats, stats
from fusedreduce.kernels import pack as pack_file
from fusedreduce.kernels import unpack as unpack_file
from fusedreduce.kernels.table import CHUNK_NUMEL, ChunkTable, Partials, Totals, new_partials
from fusedreduce.kernels.variants import Tuning, Variant, tuning_for

TILE_BYTES = (2048, 4096, 8192, 16384)
WARPS = (4, 8)
TILES_PER_PROGRAM = (1, 4)
HINTS = ("", "read", "both")
# The most telling first: the deadline may end the list early.
WORKLOADS = (
    ("gpt2", "bucket", "fp32-bf16"),
    ("one", "whole", "fp32-bf16"),
    ("gpt2", "bucket", "bf16-bf16"),
    ("tiny", "whole", "fp32-bf16"),
)
DIRECTIONS = ("pack", "unpack")
IN_USE, IN_USE_AGAIN = "in use", "in use again"
# Lanes and warps of the second stage; the partials of one tensor of 64 Mi elements, and those of GPT-2's.
SECOND_STAGES = ((256, 4), (512, 4), (1024, 8), (1024, 16), (2048, 16))
SECOND_STAGE_LISTS = ("one", "gpt2")
SECOND_STAGE_RTOL = 1e-12  # sums of fp64 in another order


@dataclass(frozen=True)
class Shape:
    """One launch shape."""

    tile_bytes: int
    num_warps: int
    tiles: int
    hint: Any

    @property
    def tuning(self) -> Tuning:
        """As launches take it."""
        return Tuning(self.tile_bytes, self.num_warps, self.hint)

    @property
    def name(self) -> str:
        """As rows call it."""
        return f"{self.tile_bytes} x {self.num_warps} warps x {self.tiles} tiles{f', {self.hint}' if self.hint else ''}"

    def chunk_numel(self, pair: Pair) -> int:
        """Elements of a program: that many tiles, which count bytes of the wider side."""
        return self.tiles * self.tile_bytes // max(pair.gradients.itemsize, pair.wire.itemsize)


# Those of one hint take turns.
GROUPS = tuple(
    tuple(Shape(*shape, hint) for shape in itertools.product(TILE_BYTES, WARPS, TILES_PER_PROGRAM)) for hint in HINTS
)
SHAPES = tuple(itertools.chain(*GROUPS))


def variants(target: tuple[str, int | str]) -> list[Variant]:
    """What a sweep launches that nothing else does, for a compilation ahead."""
    wires = dict.fromkeys(Pair.parse(pair).wire for _, _, pair in WORKLOADS)
    tunings = dict.fromkeys(shape.tuning for shape in SHAPES if shape.tuning != tuning_for(target))
    walks = []
    for tuning, wire in itertools.product(tunings, wires):
        walks.append(pack_file.pack_variant(wire, False, False, True, tuning, target[0]))
        walks.append(unpack_file.unpack_variant(wire, False, False, tuning, target[0]))
    known = stats.variants()
    return [*walks, *(one for lanes in SECOND_STAGES for one in _second_stage(*lanes) if one not in known)]


def sweep(
    device: torch.device,
    deadline_s: float,
    emit: Callable[[dict[str, Any]], object],
    *,
    rounds: int = 15,
    rehearse: bool = False,
) -> list[str]:
    """Times SECOND_STAGES, then SHAPES on WORKLOADS, as far as the time goes.

    Args:
        device: where.
        deadline_s: time.monotonic() at which nothing new is begun, nor what looks as if it would last longer.
        emit: takes a row per list of the second stage, then one per workload and direction.
        rounds: see timing.measure.
        rehearse: on CPU: two shapes and tiny sizes; torch's operators, which have no launch shape, stand for all.

    Returns:
        What there was no time for.

    Raises:
        BenchError: results are wrong, kernels do not compile, or too little memory: after all that could be timed.
    """
    if not rehearse:
        kernel_cases.prove_path(device)
    clock = _Clock(deadline_s)
    left: list[str] = []
    faults: list[str] = []
    groups = [GROUPS[0][:2]] if rehearse else GROUPS
    # In three seconds; the rest takes what there is.
    for model in SECOND_STAGE_LISTS:
        if clock.is_over():
            left.append(f"second stage of {model}")
            continue
        try:
            emit(clock.timed(functools.partial(_second_stage_row, model, device, rounds)))
        except BenchError as error:
            faults.append(str(error))
    for model, way, text in WORKLOADS:
        if clock.is_over():
            left += [f"{model} {way} {text} {direction}" for direction in DIRECTIONS]
            continue
        options: dict[str, Any] = {"cap_bytes": REHEARSED_CAP_BYTES} if rehearse else {}
        try:
            work = Workload(REHEARSED[model] if rehearse else model, Pair.parse(text), way, device, **options)
        except BenchError as error:
            faults.append(f"{model} {way} {text}: {error}")
            continue
        try:
            work.allocate()
            for direction in DIRECTIONS:
                row = _row(work, direction, groups, clock, rounds, faults)
                found = 0 if row is None else len(row["shapes"])
                if found < sum(map(len, groups)):
                    left.append(f"{model} {way} {text} {direction}: all but {found} shapes")
                if row is not None:
                    emit({**row, "model": model})
        except BenchError as error:
            faults.append(f"{model} {way} {text}: {error}")
        finally:
            work.release()  # or the next one finds less memory than there is
    if faults:
        raise BenchError("; ".join(faults))
    return left


class _Clock:
    """Says when nothing more should be begun, by how long the longest part has taken so far."""

    def __init__(self, deadline_s: float) -> None:
        self._deadline_s = deadline_s
        self._longest_s = 0.0

    def is_over(self) -> bool:
        return time.monotonic() + self._longest_s >= self._deadline_s

    def timed(self, part: Callable[[], Any]) -> Any:
        began_s = time.monotonic()
        result = part()
        self._longest_s = max(self._longest_s, time.monotonic() - began_s)
        return result


def _row(
    work: Workload,
    direction: str,
    groups: Iterable[Sequence[Shape]],
    clock: _Clock,
    rounds: int,
    faults: list[str],
) -> dict[str, Any] | None:
    """One workload and direction; None if no shape has a time. What was wrong with a group goes to `faults`."""
    wires = work.packed()
    for one, of_set in zip(work.sets, wires, strict=True):
        for bucket, wire in zip(one.buckets, of_set, strict=True):
            bucket.wire.copy_(wire)
    expected = work.unpacked() if direction == "unpack" else []
    spoil = work.spoil_wires if direction == "pack" else work.spoil_gradients

    def check(name: str) -> None:
        if direction == "pack":
            work.check_wires(name, wires)
        else:
            work.check_gradients(name, expected)

    found: dict[str, dict[str, Any]] = {}
    in_use_us, noise, eager = [], [], dict[str, str]()
    for group in groups:
        if clock.is_over():
            break
        calls: dict[str, list[timing.Call]] = {IN_USE: _calls(work, direction, None, work.tables)}
        calls[IN_USE_AGAIN] = calls[IN_USE]
        for shape in group:
            tables = _cut_anew(work, shape.chunk_numel(work.pair))
            calls[shape.name] = _calls(work, direction, shape.tuning, tables)
        checks = {name: timing.Check(poison=spoil, check=functools.partial(check, name)) for name in calls}
        try:
            times = clock.timed(functools.partial(timing.measure, calls, work.device, rounds=rounds, checks=checks))
        except Exception as error:  # a wrong result, or whatever the compiler raises: other hints have their times
            kind = "" if isinstance(error, BenchError) else f"{type(error).__name__}: "
            faults.append(f"{direction} {work.model} {work.pair.name}: {kind}{str(error).strip()[:200]}")
            continue
        eager |= times.eager
        in_use_us.append(statistics.median(times[IN_USE]) * 1e6)
        noise.append(ratio(times[IN_USE_AGAIN], times[IN_USE]))
        for shape in group:
            found[shape.name] = {
                **dataclasses.asdict(shape),
                "chunk_numel": shape.chunk_numel(work.pair),
                "median_us": statistics.median(times[shape.name]) * 1e6,
                "ratio": ratio(times[shape.name], times[IN_USE]),
            }
    if not found:
        return None
    fastest = min(timed["ratio"] for timed in found.values())
    for timed in found.values():
        timed["slower"] = timed["ratio"] / fastest
    return {
        "way": work.way,
        "pair": work.pair.name,
        "direction": direction,
        "bytes": work.bytes,
        "sets": work.count,
        "in_use_chunk_numel": CHUNK_NUMEL,
        "in_use_us": in_use_us,
        "in_use_slower": 1 / fastest,
        "noise": noise,
        "eager": eager,
        "shapes": found,
    }


def _cut_anew(work: Workload, chunk_numel: int) -> list[ChunkTable]:
    """The workload's layouts in other chunks."""
    return [
        ChunkTable(
            table.numels, table.offsets, table.dtypes, table.wire_numel, chunk_numel=chunk_numel, shapes=table.shapes
        )
        for table in work.tables
    ]


def _calls(work: Workload, direction: str, tuning: Tuning | None, tables: Sequence[ChunkTable]) -> list[timing.Call]:
    """A call of one shape for each set; None: as launches are without a choice."""
    return [functools.partial(_call, work, direction, tuning, tables, one.buckets) for one in work.sets]


def _call(
    work: Workload, direction: str, tuning: Tuning | None, tables: Sequence[ChunkTable], buckets: Sequence[Bucket]
) -> None:
    for bucket, chunks in zip(buckets, tables, strict=True):
        both = bucket.gradients, chunks, bucket.pointers, bucket.wire
        if work.device.type != "cuda" and direction == "pack":
            cpu.pack(*both, work.divisor, vouched=True)
        elif work.device.type != "cuda":
            cpu.unpack(*both, work.one, vouched=True)
        elif direction == "pack":
            pack_file.pack(*both, work.divisor, vouched=True, tuning=tuning)
        else:
            unpack_file.unpack(*both, work.one, vouched=True, tuning=tuning)


def ranking(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Shapes by how much slower than the fastest they are where they are worst, the best first.

    Only those that were timed as often as any. `ratio`: the geometric mean of their times over those of the shape in
    use.
    """
    found: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        if row["direction"] in DIRECTIONS:
            for name, one in row["shapes"].items():
                found.setdefault(name, []).append(one)
    most = max(map(len, found.values()), default=0)
    ranked = [
        {
            "shape": name,
            "slower": max(float(one["slower"]) for one in ones),
            "ratio": math.exp(statistics.fmean(math.log(float(one["ratio"])) for one in ones)),
            "rows": most,
        }
        for name, ones in found.items()
        if len(ones) == most
    ]
    return sorted(ranked, key=lambda one: float(one["slower"]))


# The second stage


def _second_stage(lanes: int, warps: int) -> tuple[Variant, Variant]:
    """Its two kernels in another shape."""
    constexprs = {"BLOCK": lanes}
    return (
        dataclasses.replace(stats.PARAMETER_TOTALS, constexprs=constexprs, num_warps=warps),
        dataclasses.replace(stats.TOTAL, constexprs=constexprs, num_warps=warps),
    )


def _second_stage_row(model: str, device: torch.device, rounds: int) -> dict[str, Any]:
    """Microseconds of the two launches over the partials of a layer list."""
    rows = [-(-math.prod(size) // CHUNK_NUMEL) for size in layers.shapes(model)]
    ends = list(itertools.accumulate(rows))
    flat = [bound for end, count in zip(ends, rows, strict=True) for bound in (end - count, end)]
    spans = torch.tensor([len(rows), *flat], dtype=torch.int64).to(device)
    partials = new_partials(ends[-1], device)
    generator = torch.Generator().manual_seed(0)
    for values in (partials.sums, partials.peaks):
        values.copy_(torch.rand(ends[-1], dtype=torch.float64, generator=generator))
    partials.first_non_finite.fill_(-1)
    expected = cpu_stats.reduce_partials(partials, spans)
    calls: dict[str, list[timing.Call]] = {}
    checks = {}
    for lanes, warps in SECOND_STAGES:
        name = f"{lanes} lanes x {warps} warps"
        into = Totals(**{field.name: torch.empty_like(getattr(expected, field.name)) for field in _FIELDS})
        calls[name] = [functools.partial(_bring_together, _second_stage(lanes, warps), partials, spans, into)]
        checks[name] = timing.Check(
            poison=functools.partial(_spoil, into), check=functools.partial(_check_totals, name, into, expected)
        )
    times = timing.measure(calls, device, rounds=rounds, checks=checks)
    return {
        "model": model,
        "direction": "second stage",
        "rows": ends[-1],
        "parameters": len(rows),
        "eager": times.eager,
        "shapes": {name: {"median_us": statistics.median(seconds) * 1e6} for name, seconds in times.items()},
    }


_FIELDS = dataclasses.fields(Totals)


def _bring_together(kernels: tuple[Variant, Variant], partials: Partials, spans: torch.Tensor, into: Totals) -> None:
    each = into.parameter_sums, into.parameter_peaks, into.first_non_finite
    if spans.device.type != "cuda":
        found = cpu_stats.reduce_partials(partials, spans)
        for field in _FIELDS:
            getattr(into, field.name).copy_(getattr(found, field.name))
        return
    of_parameters, of_all = kernels
    rows = partials.sums, partials.peaks, partials.first_non_finite
    of_parameters.launch(into.parameter_sums.numel(), (spans, *rows, *each))
    of_all.launch(1, (spans, *each, into.total))


def _spoil(totals: Totals) -> None:
    for field in _FIELDS:
        getattr(totals, field.name).fill_(-7)


def _check_totals(name: str, totals: Totals, expected: Totals) -> None:
    """Raises BenchError unless these are the totals."""
    for field in _FIELDS:
        ours, wanted = getattr(totals, field.name), getattr(expected, field.name)
        if not torch.allclose(ours.double(), wanted.double(), rtol=SECOND_STAGE_RTOL, atol=0.0):
            raise BenchError(f"second stage, {name}: {field.name} is wrong")
