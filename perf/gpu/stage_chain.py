"""Stage 5: reduce, clip and optimizer step at world size 1: GPU time, launches, waits, host time, ours beside torch's.

model      a GPT-2 of 124M, few tokens, so that a step is mostly this; each variant less the plain step, which has
           neither DDP nor clipping. GPU time is the sum of durations from torch's profiler, outside of collectives:
           differences of whole steps would be lost in what backward varies by. Event times stand beside it, of
           steps that were enqueued while the GPU slept.
bytes      the same chain on the model's gradients alone, with the 14-byte path, less AdamW alone
many       1,000 tensors of 1,000: launches per bucket, host time beside torch's C++ path
"""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import device_trace
import harness
import layers
import models
import step_variants
import timing
import torch
import torch.distributed as dist
from bench_kernels import SHARE_OF_COPY, TRIPS_US
from records import BenchError
from stage import Stage, entry, run_parts, synchronize
from step_training import Task, Training, Truth
from step_variants import BF16, FLOOR, HOOK_BF16, Variant
from torch import nn

from fusedreduce.kernels import dispatch
from fusedreduce.kernels.table import ChunkTable, PointerTable, new_partials

REUSED = f"{BF16}, norm reused"
TORCH = "torch bf16_compress_hook, batched copies, views"
if not harness.has_batched_copies():
    TORCH = "rebuilt bf16 compression, batched copies, views"
