"""The forecast of `fusedreduce doctor`: exposed communication of a step, by wire and plan, on the measured link.

The backward is a recorded one, or that of a model of which only the number of parameters is known: equal gradients that
become ready at an even pace. Costs are linear in bytes: of collectives as measured between these ranks, of packing and
unpacking as measured on this device. Python's own time per parameter is not included.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import math
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from fusedreduce.config import WIRES, wire_dtype
from fusedreduce.errors import TraceError
from fusedreduce.kernels import dispatch
from fusedreduce.kernels.table import ChunkTable, PointerTable
from fusedreduce.planning.bucketing import MIB, UNLIMITED_BYTES, BucketCaps
from fusedreduce.planning.cost_model import FREE, FS_PER_NS, Costs, Linear, fit_copy
from fusedreduce.planning.simulation.simulate import policy_plans
from fusedreduce.planning.timeline import Problem, timeline
from fusedreduce.trace.problem import known_costs, problem
from fusedreduce.trace.reader import read

from .doctor_machine import Finding, seconds

POLICIES = ("static", "planned")
_SUFFIXES = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9}
_MOST_PARAMETERS, _LEAST_NUMEL = 100, 4096
_MOST_NUMEL = 10**12
_COPY_NUMELS = (2**16, 2**20)
_COPY_TIMES = 9
# The least gain, as a share of backward and exposed communication, for which another wire is recommended.
WORTH = 0.05


@dataclass(frozen=True)
class Backward:
    """A backward whose gradients are reduced.

    Args:
        title: description for the report.
        problem: ready times and sizes; its costs and bytes on the wire are not used.
        itemsize_bytes: size of an element of the gradients.
        caps: limits of torch's buckets.
        costs: as recorded; None: not known.
    """

    title: str
    problem: Problem
    itemsize_bytes: int
    caps: BucketCaps
    costs: Costs | None = None


@dataclass(frozen=True)
class Row:
    """The forecast of one wire.

    Args:
        wire: its name.
        size_mib: all gradients on it, in MiB.
        collectives_ms: time of an all-reduce of all gradients.
        exposed_ms: exposed communication by policy.
    """

    wire: str
    size_mib: float
    collectives_ms: float
    exposed_ms: Mapping[str, float]


def parameters(typed: str) -> int:
    """A number of parameters, such as 110M, for argparse."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([KMB]?)", typed.strip().upper(), re.ASCII)
    count = round(float(found[1]) * _SUFFIXES[found[2]]) if found else 0
    if not 1 <= count <= _MOST_NUMEL:
        raise argparse.ArgumentTypeError(f"must be a number of parameters, such as 110M, 1.3B or 25000; got {typed!r}")
    return count


def positive(typed: str) -> float:
    """A positive number, for argparse."""
    try:
        value = float(typed)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value > 0):
        raise argparse.ArgumentTypeError(f"must be a positive number, got {typed!r}")
    return value


