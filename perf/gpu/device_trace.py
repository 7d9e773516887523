"""What torch's profiler saw of some steps: work on the GPU by kind, and where the host waited for it.

Read from the trace that it exports, whose categories are the same in all versions that matter here:
"kernel", "gpu_memcpy" and "gpu_memset" are work on the GPU; "cuda_runtime" and "cuda_driver" are calls of the host.
"""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

WORK = ("kernel", "gpu_memcpy", "gpu_memset")
CALLS = ("cuda_runtime", "cuda_driver")
# Calls that hold the host up until the GPU has done something.
WAITS = (
    "cudaDeviceSynchronize",
    "cudaStreamSynchronize",
    "cudaEventSynchronize",
    "cudaMemcpy",
    "cuCtxSynchronize",
    "cuStreamSynchronize",
    "cuEventSynchronize",
)
STEP = "gpu-check step"
MOST_NAMES = 12


@dataclass(frozen=True, kw_only=True)
class Seen:
    """Of one step, the mean of those that were profiled.

    Args:
        gpu_us: sum of the durations of work on the GPU, collectives left out.
        collective_us: of kernels of NCCL.
        launches: pieces of work, collectives left out: kernels, copies, fills.
        by_kind: how many of each.
        waits: calls that wait for the GPU, by name.
        longest_us: the longest kernels by name, summed.
    """

    gpu_us: float
    collective_us: float
    launches: float
    by_kind: Mapping[str, float]
    waits: Mapping[str, float]
    longest_us: Mapping[str, float]

    def as_dict(self) -> dict[str, Any]:
        """For a record."""
        return asdict(self)


def read_trace(events: Iterable[Mapping[str, Any]], steps: int) -> Seen:
    """Sums up an exported trace's events.

    Args:
        events: "traceEvents" of the trace.
        steps: how many ranges called `STEP` there are; calls outside of them do not count.
    """
    every = [event for event in events if event.get("ph") == "X"]
    ranges = [
        (float(event["ts"]), float(event["ts"]) + float(event["dur"]))
        for event in every
        if event.get("cat") == "user_annotation" and event["name"] == STEP
    ]
    kinds, waits, longest = Counter[str](), Counter[str](), Counter[str]()
    gpu_us = collective_us = 0.0
    for event in every:
        kind, name = event.get("cat"), str(event["name"])
        if kind in WORK:
            took_us = float(event["dur"])
            if "nccl" in name.lower():
                collective_us += took_us
            else:
                gpu_us += took_us
                kinds[kind] += 1
                longest[name[:100]] += took_us  # type: ignore[assignment]
        elif kind in CALLS and name in WAITS:
            at = float(event["ts"])
            if any(begin <= at < end for begin, end in ranges):
                waits[name] += 1
    return Seen(
        gpu_us=gpu_us / steps,
        collective_us=collective_us / steps,
        launches=kinds.total() / steps,
        by_kind={kind: count / steps for kind, count in kinds.items()},
        waits={name: count / steps for name, count in waits.items()},
        longest_us={name: us / steps for name, us in longest.most_common(MOST_NAMES)},
    )


def mean(seen: Sequence[Seen]) -> Seen:
    """Of steps that were profiled one by one."""

    def of(table: Callable[[Seen], Mapping[str, float]]) -> dict[str, float]:
        total: dict[str, float] = {}
        for one in seen:
            for name, value in table(one).items():
                total[name] = total.get(name, 0.0) + value / len(seen)
        return total

    return Seen(
        gpu_us=fmean(one.gpu_us for one in seen),
        collective_us=fmean(one.collective_us for one in seen),
        launches=fmean(one.launches for one in seen),
        by_kind=of(lambda one: one.by_kind),
        waits=of(lambda one: one.waits),
        longest_us=of(lambda one: one.longest_us),
    )


def watch(step: Callable[[], object], device: torch.device, steps: int, between: Callable[[], object]) -> Seen:
    """Profiles `steps` steps; `between` is done before each, and not counted."""
    on_gpu = device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    everything: list[Mapping[str, Any]] = []
    for _ in range(steps):
        between()
        if on_gpu:
            torch.cuda.synchronize(device)
        # One trace a step: what `between` does is not in it.
        with profile(activities=activities, acc_events=True) as profiled:
            with record_function(STEP):
                step()
            if on_gpu:
                torch.cuda.synchronize(device)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "trace.json")
            profiled.export_chrome_trace(str(path))
            everything += json.loads(path.read_text())["traceEvents"]
    return read_trace(everything, steps)
