"""DataParallel, replicas in one process, beside one replica that computes the whole batch with all threads.

    python perf/bench_data_parallel.py                 # two replicas on CPU; a JSON into perf/results
    python perf/bench_data_parallel.py --device cuda   # a replica per GPU, and torch.nn.DataParallel beside them

A step: gradients set to None, forward, the loss on the concatenated output, backward; `forward_parallel` is the same
with a loss per replica. No optimizer: it does the same work whoever made the gradients. Models:

    mlp      four layers on 256 images of 28 x 28
    digits   the demo's convolutions on 256 images of 8 x 8
    resnet   He et al., ResNet-18, on 8 images of 64 x 64
    gpt2     4 layers of width 128 on 8 sequences of 64 words
    narrow   100 layers of width 16 on 64 rows: nothing but calls, which threads of one interpreter make in turn

Each way has a process of its own, so that none is timed among another's threads. Only one process works at a time: they
take turns, a few steps each, in an order that changes each round; ratios are medians of those within a round; one
replica takes part twice. Before anything is timed outputs and gradients are compared with one plain backward over the
shards (a batch norm sees its shard alone, in every kind of data parallel). On CPU a step of DataParallel is to take no
longer than one replica's, on a GPU no longer than torch.nn.DataParallel's, each within 5 %: exit status 1 otherwise.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import gc
import multiprocessing
import os
import statistics
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import harness
import models
import records
import report_tables
import torch
from records import BenchError, Spread
from torch import nn

import fusedreduce
from fusedreduce.cli import digits

ONE, AGAIN, OURS, PARALLEL = "one replica", "one replica, again", "ours", "ours, forward_parallel"
TORCHS = "torch.nn.DataParallel"
ALLOWED = 1.05
WARMUP_ROUNDS = 2
TURN_STEPS = 3  # of which the median counts, behind one that brings data back into the caches
QUIET_S = 0.02  # between turns: until the threads of the process before have ceased to spin
TOLERANCE = 1e-4  # of the largest gradient or output: sums in another order, through some layers
NO_TORCH = "torch.nn.DataParallel: not measured: it needs GPUs"


class Narrow(nn.Sequential):
    """Many small layers, each beside its input."""

    def __init__(self) -> None:
        super().__init__(*(nn.Linear(16, 16) for _ in range(100)))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        for layer in self:
            rows = rows + torch.tanh(layer(rows))
        return rows


class Logits(nn.Module):
    """perf/models.py's GPT-2 up to its loss."""

    def __init__(self, gpt2: models.Gpt2) -> None:
        super().__init__()
        self.gpt2 = gpt2

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        gpt2 = self.gpt2
        hidden = gpt2.blocks(gpt2.words(words) + gpt2.places.weight[: words.shape[1]])
        return nn.functional.linear(gpt2.norm(hidden), gpt2.words.weight)


@dataclass(frozen=True, kw_only=True)
class Task:
    """A model on the CPU, and a batch of its inputs."""

    module: nn.Module
    batch: torch.Tensor


def _resnet() -> nn.Module:
    whole = models.build("resnet18")
    assert isinstance(whole, models.ResNet18)
    return nn.Sequential(whole.body, whole.head)


