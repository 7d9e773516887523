"""Traces of runs that never were: ranks whose collectives end at the same moment, and whose clocks do not agree."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fusedreduce.planning.cost_model import FS_PER_NS, Costs, Linear
from fusedreduce.planning.layout import aligned_layout
from fusedreduce.planning.plan import Plan
from fusedreduce.planning.timeline import MISSING_NS
from fusedreduce.trace.chrome import LANES
from fusedreduce.trace.recorder import Recorder, StepMarks, group_text

# 2 us and 1 ns per byte; packing 1 us and 0.1 ns per byte, unpacking 0.1 ns per byte.
COSTS = Costs(
    wire=Linear(fixed_ns=2_000, fs_per_byte=1_000_000),
    pack=Linear(fixed_ns=1_000, fs_per_byte=100_000),
    unpack=Linear(fixed_ns=0, fs_per_byte=100_000),
)
# Sizes whose buckets at bf16 have no padding, and take whole ns: costs come back as they were.
UNPADDED = (1_040, 2_000, 480, 1_480)
EPOCH_NS = 1_700_000_000_000_000_000


@dataclass(frozen=True, kw_only=True)
class FakeRun:
    """A run to record.

    Args:
        plan: of every step.
        ready_ns: per parameter on rank 0, without packing.
        numels: of fp32 parameters.
        ranks: how many.
        lag: what a rank's backward takes, by rank 0's; for each rank beyond the first as much more.
        skew_ns: what each rank's wall clock is ahead of the one before it.
        steps: how many.
        options: changes to the header.
        costs: what the file says it was fitted to.
        looks: per-parameter times are written down in every step.
    """

    plan: Plan = ((3, 2), (1,), (0,))
    ready_ns: Sequence[int] = (40_000, 30_000, 20_000, 10_000)
    numels: Sequence[int] = (1_000, 2_000, 500, 1_500)
    ranks: int = 2
    lag: float = 0.1
    skew_ns: int = 7_000_000
    steps: int = 3
    options: dict[str, Any] = field(default_factory=dict)
    costs: Costs | None = COSTS
    looks: bool = False

    def write(self, folder: Path) -> None:
        """Records every rank."""
        marks = [self._step(step) for step in range(self.steps)]
        for rank in range(self.ranks):
            recorder = Recorder(folder, self.header(rank))
            for step in range(self.steps):
                recorder.add(step + 5, self.plan, marks[step][rank], self._ready(rank) if self.looks else None)
            recorder.write(self.costs)

    def header(self, rank: int) -> dict[str, Any]:
        """The file's entries from "rank" to "parameters"."""
        parameters = [
            {
                "name": f"layer{number}.weight",
                "numel": numel,
                "ndim": 2,
                "size_bytes": 4 * numel,
                "wire": "bf16",
                "wire_bytes": 2 * numel,
                "group": group_text("torch.float32", "cpu"),
                "alone": False,
                "ready_ns": MISSING_NS if self.looks else self._ready(rank)[number],
            }
            for number, numel in enumerate(self.numels)
        ]
        return {
            "rank": rank,
            "ranks": self.ranks,
            "device": "cpu",
            "source": "wrapper",
            "clock": {"perf_ns": self._perf_ns(rank, 0), "wall_ns": EPOCH_NS + rank * self.skew_ns},
            "config": {"wire": "bf16", "policy": "ready", "cap_policy": "c10d", "link": None},
            "caps": {"first_bytes": 8_000, "cap_bytes": 16_000, "listed_bytes": [], "planned_bytes": None},
            "parameters": parameters,
            **self.options,
        }

    def _ready(self, rank: int) -> list[int]:
        return [round(ready_ns * (1 + self.lag * rank)) for ready_ns in self.ready_ns]

    def _perf_ns(self, rank: int, at_ns: int) -> int:
        """A rank's own clock at a true time; every process has another zero."""
        return at_ns + 123_456_789 * (rank + 1)

    def _step(self, step: int) -> list[StepMarks]:
        """All ranks in one step, begun at the same moment."""
        began_ns = 1_000_000 * (step + 1)
        found = [StepMarks(len(self.plan), self._perf_ns(rank, began_ns)) for rank in range(self.ranks)]
        elements = [[self.numels[number] for number in members] for members in self.plan]
        sizes = [2 * aligned_layout(numels, wire_itemsize_bytes=2).numel for numels in elements]
        for rank, marks in enumerate(found):
            marks.forward_ns = marks.began_ns - 200_000
            ready = self._ready(rank)
            head_ns, packs = 0, list[tuple[int, int]]()
            for members, size, bucket in zip(self.plan, sizes, marks.buckets, strict=True):
                last_ns = max(ready[number] for number in members)
                head_ns = max(head_ns, last_ns)
                bucket.ready_ns = last_ns + sum(pack_ns for when_ns, pack_ns in packs if when_ns <= last_ns)
                bucket.pack_ns = head_ns + sum(pack_ns for _, pack_ns in packs)
                packs.append((head_ns, COSTS.pack.fs(size) // FS_PER_NS))
                bucket.launch_ns = bucket.pack_ns + packs[-1][1]
            marks.backward_end_ns = max(ready) + sum(pack_ns for _, pack_ns in packs)
        done_ns = 0
        for index, size in enumerate(sizes):
            done_ns = (
                max(done_ns, *(marks.buckets[index].launch_ns for marks in found), 0) + COSTS.wire.fs(size) // FS_PER_NS
            )
            for marks in found:
                before = marks.buckets[index - 1].end_ns if index else 0
                bucket = marks.buckets[index]
                bucket.done_ns = done_ns
                bucket.unpack_ns = max(done_ns, marks.backward_end_ns, before)
                bucket.end_ns = bucket.unpack_ns + COSTS.unpack.fs(size) // FS_PER_NS
        return found


def edit(folder: Path, change: Callable[[dict[str, Any]], object], rank: int = 0) -> None:
    """Changes one rank's file."""
    path = folder / f"rank{rank}.json"
    found = json.loads(path.read_text())
    change(found)
    path.write_text(json.dumps(found))


def check_chrome(found: dict[str, Any]) -> None:
    """The documented fields of the JSON object format, complete and metadata events; and what Perfetto needs of them.

    Complete events of a thread must nest: ours do not overlap at all.
    """
    assert set(found) <= {"traceEvents", "displayTimeUnit", "systemTraceEvents", "otherData", "stackFrames", "samples"}
    assert found["displayTimeUnit"] in ("ms", "ns")
    threads: dict[tuple[int, int], list[tuple[float, float]]] = {}
    named = set()
    for event in found["traceEvents"]:
        assert isinstance(event["name"], str) and event["name"]
        assert type(event["pid"]) is int and type(event["tid"]) is int and isinstance(event["args"], dict)
        if event["ph"] == "M":
            assert set(event) == {"name", "ph", "pid", "tid", "args"}
            (argument,) = event["args"].items()
            kinds_of_argument = {"process_name": "name", "thread_name": "name"}
            assert argument[0] == kinds_of_argument.get(event["name"], "sort_index")
            assert event["name"] in ("process_name", "process_sort_index", "thread_name", "thread_sort_index")
            if event["name"] == "thread_name":
                named.add((event["pid"], event["tid"]))
                assert argument[1] == LANES[event["tid"]]
            continue
        assert event["ph"] == "X" and set(event) == {"name", "cat", "ph", "ts", "dur", "pid", "tid", "args"}
        assert all(isinstance(event[name], int | float) and math.isfinite(event[name]) for name in ("ts", "dur"))
        assert event["dur"] >= 0
        threads.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["dur"]))
    assert threads.keys() <= named
    for rows in threads.values():
        rows.sort()
        # 1 ns: two floats of us, subtracted.
        assert all(a[0] + a[1] <= b[0] + 1e-3 for a, b in zip(rows, rows[1:], strict=False))