def of_model(numel: int, backward_ms: float) -> Backward:
    """A backward of which only the length and the number of fp32 parameters are known."""
    count = max(1, min(_MOST_PARAMETERS, numel // _LEAST_NUMEL))
    ends = [numel * (index + 1) // count for index in range(count)]
    numels = [end - begin for begin, end in zip([0, *ends], ends, strict=False)]
    ready_ns = [round(backward_ms * 1e6) * (count - index) // count for index in range(count)]
    sizes = tuple(4 * elements for elements in numels)
    known = Problem(
        ready_ns=tuple(ready_ns),
        wire_bytes=sizes,
        size_bytes=sizes,
        groups=("",) * count,
        alone=frozenset(),
        cap_bytes=UNLIMITED_BYTES,
        costs=Costs(wire=FREE),
    )
    return Backward(f"{numel:,} fp32 parameters, backward of {backward_ms:.1f} ms", known, 4, BucketCaps())


def of_trace(folder: Path) -> Backward:
    """A recorded backward.

    Raises:
        TraceError: the folder has no trace, or one without ready times of gradients.
    """
    traces = read(folder)
    first = traces[0]
    costs = known_costs(traces)
    known = problem(traces, costs or Costs(wire=FREE), first.caps.planned_limit_bytes)
    if max(known.ready_ns) < 0:
        raise TraceError(f"the trace in {folder} has no ready time of any gradient: record more steps")
    bytes_, numel = sum(known.size_bytes), sum(parameter.numel for parameter in first.parameters)
    title = f"{numel:,} parameters recorded in {folder.name}, backward of {max(known.ready_ns) / 1e6:.1f} ms"
    return Backward(title, known, max(1, round(bytes_ / max(numel, 1))), first.caps, costs)


def copy_costs(device: torch.device) -> dict[str, tuple[Linear, Linear]]:
    """Measures packing and unpacking of fp32 gradients on this device: by wire, linear costs by bytes on the wire."""
    return {wire: _copies(device, wire_dtype(wire) or torch.float32) for wire in WIRES}


def _copies(device: torch.device, dtype: torch.dtype) -> tuple[Linear, Linear]:
    packs: list[tuple[int, int]] = []
    unpacks: list[tuple[int, int]] = []
    for numel in _COPY_NUMELS:
        gradients = [torch.zeros(numel, dtype=torch.float32, device=device)]
        chunks = ChunkTable((numel,), (0,), (torch.float32,), numel, shapes=[((numel,), (1,))])
        pointers, wire = PointerTable(), torch.zeros(numel, dtype=dtype, device=device)
        unit = torch.ones(1, dtype=torch.float32, device=device)
        pack = functools.partial(dispatch.pack, gradients, chunks, pointers, wire, 1.0, vouched=True)
        unpack = functools.partial(dispatch.unpack, gradients, chunks, pointers, wire, unit, vouched=True)
        for samples, copy in ((packs, pack), (unpacks, unpack)):
            copy()
            took_s = statistics.median(seconds(device, copy) for _ in range(_COPY_TIMES))
            samples.append((numel * dtype.itemsize, round(took_s * 1e9)))
    return fit_copy(packs), fit_copy(unpacks)


def forecast(backward: Backward, costs: Mapping[str, Costs]) -> list[Row]:
    """Computes the timeline of a step with each wire and policy.

    Args:
        backward: whose gradients are reduced.
        costs: of a bucket, by wire.

    Returns:
        A row per wire.
    """
    rows = []
    for wire in WIRES:
        dtype = wire_dtype(wire)
        share = min(1.0, dtype.itemsize / backward.itemsize_bytes) if dtype else 1.0
        wire_bytes = tuple(round(size * share) for size in backward.problem.size_bytes)
        asked = dataclasses.replace(backward.problem, wire_bytes=wire_bytes, costs=costs[wire])
        plans = policy_plans(asked, backward.caps)
        ends = {name: timeline(plans[name], asked).finish for name in POLICIES}
        exposed = {name: (end - max(asked.ready_fs)) / FS_PER_NS / 1e6 for name, end in ends.items()}
        total = sum(wire_bytes)
        rows.append(Row(wire, total / MIB, costs[wire].wire.fs(total) / FS_PER_NS / 1e6, exposed))
    return rows


def advice(backward: Backward, rows: Sequence[Row]) -> tuple[Finding, str | None]:
    """Recommends a wire.

    Returns:
        The finding, and the wire; None if no wire gains anything.
    """
    backward_ms = max(backward.problem.ready_ns) / 1e6
    native = rows[0]
    torchs_ms = backward_ms + native.exposed_ms["static"]
    best = min(rows, key=lambda row: (row.exposed_ms["planned"], row is not native))
    # fp16 only if it is clearly faster: bf16 needs no loss scale.
    by_wire = {row.wire: row for row in rows}
    if best.wire == "fp16" and _gain(by_wire["bf16"], best, torchs_ms) < WORTH:
        best = by_wire["bf16"]
    if _gain(native, best, torchs_ms) < WORTH:
        best = native
    saved = (native.exposed_ms["static"] - best.exposed_ms["planned"]) / torchs_ms
    if best is native and saved < WORTH:
        text = f"little to gain: torch's buckets in fp32 leave {native.exposed_ms['static']:.1f} ms exposed"
        return Finding("note", "forecast", text, "stay with torch's DDP"), None
    text = (
        f"wire {best.wire}, policy planned: {best.exposed_ms['planned']:.1f} ms exposed where torch's buckets in fp32 "
        f"leave {native.exposed_ms['static']:.1f}: backward and its tail {saved:.0%} shorter"
    )
    return Finding("ok", "forecast", text, "write one of the two lines below"), best.wire


def lines_of_code(wire: str) -> list[str]:
    """Lines of code for the two ways to use a wire."""
    return [
        f'ddp = fusedreduce.DistributedDataParallel(model, reduce=fusedreduce.ReduceConfig(wire="{wire}"))',
        f"torchrun --nproc-per-node=N -m fusedreduce.run --wire {wire} train.py",
    ]


def _gain(row: Row, best: Row, step_ms: float) -> float:
    return (row.exposed_ms["planned"] - best.exposed_ms["planned"]) / step_ms
