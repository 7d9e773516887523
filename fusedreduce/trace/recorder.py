"""Traces: what happened to every bucket of every recorded step, as one JSON file per rank.

    ready    the bucket's last gradient is there
    pack     packing begins: the bucket is at the head of the line
    launch   its collective is issued
    done     its collective has ended
    unpack   unpacking begins
    end      the gradients are reduced

Times are ns of the host's clock since the step's backward began, MISSING_NS where nothing was seen. `reader.py`
reads what is written here.
"""

from __future__ import annotations

import dataclasses
import json
import os
import time
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ..config import ReduceConfig
from ..planning.bucketing import BucketCaps
from ..planning.cost_model import Costs
from ..planning.plan import Plan
from ..planning.timeline import MISSING_NS

FORMAT = "fusedreduce-trace"
VERSION = 1
Source = Literal["wrapper", "reducer", "hook"]


@dataclass(slots=True)
class BucketMarks:
    """When a bucket's stages began and ended, in ns since the step's `began_ns`; in this order."""

    ready_ns: int = MISSING_NS
    pack_ns: int = MISSING_NS
    launch_ns: int = MISSING_NS
    done_ns: int = MISSING_NS
    unpack_ns: int = MISSING_NS
    end_ns: int = MISSING_NS


MARKS = tuple(field.name for field in dataclasses.fields(BucketMarks))


class StepMarks:
    """One step on one rank.

    Args:
        buckets: of the plan in use.
        began_ns: time.perf_counter_ns() at the start of backward.

    Attributes:
        forward_ns: start of forward on the same clock.
        backward_end_ns: since `began_ns`.
        buckets: in launch order.
    """

    __slots__ = ("backward_end_ns", "began_ns", "buckets", "forward_ns")

    def __init__(self, buckets: int, began_ns: int) -> None:
        self.began_ns = began_ns
        self.forward_ns = MISSING_NS
        self.backward_end_ns = MISSING_NS
        self.buckets = [BucketMarks() for _ in range(buckets)]


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """One parameter, as a trace describes it.

    Args:
        name: in the model.
        numel: its elements.
        size_bytes: of its gradient.
        wire_bytes: of its gradient on the wire.
        group: its dtype and device, as `group_text` writes them.
        alone: it has a bucket of its own (a sparse gradient).
        ready_ns: average time at which its gradient was ready since backward began, without the packing before it; or
            MISSING_NS.
    """

    name: str
    numel: int
    size_bytes: int
    wire_bytes: int
    group: str
    alone: bool
    ready_ns: int = MISSING_NS


class Recorder:
    """Keeps the first steps that it is given, and writes them down.

    Args:
        folder: where to; it is made.
        header: the file's entries that are the same for all steps, as `header` makes them.
        limit: steps to keep.

    Raises:
        ValueError: a limit below 1.
        OSError: the folder cannot be made.
    """

    def __init__(self, folder: Path, header: Mapping[str, object], limit: int = 100) -> None:
        if limit < 1:
            raise ValueError(f"a trace needs at least 1 step, got a limit of {limit}")
        self._header = dict(header)
        self._folder = Path(folder)
        self._folder.mkdir(parents=True, exist_ok=True)  # now, not after the training
        self._limit = limit
        self._numbers: dict[Plan, int] = {}
        self._latest: tuple[Plan, int] = (), -1
        self._steps: list[tuple[int, int, StepMarks, array[int] | None]] = []

    @property
    def recording(self) -> bool:
        """Whether another step would be kept."""
        return len(self._steps) < self._limit

    def add(self, step: int, plan: Plan, marks: StepMarks, ready_ns: Sequence[int] | None) -> None:
        """Keeps a step, or does nothing when it has enough of them.

        Args:
            step: its number; above that of the step before.
            plan: that it used.
            marks: its times; kept, so the next step needs others.
            ready_ns: per parameter, MISSING_NS where not seen; None: not looked at.
        """
        if not self.recording:
            return
        assert len(plan) == len(marks.buckets), "marks of another plan"
        if plan is not self._latest[0]:  # hashing a plan of 20,000 parameters takes its time
            self._latest = plan, self._numbers.setdefault(plan, len(self._numbers))
        # 8 bytes each, where a list would keep an int's 32 alive.
        self._steps.append((step, self._latest[1], marks, None if ready_ns is None else array("q", ready_ns)))

    def write(self, costs: Costs | None, ready_ns: Sequence[int] | None = None) -> Path:
        """Writes rank<i>.json in one piece: whoever reads it finds the old file or the new one.

        Args:
            costs: as fitted last.
            ready_ns: per parameter, in place of those in the header.

        Returns:
            The file.

        Raises:
            OSError: the folder cannot be made or written to.
        """
        found: dict[str, Any] = {"format": FORMAT, "version": VERSION, **self._header}
        if ready_ns is not None:
            rows = zip(found["parameters"], ready_ns, strict=True)
            found["parameters"] = [{**parameter, "ready_ns": int(time_ns)} for parameter, time_ns in rows]
        found["costs"] = None if costs is None else dataclasses.asdict(costs)
        found["plans"] = list(self._numbers)
        found["steps"] = [
            {
                "step": step,
                "plan": plan,
                "began_ns": marks.began_ns,
                "forward_ns": marks.forward_ns,
                "backward_end_ns": marks.backward_end_ns,
                "buckets": [_row(bucket) for bucket in marks.buckets],
                "ready_ns": None if ready is None else ready.tolist(),
            }
            for step, plan, marks, ready in self._steps
        ]
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"rank{found['rank']}.json"
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            temporary.write_text(json.dumps(found, separators=(",", ":"), allow_nan=False) + "\n")
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
        return path