TORCH_FOLDED = f"{TORCH}, folded by hand"
TORCH_PLAIN_VIEWS = "torch bf16_compress_hook, views"
FLOOR_AGAIN = f"{FLOOR}, again"
OURS = (REUSED, BF16)
TORCHS = (TORCH, TORCH_PLAIN_VIEWS)
WARM_UP_STEPS = 16  # the reducer profiles its first steps and may cut buckets anew
PROFILED_STEPS, FEWEST_PROFILED = 5, 2
NEEDED = (FLOOR, FLOOR_AGAIN, TORCH, REUSED)  # for the verdict and its noise
# Left of the stage's time, in seconds: less, and only those are profiled; less, and they are profiled no more.
OTHERS_END_S, ROUNDS_END_S = 40.0, 30.0
# Bytes per element, what each pass reads and writes. torch's: copy into the bucket, cast, divide, cast back, norm,
# multiply. Ours, folded: pack, unpack, and AdamW writing the gradient back; late: pack, squares of the wire, unpack.
TORCH_BYTES, FOLDED_BYTES, LATE_BYTES = 8 + 6 + 4 + 6 + 4 + 8, 6 + 6 + 4, 6 + 2 + 6
# Of a copy's rate: what ours is asked for bucket by bucket (bench_kernels.py: 25 MiB, copied in 10 us), while torch's
# passes may have all of it.
SHARE = SHARE_OF_COPY * 10 / (10 + TRIPS_US)
WANTED, WANTED_SHORT = SHARE * TORCH_BYTES / FOLDED_BYTES, SHARE * TORCH_BYTES / LATE_BYTES
TOKENS = 64
MANY = (1000, 1000)
ADAMW, FOLDED, LATE = "AdamW", "ours, folded (16 bytes)", "ours, late (14 bytes)"
SEED = 1


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What is measured, and how often."""

    model: str
    tokens: int
    rounds: int
    many: tuple[int, int]
    layers: str


FULL = Sizes(model="gpt2-small", tokens=TOKENS, rounds=16, many=MANY, layers="gpt2")
REHEARSED = Sizes(model="gpt2-tiny", tokens=8, rounds=2, many=(20, 10), layers="20x1000")


def run(stage: Stage) -> None:
    sizes = REHEARSED if stage.rehearse else FULL
    with tempfile.TemporaryDirectory() as folder:
        backend = "gloo" if stage.rehearse else "nccl"
        harness.begin(0, 1, folder, backend, stage.device.type)
        stage.note(backend=backend, batched_copies="torch's" if harness.has_batched_copies() else "rebuilt")
        try:
            parts = {
                "whole steps": (0.0, whole_steps),
                "1,000 tensors": (15.0, many_tensors),
                "the chain without a model": (10.0, bytes_alone),
            }
            run_parts(stage, {name: (s, functools.partial(_part, part, sizes)) for name, (s, part) in parts.items()})
        finally:
            synchronize(stage.device)
            dist.destroy_process_group()


def _part(part: Callable[[Stage, Sizes], None], sizes: Sizes, stage: Stage) -> None:
    try:
        part(stage, sizes)
    finally:
        gc.collect()  # models hold themselves in circles


# Whole steps


def whole_steps(stage: Stage, sizes: Sizes) -> None:
    """Each variant's step less the plain one."""
    task = Task(model=sizes.model, optimizer="adamw", clips=True)
    template = models.build(sizes.model).to(stage.device)
    (words,) = models.batch(sizes.model, 0, stage.device)
    batch = (words[:1, : sizes.tokens + 1].contiguous(),)
    truth = Truth(task, template, batch)
    known = step_variants.variants(clips=True)
    names = (FLOOR, TORCH, REUSED, TORCH_PLAIN_VIEWS, BF16, TORCH_FOLDED, HOOK_BF16)
    wanted: dict[str, Variant] = {name: known[name] for name in names}
    wanted[FLOOR_AGAIN] = known[FLOOR]
    trainings = {name: Training(name, one, task, truth, template, batch) for name, one in wanted.items()}
    stage.note(tokens=sizes.tokens, parameters=sum(one.numel() for one in template.parameters()))
    host_s = 0.0
    for training in trainings.values():
        began_s = 0.0
        for _ in range(WARM_UP_STEPS):
            training.rewind()
            synchronize(stage.device)
            began_s = time.perf_counter()
            training.step()
        host_s = max(host_s, time.perf_counter() - began_s)
        training.check()
    synchronize(stage.device)

    rows: dict[str, dict[str, Any]] = {name: {} for name in trainings}
    if stage.device.type == "cuda":
        profile_steps(stage, trainings, rows)
        judge_steps(stage, rows)
    else:
        device_trace.watch(trainings[REUSED].step, stage.device, 1, trainings[REUSED].rewind)
        stage.skip("GPU time, launches and waits of steps", "needs a GPU")
    host = host_times(trainings, stage, sizes.rounds)
    for name in trainings:
        rows[name] |= {"host_ms": statistics.median(host[name]) * 1e3, "host_over_plain_us": _over(host, name) * 1e6}
    stage.note(steps=rows)
    if stage.device.type == "cuda":
        events = event_times(trainings, stage, sizes.rounds, host_s)
        if events[FLOOR]:
            for name in trainings:
                rows[name] |= {
                    "event_ms": statistics.median(events[name]) * 1e3,
                    "event_over_plain_us": _over(events, name) * 1e6,
                }
            ratio = _ratio(rows[TORCH]["event_over_plain_us"], rows[REUSED]["event_over_plain_us"])
            stage.note(steps=rows, event_ratio=ratio)
    for training in trainings.values():
        training.check()


def profile_steps(stage: Stage, trainings: Mapping[str, Training], rows: dict[str, dict[str, Any]]) -> None:
    """GPU time, launches and waits of every variant, a step of each in turn, as far as there is time.

    What a step takes more than the plain one is the median over rounds, each of two steps of one round: between the
    first round and the last a GPU's clocks may drift by more than what is looked for.
    """
    for name, training in trainings.items():
        training.rewind()
        synchronize(stage.device)
        with count_waits() as warned, dispatch.count_launches() as counted:
            training.step()
        training.check()
        rows[name] |= {
            "warned_waits": len(warned),
            "our_launches": sum(one.launches for one in counted),
            "our_calls": len(counted),
        }
    names = list(trainings)
    seen: dict[str, dict[int, device_trace.Seen]] = {name: {} for name in names}
    for round_number in range(PROFILED_STEPS):
        if round_number >= FEWEST_PROFILED and stage.left_s() < ROUNDS_END_S:
            stage.skip("profiles of steps", f"{round_number} of {PROFILED_STEPS} rounds for lack of time")
            break
        for name in (names[turn] for turn in harness.turns(len(names), round_number)):
            if stage.left_s() >= OTHERS_END_S or name in NEEDED:
                training = trainings[name]
                seen[name][round_number] = device_trace.watch(training.step, stage.device, 1, training.rewind)
    for name, of_rounds in seen.items():
        trainings[name].check()
        if len(of_rounds) < FEWEST_PROFILED:
            stage.skip(f"profile of {name!r}", "no time left")
            continue
        over_us = [one.gpu_us - seen[FLOOR][number].gpu_us for number, one in of_rounds.items()]
        rows[name] |= {
            **device_trace.mean(list(of_rounds.values())).as_dict(),
            "gpu_us_rounds": [one.gpu_us for one in of_rounds.values()],
            "gpu_over_plain_us": statistics.median(over_us),
        }
    stage.note(steps=rows)


