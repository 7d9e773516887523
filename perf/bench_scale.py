"""What reducing costs against the number of parameters, of bytes and of buckets: lines, their slopes, and if they hold.

    python perf/bench_scale.py                    # on the GPU, or on CPU where there is none: 2 minutes
    python perf/bench_scale.py --device cpu --axis bytes --max-bytes end

axes      parameters  10 to 100,000 of 16 elements, one bucket
          bytes       of gradients, from 1 MB to the memory's end (with a margin), in 16 parameters, one bucket
          buckets     1 to 1,024, of 4,096 parameters of 1,024 elements together
measured  kernels     pack and unpack of every bucket, fp32 gradients, bf16 wire; on a GPU from CUDA graphs
          reduction   a Reducer's whole step at world size 1 (hooks, launches, collectives, waiting), less the same
                      backward without it in the same round; on the host's clock, until the GPU is done

All points of an axis take turns. The result of each is checked first; one that is wrong is an error and no number. One
point stands twice in every sweep: the ratio of the two is the noise. linear.py says when a line holds; one that does
not is MISSED, and the exit status 1. On CPU with one thread.
"""

from __future__ import annotations

import contextlib
import gc
import math
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import harness
import linear
import records
import report_tables
import timing
import torch
import torch.distributed as dist
from records import BenchError

from fusedreduce import BucketCaps, ReduceConfig, Reducer
from fusedreduce.comm.process_group import ProcessGroupCommunicator
from fusedreduce.kernels import dispatch
from fusedreduce.kernels.table import ChunkTable, PointerTable
from fusedreduce.planning.layout import aligned_layout

AXES = ("parameters", "bytes", "buckets")
MEASURED = ("kernels", "reduction")
AGAIN = " again"  # the second of the pair that is the noise
MB = 1_000_000
MARGIN_BYTES = 2**30  # left to everybody else, beside a tenth of what is free
HELD = 2.25  # times the gradients: they, the wires of all points, and of the largest twice while its bucket is made
CPU_MAX_BYTES = 2**30  # unless more is asked for: it takes minutes
MOST_ROUNDS, FEWEST_ROUNDS = 25, 5
ROUNDS_S = 5.0  # what the rounds of one sweep are to take
MOST_SETS, MOST_TENSORS = 64, 2**16  # of one point: 1,000 parameters are as far from the cache as 100,000
GRAPH_CALLS = 10  # in one timing, of two launches each at least; a thousand buckets have two thousand
SETTLE_STEPS = 3  # until a reducer has the buckets that it keeps
BLOCK_NUMEL = 2**24  # what is compared at once
VALUES = 251  # a prime: neighbours, parameters and buffers differ
OFFSET = 2.0**-9  # off the numbers of a bf16 wire: what comes back is not what went in
DIVISOR = 4.0


@dataclass(frozen=True, kw_only=True)
class Point:
    """`count` of what the axis counts: parameters of `numel` elements each, in equal buckets."""

    count: int
    parameters: int
    numel: int
    buckets: int = 1

    @property
    def total_numel(self) -> int:
        return self.parameters * self.numel

    @property
    def size_bytes(self) -> int:
        """Of the gradients."""
        return 4 * self.total_numel


