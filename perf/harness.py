"""What the benchmarks of steps share: the ranks, taking turns, torch's ways as baselines, the check of gradients.

A benchmark's worker runs once on every rank, between `begin` and `finish`. What it times it hands to `take_turns` as
cases, each with the check that allows a number at all.
"""

from __future__ import annotations

import contextlib
import datetime
import gc
import inspect
import json
import os
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from records import BenchError, line_of
from torch import nn
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException, spawn
from torch.nn.parallel import DistributedDataParallel

Shape = tuple[int, int]  # number of parameters, elements in each
Build = Callable[[nn.Module], nn.Module]

BACKENDS = {"cpu": "gloo", "cuda": "nccl"}  # ours refuses GPU tensors over gloo
WARMUP_ROUNDS = 4
ROW_STEP_NUMEL = 16  # a cache line of fp32: every row of the input is as well aligned as the first
# Of the largest mean: a few roundings to the wire.
TOLERANCE = {"native": 1e-6, "fp16": 2.0**-9, "bf16": 2.0**-6, "int8": 2.0**-6, "int4": 2.0**-2}


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
        BenchError: one is missing or wrong.
    """
    allowed = TOLERANCE[wire] * float(expected.abs().max())
    off: dict[str, torch.Tensor] = {}
    for (parameter_name, parameter), row in zip(model.named_parameters(), expected, strict=True):
        if parameter.grad is None:
            raise BenchError(f"{name} is wrong: {parameter_name} has no gradient")
        off[parameter_name] = (parameter.grad - row).abs().max()
    for parameter_name, worst in zip(off, torch.stack([*off.values()]).tolist(), strict=True):  # one wait for a GPU
        if not worst <= allowed:  # NaN is wrong too
            raise BenchError(
                f"{name} is wrong: the gradient of {parameter_name} is off by {worst:.3g}, {allowed:.3g} is allowed"
            )


def _knows(argument: str) -> bool:
    return argument in inspect.signature(DistributedDataParallel.__init__).parameters


# Buffers stay each rank's own: sending them is no matter of how gradients travel. (torch renamed the argument.)
OWN_BUFFERS: dict[str, Any] = {"forward_sync_buffers" if _knows("forward_sync_buffers") else "broadcast_buffers": False}


def torch_ddp(**options: Any) -> Build:
    """Wraps a model in torch's own DDP."""
    return lambda model: DistributedDataParallel(model, **OWN_BUFFERS, **options)


def hooked(hook: Callable[..., Any], state: object = None, **options: Any) -> Build:
    """Wraps a model in torch's own DDP with a comm hook."""

    def build(model: nn.Module) -> DistributedDataParallel:
        ddp = DistributedDataParallel(model, **OWN_BUFFERS, **options)
        ddp.register_comm_hook(state, hook)
        return ddp

    return build


# Whether torch's DDP can copy all gradients of a bucket at once: from 2.12 on.
HAS_BATCHED_COPIES = _knows("batched_grad_copy")
# The form of torch's that is seldom beaten.
TORCH_STRONGEST = "torch DDP, batched copies, views" if HAS_BATCHED_COPIES else "torch DDP, views"


def torch_variants(**options: Any) -> dict[str, Build]:
    """The ways in which torch's DDP handles gradients, with these options."""
    found = {}
    for batched, what in ((False, "torch DDP"), (True, "torch DDP, batched copies"))[: 1 + HAS_BATCHED_COPIES]:
        more = {"batched_grad_copy": True} if batched else {}
        for views, suffix in ((False, ""), (True, ", views")):
            found[what + suffix] = torch_ddp(gradient_as_bucket_view=views, **more, **options)
    return found


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


def take_turns(
    cases: Mapping[str, Case], rounds: int, device: torch.device | None = None, *, host_only: bool = False
) -> dict[str, list[float]]:
    """Seconds of every run of each case. Checked in the untimed first rounds, and once more after the last.

    Args:
        cases: by name; every rank has the same.
        rounds: in which each case is timed once.
        device: a GPU is waited for before the clock starts, and before it stops.
        host_only: not before it stops: only the time in which the host was held up counts.
    """
    names = list(cases)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    try:
        for round_number in range(-WARMUP_ROUNDS, rounds):
            if round_number == 0:
                # The collector would else walk the objects of all cases together, which no training run holds.
                gc.collect()
                gc.freeze()
            for name in (names[turn] for turn in turns(len(names), round_number)):
                case = cases[name]
                case.prepare()
                dist.barrier()  # no case waits in its own time for what a rank did before
                wait_for(device)
                begin_s = time.perf_counter()
                case.run()
                if not host_only:
                    wait_for(device)
                elapsed_s = time.perf_counter() - begin_s
                if round_number >= 0:
                    seconds[name].append(elapsed_s)
                if round_number < 0 or round_number == rounds - 1:
                    case.check()
    finally:
        gc.unfreeze()  # or what is let go of later is never collected
    return seconds


def wait_for(device: torch.device | None) -> None:
    """Until a GPU has done all that it was given; a CPU has when an operator returns."""
    if device is not None and device.type == "cuda":
        torch.cuda.synchronize(device)


def begin(rank: int, world: int, folder: str, device_type: str = "cpu") -> torch.device:
    """First line of a worker: one thread, one group of all ranks; the device that this rank works on.

    GPUs are dealt out in turn; with fewer than ranks several ranks share one, which NCCL refuses.
    """
    torch.set_num_threads(1)
    device = torch.device("cpu")
    if device_type == "cuda":
        device = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    timeout = datetime.timedelta(minutes=2)
    dist.init_process_group(
        BACKENDS[device_type],
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=world,
        timeout=timeout,
        device_id=device if device_type == "cuda" else None,
    )
    return device


def finish(rank: int, folder: str, result: object) -> NoReturn:
    """Last line of a worker: hands over its result and ends the process, with nothing taken down.

    Gloo's threads may outlive the interpreter and abort the process otherwise; plain DDP does so too.
    """
    Path(folder, f"{rank}.json").write_text(json.dumps(result))
    with contextlib.suppress(RuntimeError):  # a rank that has already left has all that it needs
        dist.barrier()
    os._exit(0)


def run_ranks(worker: Callable[..., NoReturn], ranks: int, *arguments: object) -> list[Any]:
    """Runs `worker(rank, ranks, folder, *arguments)` in a new process per rank; what each handed to `finish`.

    Raises:
        BenchError: a rank raised one, had too little memory, or was killed.
    """
    with tempfile.TemporaryDirectory() as folder:
        try:
            spawn(_run_rank, args=(worker, ranks, folder, *arguments), nprocs=ranks)
        except (ProcessRaisedException, ProcessExitedException) as error:
            # Whichever rank was seen first: its peers' collectives fail with it, and say less.
            for path in sorted(Path(folder).glob("*.failed")):
                raise BenchError(path.read_text()) from None
            if isinstance(error, ProcessExitedException):
                raise BenchError(f"a rank is gone ({error}): too little memory?") from None
            raise
        return [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(ranks)]


def _run_rank(rank: int, worker: Callable[..., NoReturn], ranks: int, folder: str, *arguments: object) -> None:
    try:
        worker(rank, ranks, folder, *arguments)
    except BaseException as error:
        if (line := line_of(error)) is not None:
            Path(folder, f"{rank}.failed").write_text(line)
        raise
