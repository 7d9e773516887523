"""Stage 4: launch shapes of pack and unpack beside each other, for the table in kernels/variants.py.

Tiles of 2 to 16 KiB, 4 or 8 warps, 1 or 4 tiles in a program's chunk, cache hints where the kernels have them. Every
shape's result is checked; times are in CUDA graphs, in turns, past the cache (timing.py); the shape in use stands twice
among them, which is the noise. The best is that with the least geometric mean of its times over the shape in use, over
all tables that there was time for.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any

import kernel_cases
import timing
import torch
from stage import Stage, entry, free_bytes
from workload import Bucket, Pair, Workload

from fusedreduce.kernels import aot, dispatch, pack, unpack, variants
from fusedreduce.kernels.table import CHUNK_NUMEL, ChunkTable
from fusedreduce.kernels.variants import Tuning

TILE_BYTES = (2048, 4096, 8192, 16384)
WARPS = (4, 8)
TILES = (1, 4)
# (model, way, dtypes), the most telling first.
TABLES = (
    ("one", "whole", "fp32-bf16"),
    ("gpt2", "bucket", "fp32-bf16"),
    ("one", "whole", "fp32-fp32"),
    ("one", "whole", "bf16-bf16"),
    ("tiny", "whole", "fp32-bf16"),
)
REHEARSED = (("1x5000", "whole", "fp32-bf16"), ("20x100", "whole", "fp32-fp32"))
DIRECTIONS = ("pack", "unpack")
ROUNDS = 15
MOST_PROCESSES = 12
TABLE_S = 12.0  # not begun with less time than this


@dataclass(frozen=True)
class Shape:
    """Of a launch: the kernel's tuning, and elements of a chunk."""

    tuning: Tuning
    chunk_numel: int

    @property
    def name(self) -> str:
        hint = getattr(self.tuning, "hint", "")
        extra = f", hint {hint}" if hint else ""
        return f"{self.tuning.tile_bytes} B, {self.tuning.num_warps} warps, chunks of {self.chunk_numel}{extra}"


