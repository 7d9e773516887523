"""Steps of one model over the present link: all variants in turns, checked, with the bytes that each puts on the wire.

A step is zero_grad (to None), forward and backward; no optimizer, which is the same work whoever averaged. Ranks start
together, behind a barrier; another one ends the count of bytes, of which its own are taken off. On a GPU the host's
clock is read when the GPU has done all that it was given, before and after: a step has the host's part in it, as in
training. A check compares gradients with the mean of all ranks', and of ours asks that all ranks have the same bits.
"""

from __future__ import annotations

import dataclasses
import gc
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import harness
import link_bound
import step_training
import torch
import torch.distributed as dist
from link_bound import AUTO
from link_variants import CLOCKED, ENCODED, OUR_HSDP, POWERSGD
from records import BenchError
from step_training import Task, Training
from step_variants import FLOOR, Variant
from torch import nn

import fusedreduce
from fusedreduce.config import Wire

WARMUP_ROUNDS = 31  # our wrapper looks at its times up to step 28, and has its last plan from step 31 on
SETTLING_ROUNDS = 4  # those of them in which the others take part, which rebuild buckets after the first step
CHOOSING_STEPS = 80  # of one that chooses a wire, before the rounds: by then it has
BARRIERS = 15
OURS = ("wrapper", "hook", OUR_HSDP)  # as Variant.side
DIGEST_NUMEL = 2**20  # at a time: what a check holds beside the model is small


class GradientClock:
    """When each gradient of a model is ready, in the order in which they are."""

    def __init__(self) -> None:
        self.ready: list[tuple[float, int, int]] = []  # when, elements, dimensions

    def attach(self, model: nn.Module) -> nn.Module:
        """Has every parameter tell; for Variant.build."""
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(self._took(parameter.numel(), parameter.ndim))
        return model

    def _took(self, numel: int, ndim: int) -> Callable[[torch.Tensor], None]:
        def note(_: torch.Tensor) -> None:
            self.ready.append((time.perf_counter(), numel, ndim))

        return note


@dataclass(frozen=True, kw_only=True)
class Steps:
    """What one rank found of one model: of each variant and round seconds, those of its core, bytes; and the bounds.

    Of one that chooses among wires what it has found; it may differ from what it finds later.

    And for a forecast when gradients are ready without DDP, as shares of the step, and how long a barrier takes.
    """

    parameters: int
    elements: int
    seconds: dict[str, list[float]]
    cpu_seconds: dict[str, list[float]]
    bytes: dict[str, list[int]]
    bounds: dict[str, list[float]]
    chosen: dict[str, Any]
    ready: list[tuple[float, int, int]]
    latency_s: float


def measure(
    model: str,
    variants: Mapping[str, Variant],
    rounds: int,
    link: link_bound.Link | None,
    sent_bytes: Callable[[], int],
    *,
    device: torch.device,
    warmup_rounds: int = WARMUP_ROUNDS,
) -> Steps:
    """Every rank calls it alike.

    Args:
        model: see models.py.
        variants: by name; those that encode are left out where nothing is encoded.
        rounds: in which each is timed once.
        link: for the bound; None: there is none, and no clock on gradients.
        sent_bytes: reads the counter.
        device: of the model.
        warmup_rounds: before them, in which results are checked; of all but our wrapper the last few of them.

    Raises:
        BenchError: something is wrong in what a variant left.
    """
    truth, new = step_training.new_training(Task(model=model), device, dist.get_rank())
    clock = GradientClock()
    cases, trainings = {}, {}
    for name, variant in variants.items():
        if name in ENCODED and not _encodes(ENCODED[name], truth.before):
            continue
        if name == CLOCKED and link is None:
            continue
        trainings[name] = made = new(
            name, dataclasses.replace(variant, build=clock.attach) if name == CLOCKED else variant
        )
        cases[name] = _finite(name, made) if variant.wire == POWERSGD else made.case()
        if variant.side in OURS:
            cases[name] = _same_everywhere(name, made, cases[name])
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    cpu_seconds: dict[str, list[float]] = {name: [] for name in cases}
    sent: dict[str, list[int]] = {name: [] for name in cases}
    readiness: list[list[tuple[float, int, int]]] = []
    barrier_bytes, latency_s = _barrier(sent_bytes, device)
    names = list(cases)
    if AUTO in cases:
        for _ in range(CHOOSING_STEPS):
            cases[AUTO].prepare()
            dist.barrier()
            cases[AUTO].run()
    try:
        for round_number in range(-warmup_rounds, rounds):
            if round_number == 0:
                gc.collect()
                gc.freeze()  # as harness.take_turns: no training run holds the objects of all cases
            for name in (names[turn] for turn in harness.turns(len(names), round_number)):
                if round_number < -SETTLING_ROUNDS and variants[name].side != "wrapper":
                    continue
                case = cases[name]
                case.prepare()
                clock.ready.clear()
                dist.barrier()
                harness.wait_for(device)
                before = sent_bytes()
                cpu_begin_s, begin_s = time.process_time(), time.perf_counter()  # the former of all threads, Gloo's too
                case.run()
                harness.wait_for(device)
                elapsed_s, cpu_s = time.perf_counter() - begin_s, time.process_time() - cpu_begin_s
                dist.barrier()
                harness.wait_for(device)
                if round_number >= 0:
                    seconds[name].append(elapsed_s)
                    cpu_seconds[name].append(cpu_s)
                    sent[name].append(sent_bytes() - before - barrier_bytes)
                    if name == CLOCKED:
                        readiness.append([(ready_s - begin_s, numel, ndim) for ready_s, numel, ndim in clock.ready])
                if round_number < 0 or round_number == rounds - 1:
                    case.check()
    finally:
        gc.unfreeze()
    scaled = [] if link is None else _scaled(seconds, readiness)
    shares = [[ready_s / local_s for ready_s, _, _ in ready] for local_s, ready in scaled]
    when = map(statistics.median, zip(*shares, strict=True))
    of = readiness[0] if readiness else []
    return Steps(
        parameters=len(truth.before),
        elements=sum(one.numel() for one in truth.before),
        seconds=seconds,
        cpu_seconds=cpu_seconds,
        bytes=sent,
        chosen={AUTO: _chosen(trainings[AUTO])} if AUTO in trainings else {},
        bounds={} if link is None else _bounds(scaled, link),
        ready=[(share, numel, ndim) for share, (_, numel, ndim) in zip(when, of, strict=True)],
        latency_s=latency_s,
    )