def task(name: str, per_device: int) -> Task:
    """By name; batches are for two devices, and larger for more.

    Raises:
        BenchError: no such model.
    """
    generator = torch.Generator().manual_seed(0)

    def normal(images: int, *shape: int) -> torch.Tensor:
        return torch.randn(images * per_device // 2, *shape, generator=generator)

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        if name == "mlp":
            layers = models.Mlp().layers
            return Task(module=layers, batch=normal(256, 784))
        if name == "digits":
            return Task(module=digits.build_model(0), batch=normal(256, 1, 8, 8))
        if name == "resnet":
            return Task(module=_resnet(), batch=normal(8, 3, 64, 64))
        if name == "gpt2":
            words = torch.randint(1024, (8 * per_device // 2, 64), generator=generator)
            built = models.build("gpt2-tiny")
            assert isinstance(built, models.Gpt2)
            return Task(module=Logits(built), batch=words)
        if name == "narrow":
            return Task(module=Narrow(), batch=normal(64, 16))
    raise BenchError(f"unknown model {name!r}: use one of {', '.join(NAMES)}")


NAMES = ("mlp", "digits", "resnet", "gpt2", "narrow")


def loss_of(output: torch.Tensor) -> torch.Tensor:
    """The mean over all samples, so that the mean of the shards' means, by their samples, is that of the batch."""
    return output.square().mean()


class Truth:
    """What a step must leave, by one replica that goes through the shards one after the other.

    Args:
        module: on the device.
        shards: of the batch; one of them: the whole of it.
    """

    def __init__(self, module: nn.Module, shards: Sequence[torch.Tensor]) -> None:
        replica = copy.deepcopy(module)
        self.output = torch.cat([replica(shard) for shard in shards])
        loss_of(self.output).backward()
        self.output = self.output.detach()
        self._gradients = {name: one.grad for name, one in replica.named_parameters()}

    def check(self, what: str, module: nn.Module, output: torch.Tensor) -> None:
        """Compares by the worst element.

        Raises:
            BenchError: an output or a gradient is missing or wrong.
        """
        _refuse(f"{what}: the output", output, self.output)
        for name, parameter in module.named_parameters():
            wanted = self._gradients[name]
            assert wanted is not None
            if parameter.grad is None:
                raise BenchError(f"{what} is wrong: {name} has no gradient")
            _refuse(f"{what}: the gradient of {name}", parameter.grad, wanted)


def _refuse(what: str, found: torch.Tensor, wanted: torch.Tensor) -> None:
    if found.shape != wanted.shape:
        raise BenchError(f"{what} is wrong: its shape is {tuple(found.shape)}, not {tuple(wanted.shape)}")
    worst, allowed = float((found - wanted).abs().max()), TOLERANCE * float(wanted.abs().max())
    if not worst <= allowed:
        raise BenchError(f"{what} is wrong: off by {worst:.3g}, {allowed:.3g} is allowed")


class Case:
    """One way to do the step.

    Args:
        what: its name.
        module: whose gradients count.
        step: forward and backward; the whole output.
        truth: what that must leave.
    """

    def __init__(self, what: str, module: nn.Module, step: Callable[[], torch.Tensor], truth: Truth) -> None:
        self._what, self._module, self._step, self._truth = what, module, step, truth

    def run(self) -> torch.Tensor:
        """One step, gradients set to None first."""
        self._module.zero_grad(set_to_none=True)
        return self._step()

    def check(self) -> None:
        """Runs one more, and compares.

        Raises:
            BenchError: it is wrong.
        """
        self._truth.check(self._what, self._module, self.run().detach())


def plain(wrapped: Callable[[torch.Tensor], torch.Tensor], batch: torch.Tensor) -> Callable[[], torch.Tensor]:
    """A step whose loss is on the whole output."""

    def step() -> torch.Tensor:
        output = wrapped(batch)
        loss_of(output).backward()
        return output

    return step


def parallel(ours: Any, shards: Sequence[torch.Tensor]) -> Callable[[], torch.Tensor]:
    """A step with a loss for each replica."""

    def step() -> torch.Tensor:
        outputs = ours.forward_parallel(shards)
        losses = [loss_of(output) for output in outputs]
        torch.autograd.backward(losses)
        return torch.cat([output.to(outputs[0].device) for output in outputs])

    return step


def case(name: str, made: Task, devices: Sequence[torch.device], stack: contextlib.ExitStack) -> Case:
    """A way to do a task's step; `stack` closes what it owns."""
    first = devices[0]
    module, batch = made.module.to(first), made.batch.to(first)
    shards = batch.chunk(len(devices))
    truth = Truth(module, [batch] if name in (ONE, AGAIN) else shards)
    if name in (ONE, AGAIN):
        return Case(name, module, plain(module, batch), truth)
    if name == TORCHS:
        theirs = nn.DataParallel(module, [one.index for one in devices])
        return Case(name, module, plain(theirs, batch), truth)
    ours = stack.enter_context(fusedreduce.DataParallel(module, devices))
    if name == OURS:
        return Case(name, module, plain(ours, batch), truth)
    placed = [shard.to(device) for shard, device in zip(shards, devices, strict=True)]
    return Case(name, module, parallel(ours, placed), truth)


def turn(way: Case, device: torch.device) -> float:
    """Seconds of a step."""
    way.run()
    found = []
    for _ in range(TURN_STEPS):
        harness.wait_for(device)
        begin_s = time.perf_counter()
        way.run()
        harness.wait_for(device)
        found.append(time.perf_counter() - begin_s)
    return statistics.median(found)


def serve(pipe: Connection, name: str, model: str, devices: Sequence[torch.device], threads: int) -> None:
    """A process: tells that its way is right, then takes a turn whenever it is asked to, and is checked once more."""
    try:
        torch.set_num_threads(threads)
        with contextlib.ExitStack() as stack:
            way = case(name, task(model, len(devices)), devices, stack)
            way.check()
            gc.collect()
            gc.freeze()
            pipe.send(0.0)
            while pipe.recv():
                pipe.send(turn(way, devices[0]))
            way.check()
            pipe.send(0.0)
    except Exception as error:
        line = records.line_of(error)
        pipe.send(line or f"{name}: {traceback.format_exc()}")
    finally:
        gc.unfreeze()


class Player:
    """A way, in a process of its own.

    Args:
        arguments: those of `serve` behind the pipe.
    """

    def __init__(self, *arguments: object) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(theirs, *arguments), daemon=True)
        self._process.start()
        theirs.close()

    def answer(self) -> float:
        """What it says next.

        Raises:
            BenchError: it is wrong, or gone.
        """
        try:
            said = self._pipe.recv()
        except (EOFError, OSError):
            raise BenchError("a process is gone: too little memory, or what it has printed") from None
        if isinstance(said, str):
            raise BenchError(said)
        return float(said)

    def ask(self, *, more: bool) -> float:
        """A turn; or, without more of them, the last check."""
        self._pipe.send(more)
        return self.answer()

    def close(self) -> None:
        """Ends the process."""
        self._process.terminate()
        self._process.join()
        self._pipe.close()


def seconds_of(
    names: Sequence[str], model: str, devices: Sequence[torch.device], threads: int, rounds: int, warmup_rounds: int
) -> dict[str, list[float]]:
    """Seconds of a step of each way, in turns; each is checked before and after.

    Raises:
        BenchError: one is wrong.
    """
    players: dict[str, Player] = {}
    found: dict[str, list[float]] = {name: [] for name in names}
    try:
        for name in names:
            players[name] = Player(name, model, devices, threads)
            players[name].answer()
        for round_number in range(-warmup_rounds, rounds):
            for name in (names[place] for place in harness.turns(len(names), round_number)):
                time.sleep(QUIET_S)
                seconds = players[name].ask(more=True)
                if round_number >= 0:
                    found[name].append(seconds)
        for player in players.values():
            player.ask(more=False)
    finally:
        for player in players.values():
            player.close()
    return found


def row_of(model: str, seconds: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """Milliseconds of each way, and ratios to one replica and to torch's."""
    ways = {
        name: {
            **Spread.of(mine).values(),
            "ratio": _ratio(mine, seconds[ONE]),
            "ratio_to_torch": _ratio(mine, seconds[TORCHS]) if TORCHS in seconds else None,
        }
        for name, mine in seconds.items()
    }
    return {"part": "steps", "case": model, "variants": ways}


def _ratio(mine: Sequence[float], base: Sequence[float]) -> float:
    return statistics.median(one / other for one, other in zip(mine, base, strict=True))


def judge(rows: Sequence[Mapping[str, Any]], *, against_torch: bool) -> list[dict[str, Any]]:
    """What is demanded of each model."""
    key, other = ("ratio_to_torch", TORCHS) if against_torch else ("ratio", ONE)
    return [
        records.demand(f"{row['case']}: {OURS}, of {other}", row["variants"][OURS][key], "<=", ALLOWED) for row in rows
    ]


def pick_devices(asked: argparse.Namespace) -> list[torch.device]:
    """As many as there are to be replicas.

    Raises:
        BenchError: there are none such.
    """
    device = records.pick_device(asked.device)
    if device.type == "cpu":
        return [device] * (asked.replicas or 2)
    there = torch.cuda.device_count()
    return [torch.device("cuda", index % there) for index in range(asked.replicas or max(2, there))]


def main() -> int:
    """Runs every model, prints tables and demands, writes one JSON."""
    parser = records.Parser(description=__doc__)
    parser.add_argument("--models", nargs="+", choices=NAMES, default=list(NAMES), metavar="NAME", help="default: all")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="cpu")
    parser.add_argument("--replicas", type=int, help="default: 2 on CPU, one per GPU but at least 2")
    parser.add_argument("--threads", type=int, help="of one replica; DataParallel divides them (default: the cores)")
    parser.add_argument("--rounds", type=int, default=40, help="turns of each way (default: 40)")
    parser.add_argument(
        "--against-torch", action="store_true", help=f"{TORCHS} takes part: GPUs only, and there always"
    )
    parser.add_record()
    asked = parser.parse_args()
    cores = len(os.sched_getaffinity(0))
    threads = cores if asked.threads is None else asked.threads
    if asked.rounds < 2 or threads < 1 or (asked.replicas is not None and asked.replicas < 2):
        parser.error("at least 2 rounds, 2 replicas and 1 thread")
    devices = pick_devices(asked)
    on_gpu = devices[0].type == "cuda"
    if asked.against_torch and not on_gpu:
        raise BenchError(NO_TORCH)
    # torch.nn.DataParallel copies to each device once.
    with_torch = on_gpu and len(set(devices)) == len(devices)
    rounds, warmup_rounds = (2, 0) if asked.rehearse else (asked.rounds, WARMUP_ROUNDS)
    ways = [ONE, AGAIN, OURS, PARALLEL, *([TORCHS] if with_torch else [])]
    rows = [row_of(name, seconds_of(ways, name, devices, threads, rounds, warmup_rounds)) for name in asked.models]
    if not with_torch:
        print(f"\n{NO_TORCH}" if not on_gpu else f"\n{TORCHS}: not measured: it wants a GPU for each replica")
    return report_tables.publish(
        asked,
        "data_parallel",
        devices[0],
        replicas=len(devices),
        threads=threads,
        rounds=rounds,
        rows=rows,
        demands=judge(rows, against_torch=with_torch) if with_torch or not on_gpu else [],
    )


if __name__ == "__main__":
    records.entry(main)