def header(
    *,
    source: Source,
    rank: int,
    ranks: int,
    device: str,
    config: ReduceConfig,
    caps: BucketCaps,
    parameters: Iterable[Parameter],
) -> dict[str, Any]:
    """A trace's entries that are the same for all its steps, for `Recorder`; reads both clocks.

    Args:
        source: what records it.
        rank: this process's rank.
        ranks: how many there are.
        device: the type of device that the gradients are on.
        config: the settings of the reduction.
        caps: limits of the buckets.
        parameters: in the order of their numbers.
    """
    return {
        "rank": rank,
        "ranks": ranks,
        "device": device,
        "source": source,
        "clock": {"perf_ns": time.perf_counter_ns(), "wall_ns": time.time_ns()},
        "config": config.to_dict(),
        "caps": {**dataclasses.asdict(caps), "listed_bytes": list(caps.listed_bytes)},
        "parameters": [vars(parameter) for parameter in parameters],
    }


def group_text(dtype: object, device: object) -> str:
    """What must agree within a bucket, in words: "float32 cuda:0"."""
    return f"{str(dtype).removeprefix('torch.')} {device}"


def stall_ns(buckets: Sequence[BucketMarks]) -> int | None:
    """For how long a bucket was ready while an earlier one was not; None: no bucket's readiness is known.

    Args:
        buckets: one step's, in launch order.
    """
    known = [(bucket.ready_ns, bucket.pack_ns) for bucket in buckets if bucket.ready_ns != MISSING_NS]
    if not known:
        return None
    waits, head_ns = [], 0
    for ready_ns, pack_ns in known:
        # Not beyond the beginning of packing: what was packed was not waiting.
        waits.append((ready_ns, head_ns if pack_ns == MISSING_NS else min(head_ns, pack_ns)))
        head_ns = max(head_ns, ready_ns)
    return covered_ns(waits)


def covered_ns(intervals: Iterable[tuple[int, int]]) -> int:
    """Length of what the intervals cover together."""
    covered_ns, reached_ns = 0, MISSING_NS
    for begin_ns, end_ns in sorted(intervals):
        if end_ns > max(begin_ns, reached_ns):
            covered_ns += end_ns - max(begin_ns, reached_ns)
            reached_ns = end_ns
    return covered_ns


def _row(marks: BucketMarks) -> tuple[int, ...]:
    """The six times, in order.

    Host and device marks may be mixed where some were not seen: what comes later is not shown earlier.
    """
    done_ns = marks.done_ns
    if done_ns != MISSING_NS:
        done_ns = max(done_ns, marks.launch_ns)
        done_ns = done_ns if marks.unpack_ns == MISSING_NS else min(done_ns, marks.unpack_ns)
    return marks.ready_ns, marks.pack_ns, marks.launch_ns, done_ns, marks.unpack_ns, marks.end_ns
