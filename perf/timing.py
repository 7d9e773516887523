"""How single operations are timed, on a GPU and on CPU: past the cache, in turns, with the limits of the same run.

A case is one callable per set of buffers. Sets are used one after the other, so many that together they are four times
as large as the last cache: a set comes round only when nothing of it is cached any more. On a GPU the calls of a case
are recorded into one CUDA graph, whose replays are timed by events: neither Python nor launches are in the time. On CPU
calls are timed one by one. Cases take turns in the order of `harness.turns`.

`triton.testing.do_bench_cudagraph` times one function after the other, in the cache and unchecked, and `do_bench` has
launches in its times: neither says how two ways compare on a machine whose clocks change.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from harness import turns
from records import BenchError

Call = Callable[[], object]

CACHES = 4  # sets together are that many times the cache
MOST_SETS = 64  # of tiny ones: thousands of tensors would be all that is measured
UNKNOWN_CACHE_BYTES = 32 * 2**20  # four of them are 128 MiB
MEMORY_SHARE = 0.9
WARMUP_S = 0.5  # an idle GPU's clocks take that long to rise
SHORTEST_S = 2e-4  # of one timing on CPU
# Of one replay: launching a graph takes some microseconds, which must not show.
SHORTEST_REPLAY_S = 1.5e-3
MOST_LAUNCHES = 400
MOST_SLEEP_S = 0.05
SLEEP_CYCLES_PER_S = 2e9  # of the fastest clock, or the sleep is longer than it need be


@dataclass(frozen=True, kw_only=True)
class Check:
    """What a case must have done before it has a time: `poison` spoils its results, `check` raises unless all of them
    are there and right."""

    poison: Call
    check: Call


class Times(dict[str, list[float]]):
    """Seconds per call of each case, one entry per round.

    Args:
        eager: cases whose calls could not be recorded into a graph: their times contain launches, and the reasons.
    """

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__((name, []) for name in names)
        self.eager: dict[str, str] = {}


def measure(
    cases: Mapping[str, Sequence[Call]],
    device: torch.device | str,
    *,
    rounds: int,
    launches: int = 20,
    checks: Mapping[str, Check] | None = None,
) -> Times:
    """Times every case, in turns.

    Args:
        cases: one callable per set of buffers; it leaves the same results however often it is called.
        device: where the work is done.
        rounds: timings of each case.
        launches: calls in one timing: at least so many on a GPU, at most so many on CPU.
        checks: run before anything is timed; on a GPU once more on what a replay of the graph left.

    Raises:
        Whatever a check raises: there are no times then.
    """
    device = torch.device(device)
    checks = checks or {}
    if device.type == "cuda":
        return _measure_graphs(cases, device, rounds, launches, checks)
    times = Times(list(cases))
    repeats = {}
    for name, calls in cases.items():
        _checked(checks.get(name), calls)
        began_s = time.perf_counter()
        for call in calls:
            call()
        took_s = (time.perf_counter() - began_s) / len(calls)
        repeats[name] = max(1, min(launches, math.ceil(SHORTEST_S / max(took_s, 1e-9))))
    names, place = list(cases), 0
    gc.collect()
    gc.disable()
    try:
        for round_number in range(rounds):
            for name in (names[turn] for turn in turns(len(names), round_number)):
                calls, count = cases[name], repeats[name]
                # The place goes on from case to case: the next set is the one that was used longest ago.
                due = [calls[(place + step) % len(calls)] for step in range(count)]
                place += count
                began_s = time.perf_counter()
                for call in due:
                    call()
                times[name].append((time.perf_counter() - began_s) / count)
    finally:
        gc.enable()
    return times


def _checked(check: Check | None, calls: Sequence[Call]) -> None:
    if check is not None:
        check.poison()
    for call in calls:
        call()
    if check is not None:
        check.check()


def _measure_graphs(
    cases: Mapping[str, Sequence[Call]],
    device: torch.device,
    rounds: int,
    launches: int,
    checks: Mapping[str, Check],
) -> Times:
    times = Times(list(cases))
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    runs: dict[str, Call] = {}
    counts: dict[str, int] = {}
    with torch.cuda.device(device), torch.cuda.stream(stream):
        for name, calls in cases.items():
            # Compiles, and uploads tables, which a capture must find there. Checks read on this stream, in order.
            _checked(checks.get(name), calls)
            torch.cuda.synchronize(device)
            runs[name], counts[name] = _recorded(calls, launches, stream, times.eager, name)
            # What the graph writes is not what the calls have just written.
            _checked(checks.get(name), [runs[name]])
        names = list(cases)
        enqueue_s = _warm_up([runs[name] for name in names], device)
        for round_number in range(rounds):
            # The GPU waits until all of the round is enqueued, so that it never waits for the host within a timing.
            _sleep(min(1.5 * enqueue_s, MOST_SLEEP_S))
            marks = [
                (name, *_marked(runs[name], stream))
                for name in (names[turn] for turn in turns(len(names), round_number))
            ]
            torch.cuda.synchronize(device)
            for name, began, ended in marks:
                times[name].append(began.elapsed_time(ended) / 1e3 / counts[name])
        for name in names:
            _checked(checks.get(name), [runs[name]])
    torch.cuda.current_stream(device).wait_stream(stream)
    return times


def _recorded(
    calls: Sequence[Call], launches: int, stream: torch.cuda.Stream, eager: dict[str, str], name: str
) -> tuple[Call, int]:
    """A replay of at least `launches` calls and of at least `SHORTEST_REPLAY_S`, and how many it holds.

    Where the calls cannot be recorded: one after the other, and the reason in `eager`.
    """
    cycles = math.ceil(launches / len(calls))
    while True:
        count = cycles * len(calls)
        graph, pool = torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle()
        try:
            # thread_local: what other threads of the process do (pinned memory, events) does not end the capture.
            with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
                for _ in range(cycles):
                    for call in calls:
                        call()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            eager[name] = str(error).strip().splitlines()[0]
            torch.cuda.synchronize()
            # A capture that did not end well may leave torch's allocator waiting for its end: then it gives no memory
            # back, and no other capture begins. If it does not wait, this is an error that says so.
            with contextlib.suppress(RuntimeError):
                torch._C._cuda_endAllocateToPool(stream.device_index, pool)
            return functools.partial(_one_by_one, list(calls) * cycles), count
        graph.replay()
        _sleep(1e-4)
        began, ended = _marked(graph.replay, stream)
        torch.cuda.synchronize()
        took_s = began.elapsed_time(ended) / 1e3
        wanted = min(MOST_LAUNCHES, math.ceil(count * SHORTEST_REPLAY_S / max(took_s, 1e-6)))
        if wanted <= 1.5 * count:
            return graph.replay, count
        cycles = math.ceil(wanted / len(calls))


def _one_by_one(calls: Sequence[Call]) -> None:
    for call in calls:
        call()


def _marked(run: Call, stream: torch.cuda.Stream) -> tuple[torch.cuda.Event, torch.cuda.Event]:
    """Enqueues `run` between two events."""
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    began.record(stream)
    run()
    ended.record(stream)
    return began, ended


def _sleep(seconds: float) -> None:
    """Keeps the GPU from going on, while the host enqueues what is to be timed."""
    torch.cuda._sleep(int(SLEEP_CYCLES_PER_S * seconds))


def _warm_up(runs: Sequence[Call], device: torch.device) -> float:
    """Keeps the GPU busy until its clocks are up; seconds that the host takes to enqueue all once."""
    began_s = time.perf_counter()
    while True:
        before_s = time.perf_counter()
        for run in runs:
            run()
        enqueue_s = time.perf_counter() - before_s
        torch.cuda.synchronize(device)
        if time.perf_counter() - began_s >= WARMUP_S:
            return enqueue_s


def cache_bytes(device: torch.device | str) -> int:
    """Size of the last cache: a GPU's L2, or what the first core shares."""
    device = torch.device(device)
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).L2_cache_size)
    units = {"K": 2**10, "M": 2**20, "G": 2**30}
    sizes = [path.read_text().strip() for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")]
    return max((int(size[:-1]) * units[size[-1]] for size in sizes if size[-1:] in units), default=UNKNOWN_CACHE_BYTES)


def free_bytes(device: torch.device | str) -> int:
    """Memory that can still be taken."""
    device = torch.device(device)
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused
    lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    return int(lines["MemAvailable"].split()[0]) * 1024


def rotation(
    set_bytes: int, device: torch.device | str, *, held_bytes: int | None = None, besides_bytes: int = 0
) -> int:
    """How many sets of buffers make every use of one a cold one.

    At least 2, where they fit. Sets so small that `MOST_SETS` of them do not reach past the cache are not cold:
    `is_cold` tells.

    Args:
        set_bytes: that one call moves through the cache.
        device: where the sets will be.
        held_bytes: memory of one set, where that is more.
        besides_bytes: what else must fit.

    Raises:
        BenchError: too little memory.
    """
    past_bytes, held_bytes = CACHES * cache_bytes(device), held_bytes or set_bytes
    wanted = min(max(2, math.ceil(past_bytes / set_bytes)), MOST_SETS)
    have_bytes = int(MEMORY_SHARE * free_bytes(device)) - besides_bytes
    fit = have_bytes // held_bytes
    if fit >= wanted or (fit >= 1 and fit * set_bytes >= past_bytes):
        return min(wanted, fit)
    raise BenchError(
        f"too little memory on {device}: {held_bytes / 2**30:.2f} GiB a set of buffers and "
        f"{besides_bytes / 2**30:.2f} GiB besides, {have_bytes / 2**30:.2f} GiB can be had"
    )


def is_cold(sets: int, set_bytes: int, device: torch.device | str) -> bool:
    """Whether that many sets reach past the cache."""
    return sets * set_bytes >= CACHES * cache_bytes(device)


class Limits:
    """What the machine can do: copies that move as many bytes as packing or unpacking, of tensors without parts.

    copy        (a) `copy_` of half the bytes: it reads and writes as many together; on a GPU the copy engine's memcpy
    copy_kernel the same by a kernel (x * 1): the faster of the two is ceiling (a)
    cast        (b) torch's casting `copy_` of one tensor of the same dtypes

    Args:
        numels: elements of each bucket; each is one copy.
        source: dtype that is read.
        destination: dtype that is written.
        device: where the memory is; as much as is moved is taken.
    """

    def __init__(
        self, numels: Sequence[int], source: torch.dtype, destination: torch.dtype, device: torch.device
    ) -> None:
        pair_bytes = source.itemsize + destination.itemsize
        sizes = [-(-numel * pair_bytes // 512) * 512 for numel in numels]
        parts = torch.empty(sum(sizes), dtype=torch.uint8, device=device).split(sizes)
        self._copies, self._casts = [], []
        for numel, part in zip(numels, parts, strict=True):
            half = len(part) // 2
            self._copies.append((part[:half].view(torch.float32), part[half:].view(torch.float32)))
            middle = numel * source.itemsize
            wide, narrow = part[:middle], part[middle : numel * pair_bytes]
            if middle % destination.itemsize:  # an odd number of 16-bit elements before 32-bit ones
                wide, narrow = part[-middle:], part[: numel * destination.itemsize]
            self._casts.append((wide.view(source), narrow.view(destination)))

    def copy(self) -> None:
        """Ceiling (a)."""
        for source, destination in self._copies:
            destination.copy_(source)

    def copy_kernel(self) -> None:
        """Ceiling (a), where a kernel is faster."""
        for source, destination in self._copies:
            torch.mul(source, 1.0, out=destination)

    def cast(self) -> None:
        """Ceiling (b)."""
        for source, destination in self._casts:
            destination.copy_(source)

    def poison(self) -> None:
        """Ones to be read, zeros where is written to."""
        for source, destination in self._copies:
            source.fill_(1.0)
            destination.zero_()

    def check_copy(self) -> None:
        """Raises unless every byte was copied."""
        if not all(torch.equal(source, destination) for source, destination in self._copies):
            raise BenchError("the copy that is the ceiling did not copy")

    def check_cast(self) -> None:
        """Raises unless every element was cast."""
        for source, destination in self._casts:
            if not torch.equal(source.to(destination.dtype), destination):
                raise BenchError("the cast that is the ceiling did not cast")
