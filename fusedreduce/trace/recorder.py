"""Recorder: writes a trace, the times of every bucket of every recorded step, as one JSON file per rank.

    ready    the bucket's last gradient is ready
    pack     packing begins: all earlier buckets have been launched
    launch   its collective is issued
    done     its collective has ended
    unpack   unpacking begins
    end      the gradients are reduced

Times are ns of the host's clock since the step's backward began, or MISSING_NS where they are not known. `reader.py`
reads the file.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import socket
import time
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ..config import Wire
from ..planning.bucketing import BucketCaps
from ..planning.cost_model import Costs
from ..planning.plan import Plan
from ..planning.timeline import MISSING_NS
from ..wires import like
from .files import replace_text

_NETWORK, _BOOT = Path("/proc/self/ns/net"), Path("/proc/sys/kernel/random/boot_id")
FORMAT = "fusedreduce-trace"
VERSION = 2
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
    """The times of one step on one rank.

    Args:
        buckets: how many the plan has.
        began_ns: time.perf_counter_ns() at the start of backward.

    Attributes:
        forward_ns: start of forward on the same clock, or MISSING_NS.
        backward_end_ns: end of backward since `began_ns`, or MISSING_NS.
        buckets: their times, in launch order.
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
        ndim: its dimensions.
        size_bytes: of its gradient.
        wire: what its gradient travels on.
        wire_bytes: of its gradient on the wire.
        group: its dtype and device, as `group_text` writes them.
        alone: it has a bucket of its own (a sparse gradient).
        ready_ns: average time at which its gradient was ready since backward began, without the packing before it; or
            MISSING_NS.
    """

    name: str
    numel: int
    ndim: int
    size_bytes: int
    wire: Wire
    wire_bytes: int
    group: str
    alone: bool
    ready_ns: int = MISSING_NS


class Recorder:
    """Keeps the first steps that it is given, and writes them to a file.

    Args:
        folder: for the file; it is created.
        header: the file's entries that are the same for all steps, as `header` makes them.
        limit: how many steps are kept.

    Raises:
        ValueError: `limit` is below 1.
        OSError: the folder cannot be created.
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
        """Keeps a step; does nothing once `limit` steps are kept.

        Args:
            step: its number; above that of the step before.
            plan: that it used.
            marks: its times, which are referenced, not copied.
            ready_ns: per parameter, or MISSING_NS; None: they were not measured.
        """
        if not self.recording:
            return
        assert len(plan) == len(marks.buckets), "marks of another plan"
        if plan is not self._latest[0]:  # because hashing a plan of 20,000 parameters is slow
            self._latest = plan, self._numbers.setdefault(plan, len(self._numbers))
        # An array takes 8 bytes per time, a list 32 for its int.
        self._steps.append((step, self._latest[1], marks, None if ready_ns is None else array("q", ready_ns)))

    def write(self, costs: Costs | None, ready_ns: Sequence[int] | None = None) -> Path:
        """Writes rank<i>.json atomically: a reader gets the old file or the new one.

        Args:
            costs: as fitted last; None: not known.
            ready_ns: per parameter, in place of the times in the header.

        Returns:
            The file's path.

        Raises:
            OSError: the folder cannot be created or written to.
        """
        trace: dict[str, Any] = {"format": FORMAT, "version": VERSION, **self._header}
        if ready_ns is not None:
            rows = zip(trace["parameters"], ready_ns, strict=True)
            trace["parameters"] = [{**parameter, "ready_ns": int(time_ns)} for parameter, time_ns in rows]
        trace["costs"] = None if costs is None else dataclasses.asdict(costs)
        trace["plans"] = list(self._numbers)
        trace["steps"] = [
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
        path = self._folder / f"rank{trace['rank']}.json"
        replace_text(path, json.dumps(trace, separators=(",", ":"), allow_nan=False))
        return path


def place() -> dict[str, str]:
    """Where this process is: processes of equal places reach each other through memory.

    The number of a namespace tells nothing between machines: that of the first one is the same on all.
    """
    found = {"host": socket.gethostname(), "network": "", "boot": ""}
    with contextlib.suppress(OSError):
        found["network"] = _NETWORK.readlink().name
    with contextlib.suppress(OSError):
        found["boot"] = _BOOT.read_text().strip()
    return found


def header(
    *,
    source: Source,
    rank: int,
    ranks: int,
    device: str,
    config: Mapping[str, object],
    caps: BucketCaps,
    parameters: Iterable[Parameter],
) -> dict[str, Any]:
    """A trace's entries that are the same for all its steps, for `Recorder`; reads both clocks.

    Args:
        source: what records it.
        rank: this process's rank.
        ranks: how many there are.
        device: the type of device that the gradients are on.
        config: the settings of the reduction, as JSON takes them. Wires of the user's own, which who reads a trace may
            not have, become the built-in ones that cost the same.
        caps: limits of the buckets.
        parameters: in the order of their numbers.
    """
    return {
        "rank": rank,
        "ranks": ranks,
        "device": device,
        "source": source,
        # Digests: what is asked is whether two are equal, and a trace may be shown to others.
        "place": {name: hashlib.blake2b(one.encode(), digest_size=8).hexdigest() for name, one in place().items()},
        "clock": {"perf_ns": time.perf_counter_ns(), "wall_ns": time.time_ns()},
        "config": {**config, "wire": like(str(config["wire"]))},
        "caps": {**dataclasses.asdict(caps), "listed_bytes": list(caps.listed_bytes)},
        "parameters": [{**vars(parameter), "wire": like(parameter.wire)} for parameter in parameters],
    }


def group_text(dtype: object, device: object) -> str:
    """Writes a dtype and a device, which must agree within a bucket: "float32 cuda:0"."""
    return f"{str(dtype).removeprefix('torch.')} {device}"


def stall_ns(buckets: Sequence[BucketMarks]) -> int | None:
    """Head-of-line stall: for how long any bucket was ready while an earlier one was not.

    Args:
        buckets: of one step, in launch order.

    Returns:
        ns; None if it is not known when any bucket was ready.
    """
    known = [(bucket.ready_ns, bucket.pack_ns) for bucket in buckets if bucket.ready_ns != MISSING_NS]
    if not known:
        return None
    waits, head_ns = [], 0
    for ready_ns, pack_ns in known:
        # A bucket that is being packed no longer waits.
        waits.append((ready_ns, head_ns if pack_ns == MISSING_NS else min(head_ns, pack_ns)))
        head_ns = max(head_ns, ready_ns)
    return covered_ns(waits)


def covered_ns(intervals: Iterable[tuple[int, int]]) -> int:
    """The length of the union of intervals (begin, end), in ns."""
    covered_ns, reached_ns = 0, MISSING_NS
    for begin_ns, end_ns in sorted(intervals):
        if end_ns > max(begin_ns, reached_ns):
            covered_ns += end_ns - max(begin_ns, reached_ns)
            reached_ns = end_ns
    return covered_ns


def _row(marks: BucketMarks) -> tuple[int, ...]:
    """The six times, in order, with `done` limited to lie between `launch` and `unpack`.

    Host and device times may be mixed where some device times are missing.
    """
    done_ns = marks.done_ns
    if done_ns != MISSING_NS:
        done_ns = max(done_ns, marks.launch_ns)
        done_ns = done_ns if marks.unpack_ns == MISSING_NS else min(done_ns, marks.unpack_ns)
    return marks.ready_ns, marks.pack_ns, marks.launch_ns, done_ns, marks.unpack_ns, marks.end_ns