def _chosen(training: Training) -> dict[str, Any]:
    """Which wire its steps have chosen, and what they took, as plain values."""
    assert isinstance(training.model, fusedreduce.DistributedDataParallel)
    times = training.model.wire_times()
    assert times is not None
    found = dataclasses.asdict(times)
    return {name: dict(value) if isinstance(value, Mapping) else value for name, value in found.items()}


def _encodes(wire: Wire, parameters: Iterable[torch.Tensor]) -> bool:
    """Whether any of these parameters' gradients is encoded on `wire`."""
    config = fusedreduce.ReduceConfig(wire=wire)
    return any(config.wire_of(parameter) != "native" for parameter in parameters)


def _finite(name: str, training: Training) -> harness.Case:
    """An approximation: of its gradients it is asked that they are there, and numbers."""

    def check() -> None:
        for parameter_name, parameter in training.model.named_parameters():
            if parameter.grad is None or not bool(parameter.grad.isfinite().all()):
                raise BenchError(f"{name} is wrong: the gradient of {parameter_name} is missing or not finite")

    return harness.Case(prepare=training.rewind, run=training.step, check=check)


def _same_everywhere(name: str, training: Training, case: harness.Case) -> harness.Case:
    """A case of ours, whose check asks too that all ranks have the same bits in every gradient."""

    def check() -> None:
        case.check()
        numbers = [(key, number) for key, one in training.model.named_parameters() for number in _digests(one)]
        own = torch.stack([number for _, number in numbers])
        most = torch.stack([own, ~own])  # of a whole number x, ~x falls as x rises, and none overflows
        dist.all_reduce(most, dist.ReduceOp.MAX)
        differ = (most[0] != ~most[1]).tolist()
        if any(differ):
            raise BenchError(f"{name} is wrong: ranks differ in the gradient of {numbers[differ.index(True)][0]}")

    return dataclasses.replace(case, check=check)


def _digests(parameter: torch.Tensor) -> list[torch.Tensor]:
    """Of each piece of a gradient a number that changes with every bit: fp32 words, times odd numbers, added up."""
    words = step_training.gradient_of(parameter).contiguous().view(-1).view(torch.int32)
    odd = torch.arange(1, 2 * min(len(words), DIGEST_NUMEL) + 1, 2, device=words.device)
    return [(piece * odd[: len(piece)]).sum() for piece in words.split(DIGEST_NUMEL)]


def _scaled(
    seconds: Mapping[str, list[float]], readiness: list[list[tuple[float, int, int]]]
) -> list[tuple[float, list[tuple[float, int, int]]]]:
    """Of every round the local step, and when gradients are ready in it. What the clock itself costs is no part of it.

    The local step is the quicker of the two without DDP: what another process took of the core bounds nobody's step.
    """
    found = []
    for local_s, clocked_s, ready in zip(seconds[FLOOR], seconds[CLOCKED], readiness, strict=True):
        local_s = min(local_s, clocked_s)
        scale = local_s / clocked_s
        found.append((local_s, [(ready_s * scale, numel, ndim) for ready_s, numel, ndim in ready]))
    return found


def _bounds(
    scaled: Sequence[tuple[float, list[tuple[float, int, int]]]], link: link_bound.Link
) -> dict[str, list[float]]:
    """By wire, of every round."""
    found: dict[str, list[float]] = {wire: [] for wire in link_bound.ITEMSIZE}
    ranks = dist.get_world_size()
    for local_s, ready in scaled:
        pairs = [(ready_s, numel) for ready_s, numel, _ in ready]
        for wire in found:
            found[wire].append(link_bound.step_bound_s(local_s, pairs, wire, ranks, link))
    return found


def _barrier(sent_bytes: Callable[[], int], device: torch.device) -> tuple[int, float]:
    """What this rank sends in a barrier, and how long it takes."""
    taken, took_s = [], []
    for _ in range(BARRIERS):
        dist.barrier()
        harness.wait_for(device)
        before, began_s = sent_bytes(), time.perf_counter()
        dist.barrier()
        harness.wait_for(device)
        took_s.append(time.perf_counter() - began_s)
        taken.append(sent_bytes() - before)
    return round(statistics.median(taken)), statistics.median(took_s)