def points(axis: str, max_bytes: int) -> list[Point]:
    """What is measured along an axis, ascending.

    Raises:
        BenchError: so few fit that there is no line.
    """
    if axis == "parameters":
        counts = (10, 30, 100, 300, 1_000, 3_000, 10_000, 30_000, 100_000)
        found = [Point(count=count, parameters=count, numel=16) for count in counts]
    elif axis == "bytes":
        sizes = [MB * 4**step for step in range(12) if MB * 4**step < 0.7 * max_bytes] + [max_bytes]
        # Every slot begins where the last one ends: multiples of 64 elements, of 4 bytes, in 16 parameters.
        numels = [size // 4096 * 64 for size in sizes]
        found = [Point(count=64 * numel, parameters=16, numel=numel) for numel in numels if numel]
    else:
        found = [Point(count=2**step, parameters=4096, numel=1024, buckets=2**step) for step in range(11)]
    fit = [point for point in found if point.size_bytes <= max_bytes]
    if len(fit) <= linear.FEWEST:
        raise BenchError(f"{axis}: {max_bytes / MB:,.0f} MB of gradients leave {len(fit)} points, which make no line")
    return fit


def most_bytes(device: torch.device, asked: str | None) -> int:
    """Of gradients, at the end of the bytes axis.

    Raises:
        BenchError: more was asked for than there is.
    """
    end = int((0.9 * timing.free_bytes(device) - MARGIN_BYTES) / HELD)
    if asked is None:
        return end if device.type == "cuda" else min(end, CPU_MAX_BYTES)
    if asked == "end":
        return end
    read = re.fullmatch(r"(\d+)([KMGT]?)", asked)
    if read is None:
        raise BenchError(
            f"--max-bytes is a number of bytes, with K, M, G or T for powers of 1024, or 'end'; got {asked!r}"
        )
    wanted: int = int(read[1]) * 1024 ** " KMGT".index(read[2] or " ")
    if wanted > end:
        raise BenchError(
            f"too little memory: {wanted / MB:,.0f} MB of gradients asked for, {max(0, end) / MB:,.0f} fit"
        )
    return wanted


# What must come out


def fill(numbers: torch.Tensor, begin: int = 0) -> torch.Tensor:
    """Numbers from -125 to 125, off those of a bf16 wire by a little: numbers[i] is that of place `begin` + i."""
    for start in range(0, numbers.numel(), BLOCK_NUMEL):
        part = numbers[start : start + BLOCK_NUMEL]
        phase = (begin + start) % VALUES  # a float of 32 bits holds what BLOCK_NUMEL and this add up to
        torch.arange(phase, phase + part.numel(), out=part)
        part.fmod_(VALUES).sub_(VALUES // 2).add_(OFFSET)
    return numbers


def check(what: str, numbers: torch.Tensor, expected: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Every element of `numbers` against what `expected` makes of those of `fill`.

    Raises:
        BenchError: one differs.
    """
    scratch = torch.empty(min(BLOCK_NUMEL, numbers.numel()), device=numbers.device)
    for start in range(0, numbers.numel(), BLOCK_NUMEL):
        part = numbers[start : start + BLOCK_NUMEL]
        right = expected(fill(scratch[: part.numel()], start))
        if not torch.equal(part, right):
            at = int((part != right).nonzero()[0])  # a NaN differs from everything
            raise BenchError(f"{what} is wrong: element {start + at} is {float(part[at])}, {float(right[at])} is right")


def packed(values: torch.Tensor) -> torch.Tensor:
    """What pack makes of gradients."""
    return (values / DIVISOR).bfloat16()


# Kernels


class Buffers:
    """Gradients and wire of a point, both without gaps, and one pack and unpack of all of it."""

    def __init__(self, point: Point, gradients: torch.Tensor, wire: torch.Tensor) -> None:
        self.gradients, self.wire = gradients[: point.total_numel], wire[: point.total_numel]
        self._scale = torch.full((1,), DIVISOR, device=wire.device)
        each = point.parameters // point.buckets
        layout = aligned_layout([point.numel] * each, wire_itemsize_bytes=2)
        assert layout.numel == point.numel * each  # gradients lie as the wire does
        # As a reducer has it: it knows the shapes, and answers for the gradients.
        shapes = [((point.numel,), (1,))] * each
        table = ChunkTable(layout.numels, layout.offsets, [torch.float32] * each, layout.numel, shapes=shapes)
        self._buckets = [
            (list(mine.split(point.numel)), table, PointerTable(), theirs)
            for mine, theirs in zip(self.gradients.split(layout.numel), self.wire.split(layout.numel), strict=True)
        ]

    def run(self) -> None:
        """What is timed. Of what it leaves it makes the same again."""
        for parts, table, pointers, wire in self._buckets:
            dispatch.pack(parts, table, pointers, wire, DIVISOR, vouched=True)
        for parts, table, pointers, wire in self._buckets:
            dispatch.unpack(parts, table, pointers, wire, self._scale, vouched=True)


def kernels(found: Mapping[str, Point], device: torch.device) -> dict[str, list[float]]:
    """Seconds of pack and unpack of each point.

    All points lie in the same memory: a set of one's buffers is another's too.
    """
    largest = max(point.total_numel for point in found.values())
    cold_numel = timing.CACHES * timing.cache_bytes(device) // 6
    gradients = torch.empty(max(largest, cold_numel), device=device)
    wire = torch.empty(gradients.numel(), dtype=torch.bfloat16, device=device)
    sets: dict[str, list[Buffers]] = {}
    for name, point in found.items():
        wanted = min(math.ceil(cold_numel / point.total_numel), MOST_SETS, MOST_TENSORS // point.parameters)
        starts = range(
            0, min(max(1, wanted), gradients.numel() // point.total_numel) * point.total_numel, point.total_numel
        )
        sets[name] = [Buffers(point, gradients[start:], wire[start:]) for start in starts]

    def spoil(buffers: Sequence[Buffers]) -> None:
        for one in buffers:
            fill(one.gradients)
            one.wire.fill_(math.nan)

    def check_all(name: str, buffers: Sequence[Buffers]) -> None:
        for one in buffers:
            check(f"{name}, pack", one.wire, packed)
            # Not what was there: that was off the wire's numbers.
            check(f"{name}, unpack", one.gradients, lambda values: packed(values).float() * DIVISOR)

    def checked(name: str, buffers: Sequence[Buffers]) -> timing.Check:
        return timing.Check(poison=lambda: spoil(buffers), check=lambda: check_all(name, buffers))

    took_s = 0.0
    for buffers in sets.values():
        buffers[0].run()  # compiles
        began_s = time.perf_counter()
        buffers[0].run()
        wait(device)
        took_s += time.perf_counter() - began_s
    return timing.measure(
        {name: [one.run for one in buffers] for name, buffers in sets.items()},
        device,
        rounds=rounds_in(took_s),
        launches=GRAPH_CALLS,
        checks={name: checked(name, buffers) for name, buffers in sets.items()},
    )


# Reductions


class _Given(torch.autograd.Function):
    """A loss whose gradients are there already: its backward hands every parameter its own, and computes nothing."""

    @staticmethod
    def forward(ctx: Any, gradients: Sequence[torch.Tensor], *parameters: torch.Tensor) -> torch.Tensor:
        ctx.gradients = gradients
        return torch.zeros(())

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        # Tensors of their own, without copies: autograd keeps what nobody else holds.
        return (None, *(gradient.detach() for gradient in ctx.gradients))


class Backward:
    """The backward of a point, with a reducer or without. All points' gradients lie in the same memory."""

    def __init__(self, point: Point, arena: torch.Tensor, *, reduced: bool) -> None:
        self.point = point
        self.arena = arena[: point.total_numel]
        self._gradients = list(self.arena.split(point.numel))
        weights = torch.zeros(point.numel, device=arena.device)  # never read: one memory for all parameters
        self._parameters = [torch.nn.Parameter(weights) for _ in range(point.parameters)]
        self.reducer: Reducer | None = None
        if reduced:
            cap_bytes = point.size_bytes // point.buckets
            self.reducer = Reducer(
                self._parameters,
                ProcessGroupCommunicator(),
                ReduceConfig(wire="bf16", policy="static"),
                caps=BucketCaps(first_bytes=cap_bytes, cap_bytes=cap_bytes),
            )
        self._loss = torch.zeros(())

    def prepare(self) -> None:
        """Forward."""
        for parameter in self._parameters:
            parameter.grad = None
        self._loss = _Given.apply(self._gradients, *self._parameters)

    def run(self) -> None:
        """What is timed."""
        if self.reducer is not None:
            self.reducer.prepare_for_backward(self._loss)
        self._loss.backward()
        wait(self.arena.device)

    def check(self, what: str) -> None:
        """Of one step with gradients that the wire rounds.

        Raises:
            BenchError: they are not what the mean over one rank is, or in other buckets than meant.
        """
        fill(self.arena)
        self.prepare()
        self.run()
        if self.reducer is None:
            check(what, self.arena, lambda values: values)
            return
        check(what, self.arena, lambda values: values.bfloat16().float())
        buckets = self.reducer.stats()["buckets"]
        if buckets != self.point.buckets:
            raise BenchError(f"{what} is wrong: {buckets} buckets in place of {self.point.buckets}")
        held = self._parameters[-1].grad
        if held is None or held.data_ptr() != self._gradients[-1].data_ptr():
            raise BenchError(f"{what} is wrong: autograd has copied the gradients, so others than these were reduced")


def reductions(found: Mapping[str, Point], device: torch.device) -> dict[str, list[float]]:
    """Seconds that reducing adds to each point's backward."""
    arena = torch.empty(max(point.total_numel for point in found.values()), device=device)
    with contextlib.ExitStack() as stack:
        pairs: dict[str, tuple[Backward, Backward]] = {}
        took_s = 0.0
        for name, point in found.items():
            pairs[name] = (Backward(point, arena, reduced=True), Backward(point, arena, reduced=False))
            reducer = pairs[name][0].reducer
            assert reducer is not None
            stack.callback(reducer.close)
            for _ in range(SETTLE_STEPS):
                pairs[name][0].prepare()
                pairs[name][0].run()
            for one in pairs[name]:
                began_s = time.perf_counter()
                one.check(name)
                took_s += time.perf_counter() - began_s
        both = [one for pair in pairs.values() for one in pair]
        seconds: list[list[float]] = [[] for _ in both]
        gc.collect()
        gc.freeze()
        try:
            for round_number in range(rounds_in(took_s)):
                for turn in harness.turns(len(both), round_number):
                    both[turn].prepare()
                    wait(device)
                    began_s = time.perf_counter()
                    both[turn].run()
                    seconds[turn].append(time.perf_counter() - began_s)
        finally:
            gc.unfreeze()
    halves = zip(seconds[::2], seconds[1::2], strict=True)
    return {
        name: [mine - floor for mine, floor in zip(with_, without, strict=True)]
        for name, (with_, without) in zip(pairs, halves, strict=True)
    }


@contextlib.contextmanager
def one_rank(device: torch.device) -> Iterator[None]:
    """A process group of this process alone."""
    backend = "nccl" if device.type == "cuda" else "gloo"
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=0, world_size=1)
        try:
            yield
        finally:
            dist.destroy_process_group()


def wait(device: torch.device) -> None:
    """Until the GPU is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def rounds_in(one_s: float) -> int:
    """How many rounds of that length there are."""
    return max(FEWEST_ROUNDS, min(MOST_ROUNDS, int(ROUNDS_S / one_s)))


# What comes of it


def sweep(measured: str, axis: str, max_bytes: int, device: torch.device) -> dict[str, Any]:
    """Measures one line; its part of the record."""
    found = {f"{measured}, {point.count:,} {axis}": point for point in points(axis, max_bytes)}
    twice = list(found)[len(found) // 2]
    times = (kernels if measured == "kernels" else reductions)({**found, twice + AGAIN: found[twice]}, device)
    pairs = zip(times[twice], times.pop(twice + AGAIN), strict=True)
    noise = statistics.median(second / first for first, second in pairs)
    rows = [{"count": point.count, "bytes": point.size_bytes, "seconds": times[name]} for name, point in found.items()]
    medians = [statistics.median(times[name]) for name in found]
    if min(medians) <= 0:
        raise BenchError(
            f"{measured}, {axis}: a step with the reducer takes no longer than one without; too much noise"
        )
    fit = linear.line([point.count for point in found.values()], medians)
    return {"points": rows, "again": noise, "line": {**asdict(fit), "holds": fit.holds}}


def show(measured: str, axis: str, found: Mapping[str, Any]) -> None:
    """Prints a sweep."""
    line = found["line"]
    slope = report_tables.slope_text(axis, line["slope_s"])
    fixed = f"{line['fixed_s'] * 1e6:,.1f} us fixed"
    print(f"\n{measured} against {axis}: {slope}, {fixed}; the same twice: {found['again']:.3f}")
    for row in found["points"]:
        spread = records.Spread.of(row["seconds"])
        said = line["fixed_s"] + line["slope_s"] * row["count"]
        print(
            f"  {row['count']:>14,} {spread.median_ms:12.4f} ms  p20 {spread.p20_ms:.4f}  p80 {spread.p80_ms:.4f}  "
            f"{spread.median_ms / 1e3 / said:6.2f} of the line"
        )
    print(f"  MISSED: not linear: {line['why_not']}" if line["why_not"] else "  linear")


def main() -> int:
    """Runs the sweeps, prints them, writes one JSON."""
    parser = records.Parser(description=__doc__)
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--axis", choices=AXES, nargs="+", default=AXES, help="default: all")
    parser.add_argument("--measure", choices=MEASURED, nargs="+", default=MEASURED, help="default: both")
    parser.add_argument("--max-bytes", metavar="SIZE", help="of gradients, as 512M or end (default: end; on CPU 1G)")
    parser.add_argument("--out", type=Path, default=records.RESULTS, help="folder for the JSON")
    parser.add_argument("--no-check", action="store_true", help="exit status 0 also where a line does not hold")
    arguments = parser.parse_args()
    device = records.pick_device(arguments.device)
    neighbours = records.Neighbours()
    torch.set_num_threads(1)
    max_bytes = most_bytes(device, arguments.max_bytes)
    for axis in arguments.axis:
        points(axis, max_bytes)  # what does not fit is said before anything is measured
    sweeps: dict[str, dict[str, Any]] = {}
    with one_rank(device):
        for measured in arguments.measure:
            sweeps[measured] = {}
            for axis in arguments.axis:
                sweeps[measured][axis] = sweep(measured, axis, max_bytes, device)
                show(measured, axis, sweeps[measured][axis])
    cores = neighbours.cores()
    print(f"\nother work kept {cores:.2f} cores busy meanwhile")
    path = records.write(
        arguments.out,
        "scale",
        device,
        others_cores=cores,
        max_bytes=max_bytes,
        allowed={"ratio": linear.MOST_RATIO, "growth": linear.MOST_GROWTH},
        sweeps=sweeps,
    )
    print(path)
    holds = all(found["line"]["holds"] for axes in sweeps.values() for found in axes.values())
    return 0 if holds or arguments.no_check else 1


if __name__ == "__main__":
    records.entry(main)
