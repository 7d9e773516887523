"""What the benchmarks share: the model, the ranks, taking turns, the record of a run.

A benchmark's worker runs once on every rank, between `begin` and `finish`. What it times it hands to `take_turns` as
cases, each with the check that allows a number at all.
"""

from __future__ import annotations

import contextlib
import datetime
import gc
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel

Shape = tuple[int, int]  # number of parameters, elements in each
Build = Callable[[nn.Module], nn.Module]

WARMUP_ROUNDS = 4
ROW_STEP_NUMEL = 16  # a cache line of fp32: every row of the input is as well aligned as the first
TOLERANCE = {"native": 1e-6, "fp16": 2.0**-9, "bf16": 2.0**-6}  # of the largest mean: a few roundings to the wire


class Many(nn.Module):
    """Parameters that are each used once, and times a row of their own: no gradient is like another's."""

    def __init__(self, count: int, numel: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.zeros(numel)) for _ in range(count))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return torch.stack([(weight * row).sum() for weight, row in zip(self.weights, rows, strict=True)]).sum()


def inputs(rank: int, shape: Shape) -> torch.Tensor:
    """One row per parameter, [count, numel], other values on each rank: also the gradients without an exchange.

    The rows overlap in memory, and so stay in cache.
    """
    count, numel = shape
    base = torch.randn(numel + ROW_STEP_NUMEL * (count - 1), generator=torch.Generator().manual_seed(rank))
    return base.unfold(0, numel, ROW_STEP_NUMEL)


def check_gradients(name: str, model: nn.Module, expected: torch.Tensor, wire: str = "native") -> None:
    """Every gradient against its row of `expected`, by the worst element.

    Raises:
        RuntimeError: one is missing or wrong.
    """
    allowed = TOLERANCE[wire] * float(expected.abs().max())
    for (parameter_name, parameter), row in zip(model.named_parameters(), expected, strict=True):
        if parameter.grad is None:
            raise RuntimeError(f"{name} is wrong: {parameter_name} has no gradient")
        worst = float((parameter.grad - row).abs().max())
        if not worst <= allowed:  # NaN is wrong too
            raise RuntimeError(
                f"{name} is wrong: the gradient of {parameter_name} is off by {worst:.3g}, {allowed:.3g} is allowed"
            )


def mean_of_ranks(rows: torch.Tensor) -> torch.Tensor:
    """The gradients that a right exchange leaves."""
    mean = rows.contiguous()
    dist.all_reduce(mean)
    return mean / dist.get_world_size()


def torch_ddp(**options: Any) -> Build:
    """Wraps a model in torch's own DDP."""
    return lambda model: DistributedDataParallel(model, **options)


def torch_variants() -> dict[str, Build]:
    """The ways in which torch's DDP handles gradients."""
    return {
        "torch DDP": torch_ddp(),
        "torch DDP, views": torch_ddp(gradient_as_bucket_view=True),
        "torch DDP, batched copies": torch_ddp(batched_grad_copy=True),
        "torch DDP, batched copies, views": torch_ddp(batched_grad_copy=True, gradient_as_bucket_view=True),
    }


@dataclass(frozen=True, kw_only=True)
class Case:
    """One thing that is timed: `run`, after `prepare`, which is not; `check` raises if what `run` left is wrong."""

    prepare: Callable[[], object]
    run: Callable[[], object]
    check: Callable[[], object]


