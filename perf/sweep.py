"""Which launch shape pack and unpack should have on an architecture: tile, warps, tiles per program, eviction hint.

Every shape's result is compared bit for bit before it has a time, and all shapes of one direction take turns.
`best` is what kernels/variants.py should say: the shape that is slowest, relative to the fastest, by the least in the
worst of the workloads. Called by the GPU check; there is nothing to sweep without a GPU but the plumbing.
"""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import kernel_cases
import records
import timing
import torch
from bench_kernels import REHEARSED, REHEARSED_CAP_BYTES
from workload import BufferSet, Pair, Workload

from fusedreduce.kernels import pack as pack_file
from fusedreduce.kernels import reference
from fusedreduce.kernels import unpack as unpack_file
from fusedreduce.kernels.table import PointerTable
from fusedreduce.kernels.variants import Tuning, current_target

TILE_BYTES = (2048, 4096, 8192, 16384)
WARPS = (4, 8)
TILES_PER_PROGRAM = (1, 4)
HINTS = ("", "read", "both")
# The most telling first: the deadline may end the list early.
WORKLOADS = (("gpt2", "bucket", "fp32-bf16"), ("one", "whole", "fp32-bf16"), ("gpt2", "bucket", "bf16-bf16"))
DIRECTIONS = ("pack", "unpack")


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


SHAPES = tuple(itertools.starmap(Shape, itertools.product(TILE_BYTES, WARPS, TILES_PER_PROGRAM, HINTS)))


def sweep(
    device: torch.device,
    deadline_s: float,
    emit: Callable[[dict[str, Any]], object],
    *,
    rounds: int = 10,
    rehearse: bool = False,
) -> list[str]:
    """Times SHAPES on WORKLOADS, as far as the time goes.

    Args:
        device: where.
        deadline_s: time.monotonic() at which nothing new is begun.
        emit: takes a row per workload and direction: the shapes' times, and how much slower than the fastest.
        rounds: see timing.measure.
        rehearse: on CPU: two shapes and tiny sizes; the torch reference, which has no launch shape, stands for both.

    Returns:
        What there was no time for.

    Raises:
        BenchError: a result is wrong, or too little memory.
    """
    if not rehearse:
        kernel_cases.prove_path(device)
        current_target(device)
    shapes = SHAPES[:2] if rehearse else SHAPES
    left = []
    for model, way, text in WORKLOADS:
        for direction in DIRECTIONS:
            if time.monotonic() >= deadline_s:
                left.append(f"{model} {way} {text} {direction}")
                continue
            emit(_row(model, way, Pair.parse(text), direction, shapes, device, rounds, rehearse))
    return left


def _row(
    model: str,
    way: str,
    pair: Pair,
    direction: str,
    shapes: Iterable[Shape],
    device: torch.device,
    rounds: int,
    rehearse: bool,
) -> dict[str, Any]:
    options = {"cap_bytes": REHEARSED_CAP_BYTES} if rehearse else {}
    work = Workload(REHEARSED[model] if rehearse else model, pair, way, device, **options).allocate()
    wires = work.packed()
    for one, of_set in zip(work.sets, wires, strict=True):
        for bucket, wire in zip(one.buckets, of_set, strict=True):
            bucket.wire.copy_(wire)
    expected = work.unpacked() if direction == "unpack" else []
    calls: dict[str, list[timing.Call]] = {}
    checks: dict[str, timing.Check] = {}
    for shape in shapes:
        # The same gradients and wires, cut otherwise.
        cut = Workload(work.model, pair, way, device, chunk_numel=shape.chunk_numel(pair), **options)
        calls[shape.name] = [functools.partial(_launch(direction, shape, cut, one, device), work) for one in work.sets]
        if direction == "pack":
            check = functools.partial(work.check_wires, shape.name, wires)
            checks[shape.name] = timing.Check(poison=work.spoil_wires, check=check)
        else:
            check = functools.partial(work.check_gradients, shape.name, expected)
            checks[shape.name] = timing.Check(poison=work.spoil_gradients, check=check)
    times = timing.measure(calls, device, rounds=rounds, checks=checks)
    medians = {name: records.Spread.of(seconds).median_ms * 1e3 for name, seconds in times.items()}
    fastest = min(medians.values())
    row = {
        "model": model,
        "way": way,
        "pair": pair.name,
        "direction": direction,
        "bytes": work.bytes,
        "sets": work.count,
        "shapes": {
            shape.name: {
                **asdict(shape),
                "chunk_numel": shape.chunk_numel(pair),
                "median_us": medians[shape.name],
                "slower": medians[shape.name] / fastest,
            }
            for shape in shapes
        },
    }
    work.release()
    return row


def _launch(
    direction: str, shape: Shape, cut: Workload, one: BufferSet, device: torch.device
) -> Callable[[Workload], None]:
    """One call of a shape on one set, with address tables of its own."""
    tables = [PointerTable() for _ in one.buckets]

    def call(work: Workload) -> None:
        for bucket, chunks, pointers in zip(one.buckets, cut.tables, tables, strict=True):
            scalar = work.divisor if direction == "pack" else work.one
            if device.type != "cuda":
                function = reference.pack if direction == "pack" else reference.unpack
                function(bucket.gradients, chunks, pointers, bucket.wire, scalar, vouched=True)
                continue
            launch = pack_file.pack if direction == "pack" else unpack_file.unpack
            launch(bucket.gradients, chunks, pointers, bucket.wire, scalar, vouched=True, tuning=shape.tuning)

    return call


def best(rows: Iterable[Mapping[str, Any]]) -> tuple[str, float]:
    """The shape whose worst row is the least bad, and how much slower than the fastest it is there."""
    worst: dict[str, float] = {}
    for row in rows:
        for name, one in row["shapes"].items():
            worst[name] = max(worst.get(name, 1.0), float(one["slower"]))
    name = min(worst, key=lambda shape: worst[shape])
    return name, worst[name]