def judge_steps(stage: Stage, rows: dict[str, dict[str, Any]]) -> None:
    """Ratios of what is over the plain step."""
    seen = {name: row for name, row in rows.items() if "gpu_us" in row}
    over = {name: float(row["gpu_over_plain_us"]) for name, row in seen.items()}
    best = min((name for name in TORCHS if name in over), key=lambda name: over[name])
    ours = min((name for name in OURS if name in over), key=lambda name: over[name])
    ratio = _ratio(over[best], over[ours])
    stage.note(
        torch_best=best,
        ours_best=ours,
        noise_us=over.get(FLOOR_AGAIN),
        folded_by_hand_ratio=_ratio(over[TORCH_FOLDED], over[ours]) if TORCH_FOLDED in over else None,
    )
    stage.at_least(f"GPU time of reduce + clip + step: {best!r} / {ours!r}", ratio, WANTED, "x")
    # The reader of a norm would wait; a step must not.
    waits = sum(seen[ours]["waits"].values()) - sum(seen[FLOOR]["waits"].values())
    stage.at_most("waits for the GPU in our step beyond the plain one's", float(waits), 0.0)


def host_times(trainings: Mapping[str, Training], stage: Stage, rounds: int) -> dict[str, list[float]]:
    """Seconds in which the host was held up by a step, the GPU idle before it."""
    cases = {
        name: harness.Case(prepare=training.rewind, run=training.step, check=lambda: None)
        for name, training in trainings.items()
    }
    return harness.take_turns(cases, rounds, stage.device, host_only=True)


def event_times(trainings: Mapping[str, Training], stage: Stage, rounds: int, host_s: float) -> dict[str, list[float]]:
    """Seconds between events around a step that was enqueued while the GPU slept."""
    seconds: dict[str, list[float]] = {name: [] for name in trainings}
    names = list(trainings)
    for round_number in range(rounds):
        if stage.left_s() < 30:
            stage.skip("event times", f"{round_number} of {rounds} rounds for lack of time")
            break
        for name in (names[turn] for turn in harness.turns(len(names), round_number)):
            trainings[name].rewind()
            torch.cuda._sleep(int(2e9 * min(0.2, 1.5 * host_s)))
            began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            began.record()
            trainings[name].step()
            ended.record()
            torch.cuda.synchronize(stage.device)
            seconds[name].append(began.elapsed_time(ended) / 1e3)
    return seconds


@contextlib.contextmanager
def count_waits() -> Iterator[list[str]]:
    """What torch itself warns of as waiting for the GPU, while the context is open."""
    said: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield said
        finally:
            torch.cuda.set_sync_debug_mode("default")
            said += [str(one.message) for one in caught if "synchroniz" in str(one.message).lower()]


def _over(times: Mapping[str, list[float]], name: str) -> float:
    """Median over rounds of what a step takes more than the plain one in that round."""
    return statistics.median(mine - plain for mine, plain in zip(times[name], times[FLOOR], strict=True))


def _ratio(one: float, other: float) -> float:
    """NaN, which meets no bound, where the other takes nothing that can be measured."""
    return one / other if other > 0 else float("nan")


# 1,000 tensors


