"""The step benchmark and the host benchmark: models, what lets a number pass, tables, options.

No processes: a world of one and a world of several are fakes, whose peers have a multiple of what this rank has.
"""

from __future__ import annotations

import dataclasses
import random
import sys
from collections.abc import Callable
from itertools import product
from typing import Any

import bench_host
import bench_step
import harness
import models
import pytest
import step_counts
import step_training
import step_variants
import torch
from records import BenchError
from torch import nn

from fusedreduce.planning.bucketing import assign_by_size

CPU = torch.device("cpu")


class Peers:
    """Stands for torch.distributed: `ranks` ranks, of which the others have `times` what this one has."""

    ReduceOp = torch.distributed.ReduceOp

    def __init__(self, ranks: int = 1, times: float = 1.0) -> None:
        self.ranks, self.times = ranks, times
        self.issued: list[tuple[torch.dtype, int]] = []

    def get_world_size(self) -> int:
        return self.ranks

    def all_reduce(self, tensor: torch.Tensor, op: Any = None, async_op: bool = False) -> Any:
        self.issued.append((tensor.dtype, tensor.numel()))
        if op is None:
            tensor.mul_(1 + (self.ranks - 1) * self.times)
        return self

    def wait(self) -> None:
        """Done already."""


@pytest.fixture
def peers(monkeypatch: pytest.MonkeyPatch) -> Peers:
    """One rank, alone."""
    alone = Peers()
    monkeypatch.setattr(step_training, "dist", alone)
    return alone


# Models


@pytest.mark.parametrize(
    ("name", "tensors", "elements"),
    [
        ("mlp", 8, 798_474),
        ("mlp-8m", 16, 8_396_800),
        ("gpt2-7m", 100, 6_859_264),
        ("resnet18", 62, 11_689_512),  # torchvision's documentation has this number
        ("gpt2-tiny", 52, 932_608),
        ("gpt2-small", 148, 124_439_808),
        ("gpt2-medium", 292, 354_823_168),
        ("many:3x5", 3, 15),
    ],
)
def test_models_have_the_parameters_that_they_are_known_for(name: str, tensors: int, elements: int) -> None:
    with torch.device("meta"):
        parameters = list(models.build(name).parameters())
    assert (len(parameters), sum(one.numel() for one in parameters)) == (tensors, elements)


@pytest.mark.parametrize("name", ["mlp", "gpt2-tiny", "many:3x5"])
def test_weights_are_the_same_on_every_rank_and_data_are_not(name: str) -> None:
    torch.manual_seed(random.randrange(1000))
    one, other = models.build(name), models.build(name)
    assert all(map(torch.equal, one.parameters(), other.parameters()))
    first, second, again = (models.batch(name, rank, CPU) for rank in (0, 1, 0))
    assert all(map(torch.equal, first, again)) and not torch.equal(first[0], second[0])
    loss = one(*first)
    loss.backward()
    assert loss.dim() == 0 and bool(loss.isfinite())
    assert all(parameter.grad is not None for parameter in one.parameters())


@pytest.mark.parametrize("name", ["resnet19", "many:5", "many:0x3"])
def test_unknown_models_are_refused(name: str) -> None:
    with pytest.raises(BenchError):
        models.build(name)
    with pytest.raises(BenchError):
        models.batch(name, 0, CPU)


# What lets a number pass


def training(
    kind: str, variant: step_variants.Variant, *, clips: bool = False, scales: bool = False
) -> step_training.Training:
    task = step_training.Task(model="many:6x40", optimizer=kind, clips=clips, scales=scales)
    return step_training.new_training(task, CPU, 0)[1]("it", variant)


PLAIN = step_variants.Variant(build=lambda model: model, side="floor", sums=False)


@pytest.mark.parametrize(
    ("kind", "clips", "scales", "clip"),
    [
        ("none", False, False, "torch"),
        *(("adamw", *flags, "torch") for flags in product([False, True], repeat=2)),
        ("adamw", True, False, "torch folded"),
    ],
)
def test_a_right_step_passes_every_time(peers: Peers, kind: str, clips: bool, scales: bool, clip: str) -> None:
    case = training(kind, dataclasses.replace(PLAIN, clip=clip), clips=clips, scales=scales).case()
    for _ in range(3):
        case.prepare()
        case.run()
        case.check()