def shapes(element_bytes: int, hints: Sequence[str]) -> list[Shape]:
    """All that are compared. `element_bytes`: of the wider side, which a tile's bytes count."""
    found = []
    for tile_bytes, warps, tiles, hint in itertools.product(TILE_BYTES, WARPS, TILES, hints):
        extra: dict[str, Any] = {"hint": hint} if hint else {}
        found.append(Shape(Tuning(tile_bytes, warps, **extra), tiles * tile_bytes // element_bytes))
    return found


def known_hints() -> tuple[str, ...]:
    """What `Tuning.hint` may be; only "" where it has none."""
    return ("", "read", "both") if any(one.name == "hint" for one in dataclasses.fields(Tuning)) else ("",)


def run(stage: Stage) -> None:
    torch.set_num_threads(1)
    kernel_cases.prove_path(stage.device)
    tables = REHEARSED if stage.rehearse else TABLES
    target = variants.current_target(stage.device) if stage.device.type == "cuda" else ("cuda", 90)
    in_use = variants.tuning_for(target)
    hints = known_hints()
    stage.note(target=list(target), in_use=dataclasses.asdict(in_use), in_use_chunk_numel=CHUNK_NUMEL, hints=hints)
    if stage.device.type == "cuda":
        compile_all(stage, target, hints)
    found: list[dict[str, Any]] = []
    for model, way, pair in tables:
        if stage.left_s() < TABLE_S and not stage.rehearse:
            stage.skip(f"{model} {pair} {way}", "no time left")
            continue
        work = Workload(model, Pair.parse(pair), way, stage.device).allocate()
        element_bytes = max(work.pair.gradients.itemsize, work.pair.wire.itemsize)
        compared = shapes(element_bytes, hints)[:: 11 if stage.rehearse else 1]
        for direction in DIRECTIONS:
            found.append(measure(work, direction, [Shape(in_use, CHUNK_NUMEL), *compared], stage))
            stage.note(tables=found, ranking=ranking(found)[:12])
        work.release()
    best = ranking(found)
    if best:
        stage.note(best=best[0])
        print("\n".join(f"{one['ratio']:.3f} {one['shape']}" for one in best[:12]), flush=True)


def measure(work: Workload, direction: str, compared: Sequence[Shape], stage: Stage) -> dict[str, Any]:
    """One table: microseconds of every shape, and ratios to the first, which is in use."""
    wires = work.packed()
    for of_set, expected in zip(work.sets, wires, strict=True):
        for bucket, wire in zip(of_set.buckets, expected, strict=True):
            bucket.wire.copy_(wire)
    gradients = work.unpacked() if direction == "unpack" else []
    spoil = work.spoil_wires if direction == "pack" else work.spoil_gradients

    def check(name: str) -> None:
        if direction == "pack":
            work.check_wires(name, wires)
        else:
            work.check_gradients(name, gradients)

    calls: dict[str, list[Callable[[], object]]] = {}
    checks = {}
    cut: dict[int, list[ChunkTable]] = {}
    for place, shape in enumerate(compared):
        name = shape.name if place else "in use"
        if shape.chunk_numel not in cut:
            cut[shape.chunk_numel] = [_cut_anew(table, shape.chunk_numel, work.device) for table in work.tables]
        calls[name] = [
            functools.partial(_call, direction, one.buckets, cut[shape.chunk_numel], work, shape.tuning)
            for one in work.sets
        ]
        checks[name] = timing.Check(poison=spoil, check=functools.partial(check, name))
    calls["in use, again"], checks["in use, again"] = calls["in use"], checks["in use"]
    rounds, launches = (2, 1) if stage.rehearse else (ROUNDS, 20)
    times = timing.measure(calls, work.device, rounds=rounds, launches=launches, checks=checks)
    base = times["in use"]
    if direction == "unpack":
        restore(work)
    return {
        "model": work.model,
        "way": work.way,
        "pair": work.pair.name,
        "direction": direction,
        "bytes": work.bytes,
        "in_use_us": statistics.median(base) * 1e6,
        "noise": _ratio(times["in use, again"], base),
        "ratios": {name: _ratio(times[name], base) for name in times if name not in ("in use", "in use, again")},
        "eager": times.eager,
    }


def restore(work: Workload) -> None:
    """Gradients that are numbers: those of an unpack that was spoiled and done again."""
    for one in work.sets:
        one.memory.nan_to_num_(0.0)


def _call(direction: str, buckets: Sequence[Bucket], tables: Sequence[ChunkTable], work: Workload, how: Tuning) -> None:
    on_gpu = work.device.type == "cuda"
    for bucket, table in zip(buckets, tables, strict=True):
        both = bucket.gradients, table, bucket.pointers, bucket.wire
        if not on_gpu:  # the same program, without shapes
            function = dispatch.pack if direction == "pack" else dispatch.unpack
            function(*both, work.divisor if direction == "pack" else work.one, vouched=True)
        elif direction == "pack":
            pack.pack(*both, work.divisor, vouched=True, tuning=how)
        else:
            unpack.unpack(*both, work.one, vouched=True, tuning=how)


def _cut_anew(table: ChunkTable, chunk_numel: int, device: torch.device) -> ChunkTable:
    """The same layout in other chunks."""
    again = ChunkTable(
        table.numels, table.offsets, table.dtypes, table.wire_numel, chunk_numel=chunk_numel, shapes=table.shapes
    )
    if device.type == "cuda":
        again.on(device)
    return again


def ranking(found: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Shapes by the geometric mean of their ratios over tables of one width of elements; the best first.

    A chunk's elements differ with the width, so bf16-bf16 shapes are matched by tile, warps and tiles.
    """
    logs: dict[str, list[float]] = {}
    for table in found:
        width = 2 if table["pair"] == "bf16-bf16" else 4
        for name, ratio in table["ratios"].items():
            head, _, tail = name.partition("chunks of ")
            numel, _, hint = tail.partition(",")
            key = f"{head}chunks of {int(numel) * width} B{',' + hint if hint else ''}"
            logs.setdefault(key, []).append(math.log(ratio))
    most = max(map(len, logs.values()), default=0)
    means = {name: math.exp(statistics.fmean(values)) for name, values in logs.items() if len(values) == most}
    return [
        {"shape": name, "ratio": ratio, "tables": most} for name, ratio in sorted(means.items(), key=lambda i: i[1])
    ]


def _ratio(seconds: Sequence[float], base: Sequence[float]) -> float:
    return statistics.median(mine / first for mine, first in zip(seconds, base, strict=True))


# Compiling


def compile_all(stage: Stage, key: tuple[str, int | str], hints: Sequence[str]) -> None:
    """Every shape's kernels, in parallel, into Triton's cache."""
    began_s = time.monotonic()
    count = len(_choices(hints))
    jobs = min(MOST_PROCESSES, len(os.sched_getaffinity(0)))
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        list(pool.map(functools.partial(compile_nth, key, tuple(hints)), range(count)))
    stage.note(
        compiled=count, compile_seconds=round(time.monotonic() - began_s, 1), free_bytes=free_bytes(stage.device)
    )


def compile_nth(key: tuple[str, int | str], hints: Sequence[str], index: int) -> None:
    """In a process of the pool."""
    direction, wire, tuning = _choices(hints)[index]
    make = pack.pack_variant if direction == "pack" else unpack.unpack_variant
    target = next((one for one in aot.TARGETS.values() if one.key == key), aot.Target("here", key))
    aot.compile_variant(make(wire, False, False, tuning, key[0]), target)


def _choices(hints: Sequence[str]) -> list[tuple[str, torch.dtype, Tuning]]:
    tunings = list(dict.fromkeys(shape.tuning for shape in shapes(4, hints)))
    return list(itertools.product(DIRECTIONS, (torch.bfloat16, torch.float32), tunings))


if __name__ == "__main__":
    entry(run)
