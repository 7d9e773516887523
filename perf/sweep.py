"""Which launch shape pack and unpack should have on an architecture: tile, warps, tiles per program, eviction hint.

    python perf/sweep.py --device cuda --out DIR     # sweep.json, rewritten after each row, the most telling ones first
    python perf/sweep.py --rehearse --out DIR        # on CPU, where there is nothing to sweep but the plumbing

Every shape's result is compared bit for bit before it has a time. Shapes of one hint take turns, and with them the
shape in use, twice: their times are compared as ratios to it, and its two are the noise. `ranking` says what
kernels/variants.py should have: the shape that is slowest, relative to the fastest, by the least in the worst of the
workloads.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import json
import math
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import kernel_cases
import records
import timing
import torch
from bench_kernels import ratio
from records import BenchError
from workload import Bucket, Pair, Workload

from fusedreduce.kernels import cpu
from fusedreduce.kernels import pack as pack_file
from fusedreduce.kernels import unpack as unpack_file
from fusedreduce.kernels.table import CHUNK_NUMEL, ChunkTable
from fusedreduce.kernels.variants import Tuning, tuned

TILE_BYTES = (2048, 4096, 8192, 16384)
WARPS = (4, 8)
TILES_PER_PROGRAM = (1, 4)
HINTS = ("", "read", "both")
# The most telling first: a time limit may end the list early.
WORKLOADS = (
    ("gpt2", "bucket", "fp32-bf16"),
    ("one", "whole", "fp32-bf16"),
    ("gpt2", "bucket", "bf16-bf16"),
    ("tiny", "whole", "fp32-bf16"),
)
REHEARSED = {"one": "1x40000", "gpt2": "12x2000", "tiny": "50x1000"}
REHEARSED_CAP_BYTES = 40_000
DIRECTIONS = ("pack", "unpack")
IN_USE, IN_USE_AGAIN = "in use", "in use again"
RANKED = 12


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


def sweep(
    device: torch.device,
    emit: Callable[[dict[str, Any]], object],
    *,
    rounds: int,
    ends_s: float = math.inf,
    rehearse: bool = False,
) -> None:
    """Times SHAPES on WORKLOADS.

    Args:
        device: where.
        emit: takes a row for each workload and direction.
        rounds: see timing.measure.
        ends_s: time.monotonic() at which no further workload is begun.
        rehearse: on CPU: two shapes and tiny sizes; torch's operators, which have no launch shape, stand for all.

    Raises:
        BenchError: results are wrong, kernels do not compile, or too little memory: after all that could be timed.
    """
    faults: list[str] = []
    groups = [GROUPS[0][:2]] if rehearse else GROUPS
    for model, way, text in WORKLOADS:
        if time.monotonic() >= ends_s:
            break
        options: dict[str, Any] = {"cap_bytes": REHEARSED_CAP_BYTES} if rehearse else {}
        try:
            work = Workload(REHEARSED[model] if rehearse else model, Pair.parse(text), way, device, **options)
        except BenchError as error:
            faults.append(f"{model} {way} {text}: {error}")
            continue
        work.allocate()
        for direction in DIRECTIONS:
            row = _row(work, direction, groups, rounds, faults)
            if row is not None:
                emit({**row, "model": model})
        work.release()  # or the next one finds less memory than there is
    if faults:
        raise BenchError("; ".join(faults))


def _row(
    work: Workload,
    direction: str,
    groups: Iterable[Sequence[Shape]],
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
        calls: dict[str, list[timing.Call]] = {IN_USE: _calls(work, direction, None, work.tables)}
        calls[IN_USE_AGAIN] = calls[IN_USE]
        for shape in group:
            tables = _cut_anew(work, shape.chunk_numel(work.pair))
            calls[shape.name] = _calls(work, direction, shape.tuning, tables)
        checks = {name: timing.Check(poison=spoil, check=functools.partial(check, name)) for name in calls}
        try:
            times = timing.measure(calls, work.device, rounds=rounds, checks=checks)
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
    pack, unpack = (cpu.pack, cpu.unpack) if work.device.type != "cuda" else (pack_file.pack, unpack_file.unpack)
    with contextlib.nullcontext() if tuning is None else tuned(tuning):
        for bucket, chunks in zip(buckets, tables, strict=True):
            both = bucket.gradients, chunks, bucket.pointers, bucket.wire
            if direction == "pack":
                pack(*both, work.divisor)
            else:
                unpack(*both, work.one)


def ranking(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Shapes by how much slower than the fastest they are where they are worst, the best first.

    Only those that were timed as often as any. `ratio`: the geometric mean of their times over those of the shape in
    use.
    """
    found: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
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


def main() -> int:
    """Sweeps, prints the ranking so far behind each row, and writes it."""
    parser = records.Parser(description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--rounds", type=int, default=30, help="timings of each shape (default: 30)")
    parser.add_argument(
        "--limit", type=float, default=math.inf, help="seconds after which no further workload is begun"
    )
    parser.add_argument("--rehearse", action="store_true", help="two shapes at tiny sizes, 2 rounds")
    parser.add_argument("--out", type=Path, required=True, help="folder for sweep.json, or sweep-2.json")
    asked = parser.parse_args()
    device = records.pick_device(asked.device)
    if device.type == "cpu" and not asked.rehearse:
        parser.error("only a GPU has launch shapes: --device cuda, or --rehearse")
    kernel_cases.prove_path(device)
    torch.set_num_threads(1)
    records.make_folder(asked.out)
    rows: list[dict[str, Any]] = []
    about = records.provenance(device)
    earlier = len(list(asked.out.glob("sweep*.json")))
    path = asked.out / f"sweep{f'-{earlier + 1}' if earlier else ''}.json"

    def emit(row: dict[str, Any]) -> None:
        rows.append(row)
        best = ranking(rows)[:RANKED]
        found = {**about, "rehearsal": asked.rehearse, "ranking": best, "rows": rows}
        path.write_text(json.dumps(found, indent=1) + "\n")
        print(f"\n{row['model']} {row['pair']} {row['way']} {row['direction']}: in use {row['in_use_slower']:.3f}")
        for one in best:
            print(f"  {one['slower']:.3f} of the fastest, {one['ratio']:.3f} of what is in use: {one['shape']}")
        print(f"best of {best[0]['rows']} rows: {best[0]['shape']}", flush=True)

    rounds = 2 if asked.rehearse else asked.rounds
    sweep(device, emit, rounds=rounds, ends_s=time.monotonic() + asked.limit, rehearse=asked.rehearse)
    return 0


if __name__ == "__main__":
    records.entry(main)