def _half_a_gradient(model: nn.Module) -> None:
    gradient = list(model.parameters())[3].grad
    assert gradient is not None
    gradient[7] *= 0.5


def _nan(model: nn.Module) -> None:
    gradient = list(model.parameters())[3].grad
    assert gradient is not None
    gradient[7] = float("nan")


def _no_gradient(model: nn.Module) -> None:
    list(model.parameters())[3].grad = None


def _weight(model: nn.Module) -> None:
    with torch.no_grad():
        list(model.parameters())[3][7] += 1e-2


@pytest.mark.parametrize("spoil", [_half_a_gradient, _nan, _no_gradient, _weight])
@pytest.mark.parametrize("wire", ["native", "bf16", "fp16"])
def test_a_wrong_step_gets_no_number(peers: Peers, spoil: Callable[[nn.Module], None], wire: str) -> None:
    variant = step_variants.Variant(build=lambda model: model, side="torch", wire=wire)
    one = training("adamw", variant, clips=True, scales=False)
    one.rewind()
    one.step()
    one.check()
    spoil(one.model)
    with pytest.raises(BenchError, match=r"it is wrong: .*weights\.3"):
        one.check()


def test_a_step_that_does_not_clip_or_that_clips_a_twentieth_off_is_found(peers: Peers) -> None:
    one = training("adamw", PLAIN, clips=True, scales=False)
    for factor in (0.95, 2.0):
        one.rewind()
        one.step()
        one.check()
        for parameter in one.model.parameters():
            assert parameter.grad is not None
            parameter.grad *= factor
        with pytest.raises(BenchError, match="the gradient"):
            one.check()


def test_a_mean_that_leaves_a_rank_out_is_found(peers: Peers) -> None:
    peers.ranks, peers.times = 2, 3.0
    one = training("none", step_variants.Variant(build=lambda model: model, side="torch", wire="bf16"))
    one.step()
    with pytest.raises(BenchError, match="off by"):
        one.check()


# Rows and demands


def results(milliseconds: dict[str, float]) -> list[dict[str, Any]]:
    """Two ranks' results of a run in which each variant took always the same."""
    names = step_variants.variants()
    seconds = {name: [milliseconds.get(name, 30.0) / 1e3] * 4 for name in names}
    counts = {
        name: {"operators": 5.0, "collectives": 1.0, "launches": None, "waits": None, "gpu_ms": None} for name in names
    }
    counts[step_variants.FLOOR]["operators"] = 2.0
    memory = {name: {"held_bytes": 100 + len(name), "peak_bytes": None} for name in names}
    size = {"parameters": 3, "elements": 15}
    return [{"seconds": seconds, "counts": counts, "memory": memory, "size": size}] * 2


def row_of(milliseconds: dict[str, float]) -> dict[str, Any]:
    return bench_step.row_of(bench_step.LARGE, results(milliseconds))


def test_ratios_are_to_the_best_of_torch_ddp_and_the_strongest_is_named() -> None:
    row = row_of({"no DDP": 10.0, "torch DDP, views": 20.0, "ours bf16": 15.0, "torch allreduce_hook, views": 18.0})
    found = row["variants"]
    assert row["torch_best"] == "torch DDP, views"
    assert row["strongest_of_torch"] == "torch allreduce_hook, views"
    assert found["ours bf16"]["ratio"] == pytest.approx(0.5) and found["torch DDP"]["ratio"] == pytest.approx(2.0)
    assert row["aa_ratio"] == pytest.approx(1.0)
    assert found["ours bf16"]["over_operators"] == 3 and found["ours bf16"]["over_launches"] is None
    assert found["ours bf16"]["over_held_bytes"] == len("ours bf16") - len("no DDP")
    assert found["no DDP"]["ratio"] is None and found["no DDP"]["sync_ms"] is None


def test_what_is_demanded_of_steps_and_of_memory() -> None:
    for ours_ms, hook_ms, met in ((15.0, 25.9, True), (30.1, 26.1, False)):
        row = row_of({"no DDP": 10.0, "ours bf16": ours_ms, "fused_hook bf16, views": hook_ms})
        judged = {one["what"]: one for one in bench_step.judge([row])}
        assert judged["bf16, many:200x50000"]["met"] is met
        assert judged["hook bf16, many:200x50000"]["met"] is met
        assert judged["hook bf16, many:200x50000"]["of"] == "torch DDP"
        assert judged["memory of bf16, many:200x50000"]["met"] is False  # as many bytes as names have letters: 9 and 9
    row["variants"]["ours bf16"]["over_held_bytes"] = 0
    assert bench_step.judge([row])[-1]["met"] is True