def turns(count: int, round_number: int) -> list[int]:
    """The order of one round: over 2 * count rounds each case has every place, and every predecessor, equally often.

    Rows of a Williams square. With 4 cases: 0 1 3 2, then 1 2 0 3, 2 3 1 0, 3 0 2 1, and the same read backwards.
    """
    zigzag = [(place + 1) // 2 if place % 2 else -(place // 2) for place in range(count)]
    row = [(entry + round_number) % count for entry in zigzag]
    return row if round_number // count % 2 == 0 else row[::-1]


def take_turns(cases: Mapping[str, Case], rounds: int) -> dict[str, list[float]]:
    """Seconds of every run of each case. Checked in the untimed first rounds, and once more after the last."""
    names = list(cases)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for round_number in range(-WARMUP_ROUNDS, rounds):
        if round_number == 0:
            # The collector would else walk the objects of all cases together, which no training run holds.
            gc.collect()
            gc.freeze()
        for name in (names[turn] for turn in turns(len(names), round_number)):
            case = cases[name]
            case.prepare()
            dist.barrier()  # no case waits in its own time for what a rank did before
            begin_s = time.perf_counter()
            case.run()
            elapsed_s = time.perf_counter() - begin_s
            if round_number >= 0:
                seconds[name].append(elapsed_s)
            if round_number < 0 or round_number == rounds - 1:
                case.check()
    return seconds


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Median and 20th and 80th percentile, in milliseconds."""

    p20_ms: float
    median_ms: float
    p80_ms: float

    @staticmethod
    def of(seconds: Sequence[float]) -> Spread:
        tenths = statistics.quantiles(seconds, n=10, method="inclusive")
        return Spread(p20_ms=tenths[1] * 1e3, median_ms=tenths[4] * 1e3, p80_ms=tenths[7] * 1e3)


class Neighbours:
    """How many cores other work keeps busy, from when this is made: beside much of it no number is worth publishing."""

    def __init__(self) -> None:
        self._begin_s = time.monotonic()
        self._begin_busy_s = self._others_busy_s()

    def cores(self) -> float:
        """Mean since then. Every process that was started here must have ended."""
        busy_s = self._others_busy_s() - self._begin_busy_s
        return max(0.0, busy_s / (time.monotonic() - self._begin_s))

    @staticmethod
    def _others_busy_s() -> float:
        user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, Path("/proc/stat").read_text().split()[1:9])
        busy_ticks = user + nice + system + irq + softirq + steal
        return busy_ticks / os.sysconf("SC_CLK_TCK") - sum(os.times()[:4])  # ours: this process and its children


def begin(rank: int, world: int, folder: str) -> None:
    """First line of a worker: one thread, one Gloo group of all ranks."""
    torch.set_num_threads(1)
    timeout = datetime.timedelta(minutes=2)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world, timeout=timeout)


def finish(rank: int, folder: str, result: object) -> NoReturn:
    """Last line of a worker: hands over its result and ends the process, with nothing taken down.

    Gloo's threads may outlive the interpreter and abort the process otherwise; plain DDP does so too.
    """
    Path(folder, f"{rank}.json").write_text(json.dumps(result))
    with contextlib.suppress(RuntimeError):  # a rank that has already left has all that it needs
        dist.barrier()
    os._exit(0)


def run_ranks(worker: Callable[..., NoReturn], ranks: int, *arguments: object) -> list[Any]:
    """Runs `worker(rank, ranks, folder, *arguments)` in a new process per rank; what each handed to `finish`."""
    with tempfile.TemporaryDirectory() as folder:
        spawn(worker, args=(ranks, folder, *arguments), nprocs=ranks)
        return [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(ranks)]


def pooled(results: Sequence[Mapping[str, list[float]]]) -> dict[str, list[float]]:
    """`take_turns` of all ranks as one."""
    return {name: [second for result in results for second in result[name]] for name in results[0]}


def parse_shape(text: str) -> Shape:
    """'200x50000' as (200, 50000), for argparse."""
    count, numel = map(int, text.lower().split("x"))
    if count < 1 or numel < 1:
        raise ValueError(text)
    return count, numel


def shape_name(shape: Shape) -> str:
    """As tables and records call a shape."""
    return f"{shape[0]:,} x {shape[1]:,}"


def write_record(folder: Path, prefix: str, **content: object) -> Path:
    """Writes <folder>/<prefix>_<date>.json: `content` after when, how, on what and with what it came about."""
    now = datetime.datetime.now(datetime.UTC)
    record = {
        "created": now.isoformat(timespec="seconds"),
        "command": " ".join(["python", f"perf/{Path(sys.argv[0]).name}", *sys.argv[1:]]),
        "commit": _commit(),
        "hardware": f"{os.cpu_count()} cores, {platform.machine()}, {_processor()}",
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
        **content,
    }
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{prefix}_{now:%Y-%m-%d}.json"
    path.write_text(json.dumps(record, indent=1) + "\n")
    return path


def _commit() -> str:
    """Short hash, with -dirty if tracked files differ from it."""
    command = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    return subprocess.run(
        command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False
    ).stdout.strip()


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), "unknown processor")
