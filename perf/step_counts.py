"""What a step does beside taking time: operators, launches, collectives, GPU time by kind, memory held.

All of it is read in passes of their own, under torch's profiler, which slows the host down and leaves the GPU's own
durations as they are: on a GPU the sum of those, outside of collectives, tells variants apart where the time of a step
does not.
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Iterable

import harness
import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

HOST_WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")
PROFILED_STEPS = 2
MALLINFO2_FIELDS = (
    *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
    *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
)


def count(case: harness.Case, device: torch.device) -> dict[str, float | None]:
    """Profiles some steps of a case, every rank at once: of one and what prepares it the mean; None: there is no GPU.

    operators          of torch, those that another one calls left out
    collectives        issued to the process group, barriers left out
    launches           kernels, copies and fills on the GPU, collectives' own left out
    waits              of the host for the GPU, with the one that ends the step
    gpu_ms             how long those took
    collective_gpu_ms  how long the collectives' kernels took
    """
    on_gpu, steps = device.type == "cuda", PROFILED_STEPS
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    # One session: to begin one takes seconds on a GPU.
    with profile(activities=activities) as profiled:
        for _ in range(steps):
            case.prepare()
            case.run()
            harness.wait_for(device)
    # As the profiler recorded them: its own lists of events take a second for each thousand parameters of a step.
    events = profiled.profiler.kineto_results.events()
    launches = waits = collectives = 0
    gpu_ns = collective_ns = 0
    for event in events:
        name = event.name()
        if event.device_type() == DeviceType.CUDA:
            if event.is_user_annotation():
                continue
            if "nccl" in name.lower():
                collective_ns += event.duration_ns()
            else:
                launches += 1
                gpu_ns += event.duration_ns()
        elif name in HOST_WAITS:
            waits += 1
        elif name.startswith("c10d::"):
            collectives += 1
    operators = outermost_operators(
        (event.start_thread_id(), event.start_ns(), event.end_ns(), event.name())
        for event in events
        if event.device_type() == DeviceType.CPU and not event.is_async()
    )
    times_ms = {"gpu_ms": gpu_ns / 1e6, "collective_gpu_ms": collective_ns / 1e6}
    on_the_gpu = {"launches": launches, "waits": waits, **times_ms}
    return {
        "operators": operators / steps,
        "collectives": collectives / steps,
        **{key: value / steps if on_gpu else None for key, value in on_the_gpu.items()},
    }


def outermost_operators(spans: Iterable[tuple[int, int, int, str]]) -> int:
    """Counts torch's operators that no other one calls directly.

    Args:
        spans: thread, begin, end and name of what ran on the host, in any order.
    """
    found, thread, around = 0, None, list[tuple[int, bool]]()
    for its_thread, begin, end, name in sorted(spans, key=lambda span: (span[0], span[1], -span[2])):
        if its_thread != thread:
            thread, around = its_thread, []
        while around and (around[-1][0] < end or around[-1][0] <= begin):
            around.pop()
        is_operator = name.startswith("aten::")
        found += is_operator and not (around and around[-1][1])
        around.append((end, is_operator))
    return found


class _Mallinfo2(ctypes.Structure):
    """glibc's struct mallinfo2."""

    _fields_ = [(name, ctypes.c_size_t) for name in MALLINFO2_FIELDS]


def heap_bytes() -> int | None:
    """Bytes that malloc has handed out and not got back, over all arenas; None without glibc 2.33."""
    try:
        mallinfo2 = ctypes.CDLL(None).mallinfo2
    except AttributeError:
        return None
    mallinfo2.restype = _Mallinfo2
    info = mallinfo2()
    return int(info.uordblks + info.hblkhd)


def held_bytes(device: torch.device) -> int | None:
    """What is in use on the device: of torch's allocator on a GPU, of the heap on a CPU; what is garbage is not."""
    gc.collect()
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else heap_bytes()


def over(value: float | None, floor: float | None) -> float | None:
    """By how much; None where either was not measured."""
    return None if value is None or floor is None else round(value - floor, 4)


def memory_of(case: harness.Case, before: int | None, steps: int, device: torch.device) -> dict[str, float | None]:
    """Runs a case's first steps: what it then holds beyond `before`, and on a GPU the peak of the last, in bytes."""
    for number in range(steps):
        if number == steps - 1 and device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        case.prepare()
        case.run()
    harness.wait_for(device)
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
    return {"held_bytes": over(held_bytes(device), before), "peak_bytes": over(peak, before)}