def test_no_ratio_where_torch_costs_nothing() -> None:
    row = row_of({"no DDP": 30.0})
    assert row["variants"]["ours bf16"]["ratio"] is None
    judged = bench_step.judge([row])
    assert [one["met"] for one in judged] == [None] * 3 + [False]
    assert all(one["why_not"].startswith("'torch DDP") for one in judged[:3])


def test_runs_of_other_settings_have_records_of_other_names(monkeypatch: pytest.MonkeyPatch) -> None:
    names = []
    for arguments in ([], ["--models", "mlp"], ["--models", "mlp", "--clip", "--amp"], ["--ranks", "4"]):
        monkeypatch.setattr(sys, "argv", ["bench_step.py", *arguments])
        names.append(bench_step.record_name(bench_step.options()))
    assert names == ["step", "step-models", "step-models-clip-amp", "step-4ranks"]


@pytest.mark.parametrize("count", [1, 2, 4, 7, 18])
def test_every_case_has_every_place_equally_often(count: int) -> None:
    rounds = [harness.turns(count, number) for number in range(2 * count)]
    for place in range(count):
        assert sorted(order[place] for order in rounds) == sorted([*range(count)] * 2)


# The host's time


@pytest.mark.parametrize("sweeps", [bench_host.SWEEPS, bench_host.SMALL_SWEEPS])
def test_points_have_the_buckets_that_they_say(sweeps: dict[str, tuple[bench_host.Point, ...]]) -> None:
    for point in (point for swept in sweeps.values() for point in swept):
        sizes = [bench_host.ELEMENTS // point.parameters * 4] * point.parameters
        assert sum(sizes) == 4 * bench_host.ELEMENTS
        assert len(assign_by_size(sizes, [torch.float32] * len(sizes), (point.cap_bytes,))) == point.buckets


def test_slopes() -> None:
    point = bench_host.Point(parameters=64, buckets=4)
    seconds = {"no DDP": [1e-3] * 3, "torch DDP": [1.5e-3] * 3}
    row = bench_host.point_row("bucket", point, seconds)
    assert row["variants"]["torch DDP"]["us"] == pytest.approx(500.0)
    assert row["variants"]["no DDP"]["us"] == pytest.approx(1000.0)
    points = [
        {"sweep": "bucket", "buckets": count, "variants": {"torch DDP": {"us": 100.0 + 5 * count}}}
        for count in (1, 4, 16)
    ]
    line = bench_host.slopes(points, "bucket")["variants"]["torch DDP"]
    assert (line["us_slope"], line["us_besides"], line["us_worst"]) == pytest.approx((5.0, 100.0, 0.0))


def test_operators_that_another_one_calls_are_not_counted() -> None:
    """In any order, thread by thread; one within something else that an operator calls counts again.

    So does one of no length where another ends.
    """
    spans = [
        (1, 0, 10, "aten::add"),
        (1, 2, 5, "aten::copy_"),
        (1, 6, 9, "c10d::allreduce_"),
        (1, 7, 8, "aten::empty"),
        (1, 11, 12, "aten::mul"),
        (1, 12, 12, "aten::view"),
        (2, 3, 4, "aten::neg"),
    ]
    assert step_counts.outermost_operators(spans) == step_counts.outermost_operators(spans[::-1]) == 5


def test_a_step_is_counted_as_the_profilers_own_list_has_it() -> None:
    """The raw events, which are read in a tenth of the time, against torch's reading of them."""
    weight = torch.ones(8, requires_grad=True)

    def run() -> None:
        (weight * 2).sum().backward()

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiled:
        run()
    expected = sum(
        event.name.startswith("aten::") and not (event.cpu_parent and event.cpu_parent.name.startswith("aten::"))
        for event in profiled.events() or ()
    )
    case = harness.Case(prepare=lambda: None, run=run, check=lambda: None)
    counts = step_counts.count(case, torch.device("cpu"))
    assert expected > 3
    assert (counts["operators"], counts["collectives"]) == (expected, 0)