class _Given(torch.autograd.Function):
    """Hands out gradients that are there already: 1,000 of them in a few launches and one node of the graph."""

    @staticmethod
    def forward(ctx: Any, rows: tuple[torch.Tensor, ...], *weights: torch.Tensor) -> torch.Tensor:
        ctx.rows = rows
        return weights[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return None, *torch._foreach_mul(ctx.rows, 1.0)


class Given(nn.Module):
    """Parameters whose gradients are `rows`."""

    def __init__(self, rows: torch.Tensor) -> None:
        super().__init__()
        self._rows = tuple(rows.unbind())
        self.weights = nn.ParameterList(nn.Parameter(torch.zeros_like(row)) for row in self._rows)

    def forward(self) -> torch.Tensor:
        loss: torch.Tensor = _Given.apply(self._rows, *self.weights)
        return loss


def many_tensors(stage: Stage, sizes: Sizes) -> None:
    """Reduction alone, of many small tensors."""
    count, numel = sizes.many
    rows = torch.randn(count, numel, generator=torch.Generator().manual_seed(0)).to(stage.device)
    expected = rows.bfloat16().float()
    known = step_variants.variants()
    names = (FLOOR, *TORCHS, BF16, HOOK_BF16)
    builds = {name: known[name].build for name in names}
    builds |= {FLOOR_AGAIN: builds[FLOOR], f"{BF16}, again": builds[BF16]}
    cases = {
        name: _many_case(name, build(Given(rows)), rows if name in (FLOOR, FLOOR_AGAIN) else expected)
        for name, build in builds.items()
    }
    for case in cases.values():
        for _ in range(WARM_UP_STEPS):
            case.prepare()
            case.run()
        case.check()
    table: dict[str, dict[str, Any]] = {}
    host = harness.take_turns(cases, 4 * sizes.rounds, stage.device, host_only=True)
    for name in cases:
        table[name] = {"host_ms": statistics.median(host[name]) * 1e3, "host_over_plain_us": _over(host, name) * 1e6}
    stage.note(many=table, many_shape=list(sizes.many))
    with dispatch.count_launches() as counted:
        cases[BF16].prepare()
        cases[BF16].run()
    packs, unpacks = (sum(one.launches for one in counted if one.function == name) for name in ("pack", "unpack"))
    calls = sum(one.function == "pack" for one in counted)
    if stage.device.type == "cuda":
        for name, case in cases.items():
            table[name] |= device_trace.watch(case.run, stage.device, PROFILED_STEPS, case.prepare).as_dict()
        plain = table[FLOOR]["launches"]
        for row in table.values():
            row["launches_over_plain"] = row["launches"] - plain
        stage.note(many=table)
        stage.at_most(f"our launches per bucket, {count:,} tensors", (packs + unpacks) / max(1, calls), 2.0)
        stage.note(many_launches={name: row["launches_over_plain"] for name, row in table.items()})
    else:
        stage.note(many_operators=(packs, unpacks, calls))
    # The rebuilt baseline is not torch's C++ path: it has no ready marks to make.
    cpp = [name for name in TORCHS if harness.has_batched_copies() or name != TORCH]
    best = min(cpp, key=lambda name: float(table[name]["host_over_plain_us"]))
    ratio = _ratio(table[BF16]["host_over_plain_us"], table[best]["host_over_plain_us"])
    stage.at_most(f"host time, {count:,} tensors: ours / {best!r}", ratio, 1.0, "x")


def _many_case(name: str, model: nn.Module, expected: torch.Tensor) -> harness.Case:
    parameters = list(model.parameters())

    def check() -> None:
        gradients = [one.grad for one in parameters]
        if any(one is None for one in gradients):
            raise BenchError(f"{name} is wrong: a parameter has no gradient")
        if not torch.equal(torch.stack([one for one in gradients if one is not None]), expected):
            raise BenchError(f"{name} is wrong: gradients are not those that went in, rounded to bf16")

    return harness.Case(prepare=lambda: model.zero_grad(set_to_none=True), run=lambda: model().backward(), check=check)


# The chain without a model


def bytes_alone(stage: Stage, sizes: Sizes) -> None:
    """From gradients to updated weights on a layer list: torch's way, ours, and the 14-byte path, less AdamW."""
    shapes = layers.shapes(sizes.layers)
    ways: dict[str, Callable[[Chain], object]] = {
        ADAMW: Chain.step_alone,
        "torch": Chain.torchs,
        FOLDED: Chain.folded,
        LATE: Chain.late,
        f"{ADAMW}, again": Chain.step_alone,
    }
    calls: dict[str, list[Callable[[], object]]] = {}
    checks = {}
    for name, way in ways.items():
        chain = Chain(shapes, stage.device, in_views=name == "torch", clips=not name.startswith(ADAMW))
        calls[name] = [functools.partial(way, chain)]
        checks[name] = timing.Check(poison=chain.reset, check=functools.partial(chain.check, name))
    rounds, launches = (2, 1) if stage.rehearse else (30, 5)
    times = timing.measure(calls, stage.device, rounds=rounds, launches=launches, checks=checks)
    if times.eager:
        raise BenchError(f"cannot be recorded into a graph, so times have launches in them: {times.eager}")
    over = {
        name: statistics.median(mine - base for mine, base in zip(seconds, times[ADAMW], strict=True)) * 1e6
        for name, seconds in times.items()
    }
    adamw_us = statistics.median(times[ADAMW]) * 1e6
    stage.note(bytes_alone={"layers": sizes.layers, "over_adamw_us": over, "adamw_us": adamw_us})
    what = "without a model, reduce + clip + step: torch /"
    stage.at_least(f"{what} {FOLDED}", _ratio(over["torch"], over[FOLDED]), WANTED, "x")
    stage.at_least(f"{what} {LATE}", _ratio(over["torch"], over[LATE]), WANTED_SHORT, "x")


class Chain:
    """Gradients of a layer list in their buckets, and ways from there to updated weights, at world size 1.

    Args:
        shapes: of the parameters.
        device: where they are.
        in_views: what is clipped and stepped are views of the buckets, as torch's DDP leaves them; what comes out of
            backward is something else, copied there first.
        clips: to half of the norm.
    """

    def __init__(self, shapes: Sequence[tuple[int, ...]], device: torch.device, *, in_views: bool, clips: bool) -> None:
        self._given = layers.gradients(shapes, torch.float32, device, SEED)
        made = [one.clone() for one in self._given]
        self._buckets = [_ChainBucket(numbers, made) for numbers in layers.buckets(shapes, 4)]
        self._gradients = made
        if in_views:
            views = {n: view for bucket in self._buckets for n, view in zip(bucket.numbers, bucket.views, strict=True)}
            self._gradients = [views[number] for number in range(len(made))]
        self._weights = [nn.Parameter(torch.zeros_like(one)) for one in made]
        for weight, gradient in zip(self._weights, self._gradients, strict=True):
            weight.grad = gradient
        # Else torch refuses to record its step into a graph.
        capturable = device.type == "cuda"
        self._optimizer: Any = torch.optim.AdamW(self._weights, lr=1e-6, fused=True, capturable=capturable)
        self._one = torch.ones(1, device=device)
        tables = [bucket.chunks for bucket in self._buckets]
        flats = [bucket.flat for bucket in self._buckets]
        self._spans, self._flat_spans = _spans(tables).to(device), _spans(flats).to(device)
        self._partials = new_partials(sum(table.data_rows for table in tables), device)
        self._flat_partials = new_partials(sum(table.data_rows for table in flats), device)
        rounded = [one.bfloat16().float() for one in self._given] if clips else self._given
        self._max_norm = float(torch.stack(torch._foreach_norm(rounded)).double().norm()) / 2
        self._expected = list(torch._foreach_mul(rounded, 0.5)) if clips else self._given

    def reset(self) -> None:
        """Gradients as backward made them, twice as large and more than they are to be."""
        torch._foreach_copy_(self._gradients, self._given)

    def check(self, name: str) -> None:
        """Raises BenchError unless gradients are clipped (of AdamW alone: as they were)."""
        worst = torch.stack(torch._foreach_norm(torch._foreach_sub(self._gradients, self._expected), float("inf")))
        allowed = 2.0**-7 * torch.stack(torch._foreach_norm(self._expected, float("inf")))
        if not bool((worst <= allowed).all()):
            raise BenchError(f"{name} is wrong: a gradient is off by {float(worst.max()):.3g}")

    def step_alone(self) -> None:
        """The floor."""
        self._optimizer.step()

    def torchs(self) -> None:
        """Batched copy into views, cast, divide, cast back; clip_grad_norm_; AdamW."""
        for bucket in self._buckets:
            torch._foreach_copy_(bucket.views, bucket.gradients)
            sent = bucket.buffer.to(torch.bfloat16).div_(1)
            bucket.buffer.copy_(sent)
        nn.utils.clip_grad_norm_(self._weights, self._max_norm)
        self._optimizer.step()

    def folded(self) -> None:
        """Pack, unpack with sums, second stage; AdamW divides and writes gradients back."""
        begin = 0
        for bucket in self._buckets:
            bucket.pack()
        for bucket in self._buckets:
            bucket.unpack(self._one, self._partials.part(begin, begin + bucket.chunks.data_rows))
            begin += bucket.chunks.data_rows
        norm = dispatch.reduce_partials(self._partials, self._spans).total[0].sqrt()
        self._optimizer.grad_scale = ((norm + 1e-6) / self._max_norm).clamp(min=1.0).float()
        self._optimizer.step()

    def late(self) -> None:
        """Pack, sums over the wire, second stage; unpack multiplies; AdamW."""
        begin = 0
        for bucket in self._buckets:
            bucket.pack()
            bucket.measure(self._flat_partials.part(begin, begin + bucket.flat.data_rows))
            begin += bucket.flat.data_rows
        norm = dispatch.reduce_partials(self._flat_partials, self._flat_spans).total[0].sqrt()
        factor = (self._max_norm / (norm + 1e-6)).clamp(max=1.0).float().reshape(1)
        for bucket in self._buckets:
            bucket.unpack(factor, None)
        self._optimizer.step()


class _ChainBucket:
    """One bucket of a Chain: as torch has it (`buffer`, `views`) and as ours has it (`wire`, tables)."""

    def __init__(self, numbers: Sequence[int], made: Sequence[torch.Tensor]) -> None:
        self.numbers = numbers
        self.gradients = gradients = [made[number] for number in numbers]
        numels = [one.numel() for one in gradients]
        offsets, end = [], 0
        for numel in numels:
            offsets.append(end)
            end += -(-numel // 64) * 64
        device = gradients[0].device
        self.chunks = ChunkTable(numels, offsets, [torch.float32] * len(numels), end)
        self.flat = ChunkTable([end], [0], [torch.bfloat16], end)
        self.wire = torch.empty(end, dtype=torch.bfloat16, device=device)
        self._pointers, self._of_wire = PointerTable(), PointerTable()
        self.buffer = torch.empty(sum(numels), device=device)
        self.views = [part.view_as(one) for part, one in zip(self.buffer.split(numels), gradients, strict=True)]

    def pack(self) -> None:
        dispatch.pack(self.gradients, self.chunks, self._pointers, self.wire, 1.0, vouched=True)

    def unpack(self, by: torch.Tensor, partials: Any) -> None:
        dispatch.unpack(self.gradients, self.chunks, self._pointers, self.wire, by, partials, vouched=True)

    def measure(self, partials: Any) -> None:
        dispatch.measure([self.wire], self.flat, self._of_wire, partials, vouched=True)


def _spans(tables: list[ChunkTable]) -> torch.Tensor:
    """Which rows of several launches' partials, laid end to end, are whose."""
    pairs, begin = [], 0
    for table in tables:
        bounds = [begin + int(row) for row in table.first_rows]
        pairs += list(itertools.pairwise(bounds))
        begin += table.data_rows
    return torch.tensor([len(pairs), *(row for pair in pairs for row in pair)], dtype=torch.int64)


if __name__ == "__main__":
    entry(run)
